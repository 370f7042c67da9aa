"""No engine process outlives the one that started it, however that one ends.

vLLM starts processes of its own (an engine core, a worker per GPU). When their parent is killed by
SIGKILL they would go on for ever, holding the GPU. `register` is a vLLM plugin (entry point group
``vllm.general_plugins``): vLLM calls it in each of those processes, and it asks the kernel to kill the
process together with its parent. Other users of vLLM in the same environment are left alone.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
ENGINE_VARIABLE = "BATCHINFER_ENGINE"
"""Set by our engine processes to their own process id, for those that they start."""


def register() -> None:
    """Tie this process to its parent, if one of our engine processes is above it. Called by vLLM."""
    host = os.environ.get(ENGINE_VARIABLE, "")
    if not host.isdigit() or int(host) == os.getpid():
        return
    die_with_parent()
    if not is_alive(int(host)):
        os.kill(os.getpid(), signal.SIGKILL)


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
