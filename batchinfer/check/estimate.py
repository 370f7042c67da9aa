"""What `check` works out of what it has found: memory on named GPUs, an earlier run's rate, time, cost and advice."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from batchinfer.check.advice import (
    GPU_MEMORY_BYTES,
    MOST_LOST_SECONDS,
    RESTART_SECONDS,
    Lengths,
    Memory,
    chunk_rows_for,
    estimate,
    lost_seconds,
    measure_lengths,
    rows_at_once,
    workers_for,
)
from batchinfer.core import units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Record
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import (
    DEFAULT_UTILIZATION,
    OVERHEAD_BYTES,
    Gpu,
    choose_parallelism,
    gib,
    memory_per_gpu,
)
from batchinfer.engines.models import ModelInfo
from batchinfer.ledger.inventory import RunReader
from batchinfer.ledger.jobs import OpenStore
from batchinfer.runs.overview import overview
from batchinfer.runs.prices import Price, Prices
from batchinfer.worker.preview import RenderedRow


class Measured(Record, frozen=True, kw_only=True):
    """What the sample's rows came to."""

    rows: int
    rows_error: int
    errors: dict[str, int]
    lengths: Lengths | None

    @classmethod
    def of(cls, rows: list[RenderedRow]) -> Measured:
        """Measure rendered rows. Lengths are None without a tokenizer."""
        errors: dict[str, int] = {}
        for row in rows:
            if row.code:
                errors[row.code] = errors.get(row.code, 0) + 1
        lengths = [row.tokens for row in rows if row.tokens is not None]
        return cls(
            rows=len(rows),
            rows_error=sum(errors.values()),
            errors=errors,
            lengths=measure_lengths(lengths) if lengths else None,
        )


# --------------------------------------------------------------------------- memory


def parse_gpu(text: str) -> tuple[str, list[Gpu]]:
    """Read NAME or NAME:N.

    Raises:
        ConfigError: nobody knows this GPU.

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
    """Lay a model out on one worker's GPUs, as the worker itself will.

    Raises:
        ConfigError: it does not fit, or the heads do not divide.
    """
    _, gpus = parse_gpu(gpu)
    plan = choose_parallelism(model, gpus, engine)
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
    at_once = None
    if tokens and prompt_tokens is not None:
        # An answer is on average half done while its row runs.
        per_row = prompt_tokens + (answer_tokens or 512) / 2
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


# --------------------------------------------------------------------------- an earlier run


class RunRate(Record, frozen=True, kw_only=True):
    """What one worker of an earlier run did. `row_seconds` is the time that a row spent in it, about."""

    run: str
    rate: float
    workers: int
    rows: int
    output_tokens_per_row: float
    load_seconds: float
    row_seconds: float
    accelerator: str
    gpus: int


def measure_run(url: str, open_store: OpenStore, clock: Clock) -> RunRate:
    """Read a run's workers: rows over the time that their engines were busy. Read-only.

    Raises:
        InputError: there is no such run, or no worker of it has finished a row.
    """
    snapshot = RunReader(open_store(url), open_store, clock).read()
    seen = overview(snapshot, Prices())
    records = [one.record for one in snapshot.workers if one.record.rows_done]
    rows = sum(record.rows_done for record in records)
    busy = sum(record.busy_seconds for record in records)
    if not rows or busy <= 0:
        raise InputError(
            f"--rate-from {url}: no worker there has finished a row",
            hint="give --rate ROWS_PER_SECOND, or name a run that got further",
        )
    first = next(view for view in seen.workers if view.rows_done)
    at_once = max((int(r.engine.get("max_num_seqs") or 0) for r in records), default=0)
    return RunRate(
        run=url,
        rate=rows / busy,
        workers=len(records),
        rows=rows,
        output_tokens_per_row=sum(record.completion_tokens for record in records) / rows,
        load_seconds=max(float(r.engine.get("load_seconds") or r.load_seconds) for r in records),
        row_seconds=at_once * busy / rows,
        accelerator=first.accelerator,
        gpus=max(1, first.gpus),
    )


# --------------------------------------------------------------------------- advice


class Asked(Record, frozen=True, kw_only=True):
    """What advice is about. `rate` is rows per second of one worker; None is what nobody knows or asked for."""

    rows: int
    rate: float
    chunks: int | None = None
    workers: int | None = None
    hours: float | None = None
    load_seconds: float | None = None
    row_seconds: float | None = None
    checkpoint_seconds: float = 30.0
    price: Price | None = None


def give_advice(asked: Asked) -> dict[str, Any]:
    """Time, cost and how to cut the job, as entries of the result."""
    rows, rate, hours, price = asked.rows, asked.rate, asked.hours, asked.price
    start = RESTART_SECONDS + (asked.load_seconds or 0.0)
    lines = []
    wanted = None
    if hours is not None:
        wanted = workers_for(rows, rate, hours * 3600, start)
        if wanted is None:
            lines.append(
                f"{units.duration(hours * 3600)} is less than a worker takes to start "
                f"(about {units.duration(start)}): allow more time"
            )
        else:
            finish = "worker finishes" if wanted == 1 else "workers finish"
            lines.append(f"{wanted:,} {finish} in {units.duration(hours * 3600)}")
    count = asked.workers or wanted or 1
    found = estimate(
        rows=rows,
        rate=rate,
        workers=count,
        start_seconds=start,
        price_per_hour=price.per_hour if price else None,
        price_source=price.source if price else "",
    )
    if price is None:
        lines.append("the cost is not known: give --price-per-hour, or --gpu for a list price")
    lines += _about_starts(found.hours * 3600, start, count)
    lines.append(_about_loss(start, asked.checkpoint_seconds, asked.row_seconds or 60.0))
    size = chunk_rows_for(rows, rate, count)
    lines += _about_chunks(asked, count, size)
    return {
        "estimate": msgspec.to_builtins(found),
        "workers_advised": wanted,
        "chunk_rows_advised": size,
        "start_seconds": round(start, 1),
        "advice": lines,
    }


def _about_starts(seconds: float, start: float, workers: int) -> list[str]:
    if start <= 0.2 * seconds:
        return []
    share = f"{start / seconds:.0%}"
    if workers == 1:
        return [f"starting takes {share} of the worker's time: a machine that is set up costs less"]
    return [f"starting takes {share} of each worker's time: fewer workers cost less"]


def _about_loss(start: float, checkpoint_seconds: float, row_seconds: float) -> str:
    lost = lost_seconds(start, checkpoint_seconds, row_seconds)
    text = (
        f"a preemption costs a worker about {units.duration(lost)}: {units.duration(start)} to start again, "
        f"up to {units.duration(checkpoint_seconds)} since the last checkpoint, and the rows under way"
    )
    if lost > MOST_LOST_SECONDS:
        text += (
            "; more than half an hour: checkpoint more often, or shorten set-up with a warm pool"
        )
    return text


def _about_chunks(asked: Asked, workers: int, size: int) -> list[str]:
    rows, chunks = asked.rows, asked.chunks
    if chunks is None:
        return [
            f"split with --chunk-rows {size} ({units.many(-(-rows // size), 'chunk')}); the size loses nothing"
        ]
    if chunks < workers:
        busy = f"{chunks:,} of {workers:,} workers busy"
        return [f"{units.many(chunks, 'chunk')} can keep only {busy}: --chunk-rows {size}"]
    longest = rows / chunks / asked.rate
    if workers > 1 and longest > rows / asked.rate / workers / 2:
        return [
            f"a chunk takes {units.duration(longest)}, so workers wait at the end: --chunk-rows {size}"
        ]
    return []
