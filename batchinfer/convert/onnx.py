"""The conversion `hf-to-onnx`: a model becomes ONNX, by optimum's exporter in an environment of its own.

The exporter needs an older transformers than vLLM, so the two cannot share an environment. `make_environment` makes a
virtual environment with the packages of the extra `onnx` and torch for the CPU. `onnx_export.py` runs there and imports
nothing of batchinfer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import shutil
import subprocess
import venv
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.cli.terminal import say
from batchinfer.convert.places import Conversion
from batchinfer.core.errors import BatchinferError, ConfigError, InputError, StorageError

logger = logging.getLogger(__name__)

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""URL at which pip finds torch without CUDA. The environment variable of the same name replaces it."""
REQUIREMENTS = ("optimum-onnx==0.1.0", "onnxruntime>=1.20")
"""Packages of the environment besides torch. The extra `onnx` lists the same packages."""
_PACKAGES = ["torch==2.13.0+cpu", *REQUIREMENTS]
_SCRIPT = Path(__file__).with_name("onnx_export.py")
_READY = "batchinfer-ready"
"""File that is written into an environment when all its packages are installed; it lists them."""
_MESSAGE_CHARS = 500


class OnnxConfig(NamedTuple):
    """Options of a conversion. None stands for the exporter's own default."""

    source: str
    environment: Path
    verify: bool = False
    batch_size: int | None = None
    max_seq_len: int | None = None
    opset: int | None = None


def default_environment() -> Path:
    """Return the folder of the environment that is used if the user names none."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "batchinfer" / "onnx"


def make_environment(folder: Path) -> None:
    """Make the environment, or do nothing if it is complete. After a kill the next call makes it anew.

    Raises:
        StorageError: A package cannot be installed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_ready(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("making %s with %s (1.3 GB, a few minutes)", folder, ", ".join(_PACKAGES))
        venv.create(folder, with_pip=True)
        index = os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)
        pip = [
            str(_python(folder)),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        done = _run([*pip, *_PACKAGES])
        if done.returncode:  # usually because pip's own index lacks torch's CPU build
            done = _run([*pip, "--extra-index-url", index, *_PACKAGES])
        if done.returncode:
            raise StorageError(
                f"{folder}: its packages cannot be installed ({_last_line(done.stderr)})",
                hint=f"check the network; torch comes from {index} (TORCH_CPU_INDEX)",
            )
        (folder / _READY).write_text("\n".join(_PACKAGES) + "\n", encoding="utf-8")


def convert(config: OnnxConfig, work: Conversion) -> dict[str, Any]:
    """Write model.onnx, config and tokenizer to `work.folder`, and return what the command reports about them.

    Raises:
        ConfigError: The environment is missing.
        InputError: There is no such model, or the exporter's process failed.
        BatchinferError: With `verify`, the answers of the ONNX model differ from those of the original model.
    """
    if not _is_ready(config.environment):
        is_default = config.environment == default_environment().absolute()
        place = "" if is_default else f" --environment {shlex.quote(str(config.environment))}"
        raise ConfigError(
            f"{config.environment}: holds no environment for the exporter, which needs an older transformers",
            hint=f"make it once (1.3 GB): batchinfer convert hf-to-onnx --setup{place}",
        )
    folder = work.fetch_model(config.source)
    result = work.folder.with_name("found.json")
    asked = config._asdict() | {
        "source": str(folder), "dest": str(work.folder), "result": str(result),
    }  # fmt: skip
    del asked["environment"]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [str(_python(config.environment)), "-I", str(_SCRIPT), json.dumps(asked)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=_child_variables(),
            )
        )
        stack.callback(process.kill)
        _, errors = process.communicate()
    if process.returncode:
        raise InputError(
            f"{config.source}: the exporter failed ({_last_line(errors)})",
            hint="its list of architectures: https://huggingface.co/docs/optimum-onnx/onnx/overview",
        )
    found: dict[str, Any] = json.loads(result.read_bytes())
    if config.verify:
        _check_answers(config.source, found)
    return found


def _check_answers(source: str, found: dict[str, Any]) -> None:
    difference = found["largest_difference"]
    tokens = "are equal" if found["tokens_equal"] else "differ"
    say(f"largest difference of a logit: {difference:.2e}; greedy tokens {tokens}")
    if not found["tokens_equal"] or difference > found["tolerance"]:
        raise BatchinferError(
            f"{source}: the ONNX model answers otherwise than the model before",
            hint="try another --opset; without --verify the conversion is published all the same",
        )


def _is_ready(folder: Path) -> bool:
    try:
        return (folder / _READY).read_text(encoding="utf-8").splitlines() == _PACKAGES
    except OSError:
        return False


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _child_variables() -> dict[str, str]:
    """Return the environment variables of the exporter's process. It asks no server: the model is on this disk."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_MESSAGE_CHARS] if lines else "no message"
