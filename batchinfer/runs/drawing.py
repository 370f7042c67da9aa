"""The report's drawings: tokens per second, finished rows and failed rows, by the minutes in the workers' records.

This module only computes. A drawing is an SVG path in a box of 1000 by 100, which the page stretches to its width, and
labels at positions in percent. Times are by storage's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import NamedTuple

from batchinfer.core import units
from batchinfer.core.records import Minute
from batchinfer.ledger.looks import SeenWorker
from batchinfer.ledger.spending import offset_of

MOST_BINS = 180
_LAST_YEAR = 2**32
"""Unix seconds after which a time in a record counts as damaged."""
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 360, 720, 1440, 2880, 10_080, 43_200, 525_600)
"""Minutes between two labels of the time axis."""


class Drawing(NamedTuple):
    """One drawing: its title, its path, its largest value as text, and (position, label) of the time axis."""

    title: str
    path: str
    top: str
    ticks: list[tuple[float, str]]


def draw(workers: Sequence[SeenWorker], total_rows: int | None) -> list[Drawing]:
    """Draw what workers counted, minute by minute. A run of less than a minute, or without a finished row, has none."""
    points: list[tuple[float, Minute]] = []
    times: list[float] = []
    for record, modified, _ in workers:
        offset = offset_of(record, modified)
        life = [moment + offset for moment in (record.started, record.heartbeat)]
        if all(0 <= moment <= _LAST_YEAR for moment in life) and record.minutes:
            times += [moment / 60 for moment in life]
            points += [(one.minute + offset / 60, one) for one in record.minutes]
    points = [(at, one) for at, one in points if 0 <= at <= max(times)]
    if not points:
        return []
    begin, end = min(times), max(times)
    if end - begin <= 1:
        return []
    width = max(1.0, (end - begin) / MOST_BINS)
    bins = [[0.0, 0.0, 0.0] for _ in range(math.ceil((end - begin) / width))]
    for at, one in points:
        parts = min(max(1, one.length), MOST_BINS)  # an old point stands for several minutes
        counts = (one.completion_tokens or one.prompt_tokens, one.rows, one.errors)
        for part in range(parts):
            place = int((at + part * one.length / parts - begin) / width)
            for index, number in enumerate(counts):
                bins[min(max(place, 0), len(bins) - 1)][index] += number / parts
    tokens, rows, errors = zip(*bins, strict=True)
    last = max(1 / 60, min(width, end - begin - width * (len(bins) - 1)))
    minutes = [width] * (len(bins) - 1) + [last]
    rates = [number / length / 60 for number, length in zip(tokens, minutes, strict=True)]
    ticks = _ticks(begin, end)
    drawings = [
        _drawing("Tokens per second", rates, ticks),
        _drawing("Finished rows", accumulate(rows), ticks, total_rows or 0),
    ]
    return drawings + [_drawing("Failed rows", accumulate(errors), ticks)] * any(errors)


def _drawing(
    title: str, numbers: Iterable[float], ticks: list[tuple[float, str]], top: float = 0.0
) -> Drawing:
    values = list(numbers)
    top = max(top, *values) or 1.0
    step = 1000 / len(values)
    corners = [
        f"L{index * step + side:.1f} {100 - 100 * value / top:.1f}"
        for index, value in enumerate(values)
        for side in (0.0, step)
    ]
    return Drawing(title, f"M0 100{''.join(corners)}L1000 100Z", units.short(top), ticks)


def _ticks(begin: float, end: float) -> list[tuple[float, str]]:
    """Return round moments between two times, in minutes since 1970, with their positions in percent."""
    length = max(end - begin, 1e-9)
    step = next((step for step in _STEPS if length / step <= 5), _STEPS[-1])
    form = "%d %b" if step >= 1440 else "%H:%M"
    found = []
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        label = datetime.fromtimestamp(number * step * 60, UTC).strftime(form)
        found.append((100 * (number * step - begin) / length, label))
    return found
