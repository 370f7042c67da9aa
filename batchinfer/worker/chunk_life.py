"""The life of one chunk on one thread, from its claim to its marker: `live`.

    claim -> marker? -> fetch -> adopt -> save every 30 s, while the engine answers its rows -> publish -> tidy
                                            (stop, error) -> save -> release

The worker's loop gives the finished rows to the chunk and wakes its thread. If a segment cannot be written,
its rows are still on the local disk, and the next segment of the chunk holds them. A chunk that cannot be opened or
published holds up no other chunk: it is tried again several times, then it is given up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from batchinfer.core import layout
from batchinfer.core.clock import Clock, iso_utc
from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    InputError,
    LeaseLapsed,
    ScratchFull,
    StorageError,
)
from batchinfer.core.events import tell
from batchinfer.core.records import Marker
from batchinfer.ledger import checkpoints
from batchinfer.ledger.claims import Held
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Published, build_output, publish, read_marker
from batchinfer.storage.scratch import remove_quietly
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.chunk_opening import Opened, open_chunk
from batchinfer.worker.worker_config import RunAccess, WorkerConfig

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 2
"""Attempts to open a chunk that turns out damaged or missing. The second may succeed if the download did the damage."""
_SEGMENT_BYTES = 8 << 20
"""Bytes of rows after which a segment ends; further rows go to the next segment. A segment is held in memory as a
whole, when it is written and when it is read, twice for a moment."""
MAX_WRITING = 4
"""Number of segments that are written at the same time."""
_RETRY_SECONDS = 0.5
"""Seconds after a failed segment until the next one of the chunk. A store that refuses at once, such as a full disk,
would otherwise be asked again and again without a pause."""
_LEAST_SECONDS = 0.001
_END_PAUSE_SECONDS = 2.0
"""Seconds between two attempts to save the rows of a chunk at the worker's end."""

Ending = Published | Marker | Held | BatchinferError | None
"""How a chunk's life ends: published; found done; held by another worker; given up with an error; or given back
unfinished, because the worker ends."""


@dataclass(slots=True)
class Hall:
    """What the lives of a worker share."""

    clock: Clock
    run: RunAccess
    config: WorkerConfig
    has_rows_left: Callable[[], bool]
    """Returns whether open chunks have unfinished rows. While the engine generates them, a store that cannot be reached
    has time to come back, so no chunk is given up because of storage."""
    wake_loop: Callable[[], None]
    """Lets the worker's loop look at once what its chunks have come to."""
    publishing: threading.Semaphore
    writing: threading.Semaphore
    is_closing: bool = False
    """Whether no chunk is opened any more."""
    is_ending: bool = False
    """Whether all chunks are saved and given back."""
    deadline: Callable[[], float] = lambda: float("-inf")
    """Returns the monotonic seconds until which rows are saved at the end."""

    def close(self) -> None:
        """Let no chunk be opened any more."""
        self.is_closing = True

    def end(self, deadline: Callable[[], float]) -> None:
        """Let all chunks be saved and given back, until the monotonic seconds that `deadline` returns."""
        self.deadline = deadline
        self.is_closing = self.is_ending = True


