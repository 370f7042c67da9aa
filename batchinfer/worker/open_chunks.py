"""Open chunks; an `OpenChunks` owns each chunk of a worker from its opening until it is published or given back.

    schedule -> opening -> open -> (all rows done) -> publishing -> closed

Opening, checkpointing and publishing run in the background; `tick`, which the worker's loop calls, collects their
results and starts new ones that are due. All methods run on the main thread, and only `release_all` blocks. A chunk
that cannot be opened or published stops neither the other chunks nor generation: it is tried again, then kept in
`failures` until the end.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from batchinfer.cli.logs import event
from batchinfer.core.errors import BatchinferError, InputError, ScratchFull, StorageError
from batchinfer.ledger.checkpoints import FinishedRow
from batchinfer.ledger.publishing import Published
from batchinfer.storage import Store
from batchinfer.worker.background import Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.config import Environment, Limits, RunAccess
from batchinfer.worker.opening import AlreadyDone, HeldByOther, Opened, Opener
from batchinfer.worker.outgoing import Checkpointer, PublishQueue
from batchinfer.worker.schedule import Candidate, Schedule
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

_RELEASE_POLL_SECONDS = 0.1
_MOST_OPEN_CHUNKS = 1000
_READ_ATTEMPTS = 2
"""Attempts to open a chunk whose copy is damaged: the damage may have happened on the network."""
_FIRST_OPENING_SECONDS = 2.0
"""Seconds that opening a chunk is assumed to take before one has been opened."""


@dataclass(slots=True)
class _Opening:
    candidate: Candidate
    pending: Pending[Opened]
    started: float
    attempts: int


@dataclass(slots=True)
class _Retry:
    """A chunk whose opening is tried again at `due`."""

    candidate: Candidate
    due: float
    attempts: int


class Demand(NamedTuple):
    """How many rows the engine needs from the open chunks, as of one round of the worker's loop."""

    rows_ahead: int = 0
    """Rows of open chunks that the engine has not taken yet."""
    rows_wanted: int = 0
    """Rows ahead that suffice to keep the engine busy; while there are fewer, more chunks are opened."""
    rows_per_second: float = 0.0
    """Rows that the engine finishes per second now."""
    own_rate: float | None = None
    """Average rows per second of this start. Slower workers are helped with their chunks; with None, nobody is."""
    is_building: bool = False
    """Whether a background job that builds prompts may be reading files of chunks, even of closed ones."""


