"""Which chunk a worker opens next, and what its looks at the other workers of a large run cost."""

import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import StorageError
from batchinfer.core.records import Claim
from batchinfer.ledger import survey
from batchinfer.ledger.claims import Claims, Lease
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import MOST_SAMPLED
from batchinfer.worker.ring import Ring
from counting_store import CountingStore
from fakes import Done, FakeClock, MemoryStore, lease_record, marker_record
from making import overwrite, put_raw
from simulation.stage import Stage

LEASE_SECONDS = 120.0
NUMBERS = itertools.count()
"""Numbers the runs."""


class Idle:
    """A worker that has no chunks of its own left, in a run over `num_chunks` chunks."""

    def __init__(
        self,
        num_chunks: int,
        *,
        num_workers: int = 2,
        beside: "Idle | None" = None,
        num_own: int = 0,
        generation: int = 0,
    ) -> None:
        self.clock = FakeClock()
        self.memory = beside.memory if beside else MemoryStore(f"memory://ring-{next(NUMBERS)}")
        self.store = CountingStore(self.memory)
        self.names = [f"part-{index:06d}" for index in range(num_chunks)]
        make_ref = partial(ChunkRef, root="memory://job", sha256="s", generation=generation)
        refs = {each: make_ref(each, key=each) for each in self.names}
        lease = Lease(self.store, "w0", self.clock, lease_seconds=LEASE_SECONDS, nonce="n")
        claims = Claims(self.store, lease, self.clock)
        self.ring = Ring(
            [refs[each] for each in self.names[:num_own]],
            environment=SimpleNamespace(clock=self.clock, background=SimpleNamespace(submit=Done)),
            run=SimpleNamespace(store=self.store, lease=lease, claims=claims),
            everything=lambda: refs,
            num_workers=num_workers,
            done=(),
        )

    def finish(self, *names: str) -> None:
        """Put the output and the marker of these chunks."""
        for name in names:
            self.memory.create(layout.output_key(layout.output_file(name, "n")), b"{}\n")
            marker = marker_record(chunk=name, output=layout.output_file(name, "n"))
            self.memory.create(layout.marker_key(name), codec.encode(marker))

    def claim(self, name: str, worker_id: str) -> None:
        """Let a live worker hold a chunk."""
        claim = Claim(worker=worker_id, nonce="n")
        self.memory.create(layout.claim_key(name), codec.encode(claim))
        self.beat(worker_id, 1)

    def beat(self, worker_id: str, number: int) -> None:
        """Let another worker's heart beat."""
        record = lease_record(id=worker_id, nonce="n", lease_seconds=LEASE_SECONDS, beat=number)
        overwrite(self.memory, layout.worker_key(worker_id), codec.encode(record))

    def tick(self, *, seconds: float = 0.0) -> None:
        """Let time pass, begin a look if one is due, and take its result in."""
        self.clock.sleep(seconds)
        self.ring.tick(is_hungry=True)
        self.ring.tick(is_hungry=False)

    def find(self, most_ticks: int, *, seconds: float = 1.0) -> str | None:
        """Ask for a chunk until there is one, every second by default. Return its name."""
        for _ in range(most_ticks):
            found = self.ring.next()
            if found is not None or self.ring.is_finished:
                return found and found.name
            self.tick(seconds=seconds)
        raise AssertionError(f"no end after {most_ticks} ticks")


def test_the_last_chunk_is_found_and_each_page_of_markers_is_listed_about_once():
    idle = Idle(5000)
    idle.finish(*idle.names[:3210], *idle.names[3211:])
    idle.tick()
    assert idle.store.requests["list"] <= 5  # notes, workers and a block of the run, not all of it
    assert idle.find(most_ticks=10) == idle.names[3210]
    idle.ring.started(idle.names[3210])
    idle.ring.ended(idle.names[3210], is_done=True)
    assert idle.find(most_ticks=10) is None
    assert idle.store.requests["list"] <= 21


@pytest.mark.parametrize(
    ("num_workers", "looks", "most"), [(100, 29, 720), (1000, 10, 160), (4000, 3, 48)]
)
def test_all_workers_of_a_job_together_read_no_more_than_a_store_takes(
    num_workers, looks, most, monkeypatch
):
    """A thousand idle ones that look at another block each second are more than a bucket takes."""
    monkeypatch.setattr(survey, "_MOST_NEIGHBOURS", 10)
    idle = Idle(300, num_workers=num_workers)
    for name in idle.names:
        idle.claim(name, "busy")
    for _ in range(30):
        assert idle.ring.next() is None
        idle.tick(seconds=1.0)
    assert idle.store.requests.total() <= most
    assert idle.store.requests["list"] >= 3 * looks, "free chunks were found minutes too late"


@pytest.mark.parametrize(
    ("num_workers", "num_neighbours", "most"), [(1000, 100, 55), (3000, 10, 130), (1000, 10, 55)]
)
def test_an_idle_worker_of_a_large_job_soon_knows_that_it_is_finished_if_nobody_else_says_so(
    num_workers, num_neighbours, most, monkeypatch
):
    """It waited five seconds after each of a hundred finished blocks."""
    monkeypatch.setattr(survey, "_MOST_NEIGHBOURS", num_neighbours)
    idle = Idle(100 * num_neighbours, num_workers=num_workers)
    idle.finish(*idle.names)
    began = idle.clock.monotonic()
    assert idle.find(most_ticks=8 * most, seconds=0.125) is None
    assert idle.clock.monotonic() - began > 0.8 * most


