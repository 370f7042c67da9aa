"""Local scratch space, where downloaded chunks are read and outputs are built before they are published whole.

A process makes a folder of its own here and removes it at its end. A killed process leaves its folder. The next process
that makes one in the same place sees that nobody holds the old folder's lock, and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.errors import ConfigError, ScratchFull, StorageError

_PREFIX = "batchinfer-scratch-"
_LOCK = "lock"
_MAKING_SECONDS = 10.0
"""Age of a folder from which its process has locked it, or is gone."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK)
"""What flock(2) says on a filesystem without locks, such as Lustre that was mounted without them."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_ELSEWHERE = "name another folder with --scratch-dir, or with TMPDIR where there is no such option"


@contextlib.contextmanager
def scratch_errors(folder: Path) -> Iterator[None]:
    """Turn OSError on a scratch file into ScratchFull if the folder is full or unwritable, else into StorageError."""
    try:
        yield
    except OSError as error:
        hint = f"see to the disk, or {_ELSEWHERE}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *_REFUSED):
            text = f"scratch folder {folder}: cannot be used ({error})"
            raise StorageError(text, hint=hint) from error
        what = "cannot be written" if error.errno in _REFUSED else "is full"
        text = f"scratch folder {folder}: {what} ({error.strerror})"
        raise ScratchFull(text, hint=hint) from error


def temporary_folder() -> Path:
    """Return the system's folder for temporary files.

    Raises:
        ScratchFull: None can be written.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        hint = f"see to the disk, or {_ELSEWHERE}"
        raise ScratchFull("no folder for temporary files can be written", hint=hint) from error


def remove_quietly(path: Path) -> None:
    """Remove a scratch file if possible. Otherwise the file stays until its scratch folder is removed."""
    with contextlib.suppress(OSError):
        path.unlink()


class Scratch:
    """A private folder below `parent` (the system's temporary folder by default).

    Raises:
        ConfigError: The folder cannot be made there.
        ScratchFull: The disk is full.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        base = Path(parent) if parent else temporary_folder()
        with scratch_errors(base), _making(base):
            base.mkdir(parents=True, exist_ok=True)
            _sweep(base)
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock = (self.folder / _LOCK).open("wb")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError:
                self.close()
                raise
        self._numbers = itertools.count(1)  # Threads share this counter; next() is atomic.

    def new_path(self, name: str) -> Path:
        """Return a path in the folder. No other call returns the same path."""
        return self.folder / f"{next(self._numbers)}-{name}"

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


@contextlib.contextmanager
def _making(base: Path) -> Iterator[None]:
    """Turn an OSError from making the folder into ConfigError if a new start would fail in the same way."""
    try:
        yield
    except OSError as error:
        if error.errno in (*_REFUSED, *NO_LOCKS, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise ConfigError(
                f"scratch folder {base}: cannot be made ({error.strerror}), expected a folder of yours",
                hint=f"check its owner and mount, or {_ELSEWHERE}",
            ) from error
        raise


def _sweep(base: Path) -> None:
    """Remove the folders of processes that are gone. One that was made just now may have no lock yet."""
    for folder in base.glob(_PREFIX + "*"):
        try:
            # Anybody may put a link or a folder into a shared place. Nothing is made in those of other users.
            found, place = folder.lstat(), folder / _LOCK
            made = (place if place.exists() else folder).lstat().st_mtime
            if found.st_uid != os.getuid() or time.time() - made < _MAKING_SECONDS:
                continue
            with place.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # The folder is in use, or gone.
