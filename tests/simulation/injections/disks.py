"""Scratch disks that are full for a while: files cannot be opened for writing, and open ones take no byte more."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Self

from batchinfer.core.errors import BatchinferError, ScratchFull

from .base import Injection


class FullDisks(Injection):
    """Fills the scratch disk of one worker."""

    NAME = "disks"

    def begin(self, seconds: float) -> None:
        super().begin(seconds)
        self.scene.has_room = self.has_room
        self.full: dict[str, float] = {}

    def strike(self) -> str:
        if not self.scene.live:
            return ""
        process = self.chance.choice(self.scene.live).process
        seconds = (
            self.chance.random() * self.chance.choice([0.5, 3.0]) * self.scene.plot.lease_seconds
        )
        self.full[process.name] = self.scene.scheduler.now + seconds
        process.num_faults += 1
        process.troubled_at = max(process.troubled_at, self.scene.scheduler.now + seconds)
        return f"the scratch disk of {process.name} is full for {seconds:.1f} s"

    def calm(self) -> None:
        self.full.clear()

    def explains(self, error: BatchinferError) -> bool:
        return bool(self.num_strikes) and isinstance(error, ScratchFull)

    def has_room(self, process_name: str) -> bool:
        """Whether a process can write to its scratch folder."""
        return self.full.get(process_name, 0.0) <= self.scene.scheduler.now


class FillingFile:
    """A file in a scratch folder, opened for writing. When the disk fills up, it takes half of what it is given."""

    def __init__(self, file: Any, path: Path, has_room: Any) -> None:
        self._file = file
        self._path = path
        self._has_room = has_room
        self._is_half_written = False

    def write(self, data: Any) -> int:
        if self._has_room():
            self._is_half_written = False
            written: int = self._file.write(data)
            return written
        if self._is_half_written or len(data) < 2:
            raise no_space(self._path)
        self._is_half_written = True
        self._file.write(data[: len(data) // 2])
        return len(data) // 2

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def no_space(path: Path) -> OSError:
    """The error of a disk that is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
