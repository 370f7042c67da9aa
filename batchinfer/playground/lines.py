"""Where a chat's messages come from: a person at a terminal, or the lines of a pipe or a file."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from batchinfer.core.errors import InputError

if TYPE_CHECKING:
    from prompt_toolkit.history import History

PROMPT = ">>> "
QUOTES = '"""'
"""Mark at the beginning and the end of a message of several lines."""


class Lines(Protocol):
    """A source of messages and commands."""

    welcome: str
    """Sentence for the beginning of the chat."""
    is_terminal: bool
    """Whether a person types the lines."""

    def read(self) -> str:
        """Return the next message or command. A message may have several lines.

        Raises:
            EOFError: there is no more.
            InputError: standard input cannot be read, or ends within a message.
            KeyboardInterrupt: the person pressed Ctrl-C while typing.
        """
        ...


def lines_of(stdin: TextIO | None, history: str | None, words: Sequence[str]) -> Lines:
    """Return the source of messages that fits standard input.

    Args:
        stdin: Standard input; None if the caller has closed it.
        history: File for the typed lines; None for the default file, "" for no file.
        words: Commands that the tab key completes.
    """
    if stdin is not None and stdin.isatty():
        return TerminalLines(history, words)
    return PipedLines(stdin or io.StringIO())


def is_open_block(text: str) -> bool:
    """Whether a text begins with `QUOTES`, and does not yet end with `QUOTES`.

    >>> is_open_block(f"{QUOTES}a"), is_open_block(f"{QUOTES}a{QUOTES}"), is_open_block("a")
    (True, False, False)
    """
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def without_quotes(text: str) -> str:
    r"""Return a message without the marks around it.

    >>> without_quotes(f"{QUOTES}\na\nb\n{QUOTES}"), without_quotes("a")
    ('a\nb', 'a')
    """
    stripped = text.strip()
    if not stripped.startswith(QUOTES) or is_open_block(stripped):
        return text
    return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")


class PipedLines:
    """Lines of standard input that is no terminal."""

    welcome = "Each line of standard input is a message."
    is_terminal = False

    def __init__(self, stdin: TextIO) -> None:
        self._stdin = stdin

    def read(self) -> str:
        """See Lines."""
        text = self._line()
        while is_open_block(text):
            try:
                text += "\n" + self._line()
            except EOFError:
                raise InputError(
                    f"standard input: ends within a message that begins with {QUOTES}",
                    hint=f"end the message with {QUOTES}",
                ) from None
        return without_quotes(text)

    def _line(self) -> str:
        try:
            line = self._stdin.readline()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"standard input: cannot be read ({error})", hint="expected text in UTF-8"
            ) from error
        if not line:
            raise EOFError
        return line.removesuffix("\n")


class TerminalLines:
    """A line editor with a history, from prompt_toolkit. It draws on stderr if stdout is no terminal.

    Args:
        history: See `lines_of`.
        words: See `lines_of`.
    """

    welcome = "/help lists the commands."
    is_terminal = True

    def __init__(self, history: str | None, words: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output

        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if is_open_block(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("escape", "c-j")  # Alt-Enter, typed before the line editor started
        def _break(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            multiline=True,
            prompt_continuation="... ",
            history=_history(history),
            key_bindings=keys,
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str:
        """See Lines."""
        return without_quotes(self._session.prompt())


def _history(path: str | None) -> History:
    """Return the history of typed lines: a file, or memory if no file is wanted or can be made.

    A new file is readable by this user alone.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path == "":
        return InMemoryHistory()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    place = Path(path or f"{state}/batchinfer/chat-history").expanduser()
    with contextlib.suppress(OSError, RuntimeError):
        place.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        return FileHistory(str(place))
    return InMemoryHistory()
