"""Prints messages and log lines to stderr, above the progress bars, and answers that are streamed to stdout."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TextIO

import click

from batchinfer.core.errors import BatchinferError
from batchinfer.core.printable import one_entry, without_controls


def say(text: str) -> None:
    """Print a text to stderr: secrets of URLs masked, control characters as escapes, lines after the first indented."""
    with above_bars():
        click.echo(one_entry(text), err=True)


def write(text: str, *, to_stderr: bool = False) -> None:
    """Print a part of a text to stdout or stderr at once, with control characters as escapes. Adds no newline.

    Raises:
        BatchinferError: stdout cannot take the text, because the disk is full, for example.
    """
    with stdout_errors("text"):
        click.echo(without_controls(text), nl=False, err=to_stderr)


@contextlib.contextmanager
def stdout_errors(what: str, hint: str = "") -> Iterator[None]:
    """Turn an OSError of what is written to stdout into our error, which says what stdout cannot take."""
    try:
        yield
    except BrokenPipeError:  # `head` has ended, for example; click ends without a message
        raise
    except OSError as error:
        reason = f"stdout: cannot take the {what} ({error.strerror})"
        raise BatchinferError(reason, hint=hint) from error


def above_bars() -> AbstractContextManager[None]:
    """Remove the progress bars of tqdm from the terminal for as long as the context lasts.

    What is written to stderr meanwhile stands above the bars.
    """
    # Without a bar, tqdm has not been imported. While another thread imports it, it lacks its class.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        return contextlib.nullcontext()
    mode: AbstractContextManager[None] = bars.external_write_mode(file=sys.stderr)
    return mode


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes log lines to stderr, above the progress bars."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The present stderr. A live table of rich replaces it, to put lines above the table."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        with above_bars():
            super().emit(record)
