"""Chooses the chunk that a worker opens next: a `Ring` holds the chunks that this worker may still do.

Chunks of the worker's own manifests come first, in their order. Once all of them were tried, the worker goes round the
whole job in blocks of up to a thousand neighbours, and takes whole chunks: those that nobody has claimed, and those of
workers that are gone. It has come to its end when every chunk of its manifests is done, and a round has found nothing
to take. `OpenChunks` calls the ring on the main thread; looks at storage run in the background (`ledger.survey`).

Each worker begins at another block, reads few claims of it, and pauses the longer the more workers there are. So a
thousand idle workers neither list the whole run again and again, nor read each other's records all the time.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from batchinfer.core.errors import StorageError
from batchinfer.core.records import WorkerLease
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE, Held
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import Survey, look_at_owners, neighbours_of, release_given_up
from batchinfer.worker.background import Pending
from batchinfer.worker.config import Environment, RunAccess

logger = logging.getLogger(__name__)

_LONGEST_LOOK_SECONDS = 10.0
_NEXT_BLOCK_SECONDS = 1.0
"""Least seconds between two looks at different blocks of the job."""
_CLAIMS_PER_SECOND = 2000
"""Most claims that the workers of a job together read in a second, if all are idle. For each they also read the owner's
record and perhaps a marker; S3 takes 5500 reads a second for a prefix."""
_FRESH_SECONDS = 60.0
"""Seconds after which chunks that a look has found are forgotten: others may have taken them since."""


class Candidate(NamedTuple):
    """A chunk to open. `take_over`: its claim that was released or has lapsed; None if there is none."""

    ref: ChunkRef
    take_over: Held | None = None


class Ring:
    """The chunks that one worker may open, in order.

    Args:
        own: Chunks of this worker's manifests that are left to do, in order.
        environment: The clock and the background threads.
        run: Access to the run's store and claims, to look at the other workers.
        everything: Function that returns all chunks of the job by name; None if this worker keeps to its own.
        num_workers: Number of workers that the job was split for.
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
        done: Iterable[str],
    ) -> None:
        self._todo = deque(Candidate(ref) for ref in own)
        self._refs = {candidate.ref.name: candidate.ref for candidate in self._todo}
        self._done = set(done)
        self._busy: set[str] = set()
        self._given_up: set[str] = set()
        self._own_left = self._refs.keys() - self._done
        self._found: deque[Candidate] = deque()
        self._found_done: set[str] = set()
        self._blocks = _Blocks(everything, run.lease.worker_id)
        self._watch = _Watch(environment, run, num_workers)
        self._is_over = False
        """Whether the last round over all blocks found nothing to take, and no claim whose owner may be gone."""
        self._has_changed = True
        """Whether a chunk was finished or given up since it was last seen whether any is left."""

    # -- what happened to a chunk

    def started(self, name: str) -> None:
        """Note that this worker opens a chunk or works on it."""
        self._busy.add(name)

    def finished(self, name: str) -> None:
        """Note that a chunk has its marker, written by this worker or another."""
        self._busy.discard(name)
        self._settle({name})

    def gave_up(self, name: str) -> None:
        """Note that this worker has failed with a chunk for good. It neither tries the chunk again nor waits for it."""
        self._busy.discard(name)
        self._own_left.discard(name)
        self._given_up.add(name)
        self._has_changed = True

    def held_by_other(self, name: str) -> None:
        """Note that this worker did not get a chunk, because another worker holds its claim."""
        self._busy.discard(name)

    # -- what is next

    def next(self) -> Candidate | None:
        """Take the next chunk to open. None if none is known now; `is_finished` says whether more may follow."""
        for chunks in (self._todo, self._found):
            while chunks:
                candidate = chunks.popleft()
                name = candidate.ref.name
                if not any(name in each for each in (self._done, self._busy, self._given_up)):
                    return candidate
        return None

    @property
    def waiting_for(self) -> set[str]:
        """Names of own chunks that are neither done nor being worked on by this worker, for example held by others."""
        return self._own_left - self._busy

    @property
    def is_finished(self) -> bool:
        """Whether no chunk is left to open or to wait for. Chunks that are open here do not count."""
        is_idle = not (self._todo or self._found or self._watch.is_looking)
        return is_idle and self._is_over and not self.waiting_for

    def take_found_done(self) -> set[str]:
        """Return the chunks that looks have found done, by any worker, since the last call."""
        found, self._found_done = self._found_done, set()
        return found

    def tick(self, *, is_hungry: bool) -> None:
        """Take in the last look at the run. If `is_hungry` and no chunk is left to open, begin the next one if due."""
        survey = self._watch.collect()
        if survey is not None:
            self._take_in(survey)
        if self._found and self._watch.age_seconds >= _FRESH_SECONDS:
            self._found.clear()  # found again if nobody has taken them meanwhile
        if is_hungry and not (self._todo or self._found or self._watch.is_looking):
            self._look()

    def _look(self) -> None:
        own, block = self.waiting_for, list[str]()
        if self._has_changed and not own:
            self._has_changed = False
            self._is_over |= not self._blocks.has_any(self._done, self._given_up | self._busy)
        if self._watch.is_block_due and not (self._is_over and not own):
            block = self._blocks.next(self._done, self._given_up | self._busy | own)
            if not block:
                self._end_round()
        if (self._watch.is_own_due and own) or block:
            wanted = own if self._watch.is_own_due else set()
            refs = {name: self._ref(name) for name in [*sorted(wanted), *block]}
            self._watch.look(refs, block, set(self._given_up))

    def _take_in(self, survey: Survey | StorageError) -> None:
        watch, blocks = self._watch, self._blocks
        if isinstance(survey, StorageError):
            logger.warning("cannot look at the other workers (%s); trying again", survey)
            watch.note_undecided()
            blocks.start_again(at_last=watch.has_block)
            return
        self._found_done |= survey.done
        self._settle(survey.done)
        free = [Candidate(self._ref(name)) for name in survey.unclaimed]
        # Each worker shuffles the unclaimed chunks in its own order, so that they seldom compete for one claim.
        random.Random(f"{watch.worker_id}{len(free)}").shuffle(free)
        lapsed = [Candidate(self._ref(name), held) for name, held in survey.lapsed.items()]
        self._found.extend(each for each in free + lapsed if each.ref.name not in self._given_up)
        foreign = {name: each for name, each in survey.alive.items() if name not in self._own_left}
        watch.note_alive(foreign)
        if watch.has_block:
            num_claims = len(foreign) + sum(name not in self._own_left for name in survey.lapsed)
            watch.pause(num_claims, has_to_wait=bool(lapsed and not free))
        if self._found:
            self._is_over = False
            watch.begin_round()
            blocks.start_again(at_last=watch.has_block)
        elif watch.has_block and blocks.is_at_end:
            self._end_round()

    def _end_round(self) -> None:
        """End a round over all blocks in which there was nothing to take. The next one begins after a pause."""
        self._is_over = not self._watch.has_undecided
        self._watch.begin_round()
        self._watch.pause(0, has_to_wait=True)
        self._blocks.start_again(at_last=False)

    def _settle(self, names: set[str]) -> None:
        self._done |= names
        self._own_left -= names
        self._has_changed = True

    def _ref(self, name: str) -> ChunkRef:
        return self._refs.get(name) or self._blocks.refs[name]


