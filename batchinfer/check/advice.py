"""What a job will take: memory, time, money, and how to cut it. Pure arithmetic; `check` gathers the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from batchinfer.core.records import Record

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
"""What the driver reports as total, a little below the number on the box. Names are SkyPilot's."""

RESTART_SECONDS = 600.0
"""From a preemption to a new machine with a loaded model, where nobody has measured it: minutes each for noticing it,
getting a machine, set-up and loading."""
MOST_LOST_SECONDS = 1800.0
"""Restart overhead that a preemption may cost."""
CHECKPOINT_SECONDS = 30.0
SHORTEST_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS = 60.0, 1200.0
CHUNKS_PER_WORKER = 4
"""Fewer leave workers idle at the end, when the slower ones cannot be helped."""
MOST_CHUNKS = 10_000


class Lengths(Record, frozen=True, kw_only=True):
    """Prompt lengths of a sample, in tokens."""

    count: int
    mean: float
    median: float
    p95: int
    longest: int
    histogram: dict[str, int]
    """Rows by the bucket's upper bound, a power of two, inclusive."""


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


class Memory(Record, frozen=True, kw_only=True):
    """How a model lies on the GPUs of one worker, and how many rows run at once."""

    explanation: str
    tensor_parallel_size: int
    replicas: int
    weights_bytes_per_gpu: int
    cache_bytes_per_gpu: int
    cache_tokens: int
    """Of one replica; 0 where the model's config does not tell."""
    rows_at_once: int | None = None
    """Of one replica, at the sample's mean prompt and the answer's limit."""


def rows_at_once(cache_tokens: int, tokens_per_row: float, max_num_seqs: int | None) -> int:
    """Rows that a KV cache holds, at most what the engine runs.

    >>> rows_at_once(65_536, 512, 256), rows_at_once(1_000_000, 512, 256)
    (128, 256)
    """
    room = int(cache_tokens // max(tokens_per_row, 1.0))
    return min(room, max_num_seqs) if max_num_seqs else room


class Estimate(Record, frozen=True, kw_only=True):
    """Time and money for a job. `rate` is rows per second of one worker. Dollars are None without a price."""

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
    """Rows over rate, and every worker's start-up once.

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
    """Workers that finish in the target time, None where starting alone takes longer.

    >>> workers_for(36_000, 1.0, 3600, 0), workers_for(10, 1.0, 100, 200)
    (10, None)
    """
    left = target_seconds - start_seconds
    return None if left <= 0 else max(1, math.ceil(rows / rate / left))


def chunk_rows_for(rows: int, rate: float, workers: int) -> int:
    """A good size of chunks: some for each worker, each of a minute's to twenty minutes' work.

    Chunks are only bookkeeping: what a kill loses does not depend on them. Too few leave workers idle at the end, too
    many cost requests.

    >>> chunk_rows_for(1_000_000, 20.0, 16), chunk_rows_for(1000, 20.0, 16)
    (15625, 16)
    """
    even = rows / (workers * CHUNKS_PER_WORKER)
    largest, smallest = rate * LONGEST_CHUNK_SECONDS, rate * SHORTEST_CHUNK_SECONDS
    size = min(even, largest)
    # Where rows are few, balance beats the number of requests.
    if size < smallest and rows / workers > smallest:
        size = smallest
    return max(1, math.ceil(max(size, rows / MOST_CHUNKS)))


def lost_seconds(
    start_seconds: float, checkpoint_seconds: float, in_flight_seconds: float
) -> float:
    """What a preemption costs one worker at most: a new start, the last checkpoint's age, and rows under way."""
    return start_seconds + checkpoint_seconds + in_flight_seconds
