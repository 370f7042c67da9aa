"""What happened when, by worker: rates over time, and the time line of starts and chunks. Pure.

All times that come out are Unix seconds by storage's clock: a worker's own are shifted by its clock's offset.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchinfer.core.records import Minute, Span, Worker
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.snapshot import SeenWorker
from batchinfer.runs.worker_views import clock_offset

MAX_BINS = 180


class Extent(NamedTuple):
    """A stretch of time cut into equal bins."""

    begin: float
    end: float
    num_bins: int

    @property
    def bin_seconds(self) -> float:
        """Length of one bin."""
        return (self.end - self.begin) / self.num_bins

    def share(self, moment: float) -> float:
        """Where a moment lies, from 0 at the beginning to 1 at the end; outside is cut off."""
        return min(1.0, max(0.0, (moment - self.begin) / (self.end - self.begin)))


class Bins(NamedTuple):
    """One worker's sums in each bin of an extent."""

    worker: str
    rows: list[float]
    input_tokens: list[float]
    output_tokens: list[float]


class Mark(NamedTuple):
    """A start of a worker, or the end of one. `kind`: start, resume, kill, end."""

    moment: float
    kind: str


class Bar(NamedTuple):
    """Chunks of one outcome in a row, one of them unless they are too short to tell apart.

    `track` counts from 0: chunks that were open at the same time have different ones.
    """

    begin: float
    end: float
    track: int
    outcome: str
    chunks: int
    name: str
    rows: int
    resumed: int


class Lane(NamedTuple):
    """One worker's time line. `up` are the stretches in which a process of it ran."""

    worker: str
    up: list[tuple[float, float]]
    bars: list[Bar]
    marks: list[Mark]
    num_tracks: int


def life_of(workers: Sequence[SeenWorker]) -> Extent:
    """From the first start to the last heartbeat, as one bin of at least ten seconds."""
    begins, ends = [], []
    for seen in workers:
        offset = clock_offset(seen)
        begins += [moment + offset for moment in (*seen.record.starts, seen.record.started)]
        ends.append(seen.record.heartbeat + offset)
    begin = min(begins, default=0.0)
    return Extent(begin, max(max(ends, default=0.0), begin + 10), 1)


def bins_of(life: Extent, max_bins: int = MAX_BINS) -> Extent:
    """Bins of whole minutes that cover a stretch of time."""
    begin = 60 * (life.begin // 60)
    minutes = int(-(-(life.end - begin) // 60))
    minutes_per_bin = -(-minutes // max_bins)
    num_bins = -(-minutes // minutes_per_bin)
    return Extent(begin, begin + num_bins * minutes_per_bin * 60, num_bins)


def bins_by_worker(workers: Sequence[SeenWorker], extent: Extent) -> list[Bins]:
    """Sort every worker's minutes into bins."""
    found = []
    for seen in workers:
        bins = Bins(seen.record.id, *([0.0] * extent.num_bins for _ in range(3)))
        for minute in seen.record.minutes:
            _spread(minute, clock_offset(seen), extent, bins)
        found.append(bins)
    return found


def _spread(minute: Minute, offset: float, extent: Extent, bins: Bins) -> None:
    """Add one point of a series to the bins that it covers, each its share."""
    begin = (minute.minute * 60 + offset - extent.begin) / extent.bin_seconds
    end = begin + minute.length * 60 / extent.bin_seconds
    first, last = max(0, int(begin)), min(extent.num_bins - 1, int(end - 1e-9))
    for index in range(first, last + 1):
        share = (min(end, index + 1) - max(begin, index)) / (end - begin)
        bins.rows[index] += share * minute.rows
        bins.input_tokens[index] += share * minute.prompt_tokens
        bins.output_tokens[index] += share * minute.completion_tokens


def cumulative(values: Iterable[float]) -> list[float]:
    """Running sums.

    >>> cumulative([1, 2, 3])
    [1.0, 3.0, 6.0]
    """
    total = 0.0
    sums = []
    for value in values:
        total += value
        sums.append(total)
    return sums


def lanes_of(
    workers: Sequence[SeenWorker], extent: Extent, *, max_bars: int = 6000, max_tracks: int = 6
) -> list[Lane]:
    """Every worker's time line; together about `max_bars` bars at most, by joining the shortest ones."""
    total = sum(len(seen.record.spans) for seen in workers)
    if total > max_bars:
        max_tracks = min(max_tracks, 3)
    shortest = 0.0015 * max(1.0, total / max_bars) * (extent.end - extent.begin)
    return [_lane(seen, shortest, max_tracks) for seen in workers]


def _lane(seen: SeenWorker, shortest: float, max_tracks: int) -> Lane:
    record, offset = seen.record, clock_offset(seen)
    spans = sorted([*record.spans, *record.open_spans], key=lambda span: (span.start, span.end))
    bars, num_tracks = _bars(spans, offset, shortest, max_tracks)
    up, marks = _life(record, offset)
    return Lane(record.id, up, bars, marks, num_tracks)


def _life(record: Worker, offset: float) -> tuple[list[tuple[float, float]], list[Mark]]:
    up, marks = [], []
    starts = record.starts or [record.started]
    ends = [*record.ends[-(len(starts) - 1) :]] if len(starts) > 1 else []
    ends = [*ends, (record.heartbeat, record.state)]
    is_first = record.epoch <= len(starts)
    for index, (start, (end, state)) in enumerate(zip(starts, ends, strict=False)):
        up.append((start + offset, max(start, end) + offset))
        kind = "start" if index == 0 and is_first else "resume"
        marks.append(Mark(start + offset, kind))
        if state in ENDED_STATES:
            marks.append(Mark(end + offset, "end"))
        elif index < len(ends) - 1:
            marks.append(Mark(end + offset, "kill"))
    return up, marks


def _bars(
    spans: Sequence[Span], offset: float, shortest: float, max_tracks: int
) -> tuple[list[Bar], int]:
    """Give chunks that overlap tracks of their own, and join neighbours that are too short to see."""
    free: list[tuple[float, int]] = []  # (end, track), the one that ends first on top
    last: dict[int, Bar] = {}
    bars: list[Bar] = []
    for span in spans:
        if free and (free[0][0] <= span.start or len(free) >= max_tracks):
            _, track = heapq.heappop(free)
        else:
            track = len(free)
        heapq.heappush(free, (span.end, track))
        bar = Bar(
            span.start + offset,
            max(span.start, span.end) + offset,
            track,
            span.outcome,
            1,
            span.chunk,
            span.rows,
            span.resumed,
        )
        before = last.get(track)
        if before is not None and _can_join(before, bar, shortest):
            last[track] = before._replace(
                end=max(before.end, bar.end),
                chunks=before.chunks + 1,
                rows=before.rows + bar.rows,
                resumed=before.resumed + bar.resumed,
            )
            continue
        if before is not None:
            bars.append(before)
        last[track] = bar
    return [*bars, *last.values()], max(1, len(free))


def _can_join(before: Bar, bar: Bar, shortest: float) -> bool:
    is_short = bar.end - bar.begin < shortest and before.end - before.begin < 4 * shortest
    return is_short and before.outcome == bar.outcome and bar.begin - before.end < shortest
