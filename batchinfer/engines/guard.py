"""Runs a server as a child, and ends it with everything that it has started when the worker is gone. Linux only.

The worker starts this file as a program, for each server one, and holds the other end of its standard input::

    python -I -S guard.py GRACE_SECONDS COMMAND...

* The worker closes the pipe, or dies in any way: the server gets SIGTERM, and after the grace SIGKILL.
* The worker writes a byte: the server gets SIGKILL at once.
* The server ends by itself: what it has left behind is killed.

Orphans of the server become children of this process, whatever group or session they have joined, so none is missed. It
ends with the server's exit status, or with 128 + N if signal N ended the server. If somebody kills this process, the
kernel kills the server too, and `parent_death` does the same for the processes that vLLM starts.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Seconds after which processes that not even SIGKILL ends, because the kernel holds them, are given up.
_REAP_SECONDS = 30.0


def main(grace_seconds: float, command: list[str]) -> int:
    """Run the command until it ends or the worker is gone. Returns the exit status."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard, server = os.getpid(), os.fork()
    if server == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:
            os._exit(127)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            os.execvp(command[0], command)  # noqa: S606 - no shell
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    ended = os.pidfd_open(server)
    ready, _, _ = select.select([0, ended], [], [])
    if ended not in ready and not os.read(0, 1):
        os.kill(server, signal.SIGTERM)
        select.select([ended], [], [], grace_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    _kill_orphans()
    return status if status >= 0 else 128 - status


def _kill_orphans() -> None:
    """Kill and reap all children of this process, which are what the server has left behind."""
    end = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < end:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - starts faster
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
