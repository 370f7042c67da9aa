"""Writing checkpoints of open chunks in the background, a few segments at once.

Belongs to the main thread; nothing here blocks. A segment that cannot be written is no loss yet: the chunk's next one
holds its rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from batchinfer.cli.logs import event
from batchinfer.core import layout
from batchinfer.core.errors import ScratchFull, StorageError
from batchinfer.ledger import checkpoints
from batchinfer.worker.background import Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.services import Services

logger = logging.getLogger(__name__)

_MAX_WRITING = 4
"""Segments written at once: a bucket that hangs must leave hands for everything else."""
_SEGMENT_BYTES = 32 << 20
"""A checkpoint of more becomes several segments: each is in memory as a whole when it is written or read."""
_NO_ROWS = -1
"""Where the rows end in a segment that has none."""


@dataclass(slots=True)
class _Writing:
    """A segment on its way. It holds the chunk's spool up to `end`, with which `rows_done` rows are safe.

    `is_cut`: of the rows that were done when it was begun, some are left for the next one.
    """

    chunk: OpenChunk
    pending: Pending[int]
    key: str
    end: int
    rows_done: int
    is_cut: bool

    def describe(self, num_records: int) -> str:
        """What it holds, for the log."""
        if self.end == _NO_ROWS:
            return f"noted {num_records} rows that were in flight when the engine died"
        if self.is_cut:
            return f"checkpoint of {num_records} rows, more of them follow"
        return f"checkpoint of {num_records} rows, {self.rows_done} of {self.chunk.num_rows} done"


class Checkpointer:
    """Writes a segment for each chunk that it is asked to, one at a time for the same chunk.

    While `is_writing_of` a chunk, its spool is being read, and which segments it has is not known yet.

    Args:
        services: The run's store, the lease and the background.
        may_write: Asked right before a chunk's segment is begun: whether it is still wanted.
    """

    def __init__(self, services: Services, may_write: Callable[[OpenChunk], bool]) -> None:
        self._services = services
        self._may_write = may_write
        self._writing: list[_Writing] = []
        self._asked: deque[OpenChunk] = deque()
        self.fingerprint = ""
        """The run's; known before the first row is finished."""

    @property
    def is_busy(self) -> bool:
        """Whether segments are on their way, or asked for."""
        return bool(self._writing or self._asked)

    def is_writing_of(self, chunk: OpenChunk) -> bool:
        """Whether a segment of this chunk is on its way."""
        return any(entry.chunk is chunk for entry in self._writing)

    def ask(self, chunks: Iterable[OpenChunk]) -> None:
        """Write down the rows of each of these that no segment holds yet, those first that were asked for before."""
        waiting = {id(chunk) for chunk in self._asked}
        self._asked.extend(chunk for chunk in chunks if id(chunk) not in waiting)
        self._start()

    def tick(self) -> None:
        """Collect the segments that are written, then start those that are still asked for.

        Raises:
            BatchinferError: something that ends the worker: a full scratch folder, refused permissions, a newer epoch.
        """
        self._collect()
        self._start()

    def note_deaths(self, chunk: OpenChunk, lines: list[int]) -> None:
        """Write down, at once, that these rows were in flight when an engine died."""
        self._write(chunk, partial(checkpoints.encode_deaths, lines), _NO_ROWS)

    def _start(self) -> None:
        while self._asked and len(self._writing) < _MAX_WRITING:
            chunk = self._asked.popleft()
            if self.is_writing_of(chunk) or not self._may_write(chunk):
                continue
            start = chunk.checkpointed_bytes
            if chunk.spool.size_bytes > start:
                end = chunk.spool.record_end(start + _SEGMENT_BYTES)
                self._write(chunk, partial(chunk.spool.read, start, end), end)

    def _write(self, chunk: OpenChunk, read: Callable[[], bytes], end: int) -> None:
        services = self._services
        chunk.num_segments_written += 1
        key = layout.segment_key(
            chunk.name, services.lease.epoch, services.lease.writer, chunk.num_segments_written
        )

        def work() -> int:
            services.lease.require()
            data = read()
            checkpoints.write_segment(
                services.run,
                key,
                data,
                chunk_sha256=chunk.local.sha256,
                fingerprint=self.fingerprint,
            )
            return data.count(b"\n")

        rows_done = chunk.num_rows - chunk.num_left
        is_cut = end != _NO_ROWS and end < chunk.spool.size_bytes
        pending = services.background.submit(work)
        self._writing.append(_Writing(chunk, pending, key, end, rows_done, is_cut))

    def _collect(self) -> None:
        for entry in [entry for entry in self._writing if entry.pending.is_done()]:
            self._writing.remove(entry)
            try:
                num_records = entry.pending.result()
            except ScratchFull:
                raise
            except StorageError as error:
                then = (
                    "the next one holds its rows" if entry.end != _NO_ROWS else "deaths not noted"
                )
                logger.warning("%s: checkpoint not written (%s); %s", entry.key, error, then)
                continue
            chunk = entry.chunk
            size = max(0, entry.end - chunk.checkpointed_bytes)
            logger.info(
                "%s: %s",
                chunk.name,
                entry.describe(num_records),
                extra=event("checkpoint", chunk=chunk.name, key=entry.key, bytes=size),
            )
            chunk.segment_keys.append(entry.key)
            chunk.checkpointed_bytes = max(chunk.checkpointed_bytes, entry.end)
            if entry.is_cut:
                self._asked.append(chunk)
