"""Checkpoints and outputs of open chunks, written in the background.

A `PublishQueue` owns complete chunks, whose rows are all finished, until they are published or given up:

    complete -> waiting -> publishing -> published, by this worker or by another
                   ^            |
                   +--- failed -+-> given up

A `Checkpointer` owns the segments (files of finished rows) that are being written. If a segment cannot be written, its
rows are still on the local disk, and the next segment of the same chunk will hold them. The methods of both classes are
called on the main thread and never wait for storage: background threads do the writing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from batchinfer.core import layout, units
from batchinfer.core.clock import iso_utc
from batchinfer.core.errors import LeaseLapsed, ScratchFull, StorageError, Superseded
from batchinfer.core.events import event
from batchinfer.ledger import checkpoints
from batchinfer.ledger.publishing import Published, build_output
from batchinfer.storage.scratch import remove_quietly
from batchinfer.worker.background import Pending, Priority
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.config import Environment, Limits, RunAccess

logger = logging.getLogger(__name__)

_MAX_WRITING = 4
"""Number of segments being written from which on no further segment of rows is begun. Each takes a background thread.
If storage does not answer, some threads must be left for other work."""
_SEGMENT_BYTES = 8 << 20
"""Bytes of rows after which a segment ends; further rows go to the next segment. A segment is held in memory as a
whole, when it is written and when it is read, twice for a moment."""
_LOG_SECONDS = 60.0
"""Seconds between two log lines about checkpoints."""
_RETRY_SECONDS = 0.5
"""Seconds after a failed segment in which no other segment of the same chunk is begun. A store that refuses at once,
such as a full disk, would otherwise be asked again and again without a pause."""
_NO_ROWS = -1
"""Value of `_Writing.end` for a segment that holds no finished rows, but notes which rows an engine died with."""


@dataclass(slots=True)
class _Waiting:
    """A chunk that waits to be published.

    Publishing begins at `due` (monotonic seconds) or later. `attempts` counts the failed attempts to publish it.
    """

    chunk: OpenChunk
    due: float
    attempts: int


@dataclass(slots=True)
class _Publishing:
    chunk: OpenChunk
    pending: Pending[Published]
    attempts: int


class PublishQueue:
    """Publishes complete chunks on threads of its own, once the worker has joined the run and while it holds its lease.

    Args:
        environment: The clock, and the background beside which the threads are made.
        run: The publisher, the lease and the scratch folder.
        limits: The number of chunks that are published at once, of attempts to publish a chunk, and the wait
            between two attempts.
        may_give_up: Returns whether a chunk whose last attempt failed may be given up. It may not while open
            chunks have unfinished rows; then the chunk is tried again.
        must_wait: Returns whether a chunk must not be published yet, for example while its segment is written.
        save: Called with a chunk after each failed attempt that will be repeated, to checkpoint the chunk's rows.
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
        self._clock = environment.clock
        self._background = environment.background.beside(limits.max_publishing)
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
        """Whether a chunk is being published now. If so, a background thread is reading its files."""
        return any(entry.chunk is chunk for entry in self._publishing)

    def waits_long(self, chunk: OpenChunk) -> bool:
        """Whether a chunk waits because an attempt to publish it failed, or because all threads are publishing."""
        return any(
            entry.chunk is chunk and (entry.attempts or not self._has_free_thread)
            for entry in self._waiting
        )

    def add(self, chunk: OpenChunk) -> None:
        """Queue a complete chunk. Publishing begins at once if it is allowed now, else as soon as it is."""
        self._wait(chunk, attempts=0, delay=0.0)

    def drop(self, chunk: OpenChunk) -> None:
        """Forget a chunk that waits to be published. If publishing the chunk has begun already, it goes on."""
        self._waiting = [entry for entry in self._waiting if entry.chunk is not chunk]

    def collect(self) -> Iterator[tuple[OpenChunk, Published | StorageError]]:
        """Yield each chunk that was published, or that was given up because of an error.

        A chunk whose attempt failed, but that is not given up, is not yielded: it waits for its next attempt.

        Raises:
            BatchinferError: the worker must end, because the scratch disk is full, storage refused permission, or a
                newer process of the same worker has started.
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
        now = self._clock.monotonic()
        for entry in list(self._waiting):
            if not self._has_free_thread:
                return
            if entry.due <= now and not self._must_wait(entry.chunk) and self._may_publish():
                self._waiting.remove(entry)
                self._publish(entry.chunk, entry.attempts)

    def _wait(self, chunk: OpenChunk, *, attempts: int, delay: float) -> None:
        due = self._clock.monotonic() + delay
        self._waiting.append(_Waiting(chunk, due, attempts))
        self.start()

    @property
    def _has_free_thread(self) -> bool:
        return len(self._publishing) < self._limits.max_publishing

    def _may_publish(self) -> bool:
        """Whether the run is known and this worker holds its lease.

        When the lease has lapsed for want of heartbeats, other workers may have taken this worker's chunks.
        """
        return bool(self._fingerprint) and self._run.lease.is_held()

    def _publish(self, chunk: OpenChunk, attempts: int) -> None:
        run = self._run
        marker = chunk.marker(
            fingerprint=self._fingerprint,
            worker=run.lease.worker_id,
            epoch=run.lease.epoch,
            start=iso_utc(chunk.started),
            # The machine's clock may have been set back since the chunk was opened.
            end=iso_utc(max(chunk.started, self._clock.now())),
        )
        leftovers = list(chunk.segment_keys)
        if run.claims is not None:
            leftovers.append(layout.claim_key(chunk.name))
        path = run.scratch.new_path(layout.output_file(chunk.name))

        def work() -> Published:
            built = build_output(path, chunk.spool.payloads())
            try:
                return run.publisher.publish(
                    built,
                    marker,
                    chunk=chunk.name,
                    leftovers=leftovers,
                    repair_goal=chunk.ref.repair_goal,
                )
            finally:
                remove_quietly(path)

        pending = self._background.submit(work)
        self._publishing.append(_Publishing(chunk, pending, attempts))

    def _tries_again(self, entry: _Publishing, error: StorageError) -> bool:
        """Put a chunk that could not be published back to the waiting ones, and return True.

        Returns False if the chunk is given up: it has failed too often, and no open chunk has unfinished rows. While
        rows of the chunk are in no segment yet, it gets one more attempt, before which they are saved.
        """
        # A failure caused by this worker's late heartbeat is not counted. `_may_publish` delays the next attempt until
        # the heartbeat has been renewed.
        attempts = entry.attempts + (not isinstance(error, LeaseLapsed))
        name = entry.chunk.name
        most = self._limits.storage_attempts + entry.chunk.has_unsaved_rows
        if attempts >= most and self._may_give_up():
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


class _Segment(NamedTuple):
    """A segment that was written. Its records are finished rows, or notes about an engine's death."""

    key: str
    num_records: int


