"""Keeps two `run` commands from working in one local work folder at once.

The kernel drops the lock of a process that ends, however it ends, so what is left of a killed command blocks nobody. In
a bucket there is no lock: there the lease of the worker `WORKER_ID` lets the command that was started last go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.errors import ConfigError, InputError

WORKER_ID = "run"
"""Id of the worker of a `run` command."""
LOCK = "running.lock"


@contextlib.contextmanager
def running_alone(folder: Path | None) -> Iterator[None]:
    """Hold the lock of a work folder for the time of a `with` block. The lock's file stays.

    Args:
        folder: The work folder, which is made if it is not there; None for one in a bucket.

    Raises:
        InputError: another `run` command works there, or the folder cannot be made.
        ConfigError: its filesystem has no locks.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        reason = f"cannot be made ({error.strerror}), expected a place for a folder"
        raise InputError(f"{folder}: {reason}", hint="name another DEST or --work") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InputError(
                f"{folder}: another `batchinfer run` works there: process {file.read().strip()}",
                hint="wait until it has ended",
            ) from error
        except OSError as error:
            reason = f"its filesystem has no locks ({error.strerror}), expected one that has"
            hint = "name another folder or a bucket for job and run: --work"
            raise ConfigError(f"{folder}: {reason}", hint=hint) from error
        # The number is for people. What needs the full disk for more than this says so.
        with contextlib.suppress(OSError):
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield
