"""Renders a user's template in a process of its own, because Jinja's sandbox bounds neither time nor memory.

The process (render_host.py) has the limits of limited_process.py. A template that goes over a limit ends its process
and nothing else: the row fails with `template_error`, and the next row gets a new process.

Rows are sent as the lines of the chunk, many at a time. If the process ends while it has several rows, they are sent
again one at a time, so that each bad row is found and the others are rendered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError
from batchinfer.core.processes import describe_exit
from batchinfer.prompts.limited_process import LimitedProcess
from batchinfer.prompts.types import Code

logger = logging.getLogger(__name__)

ROW_SECONDS = 2.0
"""Seconds of CPU time that one row may take. The template's compilation may take as many."""
MEMORY_BYTES = 1 << 30
"""Bytes of address space that the process may have, including what Python itself takes."""
FEW_ROWS = 16
"""Number of rows to render at once as long as the template has rendered no row, and after its process has ended."""
MANY_ROWS = 1 << 30


class RenderSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to the process: the template, and the limits."""

    name: str
    """Name of the template in error messages."""
    source: str
    values: dict[str, Any]
    """Variables besides the row's columns."""
    blank_columns: list[str]
    """Columns that the template gets as an empty text."""
    is_strict: bool
    """Whether the use of a missing variable is an error."""
    row_seconds: float
    memory_bytes: int


class RenderReady(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `RenderSetup`. If `error` is not empty, the template cannot be compiled, and the process ends."""

    variables: list[str] = []
    """Variables that the template reads, without those that it sets itself."""
    needed_columns: list[str] = []
    """Columns without which every row fails, as far as the template's text shows it."""
    error: str = ""
    hint: str = ""


class RenderedText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The prompt text of one row, or the code and the message of the row's error."""

    text: str | None
    code: str = ""
    message: str = ""


_encode_rows = msgspec.msgpack.Encoder().encode
_decode_texts = codec.msgpack_decoder(list[RenderedText]).decode
_decode_ready = codec.json_decoder(RenderReady).decode


class RenderProcess:
    """A template in a process of its own, which is started again whenever it has ended. Threads take turns.

    Args:
        source: Jinja text.
        name: Name of the template in error messages.
        values: Variables such as `examples`. A column of the same name takes precedence.
        blank_columns: Columns that the template gets as an empty text.
        is_strict: Whether the use of a missing variable is an error.

    Raises:
        ConfigError: the template is not UTF-8 or does not compile, or the process cannot be started.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        values: dict[str, Any],
        blank_columns: Sequence[str] = (),
        is_strict: bool = True,
    ) -> None:
        setup = RenderSetup(
            name=name,
            source=source,
            values=values,
            blank_columns=list(blank_columns),
            is_strict=is_strict,
            row_seconds=ROW_SECONDS,
            memory_bytes=MEMORY_BYTES,
        )
        try:
            encoded = msgspec.json.encode(setup)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name}: holds bytes that are no text, expected UTF-8") from error
        self._name = name
        self._lock = threading.Lock()
        self._process = LimitedProcess(
            "batchinfer.prompts.render_host",
            encoded,
            name=name,
            question_seconds=setup.row_seconds,
            memory_bytes=setup.memory_bytes,
        )
        self._has_warned = False
        self.rows_at_once = FEW_ROWS
        """Most rows that `render` should get at once. Few where rows may take seconds each, so that a caller who waits
        for the results of a bad template soon sees them."""
        with self._lock:
            ready = self._start()
        self.variables = ready.variables
        self.needed_columns = ready.needed_columns

    def render(self, lines: Sequence[bytes]) -> list[RenderedText]:
        """Return the prompt text of every row, in order. Each of `lines` is a JSON object."""
        with self._lock:
            self.rows_at_once = MANY_ROWS
            if len(lines) > 1:
                texts = self._ask_for(lines)
                if texts is not None:
                    return texts
                self._note_end()
            return [self._render_alone(line) for line in lines]

    def _render_alone(self, line: bytes) -> RenderedText:
        # A process that went over a limit has ended because of its row. A process that ended in another way may have
        # been killed from outside, so its row is tried a second time.
        reason = ""
        for _ in range(2):
            texts = self._ask_for([line])
            if texts is not None:
                return texts[0]
            status = self._note_end()
            reason = self._process.limit_of(status)
            if reason:
                break
            reason = f"the process that renders it ended twice ({describe_exit(status)})"
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: %s; such a row becomes an error row", self._name, reason)
        return RenderedText(None, Code.TEMPLATE_ERROR.value, f"{self._name}: {reason}")

    # -- the process

    def _start(self) -> RenderReady:
        """Start the process, and let it compile the template."""
        answer = self._process.start()
        if answer is None:
            status = self._note_end()
            reason = (
                self._process.limit_of(status) or f"its process ended ({describe_exit(status)})"
            )
            raise ConfigError(
                f"{self._name}: cannot be compiled: {reason}",
                hint="Jinja computes constant expressions first: look for a very large one",
            )
        ready = _decode_ready(answer)
        if ready.error:
            self._note_end()
            raise ConfigError(ready.error, hint=ready.hint)
        return ready

    def _ask_for(self, lines: Sequence[bytes]) -> list[RenderedText] | None:
        """Return the text of every row; None if the process has ended."""
        if not self._process.is_running:
            self._start()
        answer = self._process.ask(_encode_rows(lines))
        return None if answer is None else _decode_texts(answer)

    def _note_end(self) -> int:
        """Wait for the end of a process that has closed its pipe, and return its exit status."""
        self.rows_at_once = FEW_ROWS
        return self._process.note_end()