class OpenChunks:
    """The open chunks of one worker; see the module's docstring."""

    def __init__(
        self,
        environment: Environment,
        run: RunAccess,
        opener: Opener,
        schedule: Schedule,
        telemetry: Telemetry,
        limits: Limits,
    ) -> None:
        self._clock = environment.clock
        self._background = environment.background
        self._run = run
        self._opener = opener
        self._schedule = schedule
        self._telemetry = telemetry
        self._limits = limits
        self._openings: list[_Opening] = []
        self._retries: list[_Retry] = []
        self._checkpointer = Checkpointer(run, self._background, self._may_checkpoint)
        self._publish_queue = PublishQueue(
            environment,
            run,
            limits,
            may_give_up=lambda: not self._has_rows_left,
            must_wait=self._must_wait,
            save=self._save_complete,
        )
        self._retired: list[OpenChunk] = []
        self._rows_per_chunk = 1
        self._opening_seconds = _FIRST_OPENING_SECONDS
        self.open: dict[str, OpenChunk] = {}
        self.failures: dict[str, BatchinferError] = {}
        self._is_closing = False
        self._is_saving = False

    # -- state

    @property
    def is_closing(self) -> bool:
        """Whether no further chunk is opened, and no further row is handed out."""
        return self._is_closing

    @property
    def num_unread(self) -> int:
        """Rows of open chunks whose prompts have not been built yet."""
        return sum(chunk.num_unread for chunk in self.open.values())

    @property
    def may_grow(self) -> bool:
        """Whether another chunk may still be opened."""
        if self.is_closing:
            return False
        return bool(self._openings or self._retries) or not self._schedule.is_finished

    @property
    def is_drained(self) -> bool:
        """Whether no chunk is open and none will be."""
        return not self.may_grow and not self.open and not self._publish_queue.is_busy

    @property
    def _has_rows_left(self) -> bool:
        """Whether open chunks have unfinished rows, so that an unreachable store has time to come back."""
        return any(chunk.num_left for chunk in self.open.values())

    @property
    def is_writing(self) -> bool:
        """Whether checkpoints or outputs are being written."""
        return self._checkpointer.is_busy or self._publish_queue.is_busy

    # -- what the worker calls while it runs and when it ends

    def allow_publishing(self, fingerprint: str) -> None:
        """Publish complete chunks from the next `tick` on: the worker has joined the run with this fingerprint."""
        self._checkpointer.join(fingerprint)
        self._publish_queue.join(fingerprint)

    def tick(self, demand: Demand) -> list[str]:
        """Collect what has finished in the background and start what is due. Return chunks that others published.

        Raises:
            BatchinferError: the worker must end: full scratch disk, refused permissions, a newer epoch of itself.
        """
        self._checkpointer.tick()
        self._collect_published()
        self._collect_openings()
        lost = [] if self.is_closing else self._schedule.tick(list(self.open), demand.own_rate)
        for name in lost:
            chunk = self.open.get(name)
            # A chunk that is being published stays open: its publishing will find the other worker's marker, and needs
            # its files until then.
            if chunk is not None and not self._publish_queue.is_publishing(chunk):
                self._close(chunk, "lost")
        self._retry_openings()
        self._publish_queue.start()
        # Twice the rows that the engine finishes while a chunk is being opened, in case the bucket is slow.
        cushion = int(2 * demand.rows_per_second * self._opening_seconds)
        self._start_openings(demand.rows_ahead, demand.rows_wanted + cushion)
        if not demand.is_building:
            self._clean_retired()
        return lost

    def finish(self, name: str, rows: list[FinishedRow]) -> None:
        """Keep finished rows of an open chunk, and publish it after its last row. Rows of closed chunks are dropped."""
        chunk = self.open.get(name)
        if chunk is None:
            return
        fresh = chunk.finish(rows)
        if fresh:
            self._telemetry.rows_finished(fresh)
        if not chunk.num_left:
            self._publish_queue.add(chunk)

    def checkpoint(self) -> None:
        """Start writing a segment for every open chunk with finished rows that no segment holds yet."""
        self._checkpointer.ask(self.open.values())

    def begin_saving(self) -> None:
        """Prepare an early end: from now on every finished row is checkpointed, also those of complete chunks."""
        self._is_saving = True
        self.close()

    def close(self) -> None:
        """Open no more chunks and hand out no more rows, for good. Idempotent."""
        self._is_closing = True

    def _may_checkpoint(self, chunk: OpenChunk) -> bool:
        if self.open.get(chunk.name) is not chunk:
            return False
        if self._is_saving:
            return True
        # A complete chunk is published next, so it needs a checkpoint only if the worker is about to end, or publishing
        # has failed.
        is_wanted = bool(chunk.num_left) or self.is_closing or self._publish_queue.has_failed(chunk)
        return is_wanted and not self._publish_queue.is_publishing(chunk)

    def _must_wait(self, chunk: OpenChunk) -> bool:
        """Whether a chunk cannot be published yet: all its segments must be known, since publishing removes them."""
        is_unsafe = self._is_saving and chunk.checkpointed_bytes < chunk.spool.size_bytes
        return is_unsafe or self._checkpointer.is_writing_of(chunk)

    def _save_complete(self, chunk: OpenChunk) -> None:
        """Checkpoint a chunk that could not be published, so that the next start does not generate its rows again."""
        self._checkpointer.ask([chunk])

    def note_deaths(self, rows: dict[str, list[int]]) -> None:
        """Write to the chunks' segments which rows were in flight when an engine died."""
        for name, lines in rows.items():
            chunk = self.open.get(name)
            if chunk is not None:
                self._checkpointer.note_deaths(chunk, lines)

    def release_all(self, deadline: float) -> None:
        """Release the claims of unfinished chunks. Claims that are not released by `deadline` will lapse."""
        pending = [self._give_back(chunk) for chunk in list(self.open.values())]
        for chunk in list(self.open.values()):
            self._close(chunk, "released")
        clock, background = self._clock, self._background
        while not all(job.is_done() for job in pending) and clock.monotonic() < deadline:
            background.wait(_RELEASE_POLL_SECONDS)
        self._clean_retired()

    def _give_back(self, chunk: OpenChunk) -> Pending[None]:
        """Release the claim of a chunk in the background."""
        claims, name, etag = self._run.claims, chunk.name, chunk.claim_etag

        def work() -> None:
            if claims is None or not etag:
                return
            try:
                claims.release(name, etag)
            except BatchinferError as error:
                logger.warning("%s: claim not released (%s); it lapses by itself", name, error)

        return self._background.submit(work)

    # -- opening

    def _start_openings(self, rows_ahead: int, rows_wanted: int) -> None:
        if self.is_closing:
            return
        rows_ahead += sum(self._expected_rows(entry.candidate) for entry in self._openings)
        # A chunk stays open until its slowest row is done, so small chunks must be many to keep the engine full.
        many = min(_MOST_OPEN_CHUNKS, 8 * rows_wanted // self._rows_per_chunk)
        most = max(self._limits.max_open_chunks, many)
        while (
            rows_ahead < rows_wanted
            and len(self._openings) < self._limits.max_openings
            and len(self.open) + len(self._openings) < most
            and self._has_disk_left()
        ):
            candidate = self._schedule.next()
            if candidate is None:
                return
            self._start_opening(candidate, attempts=0)
            rows_ahead += self._expected_rows(candidate)

    def _start_opening(self, candidate: Candidate, *, attempts: int) -> None:
        self._schedule.started(candidate.ref.name)
        opener, now = self._opener, self._clock.now()
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
        pending = self._background.submit(work)
        self._openings.append(_Opening(candidate, pending, self._clock.monotonic(), attempts))

    def _collect_openings(self) -> None:
        for entry in [entry for entry in self._openings if entry.pending.is_done()]:
            self._openings.remove(entry)
            name = entry.candidate.ref.name
            took = self._clock.monotonic() - entry.started
            # The estimate follows a slow opening at once and falls slowly afterwards, since the next opening may be
            # slow as well.
            self._opening_seconds = max(took, 0.7 * self._opening_seconds + 0.3 * took)
            try:
                opened = entry.pending.result()
            except ScratchFull:
                raise
            except (StorageError, InputError) as error:
                self._open_again_later(entry, error)
                continue
            if isinstance(opened, AlreadyDone):
                self._schedule.finished(name)
                self._telemetry.chunk_skipped(name)
            elif isinstance(opened, HeldByOther):
                owner = opened.held.claim.worker
                logger.info(
                    "%s: worker %s has it",
                    name,
                    owner,
                    extra=event("chunk_held", chunk=name, worker=owner),
                )
                self._schedule.held_by_other(name)
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
        if isinstance(error, StorageError):
            is_last = attempts >= self._limits.storage_attempts and not self._has_rows_left
        else:
            is_last = attempts >= _READ_ATTEMPTS
        if not is_last and not self.is_closing:
            delay = self._limits.storage_delay_seconds(attempts)
            logger.warning(
                "%s: cannot be opened (%s); trying again in %.0f s",
                name,
                error,
                delay,
                extra=event("chunk_retry", chunk=name),
            )
            due = self._clock.monotonic() + delay
            self._retries.append(_Retry(entry.candidate, due, attempts))
            return
        logger.error(
            "%s: given up (%s); going on with the other chunks",
            name,
            error,
            extra=event("chunk_failed", chunk=name),
        )
        self.failures[name] = error
        self._schedule.gave_up(name)

    def _retry_openings(self) -> None:
        if self.is_closing:
            return
        now = self._clock.monotonic()
        for entry in [entry for entry in self._retries if entry.due <= now]:
            self._retries.remove(entry)
            self._start_opening(entry.candidate, attempts=entry.attempts)

    def _add(self, chunk: OpenChunk) -> None:
        if self.is_closing:
            self.open[chunk.name] = chunk  # `release_all` gives the chunk back
            return
        self._rows_per_chunk = max(1, chunk.num_rows)
        self.open[chunk.name] = chunk
        self._telemetry.chunk_opened(chunk)
        if not chunk.num_left:
            self._publish_queue.add(chunk)

    def _expected_rows(self, candidate: Candidate) -> int:
        has_checkpoints = candidate.ref.name in self._opener.chunks_with_checkpoints
        if candidate.ref.generation or has_checkpoints:
            return 1  # few rows may be left, since most may be done already
        return candidate.ref.rows or self._rows_per_chunk

    def _has_disk_left(self) -> bool:
        chunks = self.open.values()
        held = sum(chunk.local.size_bytes + chunk.spool.size_bytes for chunk in chunks)
        return not self.open or held < self._limits.max_open_bytes

    # -- closing

    def _collect_published(self) -> None:
        for chunk, ended in self._publish_queue.collect():
            if isinstance(ended, Published):
                self._close(chunk, "done" if ended.is_ours else "lost")
            else:
                self.failures[chunk.name] = ended
                self._schedule.gave_up(chunk.name)
                self._give_back(chunk)
                self._close(chunk, "released")

    def _close(self, chunk: OpenChunk, outcome: str) -> None:
        self.open.pop(chunk.name, None)
        self._publish_queue.drop(chunk)
        if outcome in ("done", "lost"):
            self._schedule.finished(chunk.name)
        if (outcome == "lost" or (outcome == "done" and self._is_saving)) and chunk.segment_keys:
            # Remove these segments here, since publishing removed only those that were known when it began.
            keys = list(chunk.segment_keys)
            self._background.submit(partial(_delete_quietly, self._run.store, keys))
        self._telemetry.chunk_closed(chunk, outcome)
        self._retired.append(chunk)

    def _clean_retired(self) -> None:
        """Remove the local files of closed chunks that no background job reads any more."""
        for chunk in list(self._retired):
            is_read = self._checkpointer.is_writing_of(chunk)
            if not is_read and not self._publish_queue.is_publishing(chunk):
                self._retired.remove(chunk)
                chunk.close()


def _delete_quietly(store: Store, keys: list[str]) -> None:
    with contextlib.suppress(BatchinferError):
        store.delete(keys)