@pytest.mark.parametrize("generation", [0, 2])
def test_what_one_idle_worker_has_seen_done_the_others_know_at_once(generation):
    """Each of 3,000 looked at every block of 150,000 chunks, for three minutes after the last one was done."""
    first = Idle(5000)
    first.finish(*first.names)
    assert first.find(most_ticks=10) is None
    second = Idle(5000, beside=first, generation=generation)
    found = second.find(most_ticks=3)
    assert bool(found) == bool(generation)
    assert generation or second.store.requests.total() == 1


@pytest.mark.parametrize("harm", ["removed", "damaged"])
def test_a_worker_does_not_believe_a_note_of_its_own_chunks(harm):
    """Another does the chunk again, and may be killed; who then had ended with success was nobody's help."""
    first = Idle(20)
    first.finish(*first.names)
    assert first.find(most_ticks=10) is None
    second = Idle(20, beside=first, num_own=1)
    key = layout.marker_key(first.names[0])
    first.memory.delete([key])
    if harm == "damaged":
        put_raw(first.memory, key, 600 * b"x")
    first.claim(first.names[0], "busy")
    assert second.ring.next().name == first.names[0]
    second.ring.ended(first.names[0])  # it is held
    for beat in range(2, 6):
        first.beat("busy", beat)
        second.tick(seconds=30.0)
        assert not second.ring.is_finished
    second.tick(seconds=LEASE_SECONDS)
    assert second.find(most_ticks=30, seconds=10.0) == first.names[0]


def test_what_was_removed_since_is_not_said_to_be_done():
    """`clean --redo` removes markers, and the notes, while workers run."""
    first = Idle(1000)
    first.finish(*first.names[1:])
    first.claim(first.names[0], "busy")
    first.tick()
    first.memory.delete([layout.marker_key(first.names[1])])
    first.finish(first.names[0])
    for _ in range(3):
        first.tick(seconds=60.0)
    assert not list(first.memory.list(layout.COMPLETE))


@pytest.mark.parametrize("left", ["undone", "open here", "given up"])
def test_no_worker_says_of_a_block_that_it_is_done_before_all_of_it_is(left):
    first = Idle(1000)
    first.finish(*first.names[1:])
    if left == "undone":
        first.claim(first.names[0], "busy")
    else:
        first.ring.started(first.names[0])
    if left == "given up":
        first.ring.ended(first.names[0], is_given_up=True)
    for _ in range(3):
        first.tick(seconds=60.0)
    assert not list(first.memory.list(layout.COMPLETE))


def test_a_store_that_is_away_is_asked_again_after_a_pause_and_before_the_worker_ends():
    idle = Idle(900)
    idle.finish(*idle.names[1:])
    with mock.patch.object(idle.memory, "list", side_effect=StorageError("away")):
        for _ in range(20):
            idle.tick(seconds=0.2)
        assert idle.store.requests["list"] == 1
        idle.tick(seconds=11.0)
        assert idle.store.requests["list"] == 2
    assert idle.find(most_ticks=60) == idle.names[0]


def test_of_many_claims_some_are_read_and_the_same_ones_are_watched_until_they_beat():
    idle = Idle(500)
    for index, name in enumerate(idle.names):
        idle.claim(name, f"other-{index}")
    idle.tick()
    # Two reads a claim. With fewer, a small fleet's survivor finds the chunks of those that are gone too late.
    assert idle.store.requests["get"] == 2 * 16
    assert not idle.ring.is_finished  # none of them has been seen to beat
    for index, _ in enumerate(idle.names):
        idle.beat(f"other-{index}", 7)
    idle.tick(seconds=11.0)
    assert idle.store.requests["get"] == 4 * 16
    assert idle.ring.is_finished  # those that it watches have


def test_a_worker_waits_for_one_owner_who_may_be_gone_among_others_who_live():
    """Its chunk would have waited for somebody to start another worker."""
    idle = Idle(10)
    for name in idle.names:
        idle.claim(name, f"other-{name}")
    idle.tick()
    for name in idle.names[1:]:
        idle.beat(f"other-{name}", 7)
    idle.tick(seconds=11.0)
    assert not idle.ring.is_finished


def test_a_look_counts_all_that_it_asks_for():
    """Pauses follow from it: a thousand idle workers asked for more than they counted."""
    idle = Idle(1000)
    idle.finish(*idle.names[:970])
    for name in idle.names[970:]:
        idle.claim(name, f"other-{name}")
    look = survey.look_at_neighbours
    seen = look(idle.store, idle.ring._run.claims, dict.fromkeys(idle.names, 0))
    assert len(seen.owners) == MOST_SAMPLED
    assert seen.num_reads == idle.store.requests.total()


def test_a_lease_that_ran_out_is_known_at_the_first_look_at_its_chunk():
    """Among many blocks of chunks, minutes pass between two looks at one of them."""
    idle = Idle(2)
    for name in idle.names:
        idle.claim(name, f"owner-{name}")
    look = partial(survey.look_at_neighbours, idle.store, idle.ring._run.claims)
    assert not look({idle.names[0]: 0}).lapsed
    idle.clock.sleep(LEASE_SECONDS)
    assert look({idle.names[1]: 0}).lapsed == [idle.names[1]]


def test_the_lease_of_a_worker_that_is_gone_runs_out_while_the_engine_loads():
    """A machine that was lost came back under another name: its GPU was idle for a whole lease more."""
    with Stage([["a"], ["b"]]) as stage:
        stage.let_another_hold("part-00000", "part-00001", beats=1)
        stage.put(layout.segment_key("part-00000", "w9.n", 0), b"")
        stage.engine.load_seconds = 60.0  # some 100 in this scene
        assert stage.run(lease_seconds=120.0).is_success
        assert stage.scheduler.now < 150.0
