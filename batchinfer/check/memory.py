"""Compute how much memory a model needs on given GPUs, and how many rows run there at once.

The worker's own rules distribute the model over the GPUs. No GPU is needed.
"""

from __future__ import annotations

import difflib

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import (
    DEFAULT_UTILIZATION,
    OVERHEAD_BYTES,
    Gpu,
    choose_parallelism,
    gib,
    memory_per_gpu,
    whole_model,
)
from batchinfer.engines.models import ModelInfo

GIB = 1 << 30

GPU_MEMORY_BYTES = {
    name: round(gib * GIB)
    for name, gib in {
        "T4": 14.7,
        "L4": 22.5,
        "A10": 22.5,
        "A10G": 22.5,
        "V100": 15.8,
        "V100-32GB": 31.7,
        "RTX3090": 23.7,
        "RTX4090": 23.6,
        "RTX5090": 31.4,
        "RTX6000-Ada": 47.5,
        "A40": 44.9,
        "L40": 44.9,
        "L40S": 44.9,
        "A100": 39.5,
        "A100-80GB": 79.2,
        "H100": 79.6,
        "H100-NVL": 93.6,
        "H200": 139.8,
        "B200": 178.4,
    }.items()
}
"""Total memory of each GPU in bytes, by SkyPilot's name of the GPU.

The numbers are those that the driver reports. They are a little less than those in the maker's data sheet.
"""


class Memory(Record, frozen=True, kw_only=True):
    """Memory of a model on the GPUs of one worker, and how many rows run at once."""

    explanation: str
    tensor_parallel_size: int
    replicas: int
    weights_bytes_per_gpu: int
    cache_bytes_per_gpu: int
    cache_tokens: int
    """Number of tokens that fit the KV cache of one replica; 0 if the model's config does not tell a token's size."""
    rows_at_once: int | None = None
    """Number of rows that one replica runs at once.

    It is computed for prompts of the sample's mean length and answers that are half finished.
    """


def rows_at_once(cache_tokens: int, tokens_per_row: float, max_num_seqs: int | None) -> int:
    """Return the number of rows that fit a KV cache of `cache_tokens` tokens, but no more than `max_num_seqs`.

    >>> rows_at_once(65_536, 512, 256), rows_at_once(1_000_000, 512, 256)
    (128, 256)
    """
    room = int(cache_tokens // max(tokens_per_row, 1.0))
    return min(room, max_num_seqs) if max_num_seqs else room


def parse_gpu(text: str) -> tuple[str, list[Gpu]]:
    """Read the option --gpu, which is NAME or NAME:N. Return the GPU's name and a list of N GPUs.

    Raises:
        ConfigError: The GPU's name is not in the table, or N is not a positive number.

    >>> parse_gpu("l4:2")[0], len(parse_gpu("L4:2")[1])
    ('L4', 2)
    """
    name, colon, count = text.partition(":")
    by_name = {known.lower(): known for known in GPU_MEMORY_BYTES}
    if name.lower() not in by_name:
        near = difflib.get_close_matches(name.lower(), by_name, n=1)
        raise ConfigError(
            f"--gpu: {name!r} is not known, expected one of {', '.join(GPU_MEMORY_BYTES)}",
            hint=f"did you mean {by_name[near[0]]}?" if near else "",
        )
    if colon and not (count.isdecimal() and int(count) > 0):
        raise ConfigError(f"--gpu: {text!r}, expected NAME or NAME:N")
    known = by_name[name.lower()]
    total = GPU_MEMORY_BYTES[known]
    return known, [
        Gpu(id=str(index), name=known, total_bytes=total) for index in range(int(count or 1))
    ]


def ask_for_memory(
    gpu: str,
    model: ModelInfo,
    engine: EngineConfig,
    prompt_tokens: float | None,
    answer_tokens: int | None,
) -> Memory:
    """Compute the memory of a model on one worker's GPUs. The worker will distribute the model in the same way.

    `prompt_tokens` is the mean length of a prompt, and `answer_tokens` the longest answer. None: not known.

    Raises:
        ConfigError: `gpu` is wrong, the model or one row of full length does not fit, or the model's attention heads
            cannot be divided evenly among the GPUs.
    """
    _, gpus = parse_gpu(gpu)
    plan = choose_parallelism(model, gpus * engine.nnodes, whole_model(engine, gpus))
    size = plan.tensor_parallel_size
    weights, cache_per_token = memory_per_gpu(model, engine, size, 1)
    share = engine.gpu_memory_utilization or DEFAULT_UTILIZATION
    cache = max(0, int(gpus[0].total_bytes * share) - OVERHEAD_BYTES - weights)
    if not cache and model.parameter_bytes:
        raise ConfigError(
            f"--gpu {gpu}: weights of {gib(weights)} a GPU leave no room for a KV cache",
            hint="more or larger GPUs, a quantized model, or a larger --tensor-parallel-size",
        )
    tokens = cache // cache_per_token if cache_per_token else 0
    limit = engine.max_model_len or model.max_model_len
    if tokens and limit > tokens:
        raise ConfigError(
            f"--gpu {gpu}: the KV cache holds {tokens:,} tokens, less than one row of {limit:,}",
            hint=f"--max-model-len {tokens // 16 * 16}, or more or larger GPUs",
        )
    # An encoder keeps no cache, so nothing but the option limits the rows.
    at_once = engine.max_num_seqs if model.is_encoder else None
    if tokens and prompt_tokens is not None:
        # On average over the time that a row runs, half of its answer is in the cache.
        per_row = prompt_tokens + (512 if answer_tokens is None else answer_tokens) / 2
        at_once = rows_at_once(tokens, per_row, engine.max_num_seqs)
    return Memory(
        explanation=plan.explanation,
        tensor_parallel_size=size,
        replicas=plan.replicas,
        weights_bytes_per_gpu=weights,
        cache_bytes_per_gpu=cache,
        cache_tokens=tokens,
        rows_at_once=at_once,
    )
