"""Chooses the chunk that a worker opens next: a `Schedule` owns the list of chunks that this worker may still do.

Chunks of the worker's own manifests come first, then chunks that nobody has claimed, then the chunks of workers that
are gone or slow. `OpenChunks` calls the schedule on the main thread. When no listed chunk is left to open, the schedule
looks at the other workers' claims on storage, in the background (`ledger.survey`).

A look shows some neighbours among a large job's chunks, not all of them, and what it found is forgotten after a while.
Each worker begins at another place of the job. So a thousand workers that help each other neither list the whole run
again and again, nor try chunks that others have done long ago (docs/performance.md).
"""

from __future__ import annotations

import logging
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from batchinfer.core.errors import StorageError
from batchinfer.core.records import Worker
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE, Held, stands_still
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import Survey, look_at_owners, neighbours_of, release_given_up
from batchinfer.worker.background import Pending
from batchinfer.worker.config import Environment, RunAccess

logger = logging.getLogger(__name__)

SLOWER = 1.5
"""Factor between two workers' rates. If this worker's rate is more than SLOWER times another worker's rate, this worker
helps with the chunks that the other one holds."""
_LONGEST_LOOK_SECONDS = 10.0
_NEXT_PART_SECONDS = 1.0
"""Least seconds between two looks at different parts of the job."""
_CLAIMS_PER_SECOND = 2000
"""Most claims that the workers of a job together read in a second, if all are idle. For each they also read the owner's
record and perhaps a marker; S3 takes 5500 reads a second for a prefix."""
_FRESH_SECONDS = 60.0
"""Seconds after which chunks that a look has found are forgotten: others may have taken them since."""


class Candidate(NamedTuple):
    """A chunk to open."""

    ref: ChunkRef
    take_over: Held | None = None
    """Claim that was released or has lapsed, and is to be replaced; None if there is none."""
    backed_up: Held | None = None
    """Claim of a slow worker that does the chunk, too: this worker then takes none."""
    owner_rate: float = 0.0
    """Rows per second of that worker; 0 if it stands still or if its rate is unknown."""
    other_helpers: int = 0
    """Number of further helpers with which this worker still helps. If there are more, it leaves the chunk alone."""


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


class _JobParts:
    """The names of a job's chunks in parts of up to a thousand neighbours, which a worker looks at in turn.

    `worker_id` decides with which part the worker begins, so that not all workers begin with the same one.
    """

    def __init__(self, names: Iterable[str], worker_id: str) -> None:
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            groups[neighbours_of(name)].append(name)
        self._parts = deque(groups.values())
        self._parts.rotate(-random.Random(worker_id).randrange(len(groups) or 1))
        self._num_left = len(self._parts)

    @property
    def is_at_end(self) -> bool:
        """Whether `next` has returned every part since the last `start_again`."""
        return self._num_left == 0

    @property
    def is_one(self) -> bool:
        """Whether one part holds everything that is not done."""
        return len(self._parts) <= 1

    def start_again(self, *, at_last: bool) -> None:
        """Let `next` return every part again; `at_last`: beginning with the one that it returned last."""
        if at_last:
            self._parts.rotate(1)
        self._num_left = len(self._parts)

    def has_any(self, done: set[str], others: set[str]) -> bool:
        """Whether any chunk is neither in `done` nor in `others`. Drops the finished parts at the front."""
        while self._parts:
            part = self._parts[0]
            if any(name not in done and name not in others for name in part):
                return True
            if any(name not in done for name in part):
                break
            self._parts.popleft()
            self._num_left = max(0, self._num_left - 1)
        return any(name not in done and name not in others for part in self._parts for name in part)

    def next(self, done: set[str], others: set[str]) -> list[str]:
        """Return the next part without chunks in `done`, which are forgotten, and in `others`; empty at the end."""
        while self._num_left:
            self._num_left -= 1
            part = [name for name in self._parts.popleft() if name not in done]
            if not part:
                continue
            self._parts.append(part)
            part = [name for name in part if name not in others]
            if part:
                return part
        return []


