"""Which GPUs this machine has, and how replicas of a model are laid out on them."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.engines import find_engine
from batchinfer.engines.adapters import adapter_bytes, describe_adapters
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import ModelInfo, check_length, describe_model

logger = logging.getLogger(__name__)

GIB = 1 << 30

# Share of a GPU's memory that vLLM uses by default (its option gpu_memory_utilization).
DEFAULT_UTILIZATION = 0.92
# Bytes of a GPU's memory for what is neither weights nor KV cache: activations, CUDA graphs, CUDA's context and NCCL.
OVERHEAD_BYTES = 2 * GIB
# Number of tokens that a KV cache should hold: 64 sequences of 1024 tokens each. With fewer sequences at once, the GPU
# is not used well.
USEFUL_KV_TOKENS = 65_536
# Most seconds to wait for nvidia-smi.
QUERY_SECONDS = 20.0
# Names of engine arguments that do not change the size of the weights. If the user gives any other engine argument, the
# computed size of the weights is only an estimate.
HARMLESS_ENGINE_ARGS = {"load_format", "kv_cache_dtype", "enable_prefix_caching", "download_dir"}


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU that this process may use."""

    id: str
    """Name of the GPU for CUDA_VISIBLE_DEVICES: an index or a UUID."""
    name: str = ""
    total_bytes: int = 0
    """Bytes of the GPU's memory; 0 if the driver does not report it."""


class Layout(Record, frozen=True, kw_only=True):
    """The number of replicas, and the number of GPUs that each replica gets."""

    tensor_parallel_size: int
    replicas: int
    explanation: str
    """Reason for the layout, in one sentence that shows the calculation."""
    warning: str = ""
    """Warning that the model may not fit into the GPUs; empty if it probably fits."""


class Placement(Record, frozen=True, kw_only=True):
    """The replicas to start, and the configuration that they share."""

    config: EngineConfig
    replicas: list[tuple[str, dict[str, str]]]
    """Name of each replica, and the environment variables that it gets in addition to the worker's."""
    revision: str = ""
    """Commit of the model on the Hub; empty for a local model."""


def place(config: EngineConfig) -> Placement:
    """Decide how many replicas there are, and which GPUs each one sees.

    Raises:
        ConfigError: more GPUs were asked for than there are, the model cannot be split over them or does not fit, or
            --max-model-len is more than the model takes.
    """
    if not find_engine(config.engine).needs_model:
        count = 1 if config.replicas == "auto" else config.replicas
        names = [f"replica {index}" for index in range(count)]
        return Placement(config=config, replicas=[(name, {}) for name in names])
    model = describe_model(config)
    # The processes get the adapters' folders, so that none of them asks the Hub.
    folders = {adapter.name: adapter.folder for adapter in describe_adapters(config)}
    config = msgspec.structs.replace(config, loras=folders)
    warning_of_length = check_length(config, model)
    gpus = visible_gpus(config.gpus)
    layout = choose_parallelism(model, gpus * config.nnodes, whole_model(config, gpus))
    logger.info("%s", layout.explanation)
    for warning in filter(None, (warning_of_length, layout.warning)):
        logger.warning("%s", warning)
    config = msgspec.structs.replace(config, tensor_parallel_size=layout.tensor_parallel_size)
    size = layout.tensor_parallel_size * config.pipeline_parallel_size // config.nnodes
    replicas: list[tuple[str, dict[str, str]]] = []
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if is_driver_order(config.gpus) else {}
    for index in range(layout.replicas):
        group = [gpu.id for gpu in gpus[index * size : (index + 1) * size]]
        if group:
            listed = ",".join(group)
            environment = {"CUDA_VISIBLE_DEVICES": listed, **order}
            replicas.append((f"replica {index} (GPU {listed})", environment))
        else:
            replicas.append((f"replica {index}", {}))
    idle = len(gpus) - layout.replicas * size
    if idle > 0:
        logger.warning(
            "%d of %d GPUs stay idle: %d replicas of %d GPUs each",
            idle,
            len(gpus),
            layout.replicas,
            size,
        )
    return Placement(config=config, replicas=replicas, revision=model.revision)


def whole_model(config: EngineConfig, gpus: Sequence[Gpu]) -> EngineConfig:
    """Return the configuration with the one replica that several nodes run together, on all their GPUs by default.

    Args:
        config: The configuration.
        gpus: GPUs of one node. Every node has as many.
    """
    if config.nnodes == 1:
        return config
    total = max(1, len(gpus)) * config.nnodes // config.pipeline_parallel_size
    size = config.tensor_parallel_size or total
    return msgspec.structs.replace(config, tensor_parallel_size=size, replicas=1)


