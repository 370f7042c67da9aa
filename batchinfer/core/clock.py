"""Time as an argument: code that waits or measures takes a `Clock`, so that a simulation can supply its own."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Monotonic time for intervals, wall time for the record, and sleep."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""
        ...

    def now(self) -> float:
        """Unix seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        time.sleep(seconds)


def iso_utc(unix_seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond.

    >>> iso_utc(0.5)
    '1970-01-01T00:00:00.500Z'
    """
    stamp = datetime.fromtimestamp(unix_seconds, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{stamp.microsecond // 1000:03d}Z"
