"""How much a worker has to do, and how much of that is done: the total of its progress bar and of its result."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.worker.chunk import OpenChunk


class Workload:
    """The chunks of a worker's manifests, and those of other workers that it does, too. Used on the main thread.

    A chunk of another worker belongs to the workload while this worker has it open, and after it is done. So the total
    grows when this worker begins to help, and what is done never exceeds it.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int | None] = {}
        """Number of rows of each chunk; None as long as it is not known."""
        self._helped: set[str] = set()
        self._open: dict[str, OpenChunk] = {}
        self._done: set[str] = set()
        self._num_rows = 0
        self._num_rows_done = 0
        self._num_unknown = 0

    def set_own(self, rows: Mapping[str, int | None]) -> None:
        """Set the chunks of this worker's manifests: the number of rows by name, None where it is not known yet."""
        for name, number in rows.items():
            self._add(name, number)

    def opened(self, chunk: OpenChunk) -> None:
        """Note that this worker has opened a chunk."""
        name = chunk.name
        if name not in self._rows:
            self._helped.add(name)
            self._add(name, chunk.num_rows)
        elif self._rows[name] is None:
            self._remove(name)
            self._add(name, chunk.num_rows)
        self._open[name] = chunk

    def released(self, name: str) -> None:
        """Note that this worker has closed a chunk that is not done."""
        self._open.pop(name, None)
        if name in self._helped and name not in self._done:
            self._helped.remove(name)
            self._remove(name)

    def done(self, name: str) -> None:
        """Note that a chunk has its marker. Chunks outside the workload are ignored."""
        self._open.pop(name, None)
        if name in self._rows and name not in self._done:
            self._done.add(name)
            self._num_rows_done += self._rows[name] or 0

    def is_done(self, name: str) -> bool:
        """Whether a chunk of the workload is known to have its marker."""
        return name in self._done

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._rows)

    @property
    def chunks_done(self) -> int:
        """Number of chunks that are known to have their marker, no matter which worker wrote it."""
        return len(self._done)

    @property
    def rows(self) -> int | None:
        """Number of rows; None if a chunk's number is not known yet, or if there are no chunks."""
        return self._num_rows if self._rows and not self._num_unknown else None

    @property
    def rows_done(self) -> int:
        """Number of rows of chunks known to have their marker, plus the finished rows of the chunks open here."""
        is_open = sum(chunk.num_rows - chunk.num_left for chunk in self._open.values())
        return self._num_rows_done + is_open

    def _add(self, name: str, rows: int | None) -> None:
        self._rows[name] = rows
        self._num_rows += rows or 0
        self._num_unknown += rows is None

    def _remove(self, name: str) -> None:
        rows = self._rows.pop(name)
        self._num_rows -= rows or 0
        self._num_unknown -= rows is None
