"""Positions and shapes of the report's charts: areas over time, time lines and histograms. Pure.

The template `charts.jinja` draws them. A chart is as wide as the page lets it be, so positions along x are in percent
of its width. Shapes are SVG paths in boxes that the template stretches to size; along time these boxes are 1000 wide.
Times are Unix seconds by storage's clock: a worker's own times are shifted by its clock's offset.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import NamedTuple

from batchinfer.core import units
from batchinfer.core.records import Minute, Span, Worker
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.inventory import SeenWorker
from batchinfer.runs.overview import clock_offset

MAX_BANDS = 7
"""Largest number of workers that get a band each in a stacked chart; more workers are drawn as one band."""
MAX_BINS = 180
"""Largest number of bins in a chart over time; in longer runs the bins are wider."""
MAX_TICKS = 6
"""Approximate number of labels on a time axis."""
MAX_TRACKS = 8
"""Largest number of tracks (rows of bars) in a worker's lane; if more chunks are open at once, their bars overlap."""
MAX_COLUMNS = 64
_MIN_BAR = 1.2
"""Smallest width of a bar, in thousandths of the lane's width, so that the shortest chunk can be seen."""
_MIN_RATE_SECONDS = 10.0
"""Shortest time in seconds over which a rate is computed: over a second or two it would be noise."""
_NAMED_CHUNKS = 3
"""Largest number of chunks that the title of a lane's bars names."""

_STEPS_SECONDS = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * n for n in (1, 2, 5, 10, 15, 30)),
    *(3600 * n for n in (1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 720, 2160)),
)


class Period(NamedTuple):
    """A stretch of time, in Unix seconds."""

    begin: float
    end: float

    def percent(self, moment: float) -> float:
        """Position of a moment in percent: 0 at the beginning, 100 at the end.

        Moments outside are moved to the edge.
        """
        share = (moment - self.begin) / (self.end - self.begin)
        return 100 * min(1.0, max(0.0, share))


class Tick(NamedTuple):
    """A label on a time axis. `at` is its position in percent of the width."""

    at: float
    label: str


# --------------------------------------------------------------------------- axes


def life_of(workers: Sequence[SeenWorker]) -> Period:
    """The time from the first start to the last heartbeat, at least ten seconds."""
    begins, ends = [], []
    for seen in workers:
        offset = clock_offset(seen)
        begins += [moment + offset for moment in (*seen.record.starts, seen.record.started)]
        ends.append(seen.record.heartbeat + offset)
    begin = min(begins, default=0.0)
    return Period(begin, max(max(ends, default=0.0), begin + 10))


def time_ticks(period: Period) -> list[Tick]:
    """Labels at round moments (UTC). Long labels near the edges are left out, since they would leave the page.

    >>> [tick.label for tick in time_ticks(Period(0.0, 7800.0))]
    ['00:00', '00:30', '01:00', '01:30', '02:00']
    """
    length = period.end - period.begin
    # Labels with seconds are wide, and only four of them fit on a phone.
    most = MAX_TICKS if length > 30 * MAX_TICKS else 4
    step = next((step for step in _STEPS_SECONDS if length / step <= most), _STEPS_SECONDS[-1])
    if step < 60:
        form = "%H:%M:%S"
    elif length <= 36 * 3600:
        form = "%H:%M"
    else:
        form = "%d %b" if step >= 86400 else "%d %b %Hh"
    first, last = math.ceil(period.begin / step), math.floor(period.end / step)
    moments = [index * step for index in range(first, last + 1)[: 2 * MAX_TICKS]]
    ticks = [Tick(period.percent(moment), clock_time(moment, form)) for moment in moments]
    return [tick for tick in ticks if len(tick.label) <= 5 or 6 <= tick.at <= 94]


def clock_time(moment: float, form: str) -> str:
    """A moment (UTC) formatted by `strftime`; "?" for a moment beyond the calendar, which a bad record may hold."""
    try:
        return datetime.fromtimestamp(moment, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "?"


def nice_maximum(value: float) -> float:
    """The smallest round number that is not below a value. Its quarters are round, too, for the labels of an axis.

    >>> nice_maximum(0), nice_maximum(37), nice_maximum(11900)
    (1.0, 40.0, 12000.0)
    """
    if value < 1e-9 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10):
        if factor * power >= value * (1 - 1e-9):
            return factor * power
    return 10 * power


# --------------------------------------------------------------------------- areas over time