class _Blocks:
    """The job's chunks in blocks of up to a thousand neighbours, one after the other.

    `worker_id` decides with which block the worker begins, so that not all workers begin with the same one.
    """

    def __init__(
        self, everything: Callable[[], dict[str, ChunkRef]] | None, worker_id: str
    ) -> None:
        self._everything = everything
        self._worker_id = worker_id
        self._blocks: deque[list[str]] | None = None
        self._num_left = 0
        self.refs: dict[str, ChunkRef] = {}

    @property
    def is_at_end(self) -> bool:
        """Whether `next` has returned every block since the last `start_again`."""
        return self._num_left == 0

    def start_again(self, *, at_last: bool) -> None:
        """Let `next` return every block again; `at_last`: beginning with the one that it returned last."""
        blocks = self._made()
        if at_last:
            blocks.rotate(1)
        self._num_left = len(blocks)

    def has_any(self, done: set[str], others: set[str]) -> bool:
        """Whether any chunk is neither in `done` nor in `others`."""
        return any(
            name not in done and name not in others for block in self._made() for name in block
        )

    def next(self, done: set[str], others: set[str]) -> list[str]:
        """Return the next block without chunks in `done`, which are forgotten, and in `others`; empty at the end."""
        blocks = self._made()
        while self._num_left:
            self._num_left -= 1
            block = [name for name in blocks.popleft() if name not in done]
            if not block:
                continue
            blocks.append(block)
            if block := [name for name in block if name not in others]:
                return block
        return []

    def _made(self) -> deque[list[str]]:
        """The blocks. They are made when they are first needed, since a job may have very many chunks."""
        if self._blocks is None:
            self.refs = self._everything() if self._everything is not None else {}
            groups: defaultdict[str, list[str]] = defaultdict(list)
            for name in self.refs:
                groups[neighbours_of(name)].append(name)
            self._blocks = deque(groups.values())
            self._blocks.rotate(-random.Random(self._worker_id).randrange(len(groups) or 1))
            self._num_left = len(groups)
        return self._blocks