class Schedule:
    """The list of chunks that this worker may open, in order.

    Args:
        own: Chunks of this worker's manifests that are left to do, in order.
        environment: The clock and the background threads.
        run: Access to the run's store and claims, to look at the other workers.
        everything: Function that returns all chunks of the job, so that this worker can help with other workers'
            chunks; None if this worker must not help.
        num_workers: Number of workers that the job was split for. The more they are, the less often each looks at
            others.
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
        num_workers: int,
        earlier_rate: float,
        done: Iterable[str],
    ) -> None:
        self._todo = deque(Candidate(ref) for ref in own)
        self._found: deque[Candidate] = deque()
        self._found_at = 0.0
        self._own = {candidate.ref.name: candidate.ref for candidate in self._todo}
        self._everything = everything
        self._store = run.store
        self._claims = run.claims
        self._clock = environment.clock
        self._background = environment.background
        self._worker_id = run.lease.worker_id
        self._lease_seconds = run.lease.lease_seconds
        self._look_seconds = min(self._lease_seconds / HEARTBEATS_PER_LEASE, _LONGEST_LOOK_SECONDS)
        self._claim_seconds = num_workers / _CLAIMS_PER_SECOND
        """Seconds for which this worker pauses for each claim that it has read."""
        self._earlier_rate = earlier_rate
        self._busy: set[str] = set()
        self._done = set(done)
        self._own_left = self._own.keys() - self._done
        self._has_changed = True
        self._helped: set[str] = set()
        self._yielded: dict[str, list[float]] = {}
        """Chunks of slow workers that this worker was to help with but left alone, and when it did so."""
        self._given_up: list[str] = []
        self._others: dict[str, ChunkRef] = {}
        self._parts: _JobParts | None = None
        self._is_asked = False
        """Whether `next` was called in vain since it last returned a chunk."""
        self._has_undecided = False
        """Whether this round over the parts met a claim whose owner may be gone, or a part that could not be seen."""
        self._first_beats: dict[str, int] = {}
        self._progress: dict[str, _OwnerProgress] = {}
        self._found_done: set[str] = set()
        self._pending: Pending[Survey] | None = None
        self._pending_has_part = False
        self._looked = float("-inf")
        self._looked_at_own = float("-inf")
        self._looked_at_part = float("-inf")
        self._part_pause_seconds = 0.0
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
        """Note that this worker did not get a chunk, because another worker holds its claim, or helps its owner."""
        self._busy.discard(name)
        if name in self._helped:
            self._helped.discard(name)
            self._yielded.setdefault(name, []).append(self._clock.monotonic())
        self._has_changed = True

    # -- what is next

    def next(self) -> Candidate | None:
        """Take the next chunk to open. None if no chunk is listed now; `is_finished` says whether more may follow."""
        self._forget_stale()
        for chunks in (self._todo, self._found):
            while chunks:
                candidate = chunks.popleft()
                name = candidate.ref.name
                if name not in self._done and name not in self._busy and name not in self._given_up:
                    self._is_asked = False
                    return candidate
        self._is_asked = True
        return None

    @property
    def waiting_for(self) -> set[str]:
        """Names of own chunks that are neither done nor being worked on by this worker, for example held by others."""
        return self._own_left - self._busy

    @property
    def is_finished(self) -> bool:
        """Whether no chunk is left to open, to wait for or to help with. Chunks that are open here do not count."""
        return (
            not self._todo
            and not self._found
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
                if self._parts is not None:
                    self._has_undecided = True
                    self._part_pause_seconds = self._look_seconds
                    self._parts.start_again(at_last=self._pending_has_part)
        self._forget_stale()
        if self._pending is None and not self._todo:
            self._look_around(set(open_names))
        return published

    def _look_around(self, open_names: set[str]) -> None:
        """Look at this worker's own and open chunks, and at a part of the others', as far as that is due."""
        if self._parts is None and self._everything is not None:
            self._others = self._everything()
            self._parts = _JobParts(self._others, self._worker_id)
        is_due, is_part_due = self._is_due(), self._is_part_due()
        if not (is_due or is_part_due or self._has_changed):
            return
        self._has_changed = False
        own, part = self.waiting_for, []
        if self._parts is not None:
            settled = self._helped | self._busy
            if not own and not self._parts.has_any(self._done, settled):
                self._has_nothing_to_help = True
            elif is_part_due:
                part = self._parts.next(self._done, settled | own)
                if not part:
                    self._end_round(self._parts)
        elif not own:
            self._has_nothing_to_help = True
        # Open chunks are looked at too, because another worker may have published one of them to help this worker.
        if is_due and (own or open_names or part):
            self._look(own, open_names, part)
        elif part:
            self._look(set(), set(), part)

    def _is_due(self) -> bool:
        return self._clock.monotonic() - self._looked_at_own >= self._look_seconds

    def _is_part_due(self) -> bool:
        """Whether to look at the next part. A worker whose engine has enough rows looks only if there is just one."""
        is_wanted = self._parts is not None and (self._is_asked or self._parts.is_one)
        since = self._clock.monotonic() - self._looked_at_part
        return is_wanted and not self._found and since >= self._part_pause_seconds

    def _look(self, own: set[str], open_names: set[str], part: list[str]) -> None:
        self._looked = self._clock.monotonic()
        if own or open_names:
            self._looked_at_own = self._looked
        if part:
            self._looked_at_part = self._looked
        # Each worker prefers other claims to watch, and the same ones at each look.
        part.sort(key=lambda name: zlib.crc32(f"{self._worker_id} {name}".encode()))
        wanted = {
            name: self._ref(name).generation
            for name in [*sorted(own | open_names), *part]
            if name in self._own or name in self._others
        }
        listed = [self._ref(name) for name in wanted if self._ref(name).sha256 is None]
        given_up = list(self._given_up)

        def look() -> Survey:
            release_given_up(self._store, self._claims, given_up)
            return look_at_owners(
                self._store, self._claims, wanted, own=open_names, listed=listed, sample=part
            )

        self._pending = self._background.submit(look)
        self._pending_has_part = bool(part)

    def _ref(self, name: str) -> ChunkRef:
        return self._own.get(name) or self._others[name]

    def _take_in(self, survey: Survey, open_names: set[str], own_rate: float | None) -> list[str]:
        published = [name for name in survey.done if name in open_names]
        self._done |= survey.done
        self._found_done |= survey.done
        self._own_left -= survey.done
        self._has_changed = True
        # A chunk may have been given up since the look began.
        not_wanted = open_names.union(self._given_up)
        free = [Candidate(self._ref(name)) for name in survey.unclaimed if name not in not_wanted]
        # Each worker shuffles the unclaimed chunks in its own order, so that helpers seldom compete for one claim.
        random.Random(f"{self._worker_id}{len(free)}").shuffle(free)
        found = list(free)
        for name, held in survey.lapsed.items():
            if name not in not_wanted:
                found.append(Candidate(self._ref(name), take_over=held))
        for name, (held, owner) in survey.alive.items():
            if name in not_wanted:
                continue
            if self._is_left_alone(name):
                self._has_undecided = True  # it is tried again once its helper had a lease's time
            elif self._is_to_help(name, held, owner, own_rate, is_idle=not open_names):
                found.append(
                    Candidate(
                        self._ref(name),
                        backed_up=held,
                        owner_rate=0.0 if self._is_still(held, owner) else rows_per_second(owner),
                        other_helpers=self._other_helpers(name),
                    )
                )
                self._helped.add(name)
            elif name not in self._own and not self._has_beaten(held, owner):
                self._has_undecided = True
        if not self._found:
            self._found_at = self._clock.monotonic()
        self._found.extend(found)
        if self._parts is not None:
            num_claims = sum(name not in self._own for name in (*survey.lapsed, *survey.alive))
            self._plan_next_part(self._parts, num_claims, is_free=bool(free), is_any=bool(found))
        return published

    def _plan_next_part(
        self, parts: _JobParts, num_claims: int, *, is_free: bool, is_any: bool
    ) -> None:
        """After a look, decide when to look at a part again, and whether to begin a new round over all parts.

        Args:
            parts: The job's parts.
            num_claims: Number of claims of the part that the look has read.
            is_free: Whether it has found unclaimed chunks.
            is_any: Whether it has found chunks to open.
        """
        # A look at a finished part reads no claims, but lists two pages.
        pause = max(_NEXT_PART_SECONDS, max(num_claims, 2) * self._claim_seconds)
        self._part_pause_seconds = max(pause, self._look_seconds)
        if is_free or not (is_any or parts.is_at_end):
            self._part_pause_seconds = pause
        if is_any:
            parts.start_again(at_last=self._pending_has_part)
            self._has_nothing_to_help = self._has_undecided = False
        elif parts.is_at_end and self._pending_has_part:
            self._end_round(parts)

    def _end_round(self, parts: _JobParts) -> None:
        """End a round over all parts in which there was nothing to open. The next one begins after a pause."""
        self._has_nothing_to_help = not self._has_undecided
        self._has_undecided = False
        self._part_pause_seconds = self._look_seconds
        self._looked_at_part = max(self._looked_at_part, self._looked)
        parts.start_again(at_last=False)

    def _forget_stale(self) -> None:
        """Forget chunks that a look found long ago. They are found again if nobody has taken them meanwhile."""
        if not self._found or self._clock.monotonic() - self._found_at < _FRESH_SECONDS:
            return
        self._helped -= {each.ref.name for each in self._found if each.backed_up}
        self._found.clear()

    def _is_left_alone(self, name: str) -> bool:
        """Whether this worker has left a slow worker's chunk alone within the length of a lease."""
        times = self._yielded.get(name, [float("-inf")])
        return self._clock.monotonic() - times[-1] < self._lease_seconds

    def _other_helpers(self, name: str) -> int:
        """Return with how many further helpers this worker still helps with a slow worker's chunk.

        With none at first. Helpers may hang, so with one more after each lease. If each worker that waits helped after
        a lease, dozens would do the same chunk.
        """
        return len(self._yielded.get(name, ()))

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