@dataclass(slots=True)
class _Writing:
    """A segment that is being written."""

    chunk: OpenChunk
    pending: Pending[_Segment]
    end: int
    """Position in the chunk's spool (its local file of finished rows), in bytes, at which the rows of this segment end;
    _NO_ROWS for a segment without rows."""
    rows_done: int
    """Number of the chunk's rows that were finished when the writing of this segment began."""
    is_cut: bool
    """Whether the segment reached its largest size, so that finished rows are left for the chunk's next segment."""

    @property
    def is_of_deaths(self) -> bool:
        """Whether the segment notes rows that an engine died with, instead of finished rows."""
        return self.end == _NO_ROWS

    def describe(self, num_records: int) -> str:
        """Say what the segment holds, for the log."""
        rows = units.many(num_records, "row")
        if self.is_of_deaths:
            return f"noted {rows} in flight when the engine died"
        if self.is_cut:
            return f"checkpoint of {rows}, more of them follow"
        return f"checkpoint of {rows}, {self.rows_done} of {self.chunk.num_rows} done"


@dataclass(slots=True)
class _Written:
    """Sums over the segments that were written since the last log line about them."""

    segments: int = 0
    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, size_bytes: int) -> None:
        """Count one segment."""
        self.segments += 1
        self.rows += rows
        self.bytes += size_bytes


