"""A worker's progress on stderr: a progress bar if stderr is a terminal, else a log line every few seconds.

For a program that started the worker and shows a bar of its own, the worker writes progress as marked lines instead.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from batchinfer.core import units
from batchinfer.core.events import tell
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
BAR_SECONDS = 0.5
MARKED_LINES = "BATCHINFER_PROGRESS_LINES"
"""Name of the environment variable that asks for marked lines, if it is set."""
_MARK = "\x1eprogress "
"""Beginning of a marked line. Log lines never hold this control character."""
_shown_decoder = msgspec.json.Decoder(tuple[int, int, str])


class Progress:
    """Shows how far the worker is, every so many seconds. It may be called as often as wanted."""

    def __init__(
        self,
        show: Callable[[Telemetry], None],
        seconds: float,
        *,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._show = show
        self._seconds = seconds
        self._end = end
        """Called after a last `show`, if there was one; None for progress that needs none."""
        self._due = time.monotonic() + (0.0 if end else seconds)
        self._shown: Telemetry | None = None

    def __call__(self, telemetry: Telemetry) -> None:
        """Show the progress, if it is time to show it again."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._seconds
            self._shown = telemetry
            self._show(telemetry)

    def close(self) -> None:
        """Leave a bar as it is at the end, and the terminal ready for other texts. Must be the last call."""
        if self._shown is not None and self._end is not None:
            self._show(self._shown)
            self._end()
        self._due = float("inf")


def progress_for(stream: TextIO, *, as_marked_lines: bool = False) -> Progress:
    """Return what shows progress: as a bar if `stream` is a terminal, else as log lines or marked lines."""

    def write(telemetry: Telemetry) -> None:
        stream.write(f"{_MARK}{json.dumps(_shown(telemetry))}\n")
        stream.flush()

    if as_marked_lines:
        return Progress(write, BAR_SECONDS, end=stream.flush)
    if not stream.isatty():
        return Progress(_log, LINE_SECONDS)
    bar = Bar(stream)
    return Progress(lambda telemetry: bar.show(*_shown(telemetry)), BAR_SECONDS, end=bar.close)


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


def _shown(telemetry: Telemetry) -> tuple[int, int, str]:
    work = telemetry.workload
    return work.rows_done, work.rows, describe(telemetry)


def _log(telemetry: Telemetry) -> None:
    tell(logger, "progress", "{}", describe(telemetry), **telemetry.sums)


class Bar:
    """A progress bar on `stream`; without one on stderr, or in a cell of a notebook."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bar: Any = None

    def show(self, done: int, rows: int, text: str) -> None:
        """Show the bar. It is made at first use, so that a worker that fails before shows none."""
        if self._bar is None:
            form = "{percentage:3.0f}% |{bar}| {desc}"
            self._bar = _bar_class()(
                total=rows, file=self._stream, dynamic_ncols=True, bar_format=form
            )
        self._bar.total = rows
        self._bar.n = done
        self._bar.set_description_str(text, refresh=True)

    def take(self, line: str) -> bool:
        """Show the progress that a line tells. Returns whether it is a marked line; others are for people to read.

        A marked line that is not whole is no marked line. It may hold the beginning of another text.
        """
        if not line.startswith(_MARK):
            return False
        try:
            self.show(*_shown_decoder.decode(line.removeprefix(_MARK)))
        except (msgspec.DecodeError, UnicodeError):
            return False
        return True

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def is_shown_to_people(stream: TextIO) -> bool:
    """Whether a bar on this stream is seen by a person: in a terminal, or below a cell of a notebook."""
    return stream.isatty() or type(stream).__module__.startswith("ipykernel.")


def _bar_class() -> Any:
    """Return tqdm's class for where this program runs: a widget in a notebook that has widgets, else a line of text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm would say that a notebook has no widgets
        from tqdm.auto import tqdm
    return tqdm