class Bins(NamedTuple):
    """Equal stretches of time, of `seconds` each."""

    begin: float
    seconds: float
    number: int

    @classmethod
    def covering(cls, period: Period, max_bins: int = MAX_BINS) -> Bins:
        """Bins of whole minutes, as in workers' records. The first may begin before the period, the last end after."""
        begin = 60 * (period.begin // 60)
        minutes = math.ceil((period.end - begin) / 60)
        minutes_per_bin = math.ceil(minutes / max_bins)
        return cls(begin, 60 * minutes_per_bin, math.ceil(minutes / minutes_per_bin))

    def edges(self) -> list[float]:
        """The beginning of each bin, and the end of the last one."""
        return [self.begin + index * self.seconds for index in range(self.number + 1)]


class Series(NamedTuple):
    """Rows and output tokens in each bin, of one worker or of all together."""

    name: str
    rows: list[float]
    tokens: list[float]


class Area(NamedTuple):
    """One band of a stacked chart. `path` is an SVG path in a box of 1000 by 1000."""

    name: str
    path: str


class AreaChart(NamedTuple):
    """Areas over time that are stacked, the lowest first.

    `levels` are the five labels of the y axis, from its foot to its top.
    """

    areas: list[Area]
    levels: list[str]
    ticks: list[Tick]


def series_of(workers: Sequence[SeenWorker], bins: Bins) -> list[Series]:
    """Rows and tokens by bin of each worker; if there are more than `MAX_BANDS`, of all workers together."""
    found = []
    for seen in workers:
        series = Series(seen.record.id, [0.0] * bins.number, [0.0] * bins.number)
        for minute in seen.record.minutes:
            _spread(minute, clock_offset(seen), bins, series)
        found.append(series)
    if len(found) <= MAX_BANDS:
        return found
    rows = [sum(values) for values in zip(*(one.rows for one in found), strict=True)]
    tokens = [sum(values) for values in zip(*(one.tokens for one in found), strict=True)]
    return [Series(f"all {len(found)} workers", rows, tokens)]


def _spread(minute: Minute, offset: float, bins: Bins, series: Series) -> None:
    """Spread one entry of a worker's record over the bins that it covers."""
    begin = (minute.minute * 60 + offset - bins.begin) / bins.seconds
    end = begin + minute.length * 60 / bins.seconds
    first, last = max(0, int(begin)), min(bins.number - 1, int(end - 1e-9))
    for index in range(first, last + 1):
        share = (min(end, index + 1) - max(begin, index)) / (end - begin)
        series.rows[index] += share * minute.rows
        series.tokens[index] += share * minute.completion_tokens


def throughput(series: Sequence[Series], bins: Bins, life: Period) -> AreaChart:
    """Output tokens per second, constant over each bin."""
    bounds = list(pairwise(bins.edges()))
    seconds = [
        max(_MIN_RATE_SECONDS, min(end, life.end) - max(begin, life.begin)) for begin, end in bounds
    ]
    values = [
        [
            tokens / lived
            for tokens, lived in zip(one.tokens, seconds, strict=True)
            for _ in ("from", "to")
        ]
        for one in series
    ]
    moments = [moment for bound in bounds for moment in bound]
    return _stack([one.name for one in series], values, moments, life)


def progress(series: Sequence[Series], bins: Bins, life: Period, total: float) -> AreaChart:
    """Rows finished since the start, at the end of each bin. The y axis reaches to `total` at least."""
    values = [[0.0, *accumulate(one.rows)] for one in series]
    return _stack([one.name for one in series], values, bins.edges(), life, total)


def _stack(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    moments: Sequence[float],
    life: Period,
    least_top: float = 0.0,
) -> AreaChart:
    """Stack areas on each other. `values` holds a list of numbers for each name, one number for each moment."""
    top = nice_maximum(max([least_top, *map(sum, zip(*values, strict=True))]))
    xs = [10 * life.percent(moment) for moment in moments]
    base = [0.0] * len(xs)
    areas = []
    for name, heights in zip(names, values, strict=True):
        upper = [low + height for low, height in zip(base, heights, strict=True)]
        points = [*zip(xs, upper, strict=True), *zip(reversed(xs), reversed(base), strict=True)]
        line = " L".join(f"{x:.1f},{1000 - 1000 * y / top:.1f}" for x, y in points)
        areas.append(Area(name, f"M{line}Z"))
        base = upper
    levels = [units.short(top * quarter / 4) for quarter in range(5)]
    return AreaChart(areas, levels, time_ticks(life))


# --------------------------------------------------------------------------- time lines


class Bars(NamedTuple):
    """The chunks of one worker with the same outcome, as one shape.

    `path` is an SVG path in a box that is 1000 wide and as high as the number of tracks.
    """

    outcome: str
    title: str
    path: str


class Mark(NamedTuple):
    """The start or end of a worker's process. `kind` is start, resume, kill or end; `at` is in percent."""

    kind: str
    at: float
    time: str


class Lane(NamedTuple):
    """One worker's time line. `up` is an SVG path that shows when its processes ran."""

    worker: str
    num_tracks: int
    up: str
    bars: list[Bars]
    marks: list[Mark]

    @property
    def num_kills(self) -> int:
        """Number of processes that ended without writing their last record."""
        return sum(mark.kind == "kill" for mark in self.marks)


def lane_of(seen: SeenWorker, life: Period) -> Lane:
    """Lay out one worker's time line."""
    record, offset = seen.record, clock_offset(seen)
    spans = sorted([*record.spans, *record.open_spans], key=lambda span: (span.start, span.end))
    tracks = _tracks(spans)
    num_tracks = 1 + max(tracks, default=0)

    def box(begin: float, end: float, y: float, height: float) -> str:
        x = 10 * life.percent(begin + offset)
        width = max(_MIN_BAR, 10 * life.percent(end + offset) - x)
        return f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h-{width:.1f}z"

    up, marks = _starts(record)
    by_outcome: dict[str, list[tuple[Span, int]]] = {}
    for span, track in zip(spans, tracks, strict=True):
        by_outcome.setdefault(span.outcome, []).append((span, track))
    return Lane(
        record.id,
        num_tracks,
        "".join(box(begin, end, 0, num_tracks) for begin, end in up),
        [
            Bars(
                outcome,
                _title(outcome, [span for span, _ in found]),
                "".join(box(span.start, span.end, track + 0.05, 0.9) for span, track in found),
            )
            for outcome, found in by_outcome.items()
        ],
        [
            Mark(kind, life.percent(moment + offset), clock_time(moment + offset, "%H:%M:%S"))
            for kind, moment in marks
        ],
    )


def _tracks(spans: Sequence[Span]) -> list[int]:
    """The track (from 0) of each span. Spans that overlap get different tracks, as long as there are enough."""
    busy: list[tuple[float, int]] = []  # a heap of (end, track)
    tracks = []
    for span in spans:
        if busy and (busy[0][0] <= span.start or len(busy) >= MAX_TRACKS):
            _, track = heapq.heappop(busy)
        else:
            track = len(busy)
        heapq.heappush(busy, (span.end, track))
        tracks.append(track)
    return tracks


def _title(outcome: str, spans: Sequence[Span]) -> str:
    """A description of the spans of one outcome: names of chunks, and sums of rows."""
    names = ", ".join(span.chunk for span in spans[:_NAMED_CHUNKS])
    more = len(spans) - _NAMED_CHUNKS
    resumed = sum(span.resumed for span in spans)
    return (
        f"{outcome}: {names}"
        + (f" and {more} more" if more > 0 else "")
        + f"; {units.many(sum(span.rows for span in spans), 'row')}"
        + (f", {resumed:,} of them resumed" if resumed else "")
    )


def _starts(record: Worker) -> tuple[list[tuple[float, float]], list[tuple[str, float]]]:
    """The times at which a worker's processes ran, and (kind, moment) of their marks, by the worker's clock."""
    up, marks = [], []
    starts = record.starts or [record.started]
    ends = [*record.ends[-(len(starts) - 1) :]] if len(starts) > 1 else []
    ends = [*ends, (record.heartbeat, record.state)]
    is_first = record.epoch <= len(starts)
    for index, (start, (end, state)) in enumerate(zip(starts, ends, strict=False)):
        up.append((start, max(start, end)))
        marks.append(("start" if index == 0 and is_first else "resume", start))
        if state in ENDED_STATES:
            marks.append(("end", end))
        elif index < len(ends) - 1:
            marks.append(("kill", end))
    return up, marks


# --------------------------------------------------------------------------- histograms


class Column(NamedTuple):
    """One column of a histogram. `height` is in percent of the highest column."""

    name: str
    height: float
    shown: str


def histogram(counts: Sequence[dict[str, int]]) -> list[Column]:
    """Columns of rows by length, from counts by the upper bound of a bucket; empty buckets between others are kept.

    >>> [(column.name, column.height) for column in histogram([{"512": 1}, {"512": 3, "2048": 2}])]
    [('512', 100.0), ('1k', 0.0), ('2k', 50.0)]
    """
    sums: dict[int, int] = {}
    for one in counts:
        for bucket, number in one.items():
            if bucket.isdecimal():
                sums[int(bucket)] = sums.get(int(bucket), 0) + number
    if not sums:
        return []
    buckets = [min(sums)]
    while buckets[-1] < max(sums) and len(buckets) < MAX_COLUMNS:
        buckets.append(max(1, buckets[-1] * 2))
    highest = max(1, *sums.values())
    return [
        Column(
            f"{bucket // 1024}k" if bucket >= 1024 and bucket % 1024 == 0 else str(bucket),
            100 * sums.get(bucket, 0) / highest,
            units.short(sums.get(bucket, 0)),
        )
        for bucket in buckets
    ]
