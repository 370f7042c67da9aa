"""Loads vLLM's engine from our configuration: defaults, engine arguments, and errors of loading.

Options that the user does not state have these defaults:

* On a GPU, vLLM's own defaults for offline use (usage context LLM_CLASS, as in `vllm.LLM`). They are 256 sequences and
  8192 tokens per step, or 1024 and 16384 on GPUs other than the A100 with 70 GiB or more. vLLM's defaults for serving
  have less throughput and a quicker first token, but in a batch nobody waits for the first token. The engine core is a
  process of its own, so that the GPU need not wait while texts are tokenized or decoded.
* Constraints on answers are kept by xgrammar, without white space between the parts of JSON (`config.CONSTRAINTS`).
* On a CPU, 1 GiB of KV cache. vLLM's own default takes nearly all memory, so that a second worker could not start.
* On a CPU, eager mode, and no chunked prefill. With chunked prefill, a prompt may be split over two steps; on a CPU the
  engine then crashes if the request has a seed.
* On a CPU, the engine core in the same process. The engine then starts in seconds and computes on all cores.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from batchinfer.core.errors import BatchinferError, ConfigError, EngineDied, EngineLoadError
from batchinfer.core.processes import no_garbage_collection
from batchinfer.core.tasks import is_pooling
from batchinfer.engines import Stop
from batchinfer.engines.adapters import (
    asked_slots,
    describe_adapters,
    refused_adapter,
    slot_count,
    slot_rank,
)
from batchinfer.engines.config import CONSTRAINTS, EngineConfig
from batchinfer.engines.models import describe_model, lacking_torchvision

T = TypeVar("T")

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 1 << 30
_LONGEST_REASON = 600
_MACHINE_ERRORS = frozenset(
    {errno.EAGAIN, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
)
"""Error numbers of the operating system that say that the machine is at fault, and not a path or an option."""
# Seconds between two looks at vLLM's processes on a node that is not node 0.
NODE_LOOK_SECONDS = 0.2
MEMORY_ADVICE = (
    "try a smaller --max-model-len or --max-num-seqs, a larger --tensor-parallel-size, a quantized model, "
    "--cpu-offload-gb, or see with nvidia-smi who else uses the GPU"
)


def prepare_process() -> bool:
    """Set vLLM's environment variables and import vLLM. Returns whether vLLM runs on the CPU.

    Raises:
        EngineLoadError: vllm, or a package that it needs, cannot be imported.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        with no_garbage_collection():
            from vllm.platforms import current_platform
            from vllm.v1.engine import llm_engine  # noqa: F401 - imports most of vLLM
    except Exception as error:
        # The error need not be an ImportError: a torchaudio that was built for another torch raises OSError.
        raise EngineLoadError(
            f"vllm: cannot be imported ({type(error).__name__}: {last_line(error)})",
            hint="python -c 'import vllm.v1.engine.llm_engine' shows why; "
            "`pip uninstall torchvision torchaudio torchcodec` removes a common cause",
        ) from error
    is_cpu = bool(current_platform.is_cpu())
    if is_cpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    else:
        # Spawn vLLM's processes. A forked process would inherit locks that other threads hold, and the connection to
        # the worker.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return is_cpu


