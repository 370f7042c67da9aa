"""A worker's progress on stderr: a progress bar if stderr is a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import time
from typing import Any, TextIO

from batchinfer.core import units
from batchinfer.core.events import tell
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
BAR_SECONDS = 0.5


class Progress:
    """Shows how far the worker is, every so many seconds. It may be called as often as wanted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seconds = BAR_SECONDS if stream.isatty() else LINE_SECONDS
        self._due = time.monotonic() + self._seconds
        self._bar: Any = None
        self._shown: Telemetry | None = None

    def __call__(self, telemetry: Telemetry) -> None:
        """Show the progress, if it is time to show it again."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._seconds
            self._show(telemetry)

    def _show(self, telemetry: Telemetry) -> None:
        if not self._stream.isatty():
            tell(logger, "progress", "{}", describe(telemetry), **telemetry.sums)
            return
        self._shown, work = telemetry, telemetry.workload
        if self._bar is None:  # at first use, so that a worker that fails before shows none
            from tqdm import tqdm

            form = "{percentage:3.0f}% |{bar}| {desc}"
            self._bar = tqdm(file=self._stream, dynamic_ncols=True, bar_format=form)
        self._bar.total, self._bar.n = work.rows, work.rows_done
        self._bar.set_description_str(describe(telemetry), refresh=True)

    def close(self) -> None:
        """Leave a bar as it is at the end, and the terminal ready for other texts. Must be the last call."""
        if self._shown is not None:
            self._show(self._shown)
            self._bar.close()


def describe(telemetry: Telemetry) -> str:
    """Describe the progress in one line: rows, rates, time left, failed rows.

    The line has at most 71 characters, so that it fits beside a bar in a terminal of 80.

    The rows are those of the whole job, and behind them stands the share of this worker's own manifests. Rates are of
    this start, since its engine became ready: rows that this start finished, and output tokens. The time left is how
    long this worker alone would need for all rows that are left; other workers make it shorter.
    """
    work, counts = telemetry.workload, telemetry.counts
    own = "" if work.own_rows == work.rows else f" (own {_count(work.own_rows)})"
    parts = [f"{_count(work.rows_done)}/{_count(work.rows)} rows{own}"]
    if telemetry.is_loading:
        parts.append(f"loading the engine for {_duration(telemetry.run_seconds)}")
    elif counts.rows_done:
        seconds = max(telemetry.busy_seconds, 1.0)
        rate = counts.rows_done / seconds
        parts.append(f"{units.short(rate)}/s")
        parts.append(f"{units.short(counts.completion_tokens / seconds)} tok/s")
        if not work.open and work.rows > work.rows_done:
            parts.append("waiting for chunks")
        elif work.rows > work.rows_done:
            most = "\N{LESS-THAN OR EQUAL TO}" if own else ""
            parts.append(f"{most}{_duration((work.rows - work.rows_done) / rate)} left")
    if counts.rows_error:
        parts.append(f"{_count(counts.rows_error)} failed")
    return ", ".join(parts)


def _count(number: int) -> str:
    return f"{number:,}" if number < 10_000 else units.short(number)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
