"""Where everything in the report's charts goes: areas over time, time lines, columns. Pure; the template draws them.

A chart is as wide as the page lets it be, so a position along x is in percent of its width. Shapes are SVG paths in
boxes that the template stretches: 1000 wide for whatever lies along time. Times are Unix seconds by storage's clock: a
worker's own times are shifted by its clock's offset.
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
"""Workers that have a colour of their own in a stacked chart; more are drawn as one."""
MAX_BINS = 180
MAX_TICKS = 6
MAX_TRACKS = 8
"""Chunks of one worker that are drawn below each other; more overlap."""
MAX_COLUMNS = 64
_MIN_BAR = 1.2
"""Thousandths of a time line's width that every chunk gets, however short it was."""
_MIN_RATE_SECONDS = 10.0
"""Time over which a rate is taken at least: over a second or two it would be noise."""
_NAMED_CHUNKS = 3

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
        """Where a moment lies, from 0 at the beginning to 100 at the end; outside is cut off."""
        share = (moment - self.begin) / (self.end - self.begin)
        return 100 * min(1.0, max(0.0, share))


class Tick(NamedTuple):
    """A label on a time axis. `at` is in percent of the width."""

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
    """Round moments (UTC), without those at the very edges whose labels are so long that they would leave the page.

    >>> [tick.label for tick in time_ticks(Period(0.0, 7800.0))]
    ['00:00', '00:30', '01:00', '01:30', '02:00']
    """
    length = period.end - period.begin
    # A label with seconds is wide: more than four do not fit on a phone.
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
    """A moment (UTC) in the form of `strftime`, or "?" beyond the calendar: a worker's record may say anything."""
    try:
        return datetime.fromtimestamp(moment, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "?"


def nice_maximum(value: float) -> float:
    """The next round number at or above a value whose quarters are round too.

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
        """Bins of whole minutes, since workers count by minutes of the clock; the last may reach over the end."""
        begin = 60 * (period.begin // 60)
        minutes = math.ceil((period.end - begin) / 60)
        minutes_per_bin = math.ceil(minutes / max_bins)
        return cls(begin, 60 * minutes_per_bin, math.ceil(minutes / minutes_per_bin))

    def edges(self) -> list[float]:
        """Where the bins begin, and where the last one ends."""
        return [self.begin + index * self.seconds for index in range(self.number + 1)]


class Series(NamedTuple):
    """Rows and output tokens in each bin, of one worker or of all together."""

    name: str
    rows: list[float]
    tokens: list[float]


class Area(NamedTuple):
    """One band of a stacked chart. `path` lies in a box of 1000 by 1000."""

    name: str
    path: str


class AreaChart(NamedTuple):
    """Areas over time, one on the other, the lowest first.

    `levels` are the labels of the y axis at 0, 1, 2, 3 and 4 quarters of its height.
    """

    areas: list[Area]
    levels: list[str]
    ticks: list[Tick]


def series_of(workers: Sequence[SeenWorker], bins: Bins) -> list[Series]:
    """Sort every worker's minutes into bins; more workers than have colours are added up."""
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
    """Add one point of a worker's record to the bins that it covers, each its share."""
    begin = (minute.minute * 60 + offset - bins.begin) / bins.seconds
    end = begin + minute.length * 60 / bins.seconds
    first, last = max(0, int(begin)), min(bins.number - 1, int(end - 1e-9))
    for index in range(first, last + 1):
        share = (min(end, index + 1) - max(begin, index)) / (end - begin)
        series.rows[index] += share * minute.rows
        series.tokens[index] += share * minute.completion_tokens


def throughput(series: Sequence[Series], bins: Bins, life: Period) -> AreaChart:
    """Output tokens per second, level over each bin."""
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
    """Rows finished by the end of each bin; the y axis reaches to the total."""
    values = [[0.0, *accumulate(one.rows)] for one in series]
    return _stack([one.name for one in series], values, bins.edges(), life, total)


def _stack(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    moments: Sequence[float],
    life: Period,
    least_top: float = 0.0,
) -> AreaChart:
    """Lay series on each other. `values` has one number for each moment, of each series."""
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
    """All chunks of one worker that ended the same way. `path` lies in a box of 1000 by the lane's tracks."""

    outcome: str
    title: str
    path: str


class Mark(NamedTuple):
    """A start of a worker or the end of one. `kind` is start, resume, kill or end; `at` is in percent."""

    kind: str
    at: float
    time: str


class Lane(NamedTuple):
    """One worker's time line: `up` is the path of the stretches in which a process of it ran."""

    worker: str
    num_tracks: int
    up: str
    bars: list[Bars]
    marks: list[Mark]

    @property
    def num_kills(self) -> int:
        """Starts that ended without a word."""
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
    """The track of each span, from 0: those that overlap have different ones, as far as there are enough."""
    busy: list[tuple[float, int]] = []  # (end, track), the one that ends first on top
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
    """What a lane's bars of one colour are, in words."""
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
    """When a worker's processes ran, and how each began and ended; by the worker's clock."""
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
    """One column. `height` is in percent of the highest."""

    name: str
    height: float
    shown: str


def histogram(counts: Sequence[dict[str, int]]) -> list[Column]:
    """Rows by length, from several counts by the upper bound of a bucket; empty buckets inside are kept.

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
