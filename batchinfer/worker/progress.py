"""A worker's progress on stderr: a progress bar if stderr is a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TextIO

from batchinfer.cli.logs import event
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
BAR_SECONDS = 0.5

ShowProgress = Callable[[Telemetry], None]


def progress_for(stream: TextIO) -> ShowProgress:
    """Return a function that shows progress: as a bar if `stream` is a terminal, else as log lines."""
    return _ProgressBar(stream) if stream.isatty() else _ProgressLines()


def describe(telemetry: Telemetry) -> str:
    """Describe the progress in one line: finished and resumed rows, rates, errors, time left.

    The time left is an estimate: the rows left in this worker's own manifests, divided by the average rate of finished
    rows since this process's engine became ready.
    """
    done, resumed = telemetry.tally.rows, telemetry.rows_resumed + telemetry.rows_skipped
    tally, seconds = telemetry.tally, telemetry.busy_seconds
    total = f"/{telemetry.num_rows}" if telemetry.num_rows else ""
    parts = [f"{done + resumed}{total} rows ({resumed} resumed)"]
    if seconds > 0 and done:
        rate = done / seconds
        parts.append(f"{rate:.1f} rows/s")
        parts.append(
            f"{tally.prompt_tokens / seconds:.0f} tok/s in, {tally.completion_tokens / seconds:.0f} out"
        )
        left = telemetry.num_rows - done - resumed
        if telemetry.num_rows and left > 0:
            parts.append(f"ETA {_duration(left / rate)}")
    if telemetry.tally.num_errors:
        parts.append(f"{telemetry.tally.num_errors} errors")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _ProgressLines:
    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_SECONDS

    def __call__(self, telemetry: Telemetry) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + LINE_SECONDS
            state = "engine loading; " if telemetry.is_loading else ""
            sums = {
                "rows": telemetry.tally.rows,
                "rows_resumed": telemetry.rows_resumed,
                "rows_error": telemetry.tally.num_errors,
                "prompt_tokens": telemetry.tally.prompt_tokens,
                "completion_tokens": telemetry.tally.completion_tokens,
            }
            logger.info("%s%s", state, describe(telemetry), extra=event("progress", **sums))


class _ProgressBar:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._due = 0.0

    @cached_property
    def _bar(self) -> Any:
        """The bar. It is made at first use, so that a worker that fails before its first progress shows no bar."""
        from tqdm import tqdm

        return tqdm(total=None, unit="row", file=self._stream, dynamic_ncols=True, leave=True)

    def __call__(self, telemetry: Telemetry) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + BAR_SECONDS
        if telemetry.num_rows and self._bar.total is None:
            self._bar.total = telemetry.num_rows
            self._bar.initial = telemetry.rows_skipped
        self._bar.n = telemetry.tally.rows + telemetry.rows_resumed + telemetry.rows_skipped
        self._bar.set_description(
            "loading engine" if telemetry.is_loading else "rows", refresh=False
        )
        seconds = max(telemetry.busy_seconds, 1e-9)
        self._bar.set_postfix_str(
            f"{telemetry.rows_resumed + telemetry.rows_skipped} resumed, "
            f"{telemetry.tally.prompt_tokens / seconds:.0f} tok/s in, "
            f"{telemetry.tally.completion_tokens / seconds:.0f} out, {telemetry.tally.num_errors} errors",
            refresh=True,
        )