class Life:
    """One chunk at work: `live` is its life, and the worker's loop tells it what has happened."""

    def __init__(self, ref: ChunkRef, hall: Hall, event: threading.Event) -> None:
        self.ref = ref
        self.name = ref.name
        self.started = hall.clock.monotonic()
        self.chunk: OpenChunk | None = None
        """The chunk, once its thread has opened it."""
        self._notes: deque[tuple[int, list[int], int]] = deque()
        """Engine deaths that are not on storage yet: number of the segment, the lines that were in the engine, and the
        number of all rows there. A note that is written again has the same name, since notes add up."""
        self._has_to_save = False
        self._hall = hall
        self._event = event

    # -- called by the worker's loop

    @property
    def has_unsaved_rows(self) -> bool:
        """Whether the chunk is open and has finished rows in no segment on storage."""
        return self.chunk is not None and self.chunk.has_unsaved_rows

    def wake(self, *, has_to_save: bool = False) -> None:
        """Let the thread look what there is to do, and perhaps save the finished rows."""
        self._has_to_save |= has_to_save
        self._event.set()

    def note_death(self, lines: list[int], rows_in_flight: int) -> None:
        """Have it noted on storage that the engine died with these lines, among so many rows of all chunks."""
        assert self.chunk is not None
        self._notes.append((next(self.chunk.saved.numbers), lines, rows_in_flight))
        self._event.set()

    # -- the thread

    def live(self) -> Ending:
        """Do the chunk from its claim to its end. Runs on a thread of its own.

        Raises:
            BatchinferError: the worker must end: full scratch disk, refused permissions, a newer start of itself.
        """
        hall, clock = self._hall, self._hall.clock
        opened = self._open()
        if not isinstance(opened, OpenChunk):
            return opened
        self.chunk = chunk = opened
        hall.wake_loop()
        ending: Ending = None
        try:
            due = clock.monotonic() + hall.config.checkpoint_seconds
            while chunk.num_left and not hall.is_ending:
                self._wait(due - clock.monotonic())
                if not chunk.num_left and not hall.is_closing:
                    break  # it is published next; a worker that may end soon saves it before
                if self._has_to_save or self._notes or clock.monotonic() >= due:
                    seconds = hall.config.checkpoint_seconds if self.save() else _RETRY_SECONDS
                    due = clock.monotonic() + seconds
            if not hall.is_ending:
                ending = self._publish(chunk)
            return ending
        finally:
            if not isinstance(ending, Published):
                self._give_back(chunk)

    def _open(self) -> Opened | BatchinferError | None:
        hall, attempts = self._hall, 0
        while not (attempts and hall.is_closing):
            attempts += 1
            try:
                return open_chunk(self.ref, hall.run, now=hall.clock.now())
            except ScratchFull:
                raise
            except (StorageError, InputError) as error:
                is_last = attempts >= _READ_ATTEMPTS
                if isinstance(error, StorageError):
                    is_last = (
                        attempts >= hall.config.limits.storage_attempts and not hall.has_rows_left()
                    )
                if is_last or hall.is_closing:
                    return self._give_up(error, "cannot be opened")
                self._pause(error, "cannot be opened", attempts)
        return None

    def _publish(self, chunk: OpenChunk) -> Ending:
        """Publish a complete chunk as soon as the lease is held. A failure is tried again; rows are saved before."""
        attempts, hall = 0, self._hall
        while not hall.is_ending:
            if not hall.run.lease.is_held():
                self._wait(_RETRY_SECONDS)  # others may have taken the chunk; a heartbeat may come
                continue
            if not hall.publishing.acquire(blocking=False):
                self.save()
                self._wait(_RETRY_SECONDS)  # all others upload, which may take long
                continue
            try:
                return _publish_once(chunk, hall)
            except ScratchFull:
                raise
            except StorageError as error:
                # A failure caused by this worker's late heartbeat is not counted: the next attempt waits for one.
                attempts += not isinstance(error, LeaseLapsed)
                most = hall.config.limits.storage_attempts + chunk.has_unsaved_rows
                if attempts >= most and not hall.has_rows_left():
                    return self._give_up(error, "not published")
                failure = error
            finally:
                hall.publishing.release()
            self.save()
            self._pause(failure, "not published", attempts)
        return None

    def save(self) -> bool:
        """Write segments with notes of engine deaths, and with the finished rows that no segment holds yet.

        Returns whether all rows that were finished at the call are on storage. A storage failure is logged.
        """
        chunk, hall = self.chunk, self._hall
        assert chunk is not None
        self._has_to_save = False
        until = chunk.spool.size_bytes
        try:
            while self._notes:
                number, lines, rows_in_flight = self._notes[0]
                with contextlib.suppress(AlreadyExists):  # written before, as it turns out
                    _write(chunk, hall, checkpoints.encode_deaths(lines, rows_in_flight), number, 0)
                self._notes.popleft()
            while (start := chunk.saved.num_bytes) < until:
                end = chunk.spool.record_end(start + _SEGMENT_BYTES)
                with hall.writing:
                    data = chunk.spool.read(start, end)
                    _write(chunk, hall, data, next(chunk.saved.numbers), data.count(b"\n"))
                chunk.saved.reach(end)
        except ScratchFull:
            raise
        except LeaseLapsed:
            return False  # until the next heartbeat every segment would be refused
        except StorageError as error:
            logger.warning(
                "%s: checkpoint not written (%s); the next one holds its rows", self.name, error
            )
            return False
        return True

    def _give_back(self, chunk: OpenChunk) -> None:
        """Save what is not saved, and give the claim back. The worker's loop removes the local files."""
        hall, run = self._hall, self._hall.run
        try:
            while (chunk.has_unsaved_rows or self._notes) and not self.save():
                if not hall.is_ending or hall.clock.monotonic() >= hall.deadline():
                    break
                hall.clock.sleep(_END_PAUSE_SECONDS)
        except BatchinferError as error:
            logger.warning("%s: not everything could be saved (%s)", self.name, error)
        try:
            if run.claims.release(self.name, chunk.claim_etag):
                return
            # Whoever has the claim now may have published the chunk, and removed only the segments that it saw.
            if read_marker(run.store, self.name, self.ref.generation)[0] is not None:
                run.store.delete(chunk.saved.keys)
        except BatchinferError as error:
            logger.warning("%s: claim not released (%s); it lapses by itself", self.name, error)

    def _wait(self, seconds: float) -> None:
        # What is left of an interval may be less than a clock can show.
        self._event.wait(max(_LEAST_SECONDS, seconds))
        self._event.clear()

    def _pause(self, error: BatchinferError, what: str, attempts: int) -> None:
        """Wait after a failed attempt, but not longer than until the worker ends.

        Rows that are to be saved meanwhile are saved.
        """
        hall = self._hall
        seconds = hall.config.limits.storage_delay_seconds(attempts)
        text = "{chunk}: {} ({}); trying again in {:.0f} s"
        level = logging.WARNING
        tell(logger, "chunk_retry", text, what, error, seconds, level=level, chunk=self.name)
        until = hall.clock.monotonic() + seconds
        while not (hall.is_ending or (hall.is_closing and self.chunk is None)):
            left = until - hall.clock.monotonic()
            if left <= 0:
                return
            self._wait(left)
            if self._has_to_save and self.chunk is not None:
                self.save()

    def _give_up(self, error: BatchinferError, what: str) -> BatchinferError:
        text = "{chunk}: {} ({}); given up, going on with the other chunks"
        level = logging.ERROR
        tell(logger, "chunk_failed", text, what, error, level=level, chunk=self.name)
        return error


