"""Scratch folders of simulated processes: files close with their process, and the disk under them may be full."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest import mock

from batchinfer.ledger import inventory
from batchinfer.storage import scratch

BASE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_open_files: dict[str, list[Any]] = {}


class _TrackedPath(type(Path())):  # type: ignore[misc]  # pathlib's own way before Python 3.12
    """Paths of the scratch folders: a killed process's open files are closed, as the kernel would do."""

    has_room: ClassVar[Callable[[str], bool]]

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        owner, has_room = self.parts[len(BASE.parts) + 1], type(self).has_room
        if "w" in mode and not has_room(owner):
            raise _no_space(self)
        file = super().open(mode, *args, **options)
        _open_files.setdefault(owner, []).append(file)
        return _FillingFile(file, self, lambda: has_room(owner)) if "w" in mode else file

    def __format__(self, spec: str) -> str:
        """Messages reach the trace, and the true path has a random part."""
        return format("/scratch", spec)


class _FillingFile:
    """A file opened for writing. When the disk fills up, it takes half of what it is given."""

    def __init__(self, file: Any, path: Path, has_room: Callable[[], bool]) -> None:
        self._file = file
        self._path = path
        self._has_room = has_room
        self._is_half_written = False

    def write(self, data: Any) -> int:
        is_full = not self._has_room()
        if is_full and (self._is_half_written or len(data) < 2):
            raise _no_space(self._path)
        self._is_half_written = is_full
        written: int = self._file.write(data[: len(data) // 2] if is_full else data)
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _no_space(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextmanager
def tracked_files(has_room: Callable[[str], bool] = lambda _process_name: True) -> Iterator[None]:
    """Remember the files that scratch folders open, for `close_files`. Nothing is read on real threads meanwhile.

    `has_room`: Whether the scratch disk of a process takes what is written to it.
    """
    _TrackedPath.has_room = staticmethod(has_room)

    def one_by_one(work: Callable[[Any], Any], items: Iterable[Any], _: int = 1) -> Iterator[Any]:
        return map(work, items)

    with (
        mock.patch.object(scratch, "Path", _TrackedPath),
        mock.patch.object(inventory, "in_parallel", one_by_one),
    ):
        yield


def close_files(process_name: str) -> None:
    """Close what a process has open in its scratch folder, which has the process's name."""
    for file in _open_files.pop(process_name, ()):
        file.close()
