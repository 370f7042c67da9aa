"""Ties engine processes to their parents, so that no engine process outlives its parent, however the parent ends.

vLLM starts processes of its own: an engine core, and a worker per GPU. If their parent is killed by SIGKILL, they go
on for ever and hold the GPU. So each of them asks the kernel to be killed together with its parent:

* A spawned process imports our host's module again, which calls `register`. Where this package is installed, vLLM
  calls `register` as well, as a plugin (entry point group ``vllm.general_plugins``).
* A forked process imports nothing, and vLLM considers its plugins loaded there. `guard_forks` acts at the fork itself.

vLLM processes that were not started by this package are left alone. All vLLM processes of an environment import this
module, so it stays small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
ENGINE_VARIABLE = "BATCHINFER_ENGINE"
"""Environment variable that holds the process id of our engine process, for the processes below it."""


def register() -> None:
    """Tie this process to its parent if one of our engine processes is an ancestor of it. Idempotent."""
    host = os.environ.get(ENGINE_VARIABLE, "")
    if not host.isdigit() or int(host) == os.getpid():
        return
    die_with_parent()
    if not is_alive(int(host)):
        os.kill(os.getpid(), signal.SIGKILL)


def guard_forks(release: Callable[[], object]) -> None:
    """Tie every process that this process forks from now on to its parent, and the processes that those fork as well.

    Args:
        release: Called in each forked child, to close what the child must not keep open, such as the connection to the
            worker: the worker takes the connection's end for the end of this process.
    """
    forking = threading.local()

    def before() -> None:
        forking.parent = os.getpid()
        # The kernel kills a child when the thread that forked it ends. Only the main thread surely lives as long as
        # the children should.
        forking.is_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        release()
        if forking.is_main:
            die_with_parent(forking.parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Works on Linux only.

    The kernel does nothing about a parent that has already ended. In that case this process kills itself.

    Args:
        parent: Process id of the parent that started this process. If it has already ended, the kernel reports another
            parent. None if the id is not known: then the parent has ended if the kernel reports process 1.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return
    now = os.getppid()
    if now != parent if parent is not None else now == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process that we may signal has this id."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
