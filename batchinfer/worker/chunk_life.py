"""The life of one chunk on one thread, from its claim to its marker: `live`.

    claim -> marker? -> fetch -> adopt -> save every 30 s, while the engine answers its rows -> publish -> tidy
                                            (stop, error) -> save -> release

The worker's loop gives the finished rows to the chunk and wakes its thread (`Life`). If a segment cannot be written,
its rows are still on the local disk, and the next segment of the chunk holds them. A chunk that cannot be opened or
published holds up no other chunk: it is tried again several times, then it is given up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from batchinfer.core import layout, units
from batchinfer.core.clock import iso_utc
from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    InputError,
    LeaseLapsed,
    ScratchFull,
    StorageError,
)
from batchinfer.core.events import event
from batchinfer.core.records import Marker
from batchinfer.ledger import checkpoints
from batchinfer.ledger.claims import Held
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Published, build_output
from batchinfer.storage.scratch import remove_quietly
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.chunk_opening import Opened, open_chunk
from batchinfer.worker.worker_config import Environment, RunAccess, WorkerConfig

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 2
"""Attempts to open a chunk that turns out damaged or missing. The second may succeed if the download did the damage."""
_SEGMENT_BYTES = 8 << 20
"""Bytes of rows after which a segment ends; further rows go to the next segment. A segment is held in memory as a
whole, when it is written and when it is read, twice for a moment."""
_MAX_WRITING = 4
"""Number of segments that are written at the same time."""
_RETRY_SECONDS = 0.5
"""Seconds after a failed segment until the next one of the chunk. A store that refuses at once, such as a full disk,
would otherwise be asked again and again without a pause."""
_LEAST_SECONDS = 0.001
_END_PAUSE_SECONDS = 2.0
"""Seconds between two attempts to save the rows of a chunk at the worker's end."""
_LOG_SECONDS = 60.0
"""Seconds between two log lines about checkpoints."""

Ending = Published | Marker | Held | BatchinferError | None
"""How a chunk's life ends: published; found done; held by another worker; given up with an error; or given back
unfinished, because the worker ends."""


