"""Ties processes to their parents on Linux, so that a process ends with its parent, also by SIGKILL.

vLLM starts processes of its own: an engine core, and a worker for each GPU. `guard` ends them with the server. Should
the guard itself be killed, each of them asks the kernel to be killed when its parent ends: vLLM calls `register` in
every process that it starts, as a plugin (entry point group ``vllm.general_plugins``). vLLM processes that were not
started by this package are left alone.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
ENGINE_VARIABLE = "BATCHINFER_ENGINE"
"""Name of the environment variable that marks processes which descend from a server of ours."""


def register() -> None:
    """Have this process killed when its parent ends, if it descends from a server of ours. May be called twice."""
    if os.environ.get(ENGINE_VARIABLE):
        die_with_parent()


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Works on Linux only.

    If the parent had already ended before this call, the kernel does nothing. In that case this process kills itself.

    Args:
        parent: Id of the parent's process; 1 where the parent is the first process of a container. None: any but 1.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return
    now = os.getppid()
    if now == 1 if parent is None else now != parent:
        os.kill(os.getpid(), signal.SIGKILL)