class _Watch:
    """Looks at the run in the background, and knows when the next look is due."""

    def __init__(self, environment: Environment, run: RunAccess, num_workers: int) -> None:
        self._clock = environment.clock
        self._background = environment.background
        self._store = run.store
        self._claims = run.claims
        self._look_seconds = min(
            run.lease.lease_seconds / HEARTBEATS_PER_LEASE, _LONGEST_LOOK_SECONDS
        )
        self._claim_seconds = num_workers / _CLAIMS_PER_SECOND
        """Seconds for which this worker pauses for each claim that it has read."""
        self._pending: Pending[Survey] | None = None
        self._own_due = self._block_due = self._collected = float("-inf")
        self._first_beats: dict[str, int] = {}
        self.worker_id = run.lease.worker_id
        self.has_block = False
        """Whether the last look was at a block, too."""
        self.has_undecided = False
        """Whether this round met a claim whose owner may be gone, or a block that could not be seen."""

    @property
    def is_looking(self) -> bool:
        """Whether a look has begun and was not collected."""
        return self._pending is not None

    @property
    def is_own_due(self) -> bool:
        """Whether it is time to look at own chunks that others hold."""
        return self._clock.monotonic() >= self._own_due

    @property
    def is_block_due(self) -> bool:
        """Whether it is time to look at the next block."""
        return self._clock.monotonic() >= self._block_due

    @property
    def age_seconds(self) -> float:
        """Seconds since the last look's result was collected."""
        return self._clock.monotonic() - self._collected

    def look(self, refs: dict[str, ChunkRef], block: list[str], given_up: set[str]) -> None:
        """Begin to look at these chunks, among them those of a block, and release claims of chunks given up."""
        self.has_block = bool(block)
        if len(refs) > len(block):
            self._own_due = self._clock.monotonic() + self._look_seconds
        # Each worker prefers other claims to watch, and the same ones at each look.
        block.sort(key=lambda name: zlib.crc32(f"{self.worker_id} {name}".encode()))
        wanted = {name: ref.generation for name, ref in refs.items()}
        look = partial(look_at_owners, self._store, self._claims, wanted, sample=block)

        def work() -> Survey:
            release_given_up(self._store, self._claims, given_up)
            return look()

        self._pending = self._background.submit(work)

    def collect(self) -> Survey | StorageError | None:
        """Return what a look has found, or why it failed; None if none has ended."""
        if self._pending is None or not self._pending.is_done():
            return None
        pending, self._pending = self._pending, None
        self._collected = self._clock.monotonic()
        try:
            return pending.result()
        except StorageError as error:
            self.pause(0, has_to_wait=True)
            return error

    def note_alive(self, claims: dict[str, tuple[Held, WorkerLease]]) -> None:
        """Note other workers' claims that are valid. Until an owner's heart has beaten again, it may be gone."""
        for held, owner in claims.values():
            first = self._first_beats.setdefault(f"{held.claim.worker}/{owner.nonce}", owner.beat)
            self.has_undecided |= owner.beat == first

    def note_undecided(self) -> None:
        """Note that this round could not see a part of the run."""
        self.has_undecided = True

    def begin_round(self) -> None:
        """Forget what the last round could not decide."""
        self.has_undecided = False

    def pause(self, num_claims: int, *, has_to_wait: bool) -> None:
        """Decide when to look at a block again.

        Args:
            num_claims: Number of others' claims that the last look has read.
            has_to_wait: Whether a new round begins, or only claims of workers that are gone were found.
        """
        # A look at a finished block reads no claims, but lists two pages.
        seconds = max(_NEXT_BLOCK_SECONDS, max(num_claims, 2) * self._claim_seconds)
        if has_to_wait:
            seconds = max(seconds, self._look_seconds)
        self._block_due = self._clock.monotonic() + seconds
