"""No engine process outlives the one that started it, however that one ends.

vLLM starts processes of its own (an engine core, a worker per GPU). When their parent is killed by
SIGKILL they would go on for ever, holding the GPU. So each of them asks the kernel to be killed together
with its parent, however it was started:

* Spawned: Python imports our host's module again there, which calls `register`. vLLM calls it, too, as a
  plugin (entry point group ``vllm.general_plugins``) where the package is installed.
* Forked: nothing is imported and vLLM takes its plugins for loaded, but `guard_forks` acts at the fork.

Other users of vLLM in the same environment are left alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
ENGINE_VARIABLE = "BATCHINFER_ENGINE"
"""Set by our engine processes to their own process id, for those that they start."""


def register() -> None:
    """Tie this process to its parent, if one of our engine processes is above it. Idempotent."""
    host = os.environ.get(ENGINE_VARIABLE, "")
    if not host.isdigit() or int(host) == os.getpid():
        return
    die_with_parent()
    if not is_alive(int(host)):
        os.kill(os.getpid(), signal.SIGKILL)


def guard_forks(release: Callable[[], object]) -> None:
    """Tie every process that this one forks from now on to its parent, and theirs to them.

    Args:
        release: Called in each child: closes what a child must not hold, such as a connection whose end
            tells the other side that this process is gone.
    """
    forking = threading.local()

    def before() -> None:
        forking.parent = os.getpid()
        # The kernel kills a child when the thread that forked it ends, and others than the main one may end
        # before their children should.
        forking.is_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        release()
        if forking.is_main:
            die_with_parent(forking.parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only; else no effect.

    Args:
        parent: The expected parent's process id. If it is another one already (or, when not given, the
            first process), the parent was gone before the kernel could be asked: this process ends at once.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return
    now = os.getppid()
    if now != parent if parent is not None else now == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process of ours has this id."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
