"""The open chunks of a worker. `OpenChunks` owns each chunk from its opening until it is published or given back.

    schedule -> opening -> open -> (all rows done) -> publishing -> closed

Background jobs open, checkpoint and publish chunks. The worker's loop calls `tick`, which collects the results of these
jobs and starts the jobs that are due. All methods run on the main thread; only `release_all` waits for jobs. A chunk
that cannot be opened or published does not hold up the other chunks: it is tried again several times, and then its
error is kept in `failures` until the worker ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from batchinfer.core.errors import BatchinferError, InputError, ScratchFull, StorageError
from batchinfer.core.events import event
from batchinfer.core.records import RowKey
from batchinfer.ledger.checkpoints import FinishedRow
from batchinfer.ledger.publishing import Published
from batchinfer.storage import Store
from batchinfer.worker.background import Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.config import Environment, Limits, RunAccess
from batchinfer.worker.opening import AlreadyDone, AwaitsRun, HeldByOther, Opened, Opener
from batchinfer.worker.outgoing import Checkpointer, PublishQueue
from batchinfer.worker.schedule import Candidate, Schedule
from batchinfer.worker.sharing import Sharing
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

_RELEASE_POLL_SECONDS = 0.1
_MOST_OPEN_CHUNKS = 1000
_READ_ATTEMPTS = 2
"""Attempts to open a chunk that turns out damaged or missing. The second may succeed if the download did the damage."""
_FIRST_OPENING_SECONDS = 2.0
"""Seconds that opening a chunk is assumed to take, before the worker has opened its first chunk."""


@dataclass(slots=True)
class _Opening:
    candidate: Candidate
    pending: Pending[Opened]
    started: float
    attempts: int


@dataclass(slots=True)
class _Retry:
    """A chunk whose opening failed and is tried again at the clock time `due`."""

    candidate: Candidate
    due: float
    attempts: int


class Demand(NamedTuple):
    """How many rows the engine needs from the open chunks now. The worker's loop makes a new one in each round."""

    rows_ahead: int = 0
    """Rows of open chunks that are not finished and that the engine has not taken yet."""
    rows_wanted: int = 0
    """Number of `rows_ahead` that suffices to keep the engine busy. While there are fewer, more chunks are opened."""
    rows_per_second: float = 0.0
    """Rows that the engine finishes per second now."""
    own_rate: float | None = None
    """Average rows per second of this start; 0 before its first row. The worker helps much slower workers.

    None while the engine loads; then it helps nobody.
    """
    is_building: bool = False
    """Whether a background job builds prompts. It may read files of open chunks and of chunks closed meanwhile."""


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
        self._checkpointer = Checkpointer(run, environment, self._may_checkpoint)
        self._publish_queue = PublishQueue(
            environment,
            run,
            limits,
            may_give_up=lambda: not self._has_rows_left,
            must_wait=self._must_wait,
            save=self._save_complete,
        )
        self._sharing = Sharing(run, environment, opener)
        self._retired: list[OpenChunk] = []
        self._rows_per_chunk = 1
        self._opening_seconds = _FIRST_OPENING_SECONDS
        self.open: dict[str, OpenChunk] = {}
        self.failures: dict[str, BatchinferError] = {}
        self.published: set[str] = set()
        """Names of the chunks whose marker this process has written."""
        self._is_closing = False
        self._is_saving = False
        self._awaits_run = False
        """Whether the opening of chunks waits until the worker has joined the run."""

    # -- state

    @property
    def is_closing(self) -> bool:
        """Whether the worker has stopped opening chunks and handing out rows, for good."""
        return self._is_closing

    @property
    def num_unread(self) -> int:
        """Unfinished rows of open chunks that have not been read yet to build their prompts."""
        return sum(chunk.num_unread for chunk in self.open.values())

    @property
    def may_grow(self) -> bool:
        """Whether another chunk may still be opened."""
        if self.is_closing:
            return False
        return bool(self._openings or self._retries) or not self._schedule.is_finished

    @property
    def is_drained(self) -> bool:
        """Whether no chunk is open or being published, and no further chunk will be opened."""
        return not self.may_grow and not self.open and not self._publish_queue.is_busy

    @property
    def _has_rows_left(self) -> bool:
        """Whether open chunks have unfinished rows.

        While the engine generates them, a store that cannot be reached has time to come back, so no chunk is given up
        because of storage.
        """
        return any(chunk.num_left for chunk in self.open.values())

    @property
    def is_writing(self) -> bool:
        """Whether checkpoints or outputs are being written."""
        return self._checkpointer.is_busy or self._publish_queue.is_busy

    # -- what the worker calls while it runs and when it ends

    def allow_publishing(self, fingerprint: str) -> None:
        """Let complete chunks be published from the next `tick` on. Call when the worker has joined the run.

        Args:
            fingerprint: The run's fingerprint, which goes into markers and segments.
        """
        self._awaits_run = False
        self._checkpointer.join(fingerprint)
        self._publish_queue.join(fingerprint)

    def tick(self, demand: Demand) -> list[str]:
        """Collect the results of background jobs and start the jobs that are due.

        Returns:
            Names of chunks that need no more rows of this worker, since other workers have done them or their last
            rows, as was just found.

        Raises:
            BatchinferError: the worker must end: full scratch disk, refused permissions, a newer epoch of itself.
        """
        self._checkpointer.tick()
        self._collect_published()
        num_unread = self.num_unread
        self._collect_openings()
        num_opened = self.num_unread - num_unread
        lost = [] if self.is_closing else self._schedule.tick(list(self.open), demand.own_rate)
        for name in self._schedule.take_found_done() - self.open.keys():
            self._telemetry.workload.done(name)
        complete: list[str] = []
        # A background job that builds prompts changes the states of rows, which taking rows in changes, too.
        if not self.is_closing and not demand.is_building:
            found = self._sharing.tick(self.open)
            self._checkpointer.ask(found.to_checkpoint)
            lost += found.published
            complete = found.complete
            for name in complete:
                self._publish_queue.add(self.open[name])
        for name in lost:
            chunk = self.open.get(name)
            # A chunk that this worker is publishing stays open, because the publishing job reads the chunk's files.
            # That job will find the other worker's marker.
            if chunk is not None and not self._publish_queue.is_publishing(chunk):
                self._close(chunk, "lost")
        self._retry_openings()
        self._publish_queue.start()
        # `cushion` is twice the number of rows that the engine finishes while one chunk is opened. It keeps the engine
        # busy if the bucket becomes slower.
        cushion = int(2 * demand.rows_per_second * self._opening_seconds)
        # `demand` does not know the rows of chunks that were being opened until now.
        self._start_openings(demand.rows_ahead + num_opened, demand.rows_wanted + cushion)
        if not demand.is_building:
            self._clean_retired()
        return lost + complete

    def finish(self, name: str, rows: list[FinishedRow]) -> None:
        """Keep finished rows of a chunk, and queue the chunk for publishing after its last row.

        Rows of a chunk that is not open any more are dropped.
        """
        chunk = self.open.get(name)
        if chunk is None:
            return
        fresh = chunk.finish(rows)
        if fresh:
            self._telemetry.rows_finished(fresh)
            if not chunk.num_left:
                self._publish_queue.add(chunk)

    def checkpoint(self) -> None:
        """Start to write segments of those finished rows that are in no segment yet.

        A complete chunk gets no segment if it is to be published at once.
        """
        self._checkpointer.ask(self.open.values())

    def begin_saving(self) -> None:
        """Prepare an early end of the worker: open no more chunks, and let complete chunks be checkpointed, too."""
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
        # A complete chunk is published next. It needs a checkpoint only if the worker opens no more chunks, so that it
        # may end soon, or if publishing the chunk takes long to begin.
        is_wanted = bool(chunk.num_left) or self.is_closing or self._publish_queue.waits_long(chunk)
        return is_wanted and not self._publish_queue.is_publishing(chunk)

    def _must_wait(self, chunk: OpenChunk) -> bool:
        """Whether a complete chunk must not be published yet.

        Publishing removes the chunk's segments, so it waits until no segment of the chunk is being written. After
        `begin_saving` it also waits until segments hold all rows of the chunk.
        """
        is_unsafe = self._is_saving and chunk.has_unsaved_rows
        return is_unsafe or self._checkpointer.is_writing_of(chunk)

    def _save_complete(self, chunk: OpenChunk) -> None:
        """Checkpoint a complete chunk that could not be published, so that no later start generates its rows again."""
        self._checkpointer.ask([chunk])

    def note_death(self, keys: Sequence[RowKey]) -> None:
        """Note which rows were in the engine when it died, also in segments for later starts and other workers."""
        lines: defaultdict[str, list[int]] = defaultdict(list)
        for name, line in keys:
            lines[name].append(line)
        for name, each in lines.items():
            chunk = self.open.get(name)
            # A complete chunk may have rows in the engine that another worker has finished.
            if chunk is not None and chunk.num_left:
                chunk.note_deaths(each, len(keys))
                self._checkpointer.note_deaths(chunk, each, len(keys))

    def release_all(self, deadline: float) -> None:
        """Close all open chunks and release their claims, so that other workers can take them.

        Blocks until the claims are released, at the latest until `deadline`. A claim that is not released lapses later.
        """
        self._checkpointer.log_written()
        pending = [self._give_back(chunk) for chunk in list(self.open.values())]
        for chunk in list(self.open.values()):
            self._close(chunk, "released")
        clock, background = self._clock, self._background
        while not all(job.is_done() for job in pending) and clock.monotonic() < deadline:
            background.wait(_RELEASE_POLL_SECONDS)
        self._clean_retired()

    def _give_back(self, chunk: OpenChunk) -> Pending[None]:
        """Start a background job that releases the chunk's claim."""
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
        if self.is_closing or self._awaits_run:
            return
        rows_ahead += sum(self._expected_rows(entry.candidate) for entry in self._openings)
        # A chunk stays open until its slowest row is done. If chunks are small, many must be open to keep the engine
        # full.
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
        if candidate.backed_up is not None:
            logger.info(
                "%s: its worker is slow; working on it too",
                candidate.ref.name,
                extra=event("chunk_helped", chunk=candidate.ref.name),
            )
            work = partial(
                opener.open_backup,
                candidate.ref,
                candidate.backed_up,
                now=now,
                owner_rate=candidate.owner_rate,
                other_helpers=candidate.other_helpers,
            )
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
            # The estimate rises at once after a slow opening. It falls slowly after fast openings, since the next one
            # may be slow again.
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
            elif isinstance(opened, AwaitsRun):
                self._open_once_joined(entry)
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
                    is_own = owner == self._run.lease.worker_id
                    whose = "an earlier start of this worker" if is_own else f"worker {owner}"
                    logger.info(
                        "%s: taken over%s",
                        name,
                        f" from {whose}" if owner else "",
                        extra=event("chunk_taken_over", chunk=name, worker=owner),
                    )
                self._add(opened)

    def _open_once_joined(self, entry: _Opening) -> None:
        """Open a chunk again once the worker has joined the run. Until then no other chunk is opened either."""
        self._awaits_run = not self._opener.has_joined
        logger.info(
            "%s: has checkpoints, and run.json is missing; opened later", entry.candidate.ref.name
        )
        self._retries.append(_Retry(entry.candidate, self._clock.monotonic(), entry.attempts))

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
        if self.is_closing or self._awaits_run:
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
            return 1  # most rows may be done already, so only one is counted on
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
        if outcome == "done":
            self.published.add(chunk.name)
        if outcome in ("done", "lost"):
            self._schedule.finished(chunk.name)
        if (outcome == "lost" or (outcome == "done" and self._is_saving)) and chunk.segment_keys:
            # The worker that published the chunk removed only segments it knew. This worker's newer ones may be left.
            keys = list(chunk.segment_keys)
            self._background.submit(partial(_delete_quietly, self._run.store, keys))
        self._telemetry.chunk_closed(chunk, outcome)
        self._retired.append(chunk)

    def _clean_retired(self) -> None:
        """Remove the local files of closed chunks, except files that a checkpoint or publishing job still reads."""
        for chunk in list(self._retired):
            is_read = self._checkpointer.is_writing_of(chunk)
            if not is_read and not self._publish_queue.is_publishing(chunk):
                self._retired.remove(chunk)
                chunk.close()


def _delete_quietly(store: Store, keys: list[str]) -> None:
    with contextlib.suppress(BatchinferError):
        store.delete(keys)