def _publish_once(chunk: OpenChunk, hall: Hall) -> Published:
    run = hall.run
    marker = Marker(
        output="",
        output_bytes=0,
        output_sha256="",
        nonce="",
        chunk=chunk.ref.key,
        chunk_sha256=chunk.local.sha256,
        generation=chunk.ref.generation,
        fingerprint=run.fingerprint,
        worker=run.lease.worker_id,
        start=iso_utc(chunk.started),
        # The machine's clock may have been set back since the chunk was opened.
        end=iso_utc(max(chunk.started, hall.clock.now())),
    )
    leftovers = [*chunk.saved.keys, layout.claim_key(chunk.name)]
    path = run.scratch.new_path(chunk.name)
    try:
        built = build_output(path, chunk.spool.payloads())
        marker = marker.plus(chunk.counts)
        return publish(run.store, run.lease, built, marker, chunk=chunk.name, leftovers=leftovers)
    finally:
        remove_quietly(path)


def _write(chunk: OpenChunk, hall: Hall, data: bytes, number: int, num_rows: int) -> None:
    run, lease = hall.run, hall.run.lease
    lease.require()
    key = layout.segment_key(chunk.name, lease.writer, number, num_rows)
    chunk.saved.keys.append(key)  # it may be there even if the reply is lost
    checkpoints.write_segment(
        run.store, key, data, chunk_sha256=chunk.local.sha256, fingerprint=run.fingerprint
    )
    text, level = "{chunk}: checkpoint {key}", logging.DEBUG
    tell(logger, "checkpoint", text, level=level, chunk=chunk.name, key=key, bytes=len(data))