class Life:
    """A chunk at work: what its thread and the worker's loop tell each other."""

    def __init__(self, ref: ChunkRef, event: threading.Event, now: float) -> None:
        self.ref = ref
        self.name = ref.name
        self.started = now
        """Monotonic seconds."""
        self.chunk: OpenChunk | None = None
        """The chunk, once its thread has opened it."""
        self.notes: deque[tuple[int, list[int], int]] = deque()
        """Engine deaths that are not on storage yet: number of the segment, the lines that were in the engine, and the
        number of all rows there. A note that is written again has the same name, since notes add up."""
        self.is_asked = False
        """Whether the finished rows are to be saved now."""
        self.saved_at = now
        """Monotonic seconds as of which all finished rows are on storage."""
        self._event = event

    @property
    def has_unsaved_rows(self) -> bool:
        """Whether the chunk is open and has finished rows in no segment on storage."""
        return self.chunk is not None and self.chunk.has_unsaved_rows

    def wake(self) -> None:
        """Let the thread look what there is to do."""
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Wait for `wake`, or so long. Called by the thread."""
        # What is left of an interval may be less than a clock can show.
        self._event.wait(max(_LEAST_SECONDS, seconds))
        self._event.clear()

    def note_death(self, lines: list[int], rows_in_flight: int) -> None:
        """Have it noted on storage that the engine died with these lines, among so many rows of all chunks."""
        assert self.chunk is not None
        self.notes.append((self.chunk.next_segment_number(), lines, rows_in_flight))
        self.wake()

    def ask(self) -> None:
        """Have the finished rows saved."""
        self.is_asked = True
        self.wake()

    def begin(self, chunk: OpenChunk) -> None:
        """Note that the chunk is open. Called by the thread."""
        self.chunk = chunk

    def answer(self) -> None:
        """Note that the rows which were finished at `ask` are being saved. Called by the thread."""
        self.is_asked = False

    def note_saved(self, moment: float) -> None:
        """Note that all rows that were finished at this moment, in monotonic seconds, are on storage."""
        self.saved_at = moment


class Hall:
    """What the lives of a worker share.

    Args:
        environment: The clock and the background.
        run: Access to the run, which the worker has joined.
        config: The worker's configuration.
        has_rows_left: Returns whether open chunks have unfinished rows. While the engine generates them, a store that
            cannot be reached has time to come back, so no chunk is given up because of storage.
    """

    def __init__(
        self,
        environment: Environment,
        run: RunAccess,
        config: WorkerConfig,
        has_rows_left: Callable[[], bool],
    ) -> None:
        self.run = run
        self.clock = environment.clock
        self.limits = config.limits
        self.checkpoint_seconds = config.checkpoint_seconds
        self.has_rows_left = has_rows_left
        self.publishing = environment.background.gate(config.limits.max_publishing)
        self.writing = environment.background.gate(_MAX_WRITING)
        self.is_closing = False
        """Whether no chunk is opened any more."""
        self.is_ending = False
        """Whether all chunks are saved and given back."""
        self.deadline: Callable[[], float] = lambda: float("-inf")
        """Returns the monotonic seconds until which rows are saved at the end."""
        self._unlogged = 0
        self._logged_at = float("-inf")

    def close(self) -> None:
        """Let no chunk be opened any more."""
        self.is_closing = True

    def end(self, deadline: Callable[[], float]) -> None:
        """Let all chunks be saved and given back, until the monotonic seconds that `deadline` returns."""
        self.deadline = deadline
        self.is_closing = self.is_ending = True

    def note_saved(self, num_rows: int = 0) -> None:
        """Log how many rows are safe, at most once a minute. Without rows: log what was not logged yet."""
        self._unlogged += num_rows
        now = self.clock.monotonic()
        if self._unlogged and (not num_rows or now - self._logged_at >= _LOG_SECONDS):
            rows, self._unlogged, self._logged_at = self._unlogged, 0, now
            logger.info(
                "checkpoints: %d more rows are safe", rows, extra=event("checkpoints", rows=rows)
            )


def live(life: Life, hall: Hall) -> Ending:
    """Do one chunk from its claim to its end. Runs on a thread of its own.

    Raises:
        BatchinferError: the worker must end: full scratch disk, refused permissions, a newer start of itself.
    """
    chunk = _open(life, hall)
    if not isinstance(chunk, OpenChunk):
        return chunk
    life.begin(chunk)
    ending: Ending = None
    try:
        due = hall.clock.monotonic() + hall.checkpoint_seconds
        while chunk.num_left and not hall.is_ending:
            life.wait(due - hall.clock.monotonic())
            if not chunk.num_left and not hall.is_closing:
                break  # it is published next; a worker that may end soon saves it before
            if life.is_asked or life.notes or hall.clock.monotonic() >= due:
                is_saved = save(life, hall)
                seconds = hall.checkpoint_seconds if is_saved else _RETRY_SECONDS
                due = hall.clock.monotonic() + seconds
        if not hall.is_ending:
            ending = _publish(life, chunk, hall)
        return ending
    finally:
        if not isinstance(ending, Published):
            _give_back(life, chunk, hall)


def _open(life: Life, hall: Hall) -> Opened | BatchinferError | None:
    for attempts in itertools.count(1):
        if attempts > 1 and hall.is_closing:
            return None
        try:
            return open_chunk(life.ref, hall.run, now=hall.clock.now())
        except ScratchFull:
            raise
        except (StorageError, InputError) as error:
            is_last = attempts >= _READ_ATTEMPTS
            if isinstance(error, StorageError):
                is_last = attempts >= hall.limits.storage_attempts and not hall.has_rows_left()
            if is_last or hall.is_closing:
                return _give_up(life, error, "cannot be opened")
            _pause(life, hall, error, "cannot be opened", attempts)
    raise AssertionError


def _publish(life: Life, chunk: OpenChunk, hall: Hall) -> Ending:
    """Publish a complete chunk as soon as the lease is held. A failure is tried again, with its rows saved before."""
    attempts = 0
    while not hall.is_ending:
        if not hall.run.lease.is_held():  # others may have taken the chunk; a heartbeat may come
            life.wait(_RETRY_SECONDS)
            continue
        if not hall.publishing.acquire(blocking=False):  # all others upload, which may take long
            save(life, hall)
            hall.publishing.acquire()
        try:
            return _publish_once(chunk, hall)
        except ScratchFull:
            raise
        except StorageError as error:
            # A failure caused by this worker's late heartbeat is not counted: the next attempt waits for a heartbeat.
            attempts += not isinstance(error, LeaseLapsed)
            most = hall.limits.storage_attempts + chunk.has_unsaved_rows
            if attempts >= most and not hall.has_rows_left():
                return _give_up(life, error, "not published")
            failure = error
        finally:
            hall.publishing.release()
        save(life, hall)
        _pause(life, hall, failure, "not published", attempts)
    return None


def _publish_once(chunk: OpenChunk, hall: Hall) -> Published:
    run = hall.run
    marker = chunk.marker(
        fingerprint=run.fingerprint,
        worker=run.lease.worker_id,
        start=iso_utc(chunk.started),
        # The machine's clock may have been set back since the chunk was opened.
        end=iso_utc(max(chunk.started, hall.clock.now())),
    )
    leftovers = [*chunk.segment_keys, layout.claim_key(chunk.name)]
    path = run.scratch.new_path(chunk.name)
    try:
        built = build_output(path, chunk.spool.payloads())
        return run.publisher.publish(built, marker, chunk=chunk.name, leftovers=leftovers)
    finally:
        remove_quietly(path)


def save(life: Life, hall: Hall) -> bool:
    """Write segments with notes of engine deaths, and with the finished rows that no segment holds yet.

    Returns whether all rows that were finished at the call are on storage. A storage failure is logged.
    """
    chunk = life.chunk
    assert chunk is not None
    life.answer()
    began = hall.clock.monotonic()
    until = chunk.spool.size_bytes
    try:
        while life.notes:
            number, lines, rows_in_flight = life.notes[0]
            with contextlib.suppress(AlreadyExists):  # written before, as it turns out
                _write(chunk, hall, checkpoints.encode_deaths(lines, rows_in_flight), number, 0)
            life.notes.popleft()
        while chunk.checkpointed_bytes < until:
            start = chunk.checkpointed_bytes
            end = chunk.spool.record_end(start + _SEGMENT_BYTES)
            with hall.writing:
                data = chunk.spool.read(start, end)
                _write(chunk, hall, data, chunk.next_segment_number(), data.count(b"\n"))
            chunk.note_checkpointed(end)
    except ScratchFull:
        raise
    except LeaseLapsed:
        return False  # until the next heartbeat every segment would be refused
    except StorageError as error:
        logger.warning(
            "%s: checkpoint not written (%s); the next one holds its rows", chunk.name, error
        )
        return False
    life.note_saved(began)
    return True


def _write(chunk: OpenChunk, hall: Hall, data: bytes, number: int, num_rows: int) -> None:
    run, lease = hall.run, hall.run.lease
    lease.require()
    key = layout.segment_key(chunk.name, lease.writer, number, num_rows)
    chunk.segment_keys.append(key)  # it may be there even if the reply is lost
    checkpoints.write_segment(
        run.store, key, data, chunk_sha256=chunk.local.sha256, fingerprint=run.fingerprint
    )
    logger.debug(
        "%s: checkpoint of %s",
        *(chunk.name, units.many(num_rows, "row")),
        extra=event("checkpoint", chunk=chunk.name, key=key, bytes=len(data)),
    )
    if num_rows:
        hall.note_saved(num_rows)


def _give_back(life: Life, chunk: OpenChunk, hall: Hall) -> None:
    """Save what is not saved, and give the claim back. The worker's loop removes the local files."""
    run = hall.run
    try:
        while (chunk.has_unsaved_rows or life.notes) and not save(life, hall):
            if not hall.is_ending or hall.clock.monotonic() >= hall.deadline():
                break
            hall.clock.sleep(_END_PAUSE_SECONDS)
    except BatchinferError as error:
        logger.warning("%s: not everything could be saved (%s)", chunk.name, error)
    try:
        if run.claims.release(chunk.name, chunk.claim_etag):
            return
        # Whoever has the claim now may have published the chunk, and removed only the segments that were there then.
        if run.publisher.current_marker(chunk.name, chunk.generation) is not None:
            run.store.delete(chunk.segment_keys)
    except BatchinferError as error:
        logger.warning("%s: claim not released (%s); it lapses by itself", chunk.name, error)


def _pause(life: Life, hall: Hall, error: BatchinferError, what: str, attempts: int) -> None:
    """Wait after a failed attempt, but not longer than until the worker ends.

    Rows that are to be saved meanwhile are saved.
    """
    seconds = hall.limits.storage_delay_seconds(attempts)
    logger.warning(
        "%s: %s (%s); trying again in %.0f s",
        *(life.name, what, error, seconds),
        extra=event("chunk_retry", chunk=life.name),
    )
    until = hall.clock.monotonic() + seconds
    while not (hall.is_ending or (hall.is_closing and life.chunk is None)):
        left = until - hall.clock.monotonic()
        if left <= 0:
            return
        life.wait(left)
        if life.is_asked and life.chunk is not None:
            save(life, hall)


def _give_up(life: Life, error: BatchinferError, what: str) -> BatchinferError:
    logger.error(
        "%s: %s (%s); given up, going on with the other chunks",
        *(life.name, what, error),
        extra=event("chunk_failed", chunk=life.name),
    )
    return error
