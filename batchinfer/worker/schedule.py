"""Chooses the chunk that a worker opens next: a `Schedule` owns the list of chunks that this worker may still do.

Chunks of the worker's own manifests come first, then chunks that nobody has claimed, then the chunks of workers that
are gone or slow. `OpenChunks` calls the schedule on the main thread. When no listed chunk is left to open, the schedule
looks at the other workers' claims on storage, in the background (`ledger.survey`).
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from batchinfer.core.errors import StorageError
from batchinfer.core.records import Worker
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE, Held, stands_still
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import Survey, look_at_owners, release_given_up
from batchinfer.worker.background import Pending
from batchinfer.worker.config import Environment, RunAccess

logger = logging.getLogger(__name__)

SLOWER = 1.5
"""Factor between two workers' rates. If this worker's rate is more than SLOWER times another worker's rate, this worker
helps with the chunks that the other one holds."""
_LONGEST_LOOK_SECONDS = 10.0


class Candidate(NamedTuple):
    """A chunk to open."""

    ref: ChunkRef
    take_over: Held | None = None
    """Claim that was released or has lapsed, and is to be replaced; None if there is none."""
    is_backup: bool = False
    """Whether this worker does the chunk without a claim, while the owner of the claim works on it too."""


class _OwnerProgress(NamedTuple):
    """What this worker has seen of another worker's progress.

    As far as this worker saw, the other worker finished no row between `since` and `until`.
    """

    rows: tuple[int, int]
    """Epoch of the other worker, and the number of rows in its record."""
    beat: int
    """Number of the other worker's latest heartbeat that was seen."""
    since: float
    """Seconds on this process's monotonic clock when `rows` was first seen."""
    until: float
    """Seconds on this process's monotonic clock of the last look that saw a new heartbeat with unchanged `rows`."""


