"""Positions and shapes of the report's charts: areas over time, time lines and histograms.

This module only computes; it reads and writes nothing.

The template `charts.jinja` draws the charts. A chart is as wide as the page allows, so positions along the x axis are
in percent of the chart's width. Shapes are SVG paths in boxes, which the template stretches to the chart's size. A box
with a time axis is 1000 units wide. Times are Unix seconds by storage's clock: a worker's own times are converted by
adding the offset of the worker's clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from batchinfer.core import units
from batchinfer.core.records import Minute, Span, Worker
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.inventory import SeenWorker
from batchinfer.runs.answers import DoneChunk, Piece
from batchinfer.runs.overview import clock_offset

MAX_BANDS = 7
"""Largest number of workers that get a band each in a stacked chart. A run with more workers gets one band for all."""
MAX_BINS = 180
"""Largest number of bins (equal stretches of time) in a chart over time. The longer the run, the wider the bins."""
MAX_TICKS = 6
"""About the largest number of labels on a time axis."""
MAX_TRACKS = 8
"""Largest number of tracks (rows of bars) in a worker's lane.

If a worker has more chunks than this open at once, some of their bars overlap.
"""
MAX_COLUMNS = 64
_MIN_BAR = 1.2
"""Smallest width of a bar, in thousandths of the lane's width, so that the bar of a very short chunk can be seen."""
_MIN_RATE_SECONDS = 10.0
"""Fewest seconds by which a count is divided to get a rate. A rate over only a second or two would be mostly noise."""
_NAMED_CHUNKS = 3
"""Largest number of chunks that are named in the title of a shape of bars."""

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

        A moment before the period gets 0, a moment after it gets 100.
        """
        share = (moment - self.begin) / (self.end - self.begin)
        return 100 * min(1.0, max(0.0, share))


class Tick(NamedTuple):
    """A label on a time axis. `at` is its position in percent of the width."""

    at: float
    label: str


# --------------------------------------------------------------------------- axes


def life_of(workers: Sequence[SeenWorker]) -> Period:
    """The period from the first start of any worker to the last heartbeat of any worker.

    The period is at least ten seconds long.
    """
    begins, ends = [], []
    for seen in workers:
        offset = clock_offset(seen)
        begins += [moment + offset for moment in (*seen.record.starts, seen.record.started)]
        ends.append(seen.record.heartbeat + offset)
    begin = min(begins, default=0.0)
    return Period(begin, max(max(ends, default=0.0), begin + 10))


def time_ticks(period: Period) -> list[Tick]:
    """Labels for a time axis, at round moments (UTC).

    Long labels near the left or right edge are left out, because they would stick out of the page.

    >>> [tick.label for tick in time_ticks(Period(0.0, 7800.0))]
    ['00:00', '00:30', '01:00', '01:30', '02:00']
    """
    length = period.end - period.begin
    # A short period gets labels with seconds. They are wide: only four of them fit on a phone's screen.
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
    """A moment (UTC) formatted by `strftime`.

    A damaged record may hold a moment that no calendar date can express. The result is then "?".
    """
    try:
        return datetime.fromtimestamp(moment, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "?"


def nice_maximum(value: float) -> float:
    """The smallest round number that is not below a value.

    A quarter of the number is round, too, because an axis has labels at each quarter.

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
    """Equal stretches of time. Each is `seconds` long."""

    begin: float
    seconds: float
    number: int

    @classmethod
    def covering(cls, period: Period, max_bins: int = MAX_BINS) -> Bins:
        """Bins that together cover a period. Each is a whole number of minutes long, as workers count rows by minutes.

        The first bin may begin before the period, and the last bin may end after it.
        """
        begin = 60 * (period.begin // 60)
        minutes = math.ceil((period.end - begin) / 60)
        minutes_per_bin = math.ceil(minutes / max_bins)
        return cls(begin, 60 * minutes_per_bin, math.ceil(minutes / minutes_per_bin))

    def edges(self) -> list[float]:
        """The beginning of each bin, and the end of the last one."""
        return [self.begin + index * self.seconds for index in range(self.number + 1)]


UNREPORTED = "in no worker's record, because a kill came before the next heartbeat"


class Series(NamedTuple):
    """Rows and output tokens in each bin, of one worker or of all workers together. `name` may be `UNREPORTED`."""

    name: str
    rows: list[float]
    tokens: list[float]


class Area(NamedTuple):
    """One band of a stacked chart.

    `path` is an SVG path in a box of 1000 by 1000. `style` is a class of the style sheet.
    """

    name: str
    path: str
    style: str


class AreaChart(NamedTuple):
    """Stacked areas over time. The list of areas begins with the lowest.

    `levels` are the five labels of the y axis, from its foot to its top.
    """

    areas: list[Area]
    levels: list[str]
    ticks: list[Tick]


def series_of(pieces: Sequence[Piece], workers: Sequence[SeenWorker], bins: Bins) -> list[Series]:
    """Rows and output tokens in each bin: one series for each worker, and one for the rows that no record tells of.

    The sums are those of the pieces. Within a piece's time, the minutes in its worker's record say how much was done
    when. With more than `MAX_BANDS` workers, one series has the sums over all of them.
    """
    paces = {seen.record.id: _pace(seen, bins) for seen in workers}
    found: dict[str, Series] = {}
    for piece in pieces:
        if piece.worker not in found:
            found[piece.worker] = _no_rows(piece.worker or UNREPORTED, bins)
        _place(piece, paces.get(piece.worker), bins, found[piece.worker])
    unreported = found.pop("", None)
    series = [found[name] for name in sorted(found)]
    if len(series) > MAX_BANDS:
        rows = [sum(values) for values in zip(*(one.rows for one in series), strict=True)]
        tokens = [sum(values) for values in zip(*(one.tokens for one in series), strict=True)]
        series = [Series(f"all {len(series)} workers", rows, tokens)]
    return series if unreported is None else [*series, unreported]


def _no_rows(name: str, bins: Bins) -> Series:
    return Series(name, [0.0] * bins.number, [0.0] * bins.number)


def _pace(seen: SeenWorker, bins: Bins) -> Series:
    """Rows and output tokens in each bin that a worker generated, by the minutes in its record."""
    series = _no_rows(seen.record.id, bins)
    for minute in seen.record.minutes:
        if minute.length > 0:  # a damaged record may say anything
            _spread(minute, clock_offset(seen), bins, series)
    return series


def _place(piece: Piece, pace: Series | None, bins: Bins, series: Series) -> None:
    """Add a piece to the bins that its time covers. What is outside all bins goes to the first or the last."""
    begin, end = (
        min(max(0.0, (moment - bins.begin) / bins.seconds), float(bins.number))
        for moment in (piece.begin, piece.end)
    )
    first = min(int(begin), bins.number - 1)
    covered = range(first, max(first + 1, math.ceil(end)))
    shares = [max(0.0, min(end, index + 1) - max(begin, index)) for index in covered]
    if not any(shares):
        shares[0] = 1.0
    for amount, values, paces in (
        (piece.rows, series.rows, pace and pace.rows),
        (piece.tokens, series.tokens, pace and pace.tokens),
    ):
        weights = shares
        if paces:
            weights = [share * paces[index] for share, index in zip(shares, covered, strict=True)]
        whole = sum(weights)
        if whole <= 0:
            weights, whole = shares, sum(shares)
        for weight, index in zip(weights, covered, strict=True):
            values[index] += amount * weight / whole


def _spread(minute: Minute, offset: float, bins: Bins, series: Series) -> None:
    """Add the counts of one entry of a worker's record to the bins that the entry's time covers, in proportion."""
    begin = (minute.minute * 60 + offset - bins.begin) / bins.seconds
    end = begin + minute.length * 60 / bins.seconds
    first, last = max(0, int(begin)), min(bins.number - 1, int(end - 1e-9))
    for index in range(first, last + 1):
        share = (min(end, index + 1) - max(begin, index)) / (end - begin)
        series.rows[index] += share * minute.rows
        series.tokens[index] += share * minute.completion_tokens


def throughput(series: Sequence[Series], bins: Bins, life: Period) -> AreaChart:
    """A chart of output tokens per second. Each bin has one value, drawn as a flat step."""
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
    """A chart of the rows that are safe, with a point at the end of each bin.

    The y axis reaches at least to `total`, the rows of the run.
    """
    values = [[0.0, *accumulate(one.rows)] for one in series]
    return _stack([one.name for one in series], values, bins.edges(), life, total)


def _stack(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    moments: Sequence[float],
    life: Period,
    least_top: float = 0.0,
) -> AreaChart:
    """Stack areas on each other.

    `values` holds one list of numbers for each name. Each list has one number for each moment. The y axis reaches at
    least to `least_top`.
    """
    top = nice_maximum(max([least_top, *map(sum, zip(*values, strict=True))]))
    xs = [10 * life.percent(moment) for moment in moments]
    base = [0.0] * len(xs)
    areas = []
    for index, (name, heights) in enumerate(zip(names, values, strict=True), start=1):
        upper = [low + height for low, height in zip(base, heights, strict=True)]
        points = [*zip(xs, upper, strict=True), *zip(reversed(xs), reversed(base), strict=True)]
        line = " L".join(f"{x:.1f},{1000 - 1000 * y / top:.1f}" for x, y in points)
        style = "unreported" if name == UNREPORTED else f"s{index}"
        areas.append(Area(name, f"M{line}Z", style))
        base = upper
    levels = [units.short(top * quarter / 4) for quarter in range(5)]
    return AreaChart(areas, levels, time_ticks(life))


# --------------------------------------------------------------------------- time lines


class Bars(NamedTuple):
    """The bars of all chunks of one worker that had the same outcome, drawn as one shape.

    `path` is an SVG path in a box that is 1000 wide and as high as the number of tracks.
    """

    outcome: str
    title: str
    path: str


class Mark(NamedTuple):
    """A mark on a time line: the start or the end of a worker's process.

    `kind` is start, resume, kill or end. `at` is the position in percent of the width.
    """

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


def lane_of(
    seen: SeenWorker, life: Period, done: Sequence[DoneChunk] = (), *, is_gone: bool = False
) -> Lane:
    """Lay out one worker's time line.

    Args:
        seen: The worker's record.
        life: The time that the line covers.
        done: The chunks with markers of this worker. The record may lack some of them, or call them open or killed.
        is_gone: Whether the worker counts as gone, so that its open chunks were killed with it.
    """
    record, offset = seen.record, clock_offset(seen)
    spans = sorted(_spans(record, done, is_gone=is_gone), key=lambda span: (span.start, span.end))
    tracks = _tracks(spans)
    num_tracks = 1 + max(tracks, default=0)

    def box(begin: float, end: float, y: float, height: float) -> str:
        x = 10 * life.percent(begin + offset)
        width = max(_MIN_BAR, 10 * life.percent(end + offset) - x)
        return f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h-{width:.1f}z"

    up, marks = _starts(record, is_gone=is_gone)
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


def _spans(record: Worker, done: Sequence[DoneChunk], *, is_gone: bool) -> list[Span]:
    """The time that a worker had each chunk open: by marker for the chunks that it has done, else by its record."""
    by_marker = {(chunk.name, chunk.epoch) for chunk in done}
    spans = [
        Span(
            chunk=chunk.name,
            start=chunk.start,
            end=chunk.end,
            rows=chunk.rows,
            resumed=chunk.resumed,
            epoch=chunk.epoch,
            outcome="done",
        )
        for chunk in done
    ]
    for span in (*record.spans, *record.open_spans):
        if (span.chunk, span.epoch) not in by_marker:
            is_killed = is_gone and span.outcome == "open"
            spans.append(msgspec.structs.replace(span, outcome="killed") if is_killed else span)
    return spans


def _tracks(spans: Sequence[Span]) -> list[int]:
    """The track of each span; tracks are counted from 0.

    Spans that overlap in time get different tracks, unless all `MAX_TRACKS` tracks are taken.
    """
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
    """The tooltip of bars with the same outcome: that outcome, names of the first chunks, and sums of all rows."""
    names = ", ".join(span.chunk for span in spans[:_NAMED_CHUNKS])
    more = len(spans) - _NAMED_CHUNKS
    resumed = sum(span.resumed for span in spans)
    return (
        f"{outcome}: {names}"
        + (f" and {more} more" if more > 0 else "")
        + f"; {units.many(sum(span.rows for span in spans), 'row')}"
        + (f", {resumed:,} of them resumed" if resumed else "")
    )


def _starts(
    record: Worker, *, is_gone: bool
) -> tuple[list[tuple[float, float]], list[tuple[str, float]]]:
    """Return two lists: (start, end) of each of a worker's processes, and (kind, moment) of each mark.

    All times are by the worker's own clock. The record of a worker that started often lacks its oldest starts.
    """
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
        elif is_gone or index < len(ends) - 1:
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
