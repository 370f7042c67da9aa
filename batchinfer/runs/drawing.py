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
from batchinfer.ledger.looks import SeenWorker
from batchinfer.ledger.spending import offset_of
from batchinfer.runs.overview import Overview

MOST_BINS = 180
_LAST_YEAR = 2**32 / 60
"""Minutes since 1970 after which a time in a record counts as damaged."""
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 360, 720, 1440, 2880, 10_080, 43_200, 525_600)
"""Minutes between two labels of the time axis."""


class Drawing(NamedTuple):
    """One drawing: its title, its path, and its largest value as text."""

    title: str
    path: str
    top: str


def draw(workers: Sequence[SeenWorker], seen: Overview) -> list[Drawing]:
    """Draw what workers counted, minute by minute. A run of less than a minute, or without a finished row, has none."""
    begin, length = _minutes(seen)
    width = math.ceil(length / MOST_BINS)
    bins = [[0.0, 0.0, 0.0] for _ in range(math.ceil(length / width))] if width else []
    for record, modified in workers if bins else ():
        shift = offset_of(record, modified) / 60 - begin
        for one in record.minutes:
            parts = min(one.length, MOST_BINS)  # an old record stands for several minutes
            counts = (one.completion_tokens or one.prompt_tokens, one.rows, one.errors)
            for part in range(parts):
                place = int((one.minute + shift + part * one.length / parts) / width)
                for index, number in enumerate(counts) if place < len(bins) else ():
                    bins[max(place, 0)][index] += number / parts
    if not any(map(any, bins)):
        return []
    tokens, rows, errors = zip(*bins, strict=True)
    drawings = [
        _drawing("Tokens per second", [number / width / 60 for number in tokens]),
        _drawing("Finished rows", accumulate(rows), seen.rows.total),
    ]
    return drawings + [_drawing("Failed rows", accumulate(errors))] * any(errors)


def _minutes(seen: Overview) -> tuple[float, float]:
    """Return the run's begin in minutes since 1970, and its length in minutes: 0 if it is too short, or damaged."""
    begin, length = (seen.started or 0.0) / 60, seen.overall.seconds / 60
    return (begin, length) if length > 1 and 0 <= begin <= begin + length <= _LAST_YEAR else (0, 0)


def _drawing(title: str, numbers: Iterable[float], top: float = 0.0) -> Drawing:
    values = list(numbers)
    top = max(top, *values) or 1.0
    step = 1000 / len(values)
    corners = [
        f"L{index * step + side:.1f} {100 - 100 * value / top:.1f}"
        for index, value in enumerate(values)
        for side in (0.0, step)
    ]
    return Drawing(title, f"M0 100{''.join(corners)}L1000 100Z", units.short(top))


def ticks_of(seen: Overview) -> list[tuple[float, str]]:
    """Return round moments of the time axis, as positions in percent and labels."""
    begin, length = _minutes(seen)
    step = next((step for step in _STEPS if length / step <= 5), _STEPS[-1])
    form = "%d %b" if step >= 1440 else "%H:%M"
    return [
        (
            100 * (at - begin) / length,
            datetime.fromtimestamp(at * 60, UTC).strftime(form),
        )
        for at in range(math.ceil(begin / step) * step, math.floor(begin + length) + 1, step)
    ]
