"""The command that starts vLLM's server: our defaults, what the user typed, and what only this package decides."""

from __future__ import annotations

import json
import sys

from batchinfer.engines.adapters import AdapterInfo, write_options
from batchinfer.engines.engine_config import CONSTRAINTS, EngineConfig
from batchinfer.engines.gpus import Gpu, is_cpu_build
from batchinfer.engines.models import ModelInfo

_CPU_KV_CACHE_BYTES = 1 << 30


def batch_sizes(config: EngineConfig, model: ModelInfo, gpu: Gpu | None) -> tuple[int, int]:
    """Return how many sequences vLLM runs at once, and how many tokens a step has at most; 0 leaves it to the server.

    These are vLLM's defaults for `LLM.generate`. Its server's own are smaller, for a quick first token, which nobody
    waits for here. `gpu` is None on a CPU.
    """
    is_large = gpu is not None and gpu.total_bytes >= 70 << 30 and "a100" not in gpu.name.lower()
    seqs, tokens = (1024, 16384) if is_large else (256, 8192)
    length = config.typed_number("max_model_len") or model.max_model_len
    if gpu is None:
        size = (config.tensor_parallel_size or 1) * config.pipeline_parallel_size
        # Without chunked prefill, a step must have room for the longest prompt.
        seqs, tokens = 256 * size, max(4096 * size, length)
    seqs = config.typed_number("max_num_seqs") or seqs
    # Many pooling models, too, take a prompt whole. vLLM knows which, and makes their steps large enough.
    is_whole = config.is_pooling or config.server_options.get("enable_chunked_prefill") is False
    is_left = model.is_multimodal or not length or (is_whole and length > tokens)
    return seqs, 0 if is_left else tokens


def write_vllm_command(
    config: EngineConfig, model: str, adapters: list[AdapterInfo], seqs: int, tokens: int
) -> list[str]:
    """Return the command that starts vLLM's server.

    Our defaults come first, then what the user typed, then what only this package decides: of an option that is there
    twice, vLLM's parser takes the last.

    Raises:
        ConfigError: --max-loras leaves no slot empty on a CPU.
    """
    typed, is_cpu = config.server_options, is_cpu_build()
    ours = ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    ours += ["--max-num-seqs", str(seqs)]
    if tokens:
        ours += ["--max-num-batched-tokens", str(tokens)]
    # The worker fetches what rows name, behind its guard against private addresses. A link that some path's body holds
    # in a form that the worker does not know must not be fetched by the server in its stead.
    ours += ["--allowed-media-domains", "none.invalid"]
    if config.tokenizer[0] != config.model:  # where vLLM would look for the model's commit
        ours += ["--tokenizer-revision", "main"]
    named = {name.partition(".")[0] for name in typed}
    if config.is_pooling:
        ours += ["--runner", "pooling"]
        # A server has one way to pool. Where a model has several, it is the vector of the whole text.
        if config.task == "token-embed" and "pooler_config" not in named:
            ours += ["--pooler-config.task", "token_embed"]
    elif "structured_outputs_config" not in named:
        ours += ["--structured-outputs-config", json.dumps(CONSTRAINTS)]
    if typed.get("tool_call_parser"):
        ours += ["--enable-auto-tool-choice"]
    if is_cpu:
        # vLLM's own default of the cache takes nearly all memory, so that a second server could not start. With chunked
        # prefill, a prompt may be split over two steps, and the CPU engine then dies if the request has a seed.
        ours += ["--kv-cache-memory-bytes", str(_CPU_KV_CACHE_BYTES)]
        ours += ["--no-enable-chunked-prefill", "--enforce-eager"]
    ours += write_options(adapters, is_cpu=is_cpu, asked_slots=config.typed_number("max_loras"))
    fixed = ["--served-model-name", *config.served_names, "--seed", str(config.seed)]
    fixed += ["--tensor-parallel-size", str(config.tensor_parallel_size or 1)]
    if config.revision:
        fixed += ["--revision", config.revision]
    if config.nnodes > 1:
        fixed += ["--master-port", str(config.master_port), "--distributed-executor-backend", "mp"]
    listen = ["--headless"] if config.node_rank else ["--uds", "{socket}"]
    program = [sys.executable, "-m", "batchinfer.engines.vllm_serve", model]
    return [*program, *ours, *config.server_args, *fixed, *listen]
