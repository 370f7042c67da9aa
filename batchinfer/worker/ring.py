"""Chooses the chunk that a worker opens next: a `Ring` holds the chunks that this worker may still do.

Chunks of the worker's own manifests come first, in their order. Once all of them were tried, the worker goes round the
whole job in blocks of up to a thousand neighbours, and takes whole chunks: those that nobody has claimed, and those of
workers that are gone. It has come to its end when every chunk of its manifests is done, and a round has found nothing
to take. `OpenChunks` calls the ring on the main thread; looks at storage run in the background (`ledger.survey`).

Each worker begins at another block, reads few claims of it, and pauses the longer the more workers there are. So a
thousand idle workers neither list the whole run again and again, nor read each other's records all the time. Who finds
a whole block done leaves a note below complete/, and no other looks at it: at the end all know within seconds.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections import ChainMap, deque
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from batchinfer.core.errors import StorageError
from batchinfer.core.records import WorkerLease
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import MOST_SAMPLED, Survey, blocks_of, look_at_block
from batchinfer.worker.worker_config import Environment, RunAccess

logger = logging.getLogger(__name__)

_LONGEST_ROUND_SECONDS = 10.0
"""Most seconds between two rounds over a job of few workers."""
_NEXT_BLOCK_SECONDS = 0.5
"""Least seconds between two looks at different blocks of the job."""
_READS_PER_SECOND = 5000
"""Most reads of the workers of a job together in a second, if all are idle; S3 takes 5500 for a prefix."""
_FEWEST_CLAIMS, _CLAIMS_OF_ALL = 4, 4000
"""Fewest claims that a look reads, and how many are read by one look of every worker. A pause follows each look, in
proportion to what it has read: where many workers read many claims, free chunks are found late."""
_FRESH_SECONDS = 60.0
"""Seconds after which chunks that a look has found are forgotten: others may have taken them since."""


class _Circle:
    """The chunks of the job in blocks of neighbours, which one round after the other goes through."""

    def __init__(self, refs: Mapping[str, ChunkRef], worker_id: str) -> None:
        self.names = dict(blocks_of(refs))
        """The names of each block's chunks, by the key of the note that they are done."""
        self._complete: set[str] = set()
        """Keys of the notes that were read."""
        self._blocks = deque(self.names.items())
        self.num_left = len(self._blocks)
        """Blocks that this round has not looked at."""
        self._blocks.rotate(-random.Random(worker_id).randrange(self.num_left or 1))
        self.is_undecided = False
        """Whether this round met a claim whose owner may be gone, or a block that could not be seen."""
        self.is_over = False
        """Whether the last round found nothing to take, and no claim whose owner may be gone."""
        self._first_beats: dict[str, int] = {}

    def next_block(self, done: Container[str], busy: Container[str]) -> tuple[str, list[str]]:
        """Return the next block without chunks at work; empty at a round's end. Chunks that are done are forgotten."""
        while self.num_left:
            self.num_left -= 1
            key, names = self._blocks.popleft()
            if not (names := [name for name in names if name not in done]):
                continue
            self._blocks.append((key, names))
            if names := [name for name in names if name not in busy]:
                return key, names
        return "", []

    def read_notes(self, keys: frozenset[str]) -> set[str]:
        """Return the chunks of those blocks that are done by notes which were not read before."""
        new = keys - self._complete
        self._complete |= new
        return set[str]().union(*(self.names.get(key, ()) for key in new))

    def begin_round(self, *, at_last: bool) -> None:
        """Look at every block again; `at_last`: beginning with the one that was looked at last."""
        self._blocks.rotate(int(at_last))
        self.num_left = len(self._blocks)
        self.is_undecided = False

    def end_round(self) -> None:
        """Note that a round found nothing to take."""
        self.is_over = not self.is_undecided
        self.begin_round(at_last=False)

    def found(self) -> None:
        """Note that there is something to take, so that the next round is not the last."""
        self.is_over = False
        self.begin_round(at_last=True)

    def failed(self) -> None:
        """Note that a block could not be seen."""
        self.begin_round(at_last=True)
        self.is_undecided = True

    def meet(self, owner: WorkerLease) -> None:
        """Note the owner of a claim. Until its heart has beaten again, it may be gone."""
        first = self._first_beats.setdefault(f"{owner.id}/{owner.nonce}", owner.beat)
        self.is_undecided |= owner.beat == first


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
        self._environment = environment
        self._run = run
        self._everything = everything
        self._num_workers = num_workers
        self._todo = deque(own)
        self._refs = ChainMap({ref.name: ref for ref in self._todo})
        """Those of the whole job, too, once this worker goes round it. They are not copied: there may be very many."""
        self._settled = set(done)
        """Chunks that need no more work of this worker: they are done, or it has failed with them for good."""
        self._busy: set[str] = set()
        self._has_given_up = False
        self._own_left = self._refs.keys() - self._settled
        self._found: deque[ChunkRef] = deque()
        """Chunks that the last look has found free."""
        self._found_at = float("-inf")
        self._circle: _Circle | None = None
        """Made when it is first needed: a job may have very many chunks."""
        self._looking: Future[Survey] | None = None
        self._due = float("-inf")

    # -- what happened to a chunk

    def started(self, name: str) -> None:
        """Note that this worker opens a chunk or works on it."""
        self._busy.add(name)

    def ended(self, name: str, *, is_done: bool = False, is_given_up: bool = False) -> None:
        """Note that this worker does not work on a chunk any more: it is done, by any worker, or another one has it.

        A chunk with which this worker has failed for good is given up: the worker neither tries it again nor waits for
        others, since it ends with an error anyhow.
        """
        self._busy.discard(name)
        if is_done or is_given_up:
            self._settle({name})
        self._has_given_up |= is_given_up

    # -- what is next

    def next(self) -> ChunkRef | None:
        """Take the next chunk to open. None if none is known now; `is_finished` says whether more may follow."""
        while self._todo or self._found:
            ref = (self._todo or self._found).popleft()
            if ref.name not in self._settled and ref.name not in self._busy:
                return ref
        return None

    @property
    def waiting_for(self) -> set[str]:
        """Names of own chunks that are neither done nor being worked on by this worker, for example held by others."""
        return set() if self._has_given_up else self._own_left - self._busy

    @property
    def is_finished(self) -> bool:
        """Whether no chunk is left to open or to wait for. Chunks that are open here do not count."""
        return self._is_idle and self._is_over and not self.waiting_for

    @property
    def _is_over(self) -> bool:
        return self._circle is not None and self._circle.is_over

    @property
    def _is_idle(self) -> bool:
        return not (self._todo or self._found or self._looking)

    def tick(self, *, is_hungry: bool) -> set[str]:
        """Take in the last look at the run. If `is_hungry` and no chunk is left to open, begin the next one if due.

        Returns the chunks that the look has found done, by any worker.
        """
        done: set[str] = set()
        now = self._environment.clock.monotonic()
        if now - self._found_at >= _FRESH_SECONDS:
            self._found.clear()  # found again if nobody has taken them meanwhile
        if self._looking is not None and self._looking.done():
            looking, self._looking = self._looking, None
            try:
                done = self._take_in(looking.result())
            except StorageError as error:
                logger.warning("cannot look at the other workers (%s); trying again", error)
                assert self._circle is not None
                self._circle.failed()
                self._pause(0, has_to_wait=True)
        is_due = now >= self._due
        if is_hungry and is_due and self._is_idle and (self.waiting_for or not self._is_over):
            self._look()
        return done

    def _look(self) -> None:
        worker_id, store, claims = self._run.lease.worker_id, self._run.store, self._run.claims
        if self._circle is None:
            if self._everything is not None:
                self._refs = ChainMap(*self._refs.maps, self._everything())
            self._circle = _Circle(self._refs, worker_id)
        key, block = self._circle.next_block(self._settled, self._busy)
        if not block:
            self._end_round()
            return
        # Each worker prefers its own chunks, then other claims than others do, and the same ones at each look.
        own = self._own_left
        block.sort(key=lambda name: (name not in own, zlib.crc32(f"{worker_id} {name}".encode())))
        wanted = {name: self._refs[name].generation for name in block}
        whole = {name: self._refs[name].generation for name in self._circle.names[key]}
        look = partial(look_at_block, store, claims, wanted, own.intersection(block))
        most = max(_FEWEST_CLAIMS, min(MOST_SAMPLED, _CLAIMS_OF_ALL // self._num_workers))
        look = partial(look, key=key, block=whole, most_claims=most)
        self._looking = self._environment.background.submit(look)

    def _take_in(self, survey: Survey) -> set[str]:
        assert self._circle is not None
        circle = self._circle
        done = survey.done | (circle.read_notes(survey.complete) - self._own_left)
        self._settle(done)
        free, lapsed = survey.unclaimed, survey.lapsed
        # Each worker shuffles the unclaimed chunks in its own order, so that they seldom compete for one claim.
        random.Random(f"{self._run.lease.worker_id}{len(free)}").shuffle(free)
        self._found.extend(self._refs[n] for n in free + lapsed if n not in self._settled)
        self._found_at = self._environment.clock.monotonic()
        for owner in survey.owners:
            circle.meet(owner)
        self._pause(survey.num_reads, has_to_wait=bool(lapsed and not free))
        if self._found:
            circle.found()
        elif not circle.num_left:
            self._end_round()
        return done

    def _settle(self, names: set[str]) -> None:
        self._settled |= names
        self._own_left -= names

    def _end_round(self) -> None:
        """End a round over all blocks in which there was nothing to take. The next one begins after a pause."""
        assert self._circle is not None
        self._circle.end_round()
        self._pause(0, has_to_wait=True)

    def _pause(self, num_reads: int, *, has_to_wait: bool) -> None:
        """Decide when to look at a block again.

        Args:
            num_reads: Number of requests of the last look.
            has_to_wait: Whether a new round begins, or only claims of workers that are gone were found.
        """
        seconds = num_reads * self._num_workers / _READS_PER_SECOND
        least = _NEXT_BLOCK_SECONDS
        if has_to_wait:
            lease_seconds = self._run.lease.lease_seconds
            least = min(lease_seconds / HEARTBEATS_PER_LEASE, _LONGEST_ROUND_SECONDS)
        self._due = self._environment.clock.monotonic() + max(seconds, least)
