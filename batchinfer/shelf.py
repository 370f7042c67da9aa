"""The chunks that a worker has open: opening, checkpointing and publishing them, all in the background.

    plan -> opening -> open -> (all rows done) -> publishing -> closed

Belongs to the main thread; nothing here blocks. A chunk that cannot be opened or published stops neither the others
nor generation: it is tried again, then kept in `failures` for the end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from batchinfer import checkpoints, layout
from batchinfer.background import Background, Pending
from batchinfer.checkpoints import FinishedRow
from batchinfer.chunks import AlreadyDone, HeldByOther, OpenChunk, Opened, Opener
from batchinfer.claims import Claims, Lease
from batchinfer.clock import Clock, iso_utc
from batchinfer.errors import (
    BatchinferError,
    InputError,
    LeaseLapsed,
    ScratchFull,
    StorageError,
)
from batchinfer.events import event
from batchinfer.plan import Candidate, Plan
from batchinfer.publishing import Built, Published, Publisher, build_output
from batchinfer.records import Failure, Record
from batchinfer.scratch import Scratch
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_RELEASE_POLL_SECONDS = 0.1
_MAX_WRITING = 4
"""Checkpoint segments written at once: a bucket that hangs must leave hands for everything else."""
_MOST_OPEN_CHUNKS = 1000


class Limits(Record, frozen=True, kw_only=True):
    """What bounds memory and disk beside the engine's own `max_in_flight`."""

    max_open_chunks: int = 64
    max_openings: int = 4
    max_open_bytes: int = 16 << 30
    """Of chunks in the scratch folder."""
    prefix_window: int = 0
    """Rows that are put in order of their prompts' beginnings; 0: none."""
    max_build_rows: int = 512
    max_build_bytes: int = 8 << 20
    max_waiting_tokens: int = 4 << 20
    """Of prompts that are built and not yet in the engine; a token is some 36 bytes here."""
    row_attempts: int = 3
    storage_attempts: int = 4
    storage_retry_seconds: float = 5.0


class Observer(Protocol):
    """Told of everything that status and logs show. Called on the main thread; must be quick."""

    def chunk_opened(self, chunk: OpenChunk) -> None:
        """A chunk is open; its resumed rows are in chunk.counts."""
        ...

    def chunk_closed(self, chunk: OpenChunk, outcome: str) -> None:
        """A chunk ended here: done, lost (somebody else published it) or released."""
        ...

    def chunk_skipped(self, name: str) -> None:
        """A chunk turned out to be done already."""
        ...

    def rows_finished(self, rows: list[FinishedRow]) -> None:
        """Rows finished here, none of them resumed."""
        ...

    def row_failed(self, chunk: str, line: int, failure: Failure) -> None:
        """A row becomes an error row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the worker's parts work with, made once. `claims` is None where the store cannot keep them."""

    run: Store
    background: Background
    clock: Clock
    lease: Lease
    claims: Claims | None
    opener: Opener
    publisher: Publisher
    scratch: Scratch
    observer: Observer


@dataclass(slots=True)
class _Opening:
    candidate: Candidate
    pending: Pending[Opened]
    started: float
    attempts: int


@dataclass(slots=True)
class _Waiting:
    """A chunk whose opening or publishing is tried again at `due`."""

    due: float
    attempts: int
    candidate: Candidate | None = None
    chunk: OpenChunk | None = None


@dataclass(slots=True)
class _Publishing:
    chunk: OpenChunk
    pending: Pending[Published]
    attempts: int


@dataclass(slots=True)
class _Checkpointing:
    chunk: OpenChunk
    pending: Pending[None]
    key: str
    end: int