class Checkpointer:
    """Writes the finished rows of chunks to storage as segments.

    `ask` leaves out a chunk whose segment is being written.

    While `is_writing_of(chunk)` is true, a background thread may be reading the chunk's spool (its local file of
    finished rows), and the chunk's list of segments does not yet hold the one being written.

    Args:
        run: The run's store and the lease.
        environment: The clock, and the background threads that write the segments.
        may_write: Called with a chunk right before a segment of its rows is begun. Returns whether the segment is still
            wanted.
    """

    def __init__(
        self, run: RunAccess, environment: Environment, may_write: Callable[[OpenChunk], bool]
    ) -> None:
        self._run = run
        self._clock = environment.clock
        self._background = environment.background
        self._may_write = may_write
        self._writing: list[_Writing] = []
        self._asked: deque[OpenChunk] = deque()
        self._paused: dict[str, float] = {}
        """Monotonic seconds until which no segment of a chunk is begun, by chunk; only of chunks with a failed one."""
        self._unlogged = _Written()
        self._logged_at = float("-inf")
        self._fingerprint = ""
        """Fingerprint of the run; it is known before the first row is finished."""

    def join(self, fingerprint: str) -> None:
        """Learn the fingerprint of the run that the worker has joined."""
        self._fingerprint = fingerprint

    @property
    def is_busy(self) -> bool:
        """Whether a segment is being written, or a chunk waits for its segment to be begun."""
        return bool(self._writing or self._asked)

    def is_writing_of(self, chunk: OpenChunk) -> bool:
        """Whether a segment of this chunk is being written."""
        return any(entry.chunk is chunk for entry in self._writing)

    def ask(self, chunks: Iterable[OpenChunk]) -> None:
        """Write segments with those finished rows of these chunks that no segment holds yet.

        Chunks of earlier calls come first.
        """
        waiting = {id(chunk) for chunk in self._asked}
        self._asked.extend(chunk for chunk in chunks if id(chunk) not in waiting)
        self._start()

    def tick(self) -> None:
        """Note the segments whose writing has ended, then begin the next ones.

        Raises:
            BatchinferError: the worker must end, because the scratch disk is full, storage refused permission, or a
                newer process of the same worker has started.
        """
        self._collect()
        self._start()

    def note_deaths(self, chunk: OpenChunk, lines: list[int], rows_in_flight: int) -> None:
        """Begin at once to write a segment that notes which rows (`lines`) an engine was processing when it died.

        `rows_in_flight` is the number of rows of all chunks that it was processing.
        """
        self._write(chunk, partial(checkpoints.encode_deaths, lines, rows_in_flight), _NO_ROWS)

    def _start(self) -> None:
        now = self._clock.monotonic()
        for chunk in list(self._asked):
            if len(self._writing) >= _MAX_WRITING or self._awaits_heartbeat():
                return
            if self._paused.get(chunk.name, now) > now or self.is_writing_of(chunk):
                continue
            self._asked.remove(chunk)
            if not self._may_write(chunk):
                continue
            if chunk.has_unsaved_rows:
                start = chunk.checkpointed_bytes
                end = chunk.spool.record_end(start + _SEGMENT_BYTES)
                self._write(chunk, partial(chunk.spool.read, start, end), end)

    def _awaits_heartbeat(self) -> bool:
        """Whether the lease has lapsed. Until the next heartbeat every segment would be refused, so none is begun."""
        try:
            self._run.lease.require()
        except LeaseLapsed:
            return True
        except Superseded:
            pass  # the segment is refused with this error, which ends the worker
        return False

    def _write(self, chunk: OpenChunk, read: Callable[[], bytes], end: int) -> None:
        run = self._run
        name_with = partial(
            layout.segment_key,
            chunk.name,
            run.lease.epoch,
            run.lease.writer,
            chunk.next_segment_number(),
        )

        def work() -> _Segment:
            run.lease.require()
            data = read()
            num_records = data.count(b"\n")
            key = name_with(0 if end == _NO_ROWS else num_records)
            checkpoints.write_segment(
                run.store,
                key,
                data,
                chunk_sha256=chunk.local.sha256,
                fingerprint=self._fingerprint,
            )
            return _Segment(key, num_records)

        rows_done = chunk.num_rows - chunk.num_left
        is_cut = end != _NO_ROWS and end < chunk.spool.size_bytes
        pending = self._background.submit(work, priority=Priority.CHECKPOINT)
        self._writing.append(_Writing(chunk, pending, end, rows_done, is_cut))

    def _collect(self) -> None:
        for entry in [entry for entry in self._writing if entry.pending.is_done()]:
            self._writing.remove(entry)
            try:
                key, num_records = entry.pending.result()
            except ScratchFull:
                raise
            except StorageError as error:
                then = "deaths not noted" if entry.is_of_deaths else "the next one holds its rows"
                logger.warning("%s: checkpoint not written (%s); %s", entry.chunk.name, error, then)
                self._paused[entry.chunk.name] = self._clock.monotonic() + _RETRY_SECONDS
                continue
            chunk = entry.chunk
            size = chunk.note_segment(key, entry.end)
            text = entry.describe(num_records)
            fields = {"chunk": chunk.name, "key": key, "bytes": size}
            if entry.is_of_deaths:
                logger.info("%s: %s", chunk.name, text, extra=event("deaths_noted", **fields))
            else:
                logger.debug("%s: %s", chunk.name, text, extra=event("checkpoint", **fields))
                self._unlogged.add(num_records, size)
            if entry.is_cut and chunk not in self._asked:
                self._asked.append(chunk)
        if self._clock.monotonic() - self._logged_at >= _LOG_SECONDS:
            self.log_written()

    def log_written(self) -> None:
        """Log the sums over the segments that were written since the last call. Does nothing if there are none."""
        written, self._unlogged = self._unlogged, _Written()
        if not written.segments:
            return
        self._logged_at = self._clock.monotonic()
        logger.info(
            "checkpoints: %d more rows are safe",
            written.rows,
            extra=event(
                "checkpoints", rows=written.rows, segments=written.segments, bytes=written.bytes
            ),
        )
