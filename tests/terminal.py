"""A terminal for tests: a program that runs in a pty, what it shows, and keys for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

_START = "import fcntl,os,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][0-9A-Za-z]?|\x1b\][^\x07]*\x07")


class Terminal:
    """Runs `python -m batchinfer …` with a pty as its controlling terminal. Use it in a `with` statement."""

    def __init__(self, *arguments: str, state: Path, stdout: Path | None = None) -> None:
        self._main, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.settings = termios.tcgetattr(slave)
        self._slave = slave
        python = sys.executable
        with contextlib.ExitStack() as stack:
            out = slave if stdout is None else stack.enter_context(stdout.open("wb"))
            self._process = subprocess.Popen(
                [python, "-c", _START, python, "-m", "batchinfer", *arguments],
                stdin=slave,
                stdout=out,
                stderr=slave,
                start_new_session=True,
                env={
                    **os.environ,
                    "TERM": "xterm",
                    "PROMPT_TOOLKIT_NO_CPR": "1",
                    "XDG_STATE_HOME": str(state),
                },
            )
        self.shown = ""
        self._seen = 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._main)
        os.close(self._slave)

    def _read(self, seconds: float) -> None:
        if select.select([self._main], [], [], seconds)[0]:
            data = os.read(self._main, 65536).decode(errors="replace")
            self.shown += _ESCAPES.sub("", data).replace("\r", "")

    def expect(self, text: str, seconds: float = 60) -> str:
        """Wait until the program shows a text after what was expected before. Returns everything up to it."""
        end = time.monotonic() + seconds
        while (place := self.shown.find(text, self._seen)) < 0:
            if time.monotonic() > end:
                raise AssertionError(f"{text!r} was not shown; the end: {self.shown[-2000:]!r}")
            self._read(0.1)
        before, self._seen = self.shown[self._seen : place], place + len(text)
        return before

    def type(self, keys: str) -> None:
        """Press keys; a line ends with "\\r"."""
        os.write(self._main, keys.encode())

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, seconds: float = 60) -> int:
        """Wait until the program has ended. Returns its exit status."""
        end = time.monotonic() + seconds
        while self._process.poll() is None:
            assert time.monotonic() < end, self.shown[-2000:]
            self._read(0.05)
        self._read(0.05)
        return self._process.returncode

    def settings_now(self) -> list:
        return termios.tcgetattr(self._slave)


CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
SIGTERM = signal.SIGTERM