def choose_parallelism(model: ModelInfo, gpus: Sequence[Gpu], config: EngineConfig) -> Layout:
    """Choose the layout with the most replicas. Each replica gets the fewest GPUs that serve the model well.

    A tensor-parallel size serves the model well if two conditions hold. First, the model's heads can be divided by it.
    Second, the memory that vLLM may use on each GPU holds that GPU's part of the weights, `OVERHEAD_BYTES`, and a KV
    cache. The KV cache must hold `USEFUL_KV_TOKENS` tokens, and at least one sequence of the greatest length. If the
    user states a size, this size is used without the second condition, provided that there are enough GPUs.

    Args:
        model: Sizes of the model. A size of 0 means unknown.
        gpus: GPUs that may be used. If there are none, the model runs on the CPU.
        config: Options of the user: parallel sizes, replicas, share of GPU memory, offload and lengths.

    Raises:
        ConfigError: more GPUs are asked for than there are, the heads cannot be divided, or the weights do not fit.
    """
    pipeline = config.pipeline_parallel_size
    stated = config.tensor_parallel_size
    if stated:
        check_heads(model, stated)
    if not gpus:
        return layout_on_cpu(config)
    count = len(gpus)
    wanted = 1 if config.replicas == "auto" else config.replicas
    warning = ""
    if stated or wanted * pipeline > count:
        size = stated or 1
        check_enough(count, wanted, size, pipeline)
        why = f"tensor parallel {size} as asked for"
    elif any(gpu.id.startswith("MIG-") for gpu in gpus):
        size, why = 1, "a process can use no more than one MIG slice"
    else:
        size, why, warning = smallest_size(model, gpus, config, count // (wanted * pipeline))
    replicas = count // (size * pipeline) if config.replicas == "auto" else wanted
    shape = f"{replicas} x tensor parallel {size}"
    if pipeline > 1:
        shape += f" x pipeline parallel {pipeline}"
    explanation = f"{shape} on {replicas * size * pipeline} of {count} GPUs: {why}"
    return Layout(
        tensor_parallel_size=size, replicas=replicas, explanation=explanation, warning=warning
    )


def layout_on_cpu(config: EngineConfig) -> Layout:
    """Return the layout for a machine without GPUs: one process, unless the user asks for more.

    Raises:
        ConfigError: --tensor-parallel-size is more than the number of cores.
    """
    size = config.tensor_parallel_size or 1
    replicas = 1 if config.replicas == "auto" else config.replicas
    cores = (os.cpu_count() or 1) * config.nnodes
    if size > 1 and size > cores:
        raise ConfigError(
            f"--tensor-parallel-size: is {size}, but no GPU is visible and this machine has {cores} cores",
            hint="leave it out; on a CPU it does not make a model faster",
        )
    explanation = f"{replicas} x tensor parallel {size} on the CPU (no GPU is visible)"
    return Layout(tensor_parallel_size=size, replicas=replicas, explanation=explanation)


def check_enough(count: int, replicas: int, size: int, pipeline: int) -> None:
    """Refuse a layout that needs more GPUs than there are.

    Raises:
        ConfigError: there are too few GPUs. The message shows how the number of GPUs is calculated.
    """
    needed = replicas * size * pipeline
    if needed <= count:
        return
    options = "--replicas x --tensor-parallel-size x --pipeline-parallel-size"
    raise ConfigError(
        f"{options}: {replicas} x {size} x {pipeline} = {needed} GPUs are asked for, {count} are visible",
        hint="lower one of them, or leave out --replicas and --tensor-parallel-size to have them chosen",
    )


def check_heads(model: ModelInfo, size: int) -> None:
    """Refuse a tensor-parallel size over which vLLM cannot split the model's heads."""
    if not divides(model, size):
        fitting = [other for other in range(1, model.num_heads + 1) if divides(model, other)]
        raise ConfigError(
            f"--tensor-parallel-size: is {size}, but {model.name} has {model.num_heads} attention heads and "
            f"{model.num_kv_heads} key-value heads, which do not divide by it",
            hint=f"possible are {', '.join(map(str, fitting))}",
        )


def divides(model: ModelInfo, size: int) -> bool:
    """Whether vLLM can split the model's heads over `size` GPUs.

    If there are fewer key-value heads than GPUs, vLLM repeats them, and `size` must be a multiple of their number.
    """
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads and heads % size:
        return False
    return not kv_heads or kv_heads % size == 0 or size % kv_heads == 0


def smallest_size(
    model: ModelInfo, gpus: Sequence[Gpu], config: EngineConfig, most: int
) -> tuple[int, str, str]:
    """Return the smallest tensor-parallel size that serves the model well, the reason, and a warning or "".

    If no size up to `most` serves the model well, or bytes of GPU or model are unknown, the largest possible size is
    returned. There is a warning if the KV cache will probably not even hold one sequence of the greatest length.

    Raises:
        ConfigError: the weights do not fit.
    """
    # Powers of two suit vLLM best. `most` is tried too, because a large model may need all GPUs.
    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, most) if size <= most})
    sizes = [size for size in sizes if divides(model, size)]
    smallest_gpu = min(gpu.total_bytes for gpu in gpus)
    if not smallest_gpu or not model.parameter_bytes:
        what = "GPUs' memory" if model.parameter_bytes else "model's size"
        return sizes[-1], f"the {what} is unknown, so the largest", ""
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
    usable = int(smallest_gpu * share) - OVERHEAD_BYTES
    room = f"{gib(smallest_gpu)} x {share:g} - {gib(OVERHEAD_BYTES)} = {gib(usable)}"
    length = config.max_model_len or model.max_model_len
    tokens = max(USEFUL_KV_TOKENS, length)
    for size in sizes:
        weights, cache = memory_per_gpu(model, config, size, tokens)
        if weights + cache <= usable:
            why = f"weights {gib(weights)} + KV cache for {tokens} tokens {gib(cache)} per GPU fit into {room}"
            return size, why, ""
    size = sizes[-1]
    weights, cache = memory_per_gpu(model, config, size, tokens)
    check_weights(model, config, size, smallest_gpu)
    why = (
        f"weights {gib(weights)} of {gib(usable)} usable per GPU leave less than the {gib(cache)} that a "
        f"KV cache for {tokens} tokens takes, so the largest"
    )
    _, sequence = memory_per_gpu(model, config, size, length)
    if weights + sequence <= usable:
        return size, why, ""
    warning = (
        f"{model.name} may not load: weights {gib(weights)} + KV cache of one sequence of {length} tokens "
        f"{gib(sequence)} per GPU, {room} usable; {advice(model, config, size, usable - weights)}"
    )
    return size, why, warning


