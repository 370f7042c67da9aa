"""vLLM's engine from our configuration: defaults, engine arguments, and what went wrong in loading.

Defaults where the user states nothing:

* On a GPU: vLLM's own for offline use (its usage context LLM_CLASS, as `vllm.LLM` takes them): 256 sequences
  and 8192 tokens a step, 1024 and 16384 on GPUs of 70 GiB and more other than the A100. Its serving defaults
  trade throughput for the time to the first token, which nobody waits for here. The engine core gets a
  process of its own, so that tokenizing and decoding text run beside the GPU.
* On a CPU: 1 GiB of KV cache (else vLLM takes nearly all memory, and a second worker cannot start), eager
  mode, no chunked prefill (a seeded request whose prompt is split over two steps kills the CPU engine), and
  the engine core in this very process, which starts in seconds and computes on every core.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchinfer.core.errors import BatchinferError, ConfigError, EngineLoadError
from batchinfer.engines.config import EngineConfig

CPU_KV_CACHE_BYTES = 1 << 30
MEMORY_ADVICE = (
    "try a smaller --max-model-len or --max-num-seqs, a larger --tensor-parallel-size, a quantized model, "
    "--cpu-offload-gb, or see with nvidia-smi who else uses the GPU"
)


def prepare_process() -> bool:
    """Import vllm with the environment that suits it. Returns whether this is its CPU build or platform.

    Raises:
        EngineLoadError: vllm or something that it needs cannot be imported.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm.platforms import current_platform
        from vllm.v1.engine import llm_engine  # noqa: F401 - most of vLLM hangs on it
    except Exception as error:
        # Among the causes: torchaudio or torchvision built for another torch, which raise OSError.
        raise EngineLoadError(
            f"vllm: cannot be imported ({type(error).__name__}: {last_line(error)})",
            hint="python -c 'import vllm.v1.engine.llm_engine' shows why; "
            "`pip uninstall torchvision torchaudio torchcodec` mends a common cause",
        ) from error
    is_cpu = bool(current_platform.is_cpu())
    if is_cpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    else:
        # A forked core would inherit this process's threads' locks and its connection to the worker.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return is_cpu


def engine_arguments(config: EngineConfig, *, is_cpu: bool) -> dict[str, Any]:
    """What to give to vLLM's EngineArgs, by name; those that are None are left to vLLM. Pure.

    `--engine-arg` comes last and wins over our defaults; what has an option was refused, see check_config.
    """
    values: dict[str, Any] = {
        "model": config.model,
        "tokenizer": config.tokenizer,
        "revision": config.revision,
        "tokenizer_revision": None if config.tokenizer else config.revision,
        "hf_config_path": config.hf_config_path,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel_size or 1,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "cpu_offload_gb": config.cpu_offload_gb or None,
        "enforce_eager": config.enforce_eager,
        "trust_remote_code": config.trust_remote_code,
        "seed": config.seed,
    }
    if is_cpu:
        values["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        values["enable_chunked_prefill"] = False
        if config.enforce_eager is None:
            values["enforce_eager"] = True
    values.update(config.engine_args)
    return {name: value for name, value in values.items() if value is not None}


def check_names(arguments: Mapping[str, Any], known: set[str]) -> None:
    """Refuse an engine argument that this version of vLLM does not have.

    Raises:
        ConfigError: names it and its nearest neighbour.
    """
    for name in arguments:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"--engine-arg {name}: vLLM's EngineArgs has no such argument",
            hint=f"did you mean {near[0]}?" if near else "names are those of vLLM's EngineArgs",
        )


def load_engine(config: EngineConfig, *, is_cpu: bool) -> Any:
    """Make an LLMEngine, which loads the model. Takes seconds to minutes.

    Raises:
        ConfigError: vLLM refuses the configuration, or the model does not fit it.
        EngineLoadError: loading failed.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    # vLLM collects garbage several times while it loads; without the imported modules that is quick.
    gc.collect()
    gc.freeze()
    arguments = engine_arguments(config, is_cpu=is_cpu)
    check_names(arguments, {field.name for field in dataclasses.fields(EngineArgs)})
    context = UsageContext.LLM_CLASS
    try:
        vllm_config = EngineArgs(**arguments).create_engine_config(context)
    except Exception as error:
        raise refused_config(config, error) from error
    try:
        return LLMEngine.from_vllm_config(vllm_config, usage_context=context)
    except Exception as error:
        raise failed_load(error) from error


def refused_config(config: EngineConfig, error: Exception) -> BatchinferError:
    """What vLLM's checks of a configuration mean to the user."""
    reason = last_line(error)
    if isinstance(error, OSError):
        # transformers' answer to a config or tokenizer that it cannot find.
        return ConfigError(
            f"--model: {config.model} cannot be read: {reason}",
            hint="--tokenizer and --hf-config-path take the missing files from elsewhere",
        )
    if isinstance(error, ImportError):
        return ConfigError(f"--model: {config.model} needs a package that is missing: {reason}")
    return ConfigError(
        f"--model: vLLM does not take {Path(config.model).name} with these options: {reason}",
        hint="the options are named in the reason; --engine-arg passes any other of vLLM's",
    )


class CoreFailed(EngineLoadError):
    """An engine core in a process of its own did not come up; its reason is in what it wrote."""


def failed_load(error: Exception) -> EngineLoadError:
    """Why the engine did not come up."""
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING and isinstance(error, RuntimeError):
        return CoreFailed(f"vLLM: {last_line(error)}")
    kind = type(error).__name__
    is_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
    hint = MEMORY_ADVICE if is_memory else ""
    return EngineLoadError(f"vLLM: {kind}: {last_line(error)}", hint=hint)


def last_line(error: BaseException, most: int = 600) -> str:
    """An error's message on one line, shortened in the middle of nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
