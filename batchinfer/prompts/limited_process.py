"""A child process with limits on its memory and on the CPU time of every question; it answers one question at a time.

On Linux the kernel enforces both limits, so no input gets around them; macOS has only the limit of CPU time. A question
that goes over a limit ends the process and nothing else. A new process answers the next question.

A frame on the pipes is four bytes of length and the data. The first frame sets the process up. The process ends when
the pipe to it is closed, thus also when this process is killed; a question that is being answered at that moment goes
on until it is answered or reaches its limit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from typing import IO

from batchinfer.core.errors import ConfigError
from batchinfer.core.processes import child_environment

MEMORY_STATUS = 71
"""Exit status of a process that ran out of memory."""

_HEADER = struct.Struct("<I")


class LimitedProcess:
    """A child process that runs one module. `start` starts it, also after its end. One thread at a time uses it.

    Args:
        module: The module to run as ``python -m``. It reads frames from its standard input and answers each with one.
        setup: The first frame.
        name: Subject of error messages.
        question_seconds: Seconds of CPU time that one question may take, for `limit_of`. The module sets the limit.
        memory_bytes: Bytes of memory that the process may have, for `limit_of`. The module sets the limit.
    """

    def __init__(
        self, module: str, setup: bytes, *, name: str, question_seconds: float, memory_bytes: int
    ) -> None:
        self._module = module
        self._setup = setup
        self._name = name
        self._question_seconds = question_seconds
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process was started, and its end has not been noted."""
        return self._process is not None

    def start(self) -> bytes | None:
        """Start the process. Returns its answer to the first frame; None if the process has ended.

        Raises:
            ConfigError: the process cannot be started.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # so that Ctrl-C does not reach it
                env=child_environment({}),
            )
        except OSError as error:
            raise ConfigError(
                f"{self._name}: its process cannot be started ({error})",
                hint="the machine may have too many processes or too little memory",
            ) from error
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        return _exchange(process, self._setup)

    def ask(self, question: bytes) -> bytes | None:
        """Send a frame to the process, which must be running. Returns its answer; None if it has ended."""
        assert self._process is not None
        return _exchange(self._process, question)

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._end()
            self._process = None

    def note_end(self) -> int:
        """Wait for the end of a process that has closed its pipe, and return its exit status."""
        assert self._process is not None
        status = self._process.wait()
        self._end()
        self._process = None
        return status

    def limit_of(self, status: int) -> str:
        """Return which limit the process went over, by its exit status; "" if it ended for another reason."""
        if status == -signal.SIGPROF:
            return f"took more than {self._question_seconds:g} s of CPU time"
        if status == MEMORY_STATUS:
            return f"needs more than {self._memory_bytes >> 20} MiB of memory"
        return ""


def _exchange(process: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """Send a frame and return the answer; None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        write_frame(process.stdin, question)
    except OSError:
        return None
    return read_frame(process.stdout)


def _end(process: subprocess.Popen[bytes]) -> None:
    # The process is killed first, because a thread that still reads from it holds the lock of the pipe.
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # the process has not read all that was written
            pipe.close()


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """Write one frame, and wait until the pipe has taken it."""
    pipe.write(_HEADER.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Read one frame. Returns None if the other side has closed the pipe."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    data: bytes = pipe.read(length)
    return data if len(data) == length else None


# --------------------------------------------------------------------------- in the child process


def limit_memory(memory_bytes: int) -> None:
    """Let the kernel refuse memory above the limit to this process, where the system can, and write no core dumps."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def present_bytes() -> int:
    """Return the bytes of address space that this process has; 64 GiB where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 64 << 30


def prepare_timer() -> None:
    """Let the timer of `restart_timer` kill this process, even if the parent ignores or blocks the signal."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def restart_timer(seconds: float) -> None:
    """Have the kernel kill this process when it has used the CPU for so many seconds from now on; 0 stops the timer.

    RLIMIT_CPU would count whole seconds from the start of the process. This timer begins anew at every call.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
