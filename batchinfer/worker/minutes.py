"""What a worker did minute by minute: a series of at most MAX_MINUTES points, however long the worker runs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from batchinfer.core.counts import Counts
from batchinfer.core.records import Minute

MAX_MINUTES = 1440


class Minutes:
    """The series of a worker. It begins with the points of earlier starts."""

    def __init__(self, before: Iterable[Minute] = ()) -> None:
        self._points = {point.minute: point for point in before}

    def add(self, counts: Counts, minute: int) -> None:
        """Add the sums over rows that finished in a minute, given in whole minutes since 1970.

        If the series gets longer than MAX_MINUTES, neighbouring points of its older half are joined in pairs.
        """
        point = Minute(
            minute=minute,
            rows=counts.rows_done,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            errors=counts.rows_error,
        )
        before = self._points.get(minute)
        self._points[minute] = point if before is None else _join(before, point)
        if len(self._points) > MAX_MINUTES:
            series = self.series()
            half = len(series) // 4 * 2
            pairs = zip(series[0:half:2], series[1:half:2], strict=True)
            joined = [_join(*pair) for pair in pairs] + series[half:]
            self._points = {point.minute: point for point in joined}

    def series(self) -> list[Minute]:
        """Return the points in the order of time."""
        return sorted(self._points.values(), key=lambda point: point.minute)


def _join(first: Minute, second: Minute) -> Minute:
    names = ("rows", "prompt_tokens", "completion_tokens", "errors")
    sums = {name: getattr(first, name) + getattr(second, name) for name in names}
    length = max(first.length, second.minute + second.length - first.minute)
    return msgspec.structs.replace(first, length=length, **sums)
