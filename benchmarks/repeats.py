"""Runs repeated turn and turn about, and what they give: medians, and how far the runs lie apart."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

Run = TypeVar("Run")


class Spread(NamedTuple):
    """The median of some runs, the least and the most of them. Formatted as "1.2 (1.1-1.4)"; one run as "1.2"."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Format each number by `spec`."""
        median, low, high = (format(value, spec) for value in self)
        return median if low == high else f"{median} ({low}-{high})"

    def __truediv__(self, divisor: float) -> Spread:
        return Spread(*(value / divisor for value in self))

    def __mul__(self, factor: float) -> Spread:
        return Spread(*(value * factor for value in self))

    def entries(self, name: str, digits: int = 4) -> dict[str, float]:
        """The three for a JSON object as NAME, NAME_min and NAME_max; NAME alone where all runs gave the same."""
        median = {name: round(self.median, digits)}
        if self.low == self.high:
            return median
        low, high = round(self.low, digits), round(self.high, digits)
        return {**median, f"{name}_min": low, f"{name}_max": high}


def spread(values: Iterable[float]) -> Spread:
    """The spread of one figure over the runs of one way."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def alternate(ways: Mapping[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Run every way `repeats` times, as A B C A B C: a machine that changes its mind meanwhile does so for all.

    Says on stderr what each run gave. Returns the runs by way, in the order in which they were made.
    """
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name, way in ways.items():
            runs[name].append(way())
            print(f"{turn + 1}/{repeats} {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return runs
