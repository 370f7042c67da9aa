"""Local scratch space: where chunks are read from and outputs are built before they are published whole.

One folder a worker process, removed at the end. A killed worker leaves its folder; the next one on the same machine
sees that nobody holds its lock and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batchinfer.core.errors import ConfigError, ScratchFull, StorageError

_PREFIX = "batchinfer-scratch-"
_LOCK = "lock"
_READ_BYTES = 1 << 16
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def scratch_errors(folder: Path) -> Iterator[None]:
    """Turn a full or unwritable scratch folder into ScratchFull, a broken one into StorageError (34); both name it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = "is full"
        elif error.errno in _REFUSED:
            what = "cannot be written"
        else:
            raise StorageError(
                f"scratch folder {folder}: cannot be used ({error.strerror or error})",
                hint="see to the disk, or name another folder with --scratch-dir",
            ) from error
        raise ScratchFull(
            f"scratch folder {folder}: {what} ({error.strerror})",
            hint="free space there, or name another folder with --scratch-dir",
        ) from error


def forget(path: Path) -> None:
    """Remove a scratch file that is not needed any more. One that cannot be removed goes with its folder."""
    with contextlib.suppress(OSError):
        path.unlink()


class Scratch:
    """A private folder below `parent` (the system's temporary folder by default).

    Raises:
        ConfigError: it cannot be made there.
        ScratchFull: the disk is full.
    """

    def __init__(self, parent: Path | None = None) -> None:
        base = parent if parent is not None else Path(tempfile.gettempdir())
        with scratch_errors(base), _making(base):
            base.mkdir(parents=True, exist_ok=True)
            _sweep(base)
            while True:
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                with contextlib.suppress(FileNotFoundError):
                    self._lock = (self.folder / _LOCK).open("wb")
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                    if (self.folder / _LOCK).exists():
                        break
                # Another worker's sweep came between making the folder and locking it.
        self._numbers = itertools.count(1)  # next() is atomic; threads share this

    def new_path(self, name: str) -> Path:
        """A path in the folder that nobody else gets."""
        return self.folder / f"{next(self._numbers)}-{name}"

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


@contextlib.contextmanager
def _making(base: Path) -> Iterator[None]:
    """Turn what keeps a scratch folder from being made into ConfigError: starting again does not help."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError):
            raise ConfigError(
                f"scratch folder {base}: cannot be made ({error.strerror}), expected a place for a local folder",
                hint="name another folder with --scratch-dir",
            ) from error
        if error.errno in _REFUSED:
            raise ConfigError(
                f"scratch folder {base}: cannot be written ({error.strerror}), expected a folder of yours",
                hint="check its owner and mount, or name another folder with --scratch-dir",
            ) from error
        raise


def _sweep(base: Path) -> None:
    """Remove the folders of scratch owners that are gone."""
    for folder in base.glob(_PREFIX + "*"):
        try:
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, just being made, or not ours to remove


class Spool:
    """Finished rows of one chunk: records appended in finishing order, found again by line.

    A record is one JSON line. Its `payload` (the output line inside it) is remembered by offset, so that memory is
    16 bytes a row, whatever the rows hold. Written by one thread; `read` may run in another up to `size_bytes` then.
    """

    def __init__(self, path: Path, num_lines: int) -> None:
        self._path = path
        with scratch_errors(path.parent):
            self._file: BinaryIO = path.open("w+b", buffering=0)
        self._offsets = array("q", bytes(8 * num_lines))
        self._lengths = array("q", bytes(8 * num_lines))
        self.size_bytes = 0

    def append(self, records: bytes, payloads: list[tuple[int, int, int]]) -> None:
        """Add whole records. `payloads` holds (line, offset within `records`, length) of each record's payload."""
        with scratch_errors(self._path.parent):
            view = memoryview(records)
            while view:
                view = view[self._file.write(view) :]
        base = self.size_bytes
        for line, offset, length in payloads:
            self._offsets[line] = base + offset
            self._lengths[line] = length
        self.size_bytes = base + len(records)

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end) of the records."""
        parts = []
        with scratch_errors(self._path.parent):
            while start < end:
                part = os.pread(self._file.fileno(), end - start, start)
                if not part:
                    raise OSError(errno.EIO, "spool ended early", str(self._path))
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def record_end(self, place: int) -> int:
        """Where the record ends that the byte before `place` belongs to; at most `size_bytes`."""
        place, end = place - 1, self.size_bytes
        while place < end:
            block = self.read(place, min(place + _READ_BYTES, end))
            newline = block.find(b"\n")
            if newline >= 0:
                return place + newline + 1
            place += len(block)
        return end

    def payloads(self) -> Iterator[bytes]:
        """Every line's payload in line order.

        Rows finish roughly in that order, so most payloads are cut from the block read last.
        """
        fileno = self._file.fileno()
        block, start, end = b"", 0, 0
        for offset, length in zip(self._offsets, self._lengths, strict=True):
            if offset >= end and length < _READ_BYTES:
                block, start = os.pread(fileno, _READ_BYTES, offset), offset
                end = start + len(block)
            place = offset - start
            if place >= 0 and offset + length <= end:
                yield block[place : place + length]
            else:
                yield os.pread(fileno, length, offset)

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._file.close()
        forget(self._path)
