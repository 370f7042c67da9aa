"""Helpers for child processes: how they find this package, and words for how they ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import batchinfer


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `additions`, for a child process.

    PYTHONPATH is extended if necessary, so that the child imports the same copy of this package.
    """
    environment = {**os.environ, **additions}
    root = str(Path(batchinfer.__file__).resolve().parent.parent)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([*paths, root])
    return environment


def describe_exit(status: int) -> str:
    """Say in words how a process ended, by its exit status.

    >>> describe_exit(-9)
    "killed by SIGKILL (often the kernel's or the container's memory limit)"
    >>> describe_exit(3)
    'ended with exit status 3'
    """
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    note = " (often the kernel's or the container's memory limit)" if status == -9 else ""
    return f"killed by {name}{note}"