def engine_arguments(config: EngineConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments for vLLM's EngineArgs. Reads the files of adapters.

    Arguments that neither the user nor this package sets are left out, so that vLLM's defaults apply. `--engine-arg`
    replaces our defaults. It cannot replace an option, because `check_config` has refused that.
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
        "limit_mm_per_prompt": config.limit_mm_per_prompt or None,
        # With it, the engine knows where reasoning ends: constraints begin there, and a budget ends it.
        "reasoning_parser": config.reasoning_parser or None,
    }
    if is_pooling(config.task):
        values["runner"] = "pooling"
    else:
        values["structured_outputs_config"] = CONSTRAINTS
    if config.nnodes > 1:
        values |= {
            "nnodes": config.nnodes,
            "node_rank": config.node_rank,
            "master_addr": config.master_addr,
            "master_port": config.master_port,
            "distributed_executor_backend": "mp",
        }
    if config.loras:
        values |= adapter_arguments(config, is_cpu=is_cpu)
    if is_cpu:
        values["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        values["enable_chunked_prefill"] = False
        if config.enforce_eager is None:
            values["enforce_eager"] = True
    values.update(config.engine_args)
    if config.pooling is not None:
        given = values.get("pooler_config") or {}
        values["pooler_config"] = {**given, "pooling_type": config.pooling.upper()}
    return {name: value for name, value in values.items() if value is not None}


def adapter_arguments(config: EngineConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments with which vLLM can hold the run's adapters.

    Raises:
        ConfigError: --engine-arg max_loras is no number, or, on a CPU, leaves no slot empty.
    """
    adapters = describe_adapters(config)
    slots = asked_slots(config)
    if is_cpu and slots is not None and slots <= len(adapters):
        raise ConfigError(
            f"--engine-arg max_loras: is {slots}, expected more than the {len(adapters)} adapters: on a CPU, vLLM "
            "answers rows without an adapter by the adapter in the last slot",
            hint="leave max_loras out",
        )
    return {
        "enable_lora": True,
        "max_loras": slot_count(adapters, is_cpu=is_cpu),
        "max_lora_rank": slot_rank(adapters),
        "max_cpu_loras": max(len(adapters) + 1, slots or 0),
    }


def load_adapters(engine: Any, config: EngineConfig) -> dict[str, Any]:
    """Load all adapters of the run into an engine, so that a bad one is found before the first row.

    Returns:
        vLLM's LoRARequest for each adapter, by its name.

    Raises:
        ConfigError: vLLM refuses an adapter; the message has its name.
    """
    if not config.loras:
        return {}
    from vllm.lora.request import LoRARequest

    requests = {}
    for number, adapter in enumerate(describe_adapters(config), 1):
        request = LoRARequest(adapter.name, number, adapter.folder)
        try:
            engine.add_lora(request)
        except Exception as error:
            raise refused_adapter(adapter, last_line(error)) from error
        requests[adapter.name] = request
    return requests


def load_engine(config: EngineConfig, *, is_cpu: bool) -> Any:
    """Create an LLMEngine, which loads the model. Takes seconds to minutes.

    Raises:
        ConfigError: vLLM refuses the configuration for this model.
        EngineLoadError: loading failed.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    # While vLLM loads, it runs Python's garbage collection several times. `freeze` exempts the objects that exist now,
    # such as imported modules, so that these collections are quick.
    gc.collect()
    gc.freeze()
    arguments = engine_arguments(config, is_cpu=is_cpu)
    context = UsageContext.LLM_CLASS
    vllm_config = create_config(
        config, lambda: EngineArgs(**_with_configs(arguments)).create_engine_config(context)
    )
    try:
        return LLMEngine.from_vllm_config(vllm_config, usage_context=context)
    except (ImportError, ValueError) as error:
        # vLLM looks at some models' classes only now.
        raise lacking_torchvision(config) or failed_load(error) from error
    except Exception as error:
        raise failed_load(error) from error


def _with_configs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return engine arguments in which dictionaries are vLLM's configurations where its `reasoning_parser` needs that.

    vLLM 0.32 sets attributes of both, and takes dictionaries only as long as there is no reasoning parser.
    """
    if "reasoning_parser" not in arguments:
        return arguments
    from vllm.config import ReasoningConfig, StructuredOutputsConfig

    kinds = {
        "structured_outputs_config": StructuredOutputsConfig,
        "reasoning_config": ReasoningConfig,
    }
    made = {
        name: kind(**arguments[name])
        for name, kind in kinds.items()
        if isinstance(arguments.get(name), dict)
    }
    return {**arguments, **made}


def create_config(config: EngineConfig, create: Callable[[], T]) -> T:
    """Return vLLM's configuration, which `create` creates. A failed inspection of the model is tried again once.

    Raises:
        ConfigError: vLLM refuses the configuration for this model.
        EngineLoadError: the machine is at fault, for example because it lacks memory.
    """
    try:
        return create()
    except Exception as error:
        entry = _uninspected(config)
        if entry is None or lacking_torchvision(config) is not None:
            raise refused_config(config, error) from error
    logger.warning("vLLM could not inspect the class of the model; trying again")
    try:
        entry.inspect_model_cls()
    except Exception as error:
        raise failed_inspection(config, error) from error
    _kept_inspections().cache_clear()
    try:
        return create()
    except Exception as error:
        raise refused_config(config, error) from error


def _uninspected(config: EngineConfig) -> Any:
    """Return vLLM's entry for the class of the model if vLLM failed to inspect this class; else None.

    vLLM inspects the class in a process of its own. If that fails, for whatever reason, vLLM keeps a None in place of
    the result, and refuses the model as it refuses one that it does not know.
    """
    from vllm.model_executor.models import ModelRegistry

    inspect = _kept_inspections()
    if inspect is None or not inspect.cache_info().currsize:
        return None
    try:
        name = describe_model(config).architecture
    except BatchinferError:
        return None
    entry = ModelRegistry.models.get(name)
    return entry if entry is not None and inspect(name, entry) is None else None


def _kept_inspections() -> Any:
    """Return vLLM's function that inspects a class and keeps the result; None if this version has no such function."""
    from vllm.model_executor.models import registry

    return getattr(registry, "_try_inspect_model_cls", None)


def failed_inspection(config: EngineConfig, error: Exception) -> BatchinferError:
    """Return our error for an exception from vLLM's inspection of the model's class.

    The inspecting process ends with a status above 0 if the class cannot be imported. A signal ended it if the machine
    lacks memory, for example.
    """
    status = getattr(error.__cause__, "returncode", -1)
    reason = (str(error).strip().splitlines() or [""])[-1][:_LONGEST_REASON]
    if status > 0:
        return ConfigError(
            f"--model: vLLM cannot inspect the class of {Path(config.model).name}: {reason}",
            hint="a package that this model needs may be missing; the log above says more",
        )
    return EngineLoadError(
        f"vLLM: the process that inspects the class of the model ended by itself: {reason}",
        hint="the machine may lack memory or processes; start it again",
    )


def run_node(config: EngineConfig, stop: Stop) -> None:
    """Run this node's share of a model until `stop` is set, as `vllm serve --headless` does.

    Raises:
        ConfigError: vLLM refuses the configuration for this model.
        EngineLoadError: loading failed.
        EngineDied: one of vLLM's processes on this node has ended.
    """
    is_cpu = prepare_process()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = engine_arguments(config, is_cpu=is_cpu)
    context = UsageContext.LLM_CLASS
    vllm_config = create_config(
        config, lambda: EngineArgs(**arguments).create_engine_config(context, headless=True)
    )
    try:
        executor = MultiprocExecutor(vllm_config, monitor_workers=False)
    except Exception as error:
        raise failed_load(error) from error
    executor.start_worker_monitor()
    try:
        while not stop.is_set():
            if executor.is_failed:
                raise EngineDied("one of vLLM's processes on this node has ended")
            time.sleep(NODE_LOOK_SECONDS)
    finally:
        executor.shutdown()


def refused_config(config: EngineConfig, error: Exception) -> BatchinferError:
    """Return our error for an exception from vLLM's check of a configuration."""
    reason = last_line(error)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _MACHINE_ERRORS:
        return EngineLoadError(f"vLLM: {type(error).__name__}: {reason}")
    if (problem := lacking_torchvision(config)) is not None:
        return problem
    if isinstance(error, OSError):
        # transformers raises OSError if it cannot find a config or a tokenizer.
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
    """An engine core in a process of its own did not start. The lines that this process wrote tell the reason."""


def failed_load(error: Exception) -> EngineLoadError:
    """Return our error for an exception from loading the model."""
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING and isinstance(error, RuntimeError):
        return CoreFailed(f"vLLM: {last_line(error)}")
    kind = type(error).__name__
    is_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
    hint = MEMORY_ADVICE if is_memory else ""
    return EngineLoadError(f"vLLM: {kind}: {last_line(error)}", hint=hint)


def last_line(error: BaseException, most: int = _LONGEST_REASON) -> str:
    """Return an error's message on one line, cut after `most` characters."""
    return " ".join(str(error).split())[:most] or type(error).__name__
