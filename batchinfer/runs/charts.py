"""Small charts as inline SVG. Pure: numbers and words in, markup out; every word is escaped here.

A chart is as wide as the page lets it be: shapes are placed in percent of the width, text keeps its size. Colours are
classes that the page's style sheet fills in, so there is no style attribute and no script.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

from batchinfer.core.records import Minute, Span, Worker
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.snapshot import SeenWorker
from batchinfer.runs.overview import clock_offset

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


_STEPS_SECONDS = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * n for n in (1, 2, 5, 10, 15, 30)),
    *(3600 * n for n in (1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 720, 2160)),
)
_TOP, _BOTTOM = 16, 20
_AREA_PIXELS = 220
_LANE_PIXELS, _TRACK_PIXELS = 18, 5
_FEW_BINS = 30

_Points = list[tuple[float, float]]


class Band(NamedTuple):
    """One series of a stacked chart. `style` is its class in the style sheet."""

    name: str
    values: Sequence[float]
    style: str


class Count(NamedTuple):
    """One bar."""

    name: str
    value: float
    shown: str


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


def time_ticks(extent: Extent, most: int = 6) -> list[tuple[float, str]]:
    """Round moments in an extent and how to write them (UTC).

    >>> time_ticks(Extent(0.0, 7200.0, 1), most=2)
    [(0.0, '00:00'), (3600.0, '01:00'), (7200.0, '02:00')]
    """
    length = extent.end - extent.begin
    step = next((s for s in _STEPS_SECONDS if length / s <= most), _STEPS_SECONDS[-1])
    form = "%H:%M" if length <= 36 * 3600 else "%d %b" if step >= 86400 else "%d %b %Hh"
    if step < 60:
        # With seconds a label is wide: more than four do not fit on a phone.
        step = next(s for s in _STEPS_SECONDS if length / s <= min(most, 4))
        form = "%H:%M:%S" if step < 60 else form
    first = math.ceil(extent.begin / step) * step
    ticks: list[tuple[float, str]] = []
    moment = float(first)
    while moment <= extent.end and len(ticks) < 20:
        ticks.append((moment, _clock(moment, form)))
        moment += step
    return ticks


def _clock(moment: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(moment, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "?"  # a worker's record may say anything


def stacked_areas(
    bands: Sequence[Band],
    bins: Extent,
    life: Extent,
    *,
    title: str,
    shown: Callable[[float], str],
    is_sum: bool = False,
    maximum: float | None = None,
) -> str:
    """Areas over time, one on the other: `values` has one number for each bin. Few bins are drawn as steps.

    Args:
        bands: The lowest first.
        bins: What the values belong to.
        life: The time along x; bins may reach over it.
        title: Read aloud instead of the picture.
        shown: How to write a number on the y axis.
        is_sum: The values are what was reached at the end of each bin, not what held during it.
        maximum: Top of the y axis, if it must reach that far.
    """
    totals = [sum(column) for column in zip(*(band.values for band in bands), strict=True)]
    top = nice_maximum(max([maximum or 0.0, *totals]))
    height = _AREA_PIXELS
    plot = height - _TOP - _BOTTOM
    place = _steps if bins.num_bins < _FEW_BINS else _points
    xs = _ends(bins, life) if is_sum else place(bins, life)
    base = [0.0] * len(totals)
    shapes = []
    for band in bands:
        upper = [low + value for low, value in zip(base, band.values, strict=True)]
        shapes.append(_area(band, (xs(base), xs(upper)), top, plot))
        base = upper
    return (
        f'<svg class="chart gutter" width="100%" height="{height}" role="img" aria-label="{escape(title)}">'
        f"{_grid(top, plot)}{_time_axis(life, height)}"
        f'<svg y="{_TOP}" width="100%" height="{plot}" viewBox="0 0 1000 {plot}" '
        f'preserveAspectRatio="none">{"".join(shapes)}</svg>'
        f"{_grid_labels(top, plot, shown)}</svg>"
    )


def _steps(bins: Extent, life: Extent) -> Callable[[Sequence[float]], _Points]:
    """Values as stairs: level over each bin."""
    edges = [
        life.share(bins.begin + index * bins.bin_seconds) for index in range(bins.num_bins + 1)
    ]
    return lambda values: [
        (edge, value)
        for index, value in enumerate(values)
        for edge in (edges[index], edges[index + 1])
    ]


def _ends(bins: Extent, life: Extent) -> Callable[[Sequence[float]], _Points]:
    """Values at the end of each bin, from 0 at the beginning."""
    ends = [
        life.share(bins.begin + (index + 1) * bins.bin_seconds) for index in range(bins.num_bins)
    ]
    return lambda values: [(0.0, 0.0), *zip(ends, values, strict=True)]


def _points(bins: Extent, life: Extent) -> Callable[[Sequence[float]], _Points]:
    """Values at the middle of each bin."""
    middles = [
        life.share(bins.begin + (index + 0.5) * bins.bin_seconds) for index in range(bins.num_bins)
    ]
    return lambda values: list(zip(middles, values, strict=True))


def _area(band: Band, edges: tuple[_Points, _Points], top: float, plot: int) -> str:
    lower, upper = (
        [f"{1000 * x:.1f},{plot - plot * value / top:.1f}" for x, value in edge] for edge in edges
    )
    path = "M" + " L".join([*upper, *reversed(lower)]) + "Z"
    return f'<path class="area {escape(band.style)}" d="{path}"><title>{escape(band.name)}</title></path>'


def _levels(top: float, plot: int) -> list[tuple[float, float]]:
    """(value, y in the chart) of the grid lines."""
    return [(top * part / 4, _TOP + plot - plot * part / 4) for part in (0, 1, 2, 3, 4)]


def _grid(top: float, plot: int) -> str:
    return "".join(
        f'<line class="{"base" if not value else "grid"}" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        for value, y in _levels(top, plot)
    )


def _grid_labels(top: float, plot: int, shown: Callable[[float], str]) -> str:
    return "".join(
        f'<text class="tick" x="-8" y="{y + 4:.1f}" text-anchor="end">{escape(shown(value))}</text>'
        for value, y in _levels(top, plot)
    )


def _time_axis(extent: Extent, height: int, *, has_lines: bool = False) -> str:
    parts = []
    for moment, label in time_ticks(extent):
        share = 100 * extent.share(moment)
        if has_lines:
            parts.append(
                f'<line class="grid" x1="{share:.2f}%" x2="{share:.2f}%" y1="0" y2="100%"/>'
            )
        elif len(label) <= 5 or 6 <= share <= 94:  # a longer one would leave the page at its edges
            parts.append(
                f'<text class="tick" x="{share:.2f}%" y="{height - 5}" text-anchor="middle">{escape(label)}</text>'
            )
    return "".join(parts)


def time_axis(extent: Extent) -> str:
    """A time axis of its own, for a list of lanes."""
    return f'<svg class="chart" width="100%" height="18" aria-hidden="true">{_time_axis(extent, 18)}</svg>'


def columns(counts: Sequence[Count], *, title: str, style: str, height: int = 180) -> str:
    """Columns side by side, in the order given; every other name is left out where there are many."""
    if not counts:
        return ""
    top = max([count.value for count in counts] + [1.0])
    plot = height - _TOP - _BOTTOM
    slot = 100 / len(counts)
    every = 1 if len(counts) <= 12 else 2
    parts = [
        f'<line class="base" x1="0" x2="100%" y1="{_TOP + plot}" y2="{_TOP + plot}"/>',
    ]
    for index, count in enumerate(counts):
        tall = max(plot * count.value / top, 1.0 if count.value else 0.0)
        middle = (index + 0.5) * slot
        parts.append(
            f'<rect class="{escape(style)}" x="{index * slot + 0.08 * slot:.2f}%" y="{_TOP + plot - tall:.1f}" '
            f'width="{0.84 * slot:.2f}%" height="{tall:.1f}" rx="2"><title>{escape(count.name)}: '
            f"{escape(count.shown)}</title></rect>"
        )
        if index % every == 0:
            parts.append(
                f'<text class="tick" x="{middle:.2f}%" y="{height - 5}" text-anchor="middle">'
                f"{escape(count.name)}</text>"
            )
        if count.value == top:
            parts.append(
                f'<text class="value" x="{middle:.2f}%" y="{_TOP + plot - tall - 4:.1f}" '
                f'text-anchor="middle">{escape(count.shown)}</text>'
            )
    return (
        f'<svg class="chart" width="100%" height="{height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def share_bar(part: float, other: float, whole: float) -> str:
    """A progress bar: `part` done, `other` under way, of `whole`."""
    first = 100 * min(1.0, part / whole) if whole else 0.0
    second = min(100 - first, 100 * other / whole) if whole else 0.0
    return (
        '<svg class="bar" width="100%" height="12" aria-hidden="true">'
        '<rect class="rest" width="100%" height="12" rx="6"/>'
        f'<rect class="going" x="{first:.3f}%" width="{second:.3f}%" height="12"/>'
        f'<rect class="finished" width="{first:.3f}%" height="12" rx="6"/></svg>'
    )


def rule(value: float, top: float, style: str) -> str:
    """One horizontal bar for a table's cell."""
    width = 100 * value / top if top else 0.0
    return (
        '<svg class="rule" width="100%" height="10" aria-hidden="true">'
        f'<rect class="{escape(style)}" width="{width:.2f}%" height="10" rx="2"/></svg>'
    )