def check_weights(model: ModelInfo, config: EngineConfig, size: int, gpu_bytes: int) -> None:
    """Refuse a model whose weights alone need more memory than vLLM may use.

    If an option may change the size of the weights, the computed size is only an estimate, and no model is refused.

    Raises:
        ConfigError: the weights do not fit. The message shows the arithmetic.
    """
    is_estimate = bool(config.quantization or config.hf_config_path)
    if is_estimate or set(config.engine_args) - HARMLESS_ENGINE_ARGS:
        return
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
    most = int(gpu_bytes * share)
    weights, _ = memory_per_gpu(model, config, size, 0)
    if weights > most:
        raise ConfigError(
            f"--model: {model.name} needs {gib(weights)} per GPU for its weights even with tensor parallel "
            f"{size}, but {gib(gpu_bytes)} x {share:g} = {gib(most)} are usable",
            hint="use more or larger GPUs, a quantized model, or --cpu-offload-gb; "
            "with --tensor-parallel-size stated it is tried all the same",
        )


def advice(model: ModelInfo, config: EngineConfig, size: int, cache_bytes: int) -> str:
    """Return the user's best remedy if one sequence does not fit into a KV cache of `cache_bytes`."""
    _, per_token = memory_per_gpu(model, config, size, 1)
    fitting = cache_bytes // per_token // 1024 * 1024 if per_token else 0
    if fitting > 0:
        return f"--max-model-len {fitting} fits"
    return "use more or larger GPUs, a quantized model, or --cpu-offload-gb"


