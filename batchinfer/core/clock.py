"""The clock of this machine. A simulation passes a clock of its own instead."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """Monotonic time to measure intervals, Unix time to record moments, and a way to wait."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back. Only differences of two readings have a meaning."""
        return time.monotonic()

    def now(self) -> float:
        """Seconds since 1970 (Unix time)."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` seconds."""
        time.sleep(seconds)


def iso_utc(unix_seconds: float) -> str:
    """Write Unix seconds as ISO 8601 in UTC, with milliseconds.

    >>> iso_utc(0.5)
    '1970-01-01T00:00:00.500Z'
    """
    stamp = datetime.fromtimestamp(unix_seconds, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{stamp.microsecond // 1000:03d}Z"
