"""What a worker did minute by minute: a series of at most MAX_MINUTES points, however long the worker runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from batchinfer.core.counts import Counts
from batchinfer.core.records import Minute

MAX_MINUTES = 1440
RECENT_MINUTES = 60
"""Number of minutes that are counted apart from the series before all of them are merged into it."""


class Minutes:
    """The series of one start of a worker."""

    def __init__(self) -> None:
        self._series: list[Minute] = []
        self._recent: dict[int, list[int]] = {}

    def add(self, counts: Counts, minute: int) -> None:
        """Add the sums over rows that finished in a minute, given in whole minutes since 1970."""
        if len(self._recent) >= RECENT_MINUTES and minute not in self._recent:
            self._series = merge_minutes(self._series, self._recent)
            self._recent = {}
        point = self._recent.setdefault(minute, [0, 0, 0, 0])
        sums = (counts.rows_done, counts.prompt_tokens, counts.completion_tokens, counts.rows_error)
        for place, number in enumerate(sums):
            point[place] += number

    def on_top_of(self, before: Iterable[Minute]) -> list[Minute]:
        """Return the series of the earlier starts with this one added."""
        return merge_minutes(chain(before, self._series), self._recent)


def merge_minutes(before: Iterable[Minute], now: dict[int, list[int]]) -> list[Minute]:
    """Merge the numbers of latest minutes (`now`) into a series of minutes (`before`).

    If the series gets longer than MAX_MINUTES, neighbouring points of its older half are joined in pairs. Pure.
    """
    recent = (
        Minute(
            minute=number,
            rows=rows,
            prompt_tokens=prompt,
            completion_tokens=completion,
            errors=errors,
        )
        for number, (rows, prompt, completion, errors) in now.items()
    )
    points: dict[int, Minute] = {}
    for point in chain(before, recent):
        old = points.get(point.minute)
        points[point.minute] = point if old is None else _join(old, point)
    series = [points[number] for number in sorted(points)]
    while len(series) > MAX_MINUTES:
        half = len(series) // 2
        series = [_join(*series[i : i + 2]) for i in range(0, half - 1, 2)] + series[
            half - half % 2 :
        ]
    return series


def _join(first: Minute, second: Minute) -> Minute:
    return Minute(
        minute=first.minute,
        rows=first.rows + second.rows,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        errors=first.errors + second.errors,
        length=max(first.length, second.minute + second.length - first.minute),
    )
