"""One engine process as the worker sees it: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping

from batchinfer.core.processes import child_environment, describe_exit
from batchinfer.core.records import EngineInfo, EngineStats, Request, RowKey
from batchinfer.engines.channel import Channel, to_worker_decoder

logger = logging.getLogger(__name__)

# Number of last lines of an engine process's output that are kept.
LAST_LINES = 200
# Number of last lines of an engine process's output that an error message shows.
REASON_LINES = 6
# Bytes that the kernel may buffer for sending at each end of the connection.
SOCKET_BUFFER_BYTES = 4 << 20


class Replica:
    """An engine process, which leads a process group of its own.

    Args:
        name: Name for messages, as in "replica 1 (GPU 2,3)".
        environment: Environment variables that the engine process gets in addition to those of this process.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.environment = environment
        self.info: EngineInfo | None = None
        self.in_flight: dict[RowKey, Request] = {}
        self.stats = EngineStats()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._progress = (0, 0, 0)
        self.num_finished = 0
        """Number of requests that the process has finished."""
        self.started = time.monotonic()
        """Time on the monotonic clock when the process was started."""
        self._last_step = self._last_token = self.started
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "batchinfer.engines.host",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # The process gets a group of its own. Then Ctrl-C does not reach it, and it can be killed together with
                # its children. It gets no session of its own, because Linux may divide processor time among sessions
                # (autogroup). A busy engine core could then leave its worker without processor time for seconds.
                process_group=0,
                env=child_environment(environment),
            )
        self.channel = Channel(ours, to_worker_decoder)
        self._reader = threading.Thread(target=self._read_lines, name=f"{name} log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the engine process, which is also the id of its process group."""
        return self._process.pid

    @property
    def free_slots(self) -> int:
        """Number of further requests that the replica should get; 0 before it is loaded."""
        return max(0, self.info.max_in_flight - len(self.in_flight)) if self.info else 0

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def _read_lines(self) -> None:
        assert self._process.stdout
        for raw in self._process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            self._lines.append(line)
            logger.debug("%s: %s", self.name, line)

    def note_loaded(self, info: EngineInfo) -> None:
        """Remember that the model is loaded. From now on the replica has free slots."""
        self.info = info

    def note_sent(self, requests: list[Request]) -> None:
        """Count requests as in flight.

        If no request was in flight before, the time without progress starts now.
        """
        if not self.in_flight:
            self._last_step = self._last_token = time.monotonic()
        for request in requests:
            self.in_flight[request.key] = request

    def note_progress(self, stats: EngineStats, tokens: int, num_finished: int) -> None:
        """Remember the time of the engine's last step, and the time of its last token or finished request.

        Args:
            stats: Counters that the engine process reports.
            tokens: Number of tokens generated so far, including those of unfinished requests.
            num_finished: Number of requests that have finished since the last report.
        """
        self.stats = stats
        self.num_finished += num_finished
        now = time.monotonic()
        steps, before, finished = self._progress
        if stats.steps != steps:
            self._last_step = now
        if tokens > before or self.num_finished != finished:
            self._last_token = now
        self._progress = (stats.steps, max(tokens, before), self.num_finished)

    def note_finished(self, key: RowKey) -> bool:
        """Count a request as finished. Returns whether this replica had it in flight."""
        return self.in_flight.pop(key, None) is not None

    def note_abandoned(self) -> None:
        """Count all requests in flight as dropped."""
        self.in_flight.clear()

    def forgive(self, seconds: float) -> None:
        """Subtract `seconds` from the time without progress, and from the time that loading takes."""
        self.started += seconds
        self._last_step += seconds
        self._last_token += seconds

    def stalled_seconds(self) -> float:
        """Return the seconds since the last step or the last token, whichever is longer ago.

        0 while no request is in flight.
        """
        if not self.in_flight:
            return 0.0
        return time.monotonic() - min(self._last_step, self._last_token)

    def reason(self) -> str:
        """Return why the process ended, with the last lines that it wrote."""
        self.settle()
        return describe_exit(self._process.poll()) + self.last_lines()

    def settle(self) -> None:
        """Wait up to 1.5 seconds for a process that is about to end, so that its last lines are read."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._reader.join(0.5)

    def last_lines(self) -> str:
        """Return the last lines that the process wrote, as a text to append to a message; empty if it wrote none."""
        lines = [line for line in self._lines if line.strip()][-REASON_LINES:]
        return "; its last lines:\n  " + "\n  ".join(lines) if lines else ""

    def has_written(self, text: str) -> bool:
        """Whether one of the last `LAST_LINES` lines of the process contains a text, such as an exception's name."""
        return any(text in line for line in self._lines)

    def end(self, grace_seconds: float) -> None:
        """Kill the process and its whole group, after waiting up to `grace_seconds` for it to exit by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if grace_seconds > 0:
                self._process.wait(grace_seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.channel.close()
        # The reader ends when the pipe closes. A process of another group may keep the pipe open, so do not wait long.
        self._reader.join(0.5)
        if not self._reader.is_alive() and self._process.stdout:
            self._process.stdout.close()
