"""Ties engine processes to their parents on Linux, so that an engine process ends with its parent, also by SIGKILL.

vLLM starts processes of its own: an engine core, and a worker per GPU. If their parent were killed by SIGKILL, they
would go on for ever and hold the GPU. So each of these processes asks the kernel to be killed when its parent ends:

* A spawned process imports `batchinfer.engines.host`, the main module of its parent, and this calls `register`. If
  this package is installed, vLLM calls `register` as well, as a plugin (entry point group ``vllm.general_plugins``).
* A forked process imports no module, and vLLM does not load its plugins there again. For these processes,
  `guard_forks` runs code at the fork itself.

vLLM processes that were not started by this package are left alone. Every vLLM process imports this module if this
package is installed, so the module stays small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
ENGINE_VARIABLE = "BATCHINFER_ENGINE"
"""Name of the environment variable that tells vLLM's processes the process id of our engine process."""


def register() -> None:
    """Have this process killed when its parent ends, if the process descends from one of our engine processes.

    A second call changes nothing. In an engine process itself, and in processes of others, this does nothing.
    """
    host = os.environ.get(ENGINE_VARIABLE, "")
    if not host.isdigit() or int(host) == os.getpid():
        return
    die_with_parent()
    if not is_alive(int(host)):
        os.kill(os.getpid(), signal.SIGKILL)


def guard_forks(release: Callable[[], object]) -> None:
    """Have every process that is forked from now on killed when its parent ends.

    This holds for children of this process, and for the children that those fork. It holds only for processes that a
    main thread forks.

    Args:
        release: Function that is called in each forked child, to close what the child must not keep open. An example is
            the connection to the worker: when it closes, the worker concludes that this process has ended.
    """
    forking = threading.local()

    def before() -> None:
        forking.parent = os.getpid()
        # The kernel kills a child when the thread that forked the child ends, even if the process goes on. Only the
        # main thread is sure to run as long as its process.
        forking.is_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        release()
        if forking.is_main:
            die_with_parent(forking.parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Works on Linux only.

    If the parent had already ended before this call, the kernel does nothing. In that case this process kills itself.

    Args:
        parent: Process id of the parent that started this process. If the kernel reports another parent, the parent
            has ended. None if the id is not known; then the parent has ended if the kernel reports process 1.
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