class Schedule:
    """The list of chunks that this worker may open, in order.

    Args:
        own: Chunks of this worker's manifests that are left to do, in order.
        environment: The clock and the background threads.
        run: Access to the run's store and claims, to look at the other workers.
        everything: Function that returns all chunks of the job, so that this worker can help with other workers'
            chunks; None if this worker must not help.
        earlier_rate: Average rows per second of this worker's earlier starts; 0 if unknown.
        done: Names of chunks that need no more work.
    """

    def __init__(
        self,
        own: Iterable[ChunkRef],
        *,
        environment: Environment,
        run: RunAccess,
        everything: Callable[[], dict[str, ChunkRef]] | None,
        earlier_rate: float,
        done: Iterable[str],
    ) -> None:
        self._todo = deque(Candidate(ref) for ref in own)
        self._own = {candidate.ref.name: candidate.ref for candidate in self._todo}
        self._everything = everything
        self._store = run.store
        self._claims = run.claims
        self._clock = environment.clock
        self._background = environment.background
        self._worker_id = run.lease.worker_id
        self._lease_seconds = run.lease.lease_seconds
        self._look_seconds = min(self._lease_seconds / HEARTBEATS_PER_LEASE, _LONGEST_LOOK_SECONDS)
        self._earlier_rate = earlier_rate
        self._busy: set[str] = set()
        self._done = set(done)
        self._own_left = self._own.keys() - self._done
        self._has_changed = True
        self._helped: set[str] = set()
        self._given_up: list[str] = []
        self._others: dict[str, ChunkRef] | None = None
        self._first_beats: dict[str, int] = {}
        self._progress: dict[str, _OwnerProgress] = {}
        self._found_done: set[str] = set()
        self._pending: Pending[Survey] | None = None
        self._looked = float("-inf")
        self._has_nothing_to_help = everything is None

    # -- what happened to a chunk

    def started(self, name: str) -> None:
        """Note that this worker opens a chunk or works on it."""
        self._busy.add(name)

    def finished(self, name: str) -> None:
        """Note that a chunk has its marker, written by this worker or another."""
        self._busy.discard(name)
        self._done.add(name)
        self._own_left.discard(name)
        self._has_changed = True

    def gave_up(self, name: str) -> None:
        """Note that this worker has failed with a chunk for good. It neither tries the chunk again nor waits for it."""
        self._busy.discard(name)
        self._own.pop(name, None)
        self._own_left.discard(name)
        self._helped.add(name)
        self._given_up.append(name)
        self._has_changed = True

    def held_by_other(self, name: str) -> None:
        """Note that this worker did not get a chunk, because another worker holds its claim."""
        self._busy.discard(name)
        self._has_changed = True

    # -- what is next

    def next(self) -> Candidate | None:
        """Take the next chunk to open. None if no chunk is listed now; `is_finished` says whether more may follow."""
        while self._todo:
            candidate = self._todo.popleft()
            if candidate.ref.name not in self._done and candidate.ref.name not in self._busy:
                return candidate
        return None

    @property
    def has_more(self) -> bool:
        """Whether `next` may return a chunk now."""
        return bool(self._todo)

    @property
    def waiting_for(self) -> set[str]:
        """Names of own chunks that are neither done nor being worked on by this worker, for example held by others."""
        return self._own_left - self._busy

    @property
    def is_finished(self) -> bool:
        """Whether no chunk is left to open, to wait for or to help with. Chunks that are open here do not count."""
        return (
            not self._todo
            and self._pending is None
            and not self.waiting_for
            and self._has_nothing_to_help
        )

    def take_found_done(self) -> set[str]:
        """Return the chunks that looks have found done, by any worker, since the last call."""
        found, self._found_done = self._found_done, set()
        return found

    def tick(self, open_names: Iterable[str], own_rate: float | None) -> list[str]:
        """Look at the other workers, in the background, once no chunk is left to open.

        Returns the names of open chunks that other workers have published, as the last look found.

        Args:
            open_names: Names of the chunks that this worker has open.
            own_rate: Rows per second of this process; 0 before its first row. None while the engine loads: then this
                worker does not race other workers for their chunks.
        """
        published: list[str] = []
        if self._pending is not None and self._pending.is_done():
            pending, self._pending = self._pending, None
            try:
                published = self._take_in(pending.result(), set(open_names), own_rate)
            except StorageError as error:
                logger.warning("cannot look at the other workers (%s); trying again", error)
        is_due = self._is_due()
        if self._pending is None and not self._todo and (is_due or self._has_changed):
            self._has_changed = False
            names = self._unsettled()
            if not names:
                self._has_nothing_to_help = True
            # Open chunks are looked at too, because another worker may have published one of them to help this worker.
            if is_due and (names or open_names):
                self._look(names, set(open_names))
        return published

    def _unsettled(self) -> set[str]:
        """Names of chunks that are neither done nor being worked on by this worker.

        If this worker may help others, these are chunks of the whole job, except those of others that it has helped
        with already; else only its own.
        """
        names = self.waiting_for
        if self._everything is not None:
            if self._others is None:
                self._others = self._everything()
            names |= self._others.keys() - self._done - self._helped - self._busy
        return names

    def _is_due(self) -> bool:
        return self._clock.monotonic() - self._looked >= self._look_seconds

    def _look(self, names: set[str], open_names: set[str]) -> None:
        self._looked = self._clock.monotonic()
        refs = {**(self._others or {}), **self._own}
        wanted = {
            name: refs[name].generation for name in sorted(names | open_names) if name in refs
        }
        listed = [refs[name] for name in wanted if refs[name].sha256 is None]
        given_up = list(self._given_up)

        def look() -> Survey:
            release_given_up(self._store, self._claims, given_up)
            return look_at_owners(self._store, self._claims, wanted, own=open_names, listed=listed)

        self._pending = self._background.submit(look)

    def _take_in(self, survey: Survey, open_names: set[str], own_rate: float | None) -> list[str]:
        published = [name for name in survey.done if name in open_names]
        self._done |= survey.done
        self._found_done |= survey.done
        self._own_left -= survey.done
        self._has_changed = True
        refs = {**(self._others or {}), **self._own}
        found = [Candidate(refs[name]) for name in survey.unclaimed if name not in open_names]
        # Each worker shuffles the unclaimed chunks in its own order, so that helpers seldom compete for one claim.
        random.Random(f"{self._worker_id}{len(found)}").shuffle(found)
        for name, held in survey.lapsed.items():
            if name not in open_names:
                found.append(Candidate(refs[name], take_over=held))
        undecided = False
        for name, (held, owner) in survey.alive.items():
            if name in open_names:
                continue
            if self._is_to_help(name, held, owner, own_rate, is_idle=not open_names):
                found.append(Candidate(refs[name], is_backup=True))
                self._helped.add(name)
            elif name not in self._own and not self._has_beaten(held, owner):
                undecided = True
        self._todo.extend(found)
        self._has_nothing_to_help = self._everything is None or (not found and not undecided)
        return published

    def _has_beaten(self, held: Held, owner: Worker) -> bool:
        """Whether a claim's owner has renewed its record since this worker first saw it.

        If so, the owner is alive and keeps its chunks.
        """
        first = self._first_beats.setdefault(f"{held.claim.worker}/{owner.epoch}", owner.beat)
        return owner.beat != first

    def _is_to_help(
        self, name: str, held: Held, owner: Worker, own_rate: float | None, *, is_idle: bool
    ) -> bool:
        """Whether the live owner of a chunk is so slow that this worker should do the chunk too."""
        if own_rate is None:
            return False
        if self._is_still(held, owner):
            return True
        rate = own_rate or self._earlier_rate
        if not rate:
            # This worker has no rate to compare with. If it has no open chunk, it does its own chunk at the same time
            # as the claim's owner rather than wait.
            return is_idle and name in self._own
        return 0 < SLOWER * rows_per_second(owner) < rate

    def _is_still(self, held: Held, owner: Worker) -> bool:
        """Whether a claim's owner is alive but has finished no row for so long that it needs help (see `stands_still`).

        The owner may be loading its engine, may hang, or may have only rows that take long. Its claims do not lapse,
        because its heartbeats go on.
        """
        rows = (owner.epoch, owner.rows_done)
        seen = self._progress.get(held.claim.worker)
        if seen is None or seen.rows != rows:
            now = self._clock.monotonic()
            seen = _OwnerProgress(rows, owner.beat, now, now)
        elif seen.beat != owner.beat:
            # Use the time at which the look began, not the present. This machine may have been suspended since, and
            # the record only says what was true at the look.
            seen = seen._replace(beat=owner.beat, until=self._looked)
        self._progress[held.claim.worker] = seen
        return stands_still(seen.until - seen.since, owner.lease_seconds, self._lease_seconds)


def rows_per_second(worker: Worker) -> float:
    """Return a worker's average rows per second over all its starts, computed from its record; 0 if unknown."""
    return worker.rows_done / worker.busy_seconds if worker.busy_seconds > 0 else 0.0
