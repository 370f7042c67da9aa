"""Loads vLLM's engine from our configuration: defaults, engine arguments, and errors of loading.

Defaults where the user states nothing:

* On a GPU, vLLM's own for offline use (usage context LLM_CLASS, as in `vllm.LLM`): 256 sequences and 8192 tokens per
  step, or 1024 and 16384 on GPUs with 70 GiB or more other than the A100. vLLM's defaults for serving give up
  throughput for a quick first token, for which nobody waits here. The engine core gets a process of its own, so that
  tokenizing and decoding do not hold up the GPU.
* On a CPU, 1 GiB of KV cache (by itself vLLM takes nearly all memory, and a second worker cannot start); eager mode;
  no chunked prefill (a request with a seed whose prompt is split over two steps crashes the engine on a CPU); and the
  engine core in the same process, which then starts in seconds and computes on all cores.
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
    """Set vLLM's environment variables and import it. Returns whether it runs on the CPU.

    Raises:
        EngineLoadError: vllm, or a package that it needs, cannot be imported.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm.platforms import current_platform
        from vllm.v1.engine import llm_engine  # noqa: F401 - imports most of vLLM
    except Exception as error:
        # One cause is a torchaudio or torchvision that was built for another torch; it raises OSError.
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
        # A forked core would inherit locks that other threads hold, and the connection to the worker.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return is_cpu


def engine_arguments(config: EngineConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments for vLLM's EngineArgs, leaving out those for which vLLM's own default holds. Pure.

    `--engine-arg` wins over our defaults. It cannot replace an option: `check_config` has refused that.
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
        ConfigError: the message names the argument, the hint the most similar one.
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
    """Create an LLMEngine, which loads the model. Takes seconds to minutes.

    Raises:
        ConfigError: vLLM refuses the configuration for this model.
        EngineLoadError: loading failed.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    # vLLM collects garbage several times while it loads. Freezing the objects of imported modules makes that quick.
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
    """Return our error for an exception from vLLM's check of a configuration."""
    reason = last_line(error)
    if isinstance(error, OSError):
        # transformers raises this for a config or tokenizer that it cannot find.
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
    """An engine core in its own process did not start. The reason is among the lines that it wrote."""


def failed_load(error: Exception) -> EngineLoadError:
    """Return our error for an exception from loading the model."""
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING and isinstance(error, RuntimeError):
        return CoreFailed(f"vLLM: {last_line(error)}")
    kind = type(error).__name__
    is_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
    hint = MEMORY_ADVICE if is_memory else ""
    return EngineLoadError(f"vLLM: {kind}: {last_line(error)}", hint=hint)


def last_line(error: BaseException, most: int = 600) -> str:
    """Return an error's message on one line, cut after `most` characters."""
    return " ".join(str(error).split())[:most] or type(error).__name__
