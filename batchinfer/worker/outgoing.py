"""Checkpoints and outputs of open chunks, written in the background.

A `PublishQueue` owns complete chunks until they are published or given up:

    complete -> waiting -> publishing -> published, by us or by somebody else
                   ^            |
                   +--- failed -+-> given up

A `Checkpointer` owns the segments that are being written. If a segment cannot be written, nothing is lost yet: the next
segment of its chunk will hold the rows. Everything here runs on the main thread, and nothing blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from batchinfer.cli.logs import event
from batchinfer.core import layout
from batchinfer.core.clock import iso_utc
from batchinfer.core.errors import LeaseLapsed, ScratchFull, StorageError
from batchinfer.ledger import checkpoints
from batchinfer.ledger.publishing import Published, build_output
from batchinfer.storage.scratch import remove_quietly
from batchinfer.worker.background import Background, Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.config import Environment, Limits, RunAccess

logger = logging.getLogger(__name__)

_MAX_WRITING = 4
"""Segments that are written at the same time. If a bucket hangs, threads must be left for other work."""
_SEGMENT_BYTES = 32 << 20
"""Bytes of the largest segment, since a segment is held in memory as a whole. More rows become several segments."""
_NO_ROWS = -1
"""The `end` of a segment that holds engine deaths and no rows."""


@dataclass(slots=True)
class _Waiting:
    """A chunk that waits to be published at `due` or later. `attempts` counts the attempts that failed."""

    chunk: OpenChunk
    due: float
    attempts: int


@dataclass(slots=True)
class _Publishing:
    chunk: OpenChunk
    pending: Pending[Published]
    attempts: int


class PublishQueue:
    """Publishes chunks in the background, as soon as the run is known and the heartbeat is fresh.

    Args:
        environment: The clock and the background.
        run: The publisher, the lease and the scratch folder.
        limits: The number of attempts for a chunk, and the wait between them.
        may_give_up: Says whether a chunk may be given up after the last attempt: not while the engine has work.
        must_wait: Whether a chunk must not be published yet, for example while a segment of it is being written.
        save: Called with a chunk that could not be published.
    """

    def __init__(
        self,
        environment: Environment,
        run: RunAccess,
        limits: Limits,
        *,
        may_give_up: Callable[[], bool],
        must_wait: Callable[[OpenChunk], bool],
        save: Callable[[OpenChunk], None],
    ) -> None:
        self._environment = environment
        self._run = run
        self._limits = limits
        self._may_give_up = may_give_up
        self._must_wait = must_wait
        self._save = save
        self._waiting: list[_Waiting] = []
        self._publishing: list[_Publishing] = []
        self._fingerprint = ""
        """Fingerprint of the run; nothing is published before it is known."""

    def join(self, fingerprint: str) -> None:
        """Learn the fingerprint of the run that the worker has joined."""
        self._fingerprint = fingerprint

    @property
    def is_busy(self) -> bool:
        """Whether outputs are being published. Chunks that wait do not count."""
        return bool(self._publishing)

    def is_publishing(self, chunk: OpenChunk) -> bool:
        """Whether a chunk is being published, so that its files are being read."""
        return any(entry.chunk is chunk for entry in self._publishing)

    def has_failed(self, chunk: OpenChunk) -> bool:
        """Whether a chunk waits because an attempt to publish it failed."""
        return any(entry.chunk is chunk and entry.attempts for entry in self._waiting)

    def add(self, chunk: OpenChunk) -> None:
        """Publish a complete chunk, at once or as soon as possible."""
        self._wait(chunk, attempts=0, delay=0.0)

    def drop(self, chunk: OpenChunk) -> None:
        """Forget a chunk that waits. Publishing that has begun goes on."""
        self._waiting = [entry for entry in self._waiting if entry.chunk is not chunk]

    def collect(self) -> Iterator[tuple[OpenChunk, Published | StorageError]]:
        """Yield each chunk that was published, or that was given up because of an error.

        Other failures are tried again.

        Raises:
            BatchinferError: the worker must end: full scratch disk, refused permissions, a newer epoch of itself.
        """
        for entry in [entry for entry in self._publishing if entry.pending.is_done()]:
            self._publishing.remove(entry)
            try:
                ended: Published | StorageError = entry.pending.result()
            except ScratchFull:
                raise
            except StorageError as error:
                if self._tries_again(entry, error):
                    continue
                ended = error
            yield entry.chunk, ended

    def start(self) -> None:
        """Start to publish the chunks that are due and may be published now."""
        now = self._environment.clock.monotonic()
        for entry in list(self._waiting):
            if entry.due <= now and not self._must_wait(entry.chunk) and self._may_publish():
                self._waiting.remove(entry)
                self._publish(entry.chunk, entry.attempts)

    def _wait(self, chunk: OpenChunk, *, attempts: int, delay: float) -> None:
        due = self._environment.clock.monotonic() + delay
        self._waiting.append(_Waiting(chunk, due, attempts))
        self.start()

    def _may_publish(self) -> bool:
        """Whether the run is known and our lease holds. Without a fresh heartbeat others may have taken our chunks."""
        return bool(self._fingerprint) and self._run.lease.is_held()

    def _publish(self, chunk: OpenChunk, attempts: int) -> None:
        run = self._run
        marker = chunk.marker(
            fingerprint=self._fingerprint,
            worker=run.lease.worker_id,
            epoch=run.lease.epoch,
            start=iso_utc(chunk.started),
            end=iso_utc(self._environment.clock.now()),
        )
        leftovers = list(chunk.segment_keys)
        if run.claims is not None:
            leftovers.append(layout.claim_key(chunk.name))
        path = run.scratch.new_path(layout.output_file(chunk.name))

        def work() -> Published:
            built = build_output(path, chunk.spool.payloads())
            try:
                return run.publisher.publish(built, marker, chunk=chunk.name, leftovers=leftovers)
            finally:
                remove_quietly(path)

        pending = self._environment.background.submit(work)
        self._publishing.append(_Publishing(chunk, pending, attempts))

    def _tries_again(self, entry: _Publishing, error: StorageError) -> bool:
        """Let a failed chunk wait again, unless it has failed too often and the engine has no other work."""
        # A late heartbeat does not count as an attempt: the chunk waits for the next heartbeat (_may_publish).
        attempts = entry.attempts + (not isinstance(error, LeaseLapsed))
        name = entry.chunk.name
        if attempts >= self._limits.storage_attempts and self._may_give_up():
            logger.error(
                "%s: not published (%s); given up",
                name,
                error,
                extra=event("chunk_failed", chunk=name),
            )
            return False
        delay = self._limits.storage_delay_seconds(attempts)
        logger.warning(
            "%s: not published (%s); trying again in %.0f s",
            name,
            error,
            delay,
            extra=event("chunk_retry", chunk=name),
        )
        self._wait(entry.chunk, attempts=attempts, delay=delay)
        self._save(entry.chunk)
        return True


@dataclass(slots=True)
class _Writing:
    """A segment that is being written."""

    chunk: OpenChunk
    pending: Pending[int]
    key: str
    end: int
    """Bytes at the beginning of the chunk's spool that are on storage once this segment is, or _NO_ROWS."""
    rows_done: int
    """Rows of the chunk that were finished when the segment was begun."""
    is_cut: bool
    """Whether the segment was cut at its largest size, so that some of these rows are left for the next one."""

    def describe(self, num_records: int) -> str:
        """Say what the segment holds, for the log."""
        if self.end == _NO_ROWS:
            return f"noted {num_records} rows that were in flight when the engine died"
        if self.is_cut:
            return f"checkpoint of {num_records} rows, more of them follow"
        return f"checkpoint of {num_records} rows, {self.rows_done} of {self.chunk.num_rows} done"