def heat_row(values: Sequence[float], top: float, *, title: str, height: int = 14) -> str:
    """Numbers over time as one row of cells, the darker the nearer to `top`; equal neighbours are one cell."""
    levels = [_level(value / top) if top > 0 else 0 for value in values]
    width = 100 / max(1, len(levels))
    cells = []
    first = 0
    for index in range(1, len(levels) + 1):
        if index < len(levels) and levels[index] == levels[first]:
            continue
        if levels[first]:
            cells.append(
                f'<rect class="h{levels[first]}" x="{first * width:.2f}%" '
                f'width="{(index - first) * width + 0.02:.2f}%" height="{height}"/>'
            )
        first = index
    return (
        f'<svg class="chart" width="100%" height="{height}" role="img" aria-label="{escape(title)}">'
        f'<rect class="up" width="100%" height="{height}"/>{"".join(cells)}</svg>'
    )


def _level(share: float) -> int:
    """Shade of a share of the highest value: few, so that ordinary unevenness does not flicker."""
    return 0 if share <= 0 else 1 + sum(share >= border for border in (0.15, 0.4, 0.7))


def lane(line: Lane, extent: Extent) -> str:
    """One worker's time line: when it was up, which chunks it had, where it was killed and came back."""
    inner = max(_LANE_PIXELS, _TRACK_PIXELS * line.num_tracks)
    height = inner + 6

    def place(begin: float, end: float) -> tuple[str, str]:
        left = 100 * extent.share(begin)
        return f"{left:.2f}%", f"{max(0.12, 100 * extent.share(end) - left):.2f}%"

    parts = [_time_axis(extent, height, has_lines=True)]
    for begin, end in line.up:
        x, width = place(begin, end)
        parts.append(f'<rect class="up" x="{x}" y="1" width="{width}" height="{height - 2}"/>')
    tall = inner / line.num_tracks
    for bar in line.bars:
        x, width = place(bar.begin, bar.end)
        what = bar.name if bar.chunks == 1 else f"{bar.name} and {bar.chunks - 1} more"
        resumed = f", {bar.resumed} resumed" if bar.resumed else ""
        parts.append(
            f'<rect class="o-{escape(bar.outcome)}" x="{x}" y="{3 + bar.track * tall:.1f}" width="{width}" '
            f'height="{max(1.5, tall - 0.8):.1f}"><title>{escape(what)}: {escape(bar.outcome)}, {bar.rows} rows'
            f"{resumed}</title></rect>"
        )
    for mark in line.marks:
        x = f"{100 * extent.share(mark.moment):.2f}%"
        clock = _clock(mark.moment, "%H:%M:%S")
        parts.append(
            f'<line class="m-{escape(mark.kind)}" x1="{x}" x2="{x}" y1="0" y2="{height}">'
            f"<title>{escape(mark.kind)} {clock}</title></line>"
        )
    return (
        f'<svg class="chart" width="100%" height="{height}" role="img" '
        f'aria-label="{escape(_spoken(line))}">{"".join(parts)}</svg>'
    )


def _spoken(line: Lane) -> str:
    chunks = sum(bar.chunks for bar in line.bars)
    kills = sum(mark.kind == "kill" for mark in line.marks)
    return f"{line.worker}: {chunks} chunks, {len(line.up)} starts, {kills} kills"
