"""The chunks that a worker has at work."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from batchinfer.core.counts import Counts
from batchinfer.core.errors import Interrupted
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.worker import chunk_life
from batchinfer.worker.background import Background, Stopper
from batchinfer.worker.chunk import Saved
from batchinfer.worker.chunk_life import Life
from batchinfer.worker.chunk_opening import open_chunk
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Limits
from fakes import FakeClock
from simulation.stage import Stage


def chunks_of(clock: FakeClock, *, ring: Any = None, **outside: Any) -> OpenChunks:
    """The chunks of a worker, of which only so much is there."""
    environment = SimpleNamespace(clock=clock, **{"background": Background()} | outside)
    config = SimpleNamespace(limits=Limits())
    return OpenChunks(environment, None, ring, Telemetry("w", clock, host={}), config)


def begin(chunks: OpenChunks) -> Life:
    """Begin the life of a chunk, without its thread."""
    life = Life(ChunkRef("c", "", "c"), chunks._hall, threading.Event())
    chunks._lives["c"] = life, Future()
    return life


def test_a_chunk_that_was_just_opened_counts_as_work_until_its_rows_do():
    """Its thread opens it between two looks of the main loop, which took the work for done and waited for ever."""
    chunks = chunks_of(FakeClock(), ring=SimpleNamespace(is_finished=True))
    assert not chunks.may_grow
    life = begin(chunks)
    assert chunks.may_grow
    opened = SimpleNamespace(num_unread=2)
    life.chunk = opened
    assert chunks.may_grow
    chunks.open["c"] = opened
    assert not chunks.may_grow
    assert chunks.num_unread == 2


class Ticking(FakeClock):
    """A clock that goes on with every look, as a real one does."""

    def monotonic(self) -> float:
        self.seconds += 0.01
        return self.seconds


def test_a_worker_that_is_stopped_ends_after_its_grace_though_nothing_can_be_saved():
    """With a full disk or a bucket that is away it went on for ever, and so did the machine's cost."""
    clock, turns = Ticking(), 0
    background = Background()
    background.wait = lambda _seconds: None
    stopper = Stopper(clock, grace_seconds=1)
    chunks = chunks_of(clock, background=background, stopper=stopper)
    begin(chunks)
    stopper.request(Interrupted("stopped by SIGTERM"))

    def on_turn() -> None:
        nonlocal turns
        turns += 1
        assert turns < 10_000

    chunks.end(stopper.seconds_left, on_turn)
    assert stopper.is_set()
    assert clock.monotonic() >= chunks._hall.deadline()


def test_a_worker_whose_first_answers_take_long_leaves_other_chunks_to_others(clock):
    """It opened up to four at once, as if each of its rows took a second, and was the last to end, by minutes."""
    ring = Mock(tick=Mock(return_value=set()), next=Mock(return_value=None))
    chunks = chunks_of(clock, ring=ring)
    size = SimpleNamespace(size_bytes=0)
    chunk = SimpleNamespace(num_unread=500, local=size, spool=size)
    chunks.open["c"] = chunk
    chunks.telemetry._running_since = clock.monotonic()
    chunks.tick(0, 256)
    chunk.num_unread = 300
    chunks.tick(0, 256)
    clock.seconds += 100
    chunks.tick(0, 256)
    assert [each.kwargs["is_hungry"] for each in ring.tick.mock_calls] == [False, True, False]


def test_a_death_is_noted_on_storage_with_the_number_of_rows_of_all_chunks():
    """A later start would take a row for alone in the engine that was only alone of its chunk, and blame it."""
    chunks = chunks_of(FakeClock())
    life = begin(chunks)
    life.chunk = chunks.open["c"] = Mock(saved=Saved())
    chunks.note_death([("c", 3), ("closed", 0)])
    assert list(life._notes) == [(1, [3], 2)]
    life.chunk.note_deaths.assert_called_once_with([3], 2)


def test_several_chunks_of_a_repair_are_opened_at_once(clock):
    """Each has few rows left: one at a time, the engine was idle."""
    refs = [ChunkRef(f"c{n}", "", "c", rows=1000, generation=1, base=0) for n in range(9)]
    ring = Mock(tick=Mock(return_value=set()), next=Mock(side_effect=refs))
    chunks = chunks_of(clock, ring=ring, background=Mock(submit=lambda _work: Future()))
    chunks.tick(0, 256)
    assert len(chunks._lives) == chunks._limits.max_openings > 1


def test_answers_take_room_on_the_disk_as_chunks_do(clock):
    ref = ChunkRef("c", "", "c", rows=9, rows_to_do=9)
    for num_bytes, num_lives in ((1 << 50, 0), (0, 1)):
        ring = Mock(tick=Mock(return_value=set()), next=Mock(side_effect=[ref, None]))
        chunks = chunks_of(clock, ring=ring, background=Mock(submit=lambda _work: Future()))
        sizes = {"local": Mock(size_bytes=0), "spool": Mock(size_bytes=num_bytes)}
        chunks.open["d"] = SimpleNamespace(num_unread=0, **sizes)
        chunks.tick(0, 256)
        assert len(chunks._lives) == num_lives


def test_one_slow_opening_lets_the_next_chunks_be_opened_sooner_at_once(clock):
    """The engine would be idle until the mean had risen, too."""
    chunks = chunks_of(clock)
    for seconds, expected in ((20.0, 20.0), (0.0, 14.0)):
        life = begin(chunks)
        clock.seconds += seconds
        life.chunk = SimpleNamespace(name="c", num_rows=1, counts=Counts())
        chunks._collect()
        assert chunks._opening_seconds == expected
        chunks.open.clear()


def test_an_idle_engine_has_rows_as_soon_as_their_chunk_is_open(monkeypatch):
    """The loop, which looks once a second for an idle engine, looks when a chunk is open."""
    opened, taken = [], []
    with Stage([["a"]]) as stage:

        def open_it(*arguments, **named):
            chunk = open_chunk(*arguments, **named)
            opened.append(stage.scheduler.now)
            return chunk

        monkeypatch.setattr(chunk_life, "open_chunk", open_it)
        monkeypatch.setattr(stage, "took", lambda *_call: taken.append(stage.scheduler.now))
        assert stage.run().is_success
    assert taken[0] - opened[0] < 0.3
