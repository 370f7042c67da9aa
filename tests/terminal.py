"""A terminal for tests: a program that runs in a pty, what it shows, and keys for it."""

import os
import re
import shlex
import sys
import termios
from pathlib import Path
from typing import Any

import pexpect

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][0-9A-Za-z]?|\x1b\][^\x07]*\x07")


class Terminal(pexpect.spawn):
    """Runs `python -m batchinfer …` with a pty as its controlling terminal. Use it in a `with` statement.

    `send` presses keys; a line ends with "\\r".
    """

    def __init__(self, *arguments: str, state: Path) -> None:
        self.shown = ""
        command = shlex.join([sys.executable, "-m", "batchinfer", *arguments])
        own = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state)}
        super().__init__(
            "bash",
            ["-c", f"exec {command}"],
            timeout=240,
            env=os.environ | own,
            dimensions=(40, 120),
            encoding="utf-8",
            codec_errors="replace",
        )
        self.settings = self.settings_now()

    def read_nonblocking(self, *size_and_timeout: Any, **named: Any) -> str:
        """What the program has shown meanwhile, without what moves the cursor."""
        text = super().read_nonblocking(*size_and_timeout, **named)
        text = _ESCAPES.sub("", text).replace("\r", "")
        self.shown += text
        return text

    def expect(self, text: str, seconds: float = 120) -> str:
        """Wait until the program shows a text after what was expected before. Returns everything up to it."""
        self.expect_exact(text, timeout=seconds)
        return str(self.before)

    def talk(self, *turns: tuple[str, str]) -> None:
        """Type lines in turn, each followed by what it shows and by the next prompt."""
        for typed, shown in turns:
            self.send(f"{typed}\r")
            self.expect(shown)
            self.expect(">>>")

    def leave(self) -> None:
        """End a chat by Ctrl-D. Before its prompt the terminal itself, not the line editor, would take the key."""
        self.send(CTRL_D)
        assert self.end() == 0

    def end(self) -> int:
        """Wait until the program has ended. Returns its exit status."""
        self.expect_exact(pexpect.EOF)
        return int(self.wait())

    def settings_now(self) -> list[Any]:
        return termios.tcgetattr(self.child_fd)


CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