class Shelf:
    """See the module."""

    def __init__(self, services: Services, plan: Plan, limits: Limits) -> None:
        self._services = services
        self._plan = plan
        self._limits = limits
        self._openings: list[_Opening] = []
        self._waiting: list[_Waiting] = []
        self._publishing: list[_Publishing] = []
        self._checkpointing: list[_Checkpointing] = []
        self._to_checkpoint: list[OpenChunk] = []
        self._retired: list[OpenChunk] = []
        self._rows_per_chunk = 1
        self._opening_seconds = 0.5
        self.open: dict[str, OpenChunk] = {}
        self.failures: dict[str, BatchinferError] = {}
        self.is_closing = False
        self.fingerprint = ""
        """The run's; nothing is published before it is known."""

    # -- state

    @property
    def num_unread(self) -> int:
        """Rows of open chunks that nobody has read yet."""
        return sum(chunk.num_unread for chunk in self.open.values())

    @property
    def may_grow(self) -> bool:
        """Whether rows may still come from chunks that are not open."""
        if self.is_closing:
            return False
        has_retry = any(waiting.candidate is not None for waiting in self._waiting)
        return bool(self._openings) or has_retry or not self._plan.is_finished

    @property
    def is_drained(self) -> bool:
        """Nothing is open, and nothing will be."""
        return not self.may_grow and not self.open and not self._publishing

    @property
    def is_writing(self) -> bool:
        """Whether checkpoints or outputs are on their way."""
        return bool(self._checkpointing or self._to_checkpoint or self._publishing)

    # -- the round

    def tick(
        self,
        *,
        rows_ahead: int,
        rows_wanted: int,
        rows_per_second: float,
        own_rate: float,
        is_building: bool,
    ) -> list[str]:
        """Collect what has finished in the background and start what is due. Return chunks that others published.

        `rows_per_second` is what the engine eats now, `own_rate` what this worker did on the average: a slower one is
        helped.

        Raises:
            BatchinferError: something that ends the worker: a full scratch folder, refused permissions, a newer epoch.
        """
        self._collect_checkpoints()
        self._start_checkpoints()
        self._collect_publishing()
        self._collect_openings()
        lost = [] if self.is_closing else self._plan.tick(list(self.open), own_rate)
        publishing = {entry.chunk.name for entry in self._publishing}
        for name in lost:
            # What is being published finds the other's marker by itself, and needs its files until then.
            if name in self.open and name not in publishing:
                self._close(self.open[name], "lost")
        self._retry_waiting()
        # While a chunk opens, the engine eats this many rows; twice that, so that no bucket's mood starves it.
        cushion = int(2 * rows_per_second * self._opening_seconds)
        self._start_openings(rows_ahead, max(rows_wanted, rows_wanted + cushion))
        if not is_building:
            self._clean_retired()
        return lost

    def finish(self, name: str, rows: list[FinishedRow]) -> None:
        """Keep finished rows of an open chunk; publish it with its last one. Rows of closed chunks are dropped."""
        chunk = self.open.get(name)
        if chunk is None:
            return
        fresh = chunk.finish(rows)
        if fresh:
            self._services.observer.rows_finished(fresh)
        if not chunk.num_left:
            self._publish_when_possible(chunk, attempts=0)

    def checkpoint(self) -> None:
        """Start writing a segment for every open chunk that has rows no segment holds yet."""
        self._to_checkpoint = list(self.open.values())
        self._start_checkpoints()

    def _start_checkpoints(self) -> None:
        busy = {id(entry.chunk) for entry in self._checkpointing}
        busy |= {id(entry.chunk) for entry in self._publishing}
        while self._to_checkpoint and len(self._checkpointing) < _MAX_WRITING:
            chunk = self._to_checkpoint.pop()
            # A complete chunk is about to be published, unless the worker ends before it can be.
            if (
                id(chunk) not in busy
                and self.open.get(chunk.name) is chunk
                and (chunk.num_left or self.is_closing)
                and chunk.spool.size_bytes > chunk.checkpointed_bytes
            ):
                start, end = chunk.checkpointed_bytes, chunk.spool.size_bytes
                self._write_segment(chunk, partial(chunk.spool.read, start, end), end)

    def note_deaths(self, rows: dict[str, list[int]]) -> None:
        """Write down which rows were in flight when an engine died."""
        for name, lines in rows.items():
            chunk = self.open.get(name)
            if chunk is not None:
                data = checkpoints.encode_deaths(lines)
                self._write_segment(chunk, partial(bytes, data), -1)

    def release_all(self, deadline: float) -> None:
        """Give the claims of unfinished chunks back, until `deadline` at the latest; what is left lapses by itself."""
        pending = [self._give_back(chunk) for chunk in list(self.open.values())]
        for chunk in list(self.open.values()):
            self._close(chunk, "released")
        clock, background = self._services.clock, self._services.background
        while not all(job.is_done() for job in pending) and clock.monotonic() < deadline:
            background.wait(_RELEASE_POLL_SECONDS)
        self._clean_retired()

    def _give_back(self, chunk: OpenChunk) -> Pending[None]:
        """Release a chunk's claim in the background."""
        claims, name, etag = self._services.claims, chunk.name, chunk.claim_etag

        def work() -> None:
            if claims is None or not etag:
                return
            try:
                claims.release(name, etag)
            except BatchinferError as error:
                logger.warning("%s: claim not released (%s); it lapses by itself", name, error)

        return self._services.background.submit(work)

    # -- opening

    def _start_openings(self, rows_ahead: int, rows_wanted: int) -> None:
        if self.is_closing:
            return
        rows_ahead += sum(self._expected_rows(entry.candidate) for entry in self._openings)
        # A chunk stays open for its slowest row: small ones need many to keep the engine full.
        many = min(_MOST_OPEN_CHUNKS, 8 * rows_wanted // self._rows_per_chunk)
        most = max(self._limits.max_open_chunks, many)
        while (
            rows_ahead < rows_wanted
            and len(self._openings) < self._limits.max_openings
            and len(self.open) + len(self._openings) < most
            and self._has_disk_left()
        ):
            candidate = self._plan.next()
            if candidate is None:
                return
            self._start_opening(candidate, attempts=0)
            rows_ahead += self._expected_rows(candidate)

    def _start_opening(self, candidate: Candidate, *, attempts: int) -> None:
        self._plan.started(candidate.ref.name)
        opener, now = self._services.opener, self._services.clock.now()
        work: partial[Opened]
        if candidate.is_backup:
            logger.info(
                "%s: its worker is slow; working on it too",
                candidate.ref.name,
                extra=event("chunk_helped", chunk=candidate.ref.name),
            )
            work = partial(opener.open_backup, candidate.ref, now=now)
        else:
            work = partial(
                opener.open,
                candidate.ref,
                now=now,
                take_over=candidate.take_over,
            )
        pending = self._services.background.submit(work)
        self._openings.append(
            _Opening(candidate, pending, self._services.clock.monotonic(), attempts)
        )

    def _collect_openings(self) -> None:
        for entry in [entry for entry in self._openings if entry.pending.is_done()]:
            self._openings.remove(entry)
            name = entry.candidate.ref.name
            took = self._services.clock.monotonic() - entry.started
            self._opening_seconds += 0.3 * (took - self._opening_seconds)
            try:
                opened = entry.pending.result()
            except ScratchFull:
                raise
            except (StorageError, InputError) as error:
                self._open_again_later(entry, error)
                continue
            if isinstance(opened, AlreadyDone):
                self._plan.finished(name)
                self._services.observer.chunk_skipped(name)
            elif isinstance(opened, HeldByOther):
                owner = opened.held.claim.worker
                logger.info(
                    "%s: worker %s has it",
                    name,
                    owner,
                    extra=event("chunk_held", chunk=name, worker=owner),
                )
                self._plan.held_by_other(name)
            else:
                if entry.candidate.take_over is not None:
                    owner = entry.candidate.take_over.claim.worker
                    logger.info(
                        "%s: taken over%s",
                        name,
                        f" from worker {owner}" if owner else "",
                        extra=event("chunk_taken_over", chunk=name, worker=owner),
                    )
                self._add(opened)

    def _open_again_later(self, entry: _Opening, error: BatchinferError) -> None:
        attempts = entry.attempts + 1
        name = entry.candidate.ref.name
        if (
            isinstance(error, StorageError)
            and attempts < self._limits.storage_attempts
            and not self.is_closing
        ):
            delay = self._limits.storage_retry_seconds * 2 ** (attempts - 1)
            logger.warning(
                "%s: cannot be opened (%s); trying again in %.0f s",
                name,
                error,
                delay,
                extra=event("chunk_retry", chunk=name),
            )
            due = self._services.clock.monotonic() + delay
            self._waiting.append(_Waiting(due, attempts, candidate=entry.candidate))
            return
        logger.error(
            "%s: given up (%s); going on with the other chunks",
            name,
            error,
            extra=event("chunk_failed", chunk=name),
        )
        self.failures[name] = error
        self._plan.gave_up(name)

    def _add(self, chunk: OpenChunk) -> None:
        if self.is_closing:
            self.open[chunk.name] = chunk  # release_all gives it back
            return
        self._rows_per_chunk = max(1, chunk.num_rows)
        self.open[chunk.name] = chunk
        self._services.observer.chunk_opened(chunk)
        if not chunk.num_left:
            self._publish_when_possible(chunk, attempts=0)

    def _expected_rows(self, candidate: Candidate) -> int:
        return candidate.ref.rows or self._rows_per_chunk

    def _has_disk_left(self) -> bool:
        held = sum(chunk.ref.bytes or 0 for chunk in self.open.values())
        return not self.open or held < self._limits.max_open_bytes

    # -- checkpoints

    def _write_segment(self, chunk: OpenChunk, read: Callable[[], bytes], end: int) -> None:
        services = self._services
        chunk.num_segments_written += 1
        key = layout.segment_key(
            chunk.name, services.lease.epoch, services.lease.worker_id, chunk.num_segments_written
        )

        def work() -> None:
            services.lease.require()
            checkpoints.write_segment(services.run, key, read())

        self._checkpointing.append(
            _Checkpointing(chunk, services.background.submit(work), key, end)
        )

    def _collect_checkpoints(self) -> None:
        for entry in [entry for entry in self._checkpointing if entry.pending.is_done()]:
            self._checkpointing.remove(entry)
            try:
                entry.pending.result()
            except ScratchFull:
                raise
            except StorageError as error:
                logger.warning(
                    "%s: checkpoint not written (%s); the next one holds its rows", entry.key, error
                )
                continue
            size = max(0, entry.end - entry.chunk.checkpointed_bytes)
            logger.info(
                "%s: checkpoint, %d of %d rows done",
                entry.chunk.name,
                entry.chunk.num_rows - entry.chunk.num_left,
                entry.chunk.num_rows,
                extra=event("checkpoint", chunk=entry.chunk.name, key=entry.key, bytes=size),
            )
            entry.chunk.segment_keys.append(entry.key)
            entry.chunk.checkpointed_bytes = max(entry.chunk.checkpointed_bytes, entry.end)

    # -- publishing

    def _publish_when_possible(
        self, chunk: OpenChunk, *, attempts: int, delay: float = 0.0
    ) -> None:
        due = self._services.clock.monotonic() + delay
        self._waiting.append(_Waiting(due, attempts, chunk=chunk))
        self._retry_waiting()

    def _retry_waiting(self) -> None:
        now = self._services.clock.monotonic()
        writing = {id(entry.chunk) for entry in self._checkpointing}
        for entry in list(self._waiting):
            if entry.due > now:
                continue
            if entry.candidate is not None:
                if not self.is_closing:
                    self._waiting.remove(entry)
                    self._start_opening(entry.candidate, attempts=entry.attempts)
            elif entry.chunk is not None and id(entry.chunk) not in writing and self._may_publish():
                self._waiting.remove(entry)
                self._start_publishing(entry.chunk, entry.attempts)

    def _may_publish(self) -> bool:
        """Without a fresh heartbeat others may have taken our chunks: wait until it is renewed, or refused."""
        return bool(self.fingerprint) and self._services.lease.is_held()

    def _start_publishing(self, chunk: OpenChunk, attempts: int) -> None:
        services = self._services
        marker = chunk.marker(
            fingerprint=self.fingerprint,
            worker=services.lease.worker_id,
            epoch=services.lease.epoch,
            start=iso_utc(chunk.started),
            end=iso_utc(services.clock.now()),
        )
        leftovers = list(chunk.segment_keys)
        if services.claims is not None:
            leftovers.append(layout.claim_key(chunk.name))
        path = services.scratch.new_path(layout.output_file(chunk.name))

        def work() -> Published:
            built: Built = build_output(path, chunk.spool.payloads())
            try:
                return services.publisher.publish(
                    built, marker, chunk=chunk.name, leftovers=leftovers
                )
            finally:
                path.unlink(missing_ok=True)

        self._publishing.append(_Publishing(chunk, services.background.submit(work), attempts))

    def _collect_publishing(self) -> None:
        for entry in [entry for entry in self._publishing if entry.pending.is_done()]:
            self._publishing.remove(entry)
            chunk = entry.chunk
            try:
                published = entry.pending.result()
            except ScratchFull:
                raise
            except StorageError as error:
                # A late heartbeat is no failure of this chunk's: it waits for the next one (_may_publish).
                attempts = entry.attempts + (not isinstance(error, LeaseLapsed))
                if attempts < self._limits.storage_attempts:
                    delay = self._limits.storage_retry_seconds * 2 ** max(0, attempts - 1)
                    logger.warning(
                        "%s: not published (%s); trying again in %.0f s",
                        chunk.name,
                        error,
                        delay,
                        extra=event("chunk_retry", chunk=chunk.name),
                    )
                    self._publish_when_possible(chunk, attempts=attempts, delay=delay)
                else:
                    logger.error(  # noqa: TRY400 - ours, no traceback
                        "%s: not published (%s); given up",
                        chunk.name,
                        error,
                        extra=event("chunk_failed", chunk=chunk.name),
                    )
                    self.failures[chunk.name] = error
                    self._plan.gave_up(chunk.name)
                    self._give_back(chunk)
                    self._close(chunk, "released")
                continue
            self._close(chunk, "done" if published.is_ours else "lost")

    # -- closing

    def _close(self, chunk: OpenChunk, outcome: str) -> None:
        self.open.pop(chunk.name, None)
        self._waiting = [entry for entry in self._waiting if entry.chunk is not chunk]
        if outcome in ("done", "lost"):
            self._plan.finished(chunk.name)
        if outcome == "lost" and chunk.segment_keys:
            # Its publisher has removed those that it knew.
            keys = list(chunk.segment_keys)
            self._services.background.submit(partial(_delete_quietly, self._services.run, keys))
        self._services.observer.chunk_closed(chunk, outcome)
        self._retired.append(chunk)

    def _clean_retired(self) -> None:
        """Remove local files once nothing in the background reads them any more."""
        busy = {id(entry.chunk) for entry in self._checkpointing} | {
            id(entry.chunk) for entry in self._publishing
        }
        for chunk in [chunk for chunk in self._retired if id(chunk) not in busy]:
            self._retired.remove(chunk)
            chunk.close()


def _delete_quietly(store: Store, keys: list[str]) -> None:
    with contextlib.suppress(BatchinferError):
        store.delete(keys)
