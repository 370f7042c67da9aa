"""Estimate a job's time and cost, and advise on the number of workers and the chunk size.

The rate (rows per second of one worker) comes from the user or is measured on an earlier run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core import units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.prices import Price, Prices
from batchinfer.core.records import Record
from batchinfer.ledger.inventory import RunReader
from batchinfer.ledger.jobs import OpenStore
from batchinfer.runs.overview import overview
from batchinfer.worker.preview import RenderedRow, ShownImage

RESTART_SECONDS = 600.0
"""Assumed seconds from a preemption until a new machine can begin to load the model.

Noticing the preemption, getting a machine and setting it up take some minutes each.
"""
MOST_LOST_SECONDS = 1800.0
"""Seconds lost by one preemption above which `check` advises to change the settings."""
SHORTEST_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS = 60.0, 1200.0
CHUNKS_PER_WORKER = 4
"""Number of chunks that each worker should have at least.

With fewer chunks, workers that have no chunk left would wait long for the others at the end.
"""
MOST_CHUNKS = 10_000


# --------------------------------------------------------------------------- a sample


class Lengths(Record, frozen=True, kw_only=True):
    """Statistics of the prompt lengths of sample rows, in tokens."""

    count: int
    mean: float
    median: float
    p95: int
    longest: int
    histogram: dict[str, int]
    """Number of rows in each bucket of lengths. A key is the largest length in the bucket: a power of two, or 0."""


def measure_lengths(lengths: Sequence[int]) -> Lengths:
    """Compute the statistics of some lengths. There must be at least one length.

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


class Images(Record, frozen=True, kw_only=True):
    """Images of the sample rows that can be answered. `largest` is the one with most pixels, as "WIDTH x HEIGHT"."""

    mean: float
    """Images a row, on average."""
    mean_bytes: float
    """Bytes an image, as it is stored, on average."""
    largest: str


class Measured(Record, frozen=True, kw_only=True):
    """What was found when prompts were made from the sample rows: errors by code, and prompt lengths."""

    rows: int
    rows_error: int
    errors: dict[str, int]
    lengths: Lengths | None
    images: Images | msgspec.UnsetType = msgspec.UNSET
    """Unset if no row has an image."""

    @classmethod
    def of(cls, rows: list[RenderedRow]) -> Measured:
        """Count the errors of rendered rows, and compute the statistics of their lengths in tokens.

        Without a tokenizer the lengths are not known, and `lengths` is None.
        """
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
            images=_measure_images([row.images or [] for row in rows if not row.code]),
        )


def _measure_images(rows: list[list[ShownImage]]) -> Images | msgspec.UnsetType:
    images = [image for row in rows for image in row]
    if not images:
        return msgspec.UNSET
    largest = max(images, key=lambda image: image.width * image.height)
    return Images(
        mean=len(images) / len(rows),
        mean_bytes=sum(image.bytes for image in images) / len(images),
        largest=f"{largest.width} x {largest.height}",
    )


# --------------------------------------------------------------------------- an earlier run


class RunRate(Record, frozen=True, kw_only=True):
    """Figures of an earlier run. `rate` is the average number of rows per second of one worker.

    `load_seconds` is the longest load of an engine. `row_seconds` is about how many seconds a row stays in the engine.
    """

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
    """Measure the rate of an earlier run: the rows of all workers, divided by the time that their engines were busy.

    Nothing in the run is changed.

    Raises:
        InputError: There is no such run, or no worker of the run has finished a row.
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
        load_seconds=max(r.engine_load_seconds or r.load_seconds for r in records),
        row_seconds=at_once * busy / rows,
        accelerator=first.accelerator,
        gpus=max(1, first.gpus),
    )


# --------------------------------------------------------------------------- time, cost, workers and chunk size


class Estimate(Record, frozen=True, kw_only=True):
    """Time and cost of a job. `rate` is rows per second of one worker.

    Costs are in dollars. They are None if no price is known.
    """

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
    """Estimate time and cost. The time of work is rows divided by rate; each worker adds one start.

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
    """Return how many workers are needed to finish `rows` in the target time.

    The result is None if a worker's start alone takes the target time or longer.

    >>> workers_for(36_000, 1.0, 3600, 0), workers_for(10, 1.0, 100, 200)
    (10, None)
    """
    left = target_seconds - start_seconds
    return None if left <= 0 else max(1, math.ceil(rows / rate / left))


def chunk_rows_for(rows: int, rate: float, workers: int) -> int:
    """Return a good number of rows for a chunk. The aim: several chunks for each worker, of one to twenty minutes each.

    With too few chunks, workers wait for others at the end. With too many, requests to storage cost time and money.
    How much work a killed worker loses does not depend on the chunk size.

    >>> chunk_rows_for(1_000_000, 20.0, 16), chunk_rows_for(1000, 20.0, 16)
    (15625, 16)
    """
    even = rows / (workers * CHUNKS_PER_WORKER)
    largest, smallest = rate * LONGEST_CHUNK_SECONDS, rate * SHORTEST_CHUNK_SECONDS
    size = min(even, largest)
    # If a worker has less than a minute of work in all, small chunks that share the rows evenly are better than few
    # requests.
    if size < smallest and rows / workers > smallest:
        size = smallest
    return max(1, math.ceil(max(size, rows / MOST_CHUNKS)))


def lost_seconds(
    start_seconds: float, checkpoint_seconds: float, in_flight_seconds: float
) -> float:
    """Return about how many seconds of a worker one preemption costs at most.

    This is the time of a new start, of the rows done since the last checkpoint, and of the rows in flight.
    """
    return start_seconds + checkpoint_seconds + in_flight_seconds


# --------------------------------------------------------------------------- advice


class Asked(Record, frozen=True, kw_only=True):
    """What `give_advice` needs to know.

    `rate` is rows per second of one worker. A field is None if its value is not known or the user did not give it.
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
    """Return the estimate and the advice, as entries for the result of `check`."""
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
