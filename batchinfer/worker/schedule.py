"""Which chunk to open next: own ones first, then what others left, then the chunks of workers that are gone or slow.

The schedule belongs to the worker's main thread. It looks at storage only through `ledger.survey`, in the background,
and only once its own chunks have run out.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from batchinfer.core.errors import StorageError
from batchinfer.core.records import Worker
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE, Held, has_lapsed
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import Survey, look_at_owners, release_given_up
from batchinfer.worker.background import Pending
from batchinfer.worker.config import Environment, RunAccess

logger = logging.getLogger(__name__)

SLOWER = 1.5
"""A worker this many times slower than this one is helped with the chunks that it holds."""
_LONGEST_LOOK_SECONDS = 10.0


class Candidate(NamedTuple):
    """A chunk to open. `take_over`: its lapsed claim. `is_backup`: without a claim, in a race with its owner."""

    ref: ChunkRef
    take_over: Held | None = None
    is_backup: bool = False


class _Progress(NamedTuple):
    """An owner's epoch and rows. At `until` it had written its record anew, and they were still those of `since`."""

    rows: tuple[int, int]
    beat: int
    since: float
    until: float


class Schedule:
    """The order of work. `everything` gives all chunks of the job (for helping), or is None with ``--no-steal``.

    `earlier_rate` is what this worker did in a second at its earlier starts; 0: not known.
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
        self._progress: dict[str, _Progress] = {}
        self._pending: Pending[Survey] | None = None
        self._looked = float("-inf")
        self._has_nothing_to_help = everything is None

    # -- what the stream tells

    def started(self, name: str) -> None:
        """A chunk is being opened or worked on."""
        self._busy.add(name)

    def finished(self, name: str) -> None:
        """A chunk has its marker, whoever wrote it."""
        self._busy.discard(name)
        self._done.add(name)
        self._own_left.discard(name)
        self._has_changed = True

    def gave_up(self, name: str) -> None:
        """A chunk failed here for good. It counts as neither done nor waiting."""
        self._busy.discard(name)
        self._own.pop(name, None)
        self._own_left.discard(name)
        self._helped.add(name)
        self._given_up.append(name)
        self._has_changed = True

    def held_by_other(self, name: str) -> None:
        """A chunk's claim is somebody else's."""
        self._busy.discard(name)
        self._has_changed = True

    # -- what the stream asks

    def next(self) -> Candidate | None:
        """The next chunk to open now; None while there is none (see `is_finished`)."""
        while self._todo:
            candidate = self._todo.popleft()
            if candidate.ref.name not in self._done and candidate.ref.name not in self._busy:
                return candidate
        return None

    @property
    def has_more(self) -> bool:
        """Whether `next` may give one at once."""
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
        """Look around once the own chunks have run out; return the open chunks that others have published.

        `own_rate` is in rows per second, 0 before the first row, None while the engine loads: nobody is helped then.
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
            # The open ones too: a helper may have published what this worker is slow with.
            if is_due and (names or open_names):
                self._look(names, set(open_names))
        return published

    def _unsettled(self) -> set[str]:
        """Chunks that are not done, and not being worked on here: own ones, and with helping all others."""
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
        # Helpers that arrive together start at different places, so that they do not queue for the same claims.
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
        """Whether an owner's heart beat since it was first seen: then it is alive, and its chunks are its own."""
        first = self._first_beats.setdefault(f"{held.claim.worker}/{owner.epoch}", owner.beat)
        return owner.beat != first

    def _is_to_help(
        self, name: str, held: Held, owner: Worker, own_rate: float | None, *, is_idle: bool
    ) -> bool:
        """Whether an owner that is alive makes too little of its chunk."""
        if own_rate is None:
            return False
        if self._is_still(held, owner):
            return True
        rate = own_rate or self._earlier_rate
        if not rate:
            # Nobody can be told to be slow. To race whoever has it is better than to wait for it with an idle engine.
            return is_idle and name in self._own
        return 0 < SLOWER * rows_per_second(owner) < rate

    def _is_still(self, held: Held, owner: Worker) -> bool:
        """Whether an owner finished no row for a lease, seen here: loading, hung, or with nothing but long rows.

        Its heart beats all the while, so that its claims never lapse.
        """
        rows = (owner.epoch, owner.rows_done)
        seen = self._progress.get(held.claim.worker)
        if seen is None or seen.rows != rows:
            now = self._clock.monotonic()
            seen = _Progress(rows, owner.beat, now, now)
        elif seen.beat != owner.beat:
            # As of asking: this machine may have slept over the answer. A record that is old says nothing of now.
            seen = seen._replace(beat=owner.beat, until=self._looked)
        self._progress[held.claim.worker] = seen
        return has_lapsed(seen.until - seen.since, owner.lease_seconds, self._lease_seconds)


def rows_per_second(worker: Worker) -> float:
    """What a worker did on the average of all its starts, by its record; 0: not known."""
    return worker.rows_done / worker.busy_seconds if worker.busy_seconds > 0 else 0.0
