"""Estimate a job's time and cost, and advise on workers and chunk size. Rates come from the user or an earlier run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core import units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Record
from batchinfer.ledger.inventory import RunReader
from batchinfer.ledger.jobs import OpenStore
from batchinfer.runs.overview import overview
from batchinfer.runs.prices import Price, Prices
from batchinfer.worker.preview import RenderedRow

RESTART_SECONDS = 600.0
"""Seconds from a preemption to a new machine that can load the model, where no earlier run has measured it: some
minutes each for noticing the preemption, getting a machine and setting it up."""
MOST_LOST_SECONDS = 1800.0
"""Seconds that a preemption may cost before `check` advises against the settings."""
SHORTEST_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS = 60.0, 1200.0
CHUNKS_PER_WORKER = 4
"""Chunks that each worker should have at least. With fewer, workers idle at the end because there is nothing to
share."""
MOST_CHUNKS = 10_000


# --------------------------------------------------------------------------- a sample


class Lengths(Record, frozen=True, kw_only=True):
    """Prompt lengths of a sample, in tokens."""

    count: int
    mean: float
    median: float
    p95: int
    longest: int
    histogram: dict[str, int]
    """Rows by length. A key is the bucket's largest length, a power of two."""


def measure_lengths(lengths: Sequence[int]) -> Lengths:
    """Describe the lengths of a sample, which must not be empty.

    >>> measure_lengths([3, 4, 9]).histogram
    {'4': 2, '16': 1}
    """
    histogram: dict[str, int] = {}
    ordered = sorted(lengths)
    for length in ordered:
        bucket = str(1 << (length - 1).bit_length()) if length > 0 else "0"
        histogram[bucket] = histogram.get(bucket, 0) + 1
    return Lengths(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        median=statistics.median(ordered),
        p95=ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)],
        longest=ordered[-1],
        histogram=histogram,
    )


class Measured(Record, frozen=True, kw_only=True):
    """Result of rendering the sample: rows, errors by code, prompt lengths."""

    rows: int
    rows_error: int
    errors: dict[str, int]
    lengths: Lengths | None

    @classmethod
    def of(cls, rows: list[RenderedRow]) -> Measured:
        """Count the errors of rendered rows, and measure their lengths in tokens (None without a tokenizer)."""
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


# --------------------------------------------------------------------------- an earlier run


class RunRate(Record, frozen=True, kw_only=True):
    """Rate of one worker of an earlier run. `row_seconds` is about how long a row is in the engine."""

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
    """Measure a run: rows of all workers over the time that their engines were busy. Read-only.

    Raises:
        InputError: There is no such run, or none of its workers has finished a row.
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


# --------------------------------------------------------------------------- time and money


class Estimate(Record, frozen=True, kw_only=True):
    """Time and cost of a job. `rate` is rows per second of one worker. Costs are in dollars, None without a price."""

    rows: int
    rate: float
    workers: int
    hours: float
    worker_hours: float
    cost: float | None
    cost_per_million_rows: float | None
    price_per_hour: float | None
    price_source: str = ""


def estimate(
    *,
    rows: int,
    rate: float,
    workers: int,
    start_seconds: float,
    price_per_hour: float | None,
    price_source: str = "",
) -> Estimate:
    """Estimate time and cost: rows over rate, plus one start-up for each worker.

    >>> estimate(rows=36_000, rate=1.0, workers=10, start_seconds=0, price_per_hour=2.0).cost
    20.0
    """
    busy_hours = rows / rate / 3600
    worker_hours = busy_hours + workers * start_seconds / 3600
    cost = None if price_per_hour is None else worker_hours * price_per_hour
    return Estimate(
        rows=rows,
        rate=rate,
        workers=workers,
        hours=busy_hours / workers + start_seconds / 3600,
        worker_hours=worker_hours,
        cost=cost,
        cost_per_million_rows=None if cost is None else cost / rows * 1e6,
        price_per_hour=price_per_hour,
        price_source=price_source if price_per_hour is not None else "",
    )


def workers_for(rows: int, rate: float, target_seconds: float, start_seconds: float) -> int | None:
    """Return how many workers finish in the target time; None if starting takes longer than that.

    >>> workers_for(36_000, 1.0, 3600, 0), workers_for(10, 1.0, 100, 200)
    (10, None)
    """
    left = target_seconds - start_seconds
    return None if left <= 0 else max(1, math.ceil(rows / rate / left))


def chunk_rows_for(rows: int, rate: float, workers: int) -> int:
    """Return a good chunk size in rows: several chunks for each worker, each a minute to twenty minutes of work.

    The size does not change what a kill loses. Too few chunks leave workers idle at the end, too many cost requests.

    >>> chunk_rows_for(1_000_000, 20.0, 16), chunk_rows_for(1000, 20.0, 16)
    (15625, 16)
    """
    even = rows / (workers * CHUNKS_PER_WORKER)
    largest, smallest = rate * LONGEST_CHUNK_SECONDS, rate * SHORTEST_CHUNK_SECONDS
    size = min(even, largest)
    # With few rows per worker, an even share matters more than the number of requests.
    if size < smallest and rows / workers > smallest:
        size = smallest
    return max(1, math.ceil(max(size, rows / MOST_CHUNKS)))


def lost_seconds(
    start_seconds: float, checkpoint_seconds: float, in_flight_seconds: float
) -> float:
    """Return the most seconds that a preemption costs: a new start, rows since the last checkpoint, rows in flight."""
    return start_seconds + checkpoint_seconds + in_flight_seconds


# --------------------------------------------------------------------------- advice


class Asked(Record, frozen=True, kw_only=True):
    """Input of the advice.

    `rate` is rows per second of one worker. A field is None if it is not known or not asked for.
    """

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
    """Return estimate and advice as entries of the result."""
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
