"""Which chunk to open next: a `Schedule` owns the list of chunks that this worker may still do.

Own chunks come first, then chunks that nobody has claimed, then the chunks of workers that are gone or slow. The
schedule belongs to `OpenChunks`, on the main thread. The schedule looks at storage only through `ledger.survey`, in the
background, once its own chunks have run out.
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
"""A worker this many times slower than this one is helped with the chunks that it holds."""
_LONGEST_LOOK_SECONDS = 10.0


class Candidate(NamedTuple):
    """A chunk to open."""

    ref: ChunkRef
    take_over: Held | None = None
    """The lapsed claim of another worker that is to be taken over."""
    is_backup: bool = False
    """Whether to work without a claim, in a race with the chunk's owner."""


class _OwnerProgress(NamedTuple):
    """What this worker has seen of another worker's progress. Between `since` and `until` the other finished no row."""

    rows: tuple[int, int]
    """The owner's epoch and the rows that it has done."""
    beat: int
    """Number of the owner's heartbeat that was seen last."""
    since: float
    """Monotonic time of this process when this number of rows was seen first."""
    until: float
    """Monotonic time of this process when a newer heartbeat last showed the same number of rows."""


class Schedule:
    """The order of work.

    Args:
        own: Chunks of this worker's manifests that are left to do, in order.
        environment: The clock and the background.
        run: Access to the run, to look at the other workers.
        everything: Function that returns all chunks of the job, to help other workers; None if this worker must not
            help.
        earlier_rate: Rows per second of this worker's earlier starts; 0 if unknown.
        done: Names of chunks that are done.
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
        self._pending: Pending[Survey] | None = None
        self._looked = float("-inf")
        self._has_nothing_to_help = everything is None

    # -- what happened to a chunk

    def started(self, name: str) -> None:
        """Note that a chunk is being opened or worked on here."""
        self._busy.add(name)

    def finished(self, name: str) -> None:
        """Note that a chunk has its marker, from this worker or another."""
        self._busy.discard(name)
        self._done.add(name)
        self._own_left.discard(name)
        self._has_changed = True

    def gave_up(self, name: str) -> None:
        """Note that a chunk failed here for good. Nothing waits for it any more."""
        self._busy.discard(name)
        self._own.pop(name, None)
        self._own_left.discard(name)
        self._helped.add(name)
        self._given_up.append(name)
        self._has_changed = True

    def held_by_other(self, name: str) -> None:
        """Note that another worker holds a chunk."""
        self._busy.discard(name)
        self._has_changed = True

    # -- what is next

    def next(self) -> Candidate | None:
        """Take the next chunk to open; None if there is none yet, or none any more (see `is_finished`)."""
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
        """Own chunks that others hold."""
        return self._own_left - self._busy

    @property
    def is_finished(self) -> bool:
        """No chunk is left to open, to wait for or to help with. Chunks being worked on do not count."""
        return (
            not self._todo
            and self._pending is None
            and not self.waiting_for
            and self._has_nothing_to_help
        )

    def tick(self, open_names: Iterable[str], own_rate: float | None) -> list[str]:
        """Look at the other workers once no chunk is left to open. Return the open chunks that others have published.

        Args:
            open_names: Names of the chunks that are open here.
            own_rate: Rows per second of this start, 0 before the first row; None while the engine loads, when nobody
                is helped.
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
            # Open chunks are looked at too: a helper may have published one that this worker is slow with.
            if is_due and (names or open_names):
                self._look(names, set(open_names))
        return published

    def _unsettled(self) -> set[str]:
        """Chunks that are neither done nor being worked on here; with those of others if this worker may help."""
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
        self._own_left -= survey.done
        self._has_changed = True
        refs = {**(self._others or {}), **self._own}
        found = [Candidate(refs[name]) for name in survey.unclaimed if name not in open_names]
        # Helpers that start together shuffle differently, so that they do not compete for the same claims.
        random.Random(f"{self._worker_id}{len(found)}").shuffle(found)
        for name, held in survey.lapsed.items():
            if name not in open_names:
                found.append(Candidate(refs[name], take_over=held))
        undecided = False
        for name, (held, owner) in survey.alive.items():
            if name in open_names or held.claim.worker == self._worker_id:
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
        """Whether an owner has renewed its record since we first saw it. If so, it is alive and keeps its chunks."""
        first = self._first_beats.setdefault(f"{held.claim.worker}/{owner.epoch}", owner.beat)
        return owner.beat != first

    def _is_to_help(
        self, name: str, held: Held, owner: Worker, own_rate: float | None, *, is_idle: bool
    ) -> bool:
        """Whether a live owner is so slow that we should do its chunk too."""
        if own_rate is None:
            return False
        if self._is_still(held, owner):
            return True
        rate = own_rate or self._earlier_rate
        if not rate:
            # We have no rate of our own to compare with. If idle, race the owner rather than wait.
            return is_idle and name in self._own
        return 0 < SLOWER * rows_per_second(owner) < rate

    def _is_still(self, held: Held, owner: Worker) -> bool:
        """Whether a live owner has finished no row for the length of a lease.

        Such an owner is loading, hung, or has nothing but long rows. Its claims do not lapse, because its heartbeats go
        on.
        """
        rows = (owner.epoch, owner.rows_done)
        seen = self._progress.get(held.claim.worker)
        if seen is None or seen.rows != rows:
            now = self._clock.monotonic()
            seen = _OwnerProgress(rows, owner.beat, now, now)
        elif seen.beat != owner.beat:
            # Use the time at which we asked, not now: this machine may have slept before it handled the answer, so the
            # record may be old.
            seen = seen._replace(beat=owner.beat, until=self._looked)
        self._progress[held.claim.worker] = seen
        return stands_still(seen.until - seen.since, owner.lease_seconds, self._lease_seconds)


def rows_per_second(worker: Worker) -> float:
    """Return the average rate of a worker over all its starts, from its record; 0 if unknown."""
    return worker.rows_done / worker.busy_seconds if worker.busy_seconds > 0 else 0.0