def memory_per_gpu(
    model: ModelInfo, config: EngineConfig, size: int, tokens: int
) -> tuple[int, int]:
    """Return the bytes of weights and of a KV cache for `tokens` tokens on each GPU.

    Adapters count among the weights. A draft model counts among both.
    """
    pipeline = config.pipeline_parallel_size
    offload = int(config.cpu_offload_gb * GIB)
    weights = max(0, model.parameter_bytes // (size * pipeline) - offload)
    # vLLM divides a draft model among the GPUs of a tensor-parallel group, but not over a pipeline's stages.
    weights += model.draft_bytes // size
    # By default each GPU of a group holds most of an adapter.
    weights += adapter_bytes(config, model) // pipeline
    # Each GPU holds at least one key-value head. So if there are more GPUs than key-value heads, another GPU does not
    # make the cache per GPU smaller.
    split = min(size, model.num_kv_heads or size)
    cache = model.kv_bytes_per_token * tokens // pipeline + model.draft_kv_bytes_per_token * tokens
    return weights, cache // split


def gib(size_bytes: int) -> str:
    """Write a number of bytes in GiB.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size_bytes / GIB:.1f} GiB"


def visible_gpus(wanted: Sequence[str] | None = None) -> list[Gpu]:
    """Return the GPUs that this process may use, in order. Changes nothing, and opens no CUDA context.

    Args:
        wanted: Indices or UUIDs of GPUs, as the driver lists them. None means the GPUs in CUDA_VISIBLE_DEVICES, or all
            GPUs if that variable is not set.

    Returns:
        An empty list on a machine without a GPU.

    Raises:
        ConfigError: one of `wanted` does not exist.
    """
    found = query_nvidia()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None and variable is None:
        return [gpu for gpu, _ in found]
    names = list(wanted) if wanted is not None else (variable or "").split(",")
    chosen: list[Gpu] = []
    for name in (name.strip() for name in names):
        gpu = find_gpu(found, name)
        if gpu is None and wanted is None:
            # At an index that does not exist, CUDA ignores this index and all names after it, so we do the same. A UUID
            # is kept although `found` lacks it, because `found` does not contain MIG slices.
            if not name.startswith(("GPU-", "MIG-")):
                break
            gpu = Gpu(id=name)
        if gpu is None:
            there = ", ".join(gpu.id for gpu, _ in found) or "none"
            raise ConfigError(f"--gpus: {name!r} is not on this machine, there are: {there}")
        chosen.append(gpu)
    return chosen


def find_gpu(found: Sequence[tuple[Gpu, str]], name: str) -> Gpu | None:
    """Return the GPU with this index or UUID; None if there is none.

    The beginning of a UUID is enough if only one GPU's UUID begins with it.
    """
    for gpu, uuid in found:
        if name and name in {gpu.id, uuid}:
            return gpu
    if not name.startswith("GPU-"):
        return None
    alike = [gpu for gpu, uuid in found if uuid.startswith(name)]
    return alike[0] if len(alike) == 1 else None


def is_driver_order(wanted: Sequence[str] | None = None) -> bool:
    """Whether the indices that `visible_gpus` returns count GPUs in the driver's order, by PCI bus.

    By default CUDA counts GPUs in another order, the fastest first. So a replica that gets the driver's indices needs
    CUDA_DEVICE_ORDER=PCI_BUS_ID. Indices that were taken from CUDA_VISIBLE_DEVICES already have the order that the user
    of that variable meant, so they are passed on without CUDA_DEVICE_ORDER.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    return wanted is not None or variable is None or "GPU-" in variable


def query_nvidia() -> list[tuple[Gpu, str]]:
    """Return the NVIDIA GPUs of the machine with their UUIDs. GPUs that do not answer are left out.

    The list comes from NVML if the package pynvml can be imported, else from the command nvidia-smi.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return query_nvidia_smi()
    return query_nvml(nvml)


def query_nvml(nvml: Any) -> list[tuple[Gpu, str]]:
    """Ask NVML, through the package nvidia-ml-py; see `query_nvidia`."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    found: list[tuple[Gpu, str]] = []
    with contextlib.suppress(nvml.NVMLError):
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                # If one GPU has failed ("fallen off the bus"), skip it and list the others.
                with contextlib.suppress(nvml.NVMLError):
                    found.append(describe_nvml(nvml, index))
        finally:
            nvml.nvmlShutdown()
    return found


def describe_nvml(nvml: Any, index: int) -> tuple[Gpu, str]:
    """Return the GPU with this index in NVML, and its UUID."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    try:
        total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # for example, the GPU shares the CPU's memory
        total = 0
    return Gpu(id=str(index), name=str(name), total_bytes=total), str(uuid)


def query_nvidia_smi() -> list[tuple[Gpu, str]]:
    """Ask nvidia-smi, the driver's own command; see `query_nvidia`."""
    if not shutil.which("nvidia-smi"):
        return []
    fields = "--query-gpu=index,name,memory.total,uuid"
    try:
        answer = subprocess.run(
            ["nvidia-smi", fields, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> list[tuple[Gpu, str]]:
    """Read nvidia-smi's lines of index, name, MiB of memory and UUID. Memory that is not a number counts as 0.

    >>> parse_nvidia_smi("0, NVIDIA L4, 23034, GPU-1f")[0][0].total_bytes // 2**20
    23034
    """
    found: list[tuple[Gpu, str]] = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) == 4:
            index, name, mebibytes, uuid = (cell.strip() for cell in row)
            total = int(mebibytes) << 20 if mebibytes.isdigit() else 0
            found.append((Gpu(id=index, name=name, total_bytes=total), uuid))
    return found