class Checkpointer:
    """Writes segments of chunks on request, never two of the same chunk at the same time.

    While `is_writing_of(chunk)` is true, the chunk's spool is being read, and not all its segments are known.

    Args:
        run: The run's store and the lease.
        background: Writes the segments.
        may_write: Called right before a segment of a chunk is begun; says whether the segment is still wanted.
    """

    def __init__(
        self, run: RunAccess, background: Background, may_write: Callable[[OpenChunk], bool]
    ) -> None:
        self._run = run
        self._background = background
        self._may_write = may_write
        self._writing: list[_Writing] = []
        self._asked: deque[OpenChunk] = deque()
        self._fingerprint = ""
        """Fingerprint of the run; it is known before the first row is finished."""

    def join(self, fingerprint: str) -> None:
        """Learn the fingerprint of the run that the worker has joined."""
        self._fingerprint = fingerprint

    @property
    def is_busy(self) -> bool:
        """Whether segments are being written or waiting to be."""
        return bool(self._writing or self._asked)

    def is_writing_of(self, chunk: OpenChunk) -> bool:
        """Whether a segment of this chunk is being written."""
        return any(entry.chunk is chunk for entry in self._writing)

    def ask(self, chunks: Iterable[OpenChunk]) -> None:
        """Write the finished rows of these chunks that no segment holds yet. Earlier requests come first."""
        waiting = {id(chunk) for chunk in self._asked}
        self._asked.extend(chunk for chunk in chunks if id(chunk) not in waiting)
        self._start()

    def tick(self) -> None:
        """Collect the segments that are written, then start the next ones.

        Raises:
            BatchinferError: the worker must end: full scratch disk, refused permissions, a newer epoch of itself.
        """
        self._collect()
        self._start()

    def note_deaths(self, chunk: OpenChunk, lines: list[int]) -> None:
        """Write a segment at once that notes which rows were in flight when an engine died."""
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
        run = self._run
        key = layout.segment_key(
            chunk.name, run.lease.epoch, run.lease.writer, chunk.next_segment_number()
        )

        def work() -> int:
            run.lease.require()
            data = read()
            checkpoints.write_segment(
                run.store,
                key,
                data,
                chunk_sha256=chunk.local.sha256,
                fingerprint=self._fingerprint,
            )
            return data.count(b"\n")

        rows_done = chunk.num_rows - chunk.num_left
        is_cut = end != _NO_ROWS and end < chunk.spool.size_bytes
        pending = self._background.submit(work)
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
            size = chunk.note_segment(entry.key, entry.end)
            logger.info(
                "%s: %s",
                chunk.name,
                entry.describe(num_records),
                extra=event("checkpoint", chunk=chunk.name, key=entry.key, bytes=size),
            )
            if entry.is_cut:
                self._asked.append(chunk)
