"""How many rows there are to do for a worker, and how many are done: the total of its progress bar and result."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.core.counts import Counts
from batchinfer.worker.chunk import OpenChunk


class Workload:
    """The rows of the job, those of this worker's own manifests, and which of them are done. Used on the main thread.

    A worker that keeps to its manifests has only their rows. Of other workers' rows those count as done whose chunk is
    known to have its marker, as of this worker's last look at storage.
    """

    def __init__(self) -> None:
        self._rows: Mapping[str, int] = {}
        self._own: set[str] = set()
        self._done: set[str] = set()
        self._num_done = 0
        self.open: dict[str, OpenChunk] = {}
        """Chunks that this worker has open, by name."""
        self.published: set[str] = set()
        """Chunks whose marker is of this start."""
        self.counts = Counts()
        """What is counted of all rows of those, resumed ones included."""
        self.rows = 0
        """Number of rows of the job, or of the worker's own manifests if it keeps to them."""
        self.own_rows = 0
        """Number of rows of the worker's own manifests."""
        self.num_opened = 0
        """Number of chunks that this start has opened."""

    def set_own(self, rows: Mapping[str, int]) -> None:
        """Set the number of rows of each chunk of this worker's manifests, by the chunk's name."""
        self._own = set(rows)
        self.own_rows = sum(rows.values())
        self.set_job(rows)

    def set_job(self, rows: Mapping[str, int]) -> None:
        """Set the chunks of the whole job, own ones included."""
        self._rows = rows
        self.rows = sum(rows.values())

    def opened(self, chunk: OpenChunk) -> None:
        """Note that this worker has opened a chunk."""
        self.open[chunk.name] = chunk
        self.num_opened += 1

    def closed(self, chunk: OpenChunk, outcome: str) -> None:
        """Note that this worker has closed a chunk. `outcome`: as for `Telemetry.chunk_closed`."""
        if outcome != "released":
            self.done(chunk.name)
        if outcome == "done":
            self.published.add(chunk.name)
            self.counts = self.counts.plus(chunk.counts)
        self.open.pop(chunk.name, None)

    def done(self, *names: str) -> None:
        """Note that chunks have their marker. Names of other chunks are ignored."""
        for name in names:
            if name in self._rows and name not in self._done:
                self._done.add(name)
                self._num_done += self._rows[name]

    @property
    def chunks(self) -> int:
        """Number of chunks of the manifests, and of others that this start has published."""
        return len(self._own | self.published)

    @property
    def chunks_done(self) -> int:
        """Number of these chunks that are known to have their marker, no matter which worker wrote it."""
        return len((self._own | self.published) & self._done)

    @property
    def chunks_skipped(self) -> int:
        """Number of these chunks that another worker or an earlier start has done."""
        return self.chunks_done - len(self.published)

    @property
    def rows_done(self) -> int:
        """Number of rows of chunks known to have their marker, plus the finished rows of the chunks open here."""
        is_open = sum(chunk.num_rows - chunk.num_left for chunk in self.open.values())
        return self._num_done + is_open
