"""Complete chunks on their way out.

    complete -> waiting -> publishing -> published, by us or by somebody else
                   ^            |
                   +--- failed -+-> given up

Belongs to the main thread; nothing here blocks. What an outcome means to everything else is the affair of `OpenChunks`.
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
"""Segments written at once: a bucket that hangs must leave hands for everything else."""
_SEGMENT_BYTES = 32 << 20
"""A checkpoint of more becomes several segments: each is in memory as a whole when it is written or read."""
_NO_ROWS = -1
"""Where the rows end in a segment that has none."""


@dataclass(slots=True)
class _Waiting:
    """A chunk that is published at `due`, or later."""

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
        limits: How often a chunk is tried, and after which time again.
        may_give_up: Whether a chunk that has failed as often as that is to be given up: not while the engine has work.
        must_wait: Whether a chunk is not to be published yet, as while a segment of it is on its way.
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
        """The run's; nothing is published before it is known."""

    def join(self, fingerprint: str) -> None:
        """Learn the fingerprint of the run that the worker has joined."""
        self._fingerprint = fingerprint

    @property
    def is_busy(self) -> bool:
        """Whether outputs are on their way. Chunks that wait do not count."""
        return bool(self._publishing)

    def is_publishing(self, chunk: OpenChunk) -> bool:
        """Whether this chunk's output is on its way, so that its files are being read."""
        return any(entry.chunk is chunk for entry in self._publishing)

    def has_failed(self, chunk: OpenChunk) -> bool:
        """Whether this chunk waits because it could not be published."""
        return any(entry.chunk is chunk and entry.attempts for entry in self._waiting)

    def add(self, chunk: OpenChunk) -> None:
        """Publish a complete chunk, at once or when it can be."""
        self._wait(chunk, attempts=0, delay=0.0)

    def drop(self, chunk: OpenChunk) -> None:
        """Forget a chunk that waits. One that is being published goes on."""
        self._waiting = [entry for entry in self._waiting if entry.chunk is not chunk]

    def collect(self) -> Iterator[tuple[OpenChunk, Published | StorageError]]:
        """What became of chunks: their marker, or why they are given up. Others that failed are tried again later.

        Raises:
            BatchinferError: something that ends the worker: a full scratch folder, refused permissions, a newer epoch.
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
        """Start what is due and can be published now."""
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
        """Without a fresh heartbeat others may have taken our chunks: wait until it is renewed, or refused."""
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
        """Put a chunk that failed back, unless it has failed too often and nothing is left to do meanwhile."""
        # A late heartbeat is no failure of this chunk's: it waits for the next one (_may_publish).
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
        run: The run's store and the lease.
        background: Writes the segments.
        may_write: Asked right before a chunk's segment is begun: whether it is still wanted.
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
        """The run's; known before the first row is finished."""

    def join(self, fingerprint: str) -> None:
        """Learn the fingerprint of the run that the worker has joined."""
        self._fingerprint = fingerprint

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
