"""Which chunk a worker opens next, and what its looks at the other workers of a large run cost."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import StorageError
from batchinfer.core.records import Claim
from batchinfer.ledger import survey
from batchinfer.ledger.claims import Claims, Lease
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import MOST_SAMPLED
from batchinfer.storage import ObjectInfo
from batchinfer.storage.memory import MemoryStore
from batchinfer.worker import schedule
from batchinfer.worker.config import Environment, RunAccess
from batchinfer.worker.schedule import Candidate, Schedule
from counting_store import CountingStore
from fakes import Done, FakeClock, marker_record, worker_record

LEASE_SECONDS = 120.0
LONG = 61.0
"""Seconds after which what a look found is forgotten."""


class Helper:
    """A worker that has no chunks of its own left, in a run over `num_chunks` chunks.

    With `is_alone` all chunks are its own, and it helps nobody.
    """

    def __init__(
        self,
        name: str,
        num_chunks: int,
        worker_id: str = "w0",
        *,
        is_alone: bool = False,
        num_workers: int = 2,
    ) -> None:
        self.clock = FakeClock()
        self.memory = MemoryStore(f"memory://schedule-{name}")
        self.store = CountingStore(self.memory)
        self.names = [layout.chunk_name(index, 1_000_000) for index in range(num_chunks)]
        refs = {
            each: ChunkRef(each, "memory://job", layout.chunk_file(each, "none"), sha256="s")
            for each in self.names
        }
        lease = Lease(self.store, worker_id, self.clock, lease_seconds=LEASE_SECONDS, nonce="n")
        background = SimpleNamespace(submit=Done)
        self.schedule = Schedule(
            list(refs.values()) if is_alone else [],
            environment=cast(
                "Environment", SimpleNamespace(clock=self.clock, background=background)
            ),
            run=cast(
                "RunAccess",
                SimpleNamespace(
                    store=self.store,
                    lease=lease,
                    claims=Claims(self.store, lease, self.clock),
                ),
            ),
            everything=None if is_alone else lambda: refs,
            num_workers=num_workers,
            earlier_rate=0.0,
            done=(),
        )

    def finish(self, *names: str) -> None:
        """Put the output and the marker of these chunks."""
        for name in names:
            self.memory.create(layout.output_key(layout.output_file(name, "n")), b"{}\n")
            marker = marker_record(chunk=name, output=layout.output_file(name, "n"))
            self.memory.create(layout.marker_key(name), codec.encode(marker))

    def claim(self, name: str, worker_id: str, **fields: Any) -> None:
        """Let a live worker hold a chunk. `fields` are those of its record."""
        claim = Claim(worker=worker_id, epoch=1, nonce="n")
        self.memory.create(layout.claim_key(name), codec.encode(claim))
        record = worker_record(
            id=worker_id, epoch=1, nonce="n", lease_seconds=LEASE_SECONDS, **fields
        )
        self.memory.create(layout.worker_key(worker_id), codec.encode(record))

    def tick(self, *open_names: str, seconds: float = 0.0) -> list[str]:
        """Let time pass, begin a look if one is due, and take its result in."""
        self.clock.sleep(seconds)
        self.schedule.tick(open_names, 1.0)
        return self.schedule.tick(open_names, 1.0)

    def find(self, most_ticks: int) -> Candidate | None:
        """Ask for a chunk until there is one, every second."""
        for _ in range(most_ticks):
            found = self.schedule.next()
            if found is not None or self.schedule.is_finished:
                return found
            self.tick(seconds=1.0)
        raise AssertionError(f"no end after {most_ticks} s")


def test_a_look_lists_a_part_of_a_large_run_and_not_all_of_it() -> None:
    helper = Helper("part", 5000)
    helper.finish(*helper.names[100:])  # 10 pages of markers and outputs
    helper.schedule.next()
    helper.tick()
    assert helper.store.requests["list"] <= 3


def test_the_last_chunk_is_found_wherever_it_is_and_whoever_looks() -> None:
    for worker_id in ("w0", "w1", "w2"):
        helper = Helper(f"last-{worker_id}", 5000, worker_id)
        helper.finish(*helper.names[:3210], *helper.names[3211:])
        found = helper.find(most_ticks=10)
        assert found is not None
        assert found.ref.name == helper.names[3210]
        helper.schedule.started(found.ref.name)
        helper.schedule.finished(found.ref.name)
        assert helper.find(most_ticks=10) is None
        assert helper.store.requests["list"] <= 16  # each page of markers was listed about once


@pytest.mark.parametrize(
    ("num_workers", "least", "most"), [(100, 290, 300), (1000, 50, 70), (4000, 10, 20)]
)
def test_all_workers_of_a_job_together_read_2000_claims_a_second_at_most(
    num_workers: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand idle ones that look at another part each second are more than a bucket takes."""
    monkeypatch.setattr(schedule, "neighbours_of", lambda name: name[:-1])
    helper = Helper(f"idle-{num_workers}", 300, num_workers=num_workers)
    for name in helper.names:
        helper.claim(name, "busy", rows_done=10, busy_seconds=1.0)
    with mock.patch.object(survey, "_read_claim", wraps=survey._read_claim) as read:
        for _ in range(30):
            assert helper.schedule.next() is None
            helper.tick(seconds=1.0)
    assert least <= read.call_count <= most


@pytest.mark.parametrize(("num_workers", "most"), [(1000, 110), (3000, 310)])
def test_idle_workers_of_a_large_job_soon_know_that_it_is_finished(
    num_workers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited five seconds after each of a hundred finished parts: nine minutes of a thousand idle machines."""
    monkeypatch.setattr(schedule, "neighbours_of", lambda name: name[:-1])
    helper = Helper(f"finished-{num_workers}", 1000, num_workers=num_workers)
    helper.finish(*helper.names)
    began = helper.clock.monotonic()
    assert helper.find(most_ticks=most) is None
    assert helper.clock.monotonic() - began > 0.8 * most


def test_a_chunk_that_is_given_up_during_a_look_is_not_tried_again() -> None:
    """The look's result names it, as unclaimed or with a claim that has lapsed. The worker crashed over that."""
    for is_alone in (True, False):
        helper = Helper(f"given-up-{is_alone}", 1, is_alone=is_alone)
        [name] = helper.names
        if is_alone:
            helper.schedule.next()
            helper.schedule.started(name)
            helper.schedule.held_by_other(name)
        helper.schedule.next()
        helper.schedule.tick((), 1.0)  # begins a look
        helper.schedule.gave_up(name)
        helper.schedule.tick((), 1.0)  # takes its result in
        assert helper.schedule.next() is None


def test_a_chunk_that_two_looks_have_found_is_not_tried_again_once_it_is_given_up() -> None:
    helper = Helper("found-twice", 1, is_alone=True)
    [name] = helper.names
    assert helper.schedule.next() is not None
    helper.schedule.started(name)
    helper.schedule.held_by_other(name)
    helper.tick(seconds=11.0)
    helper.tick(seconds=11.0)
    assert len(helper.schedule._found) == 2
    assert helper.schedule.next() is not None
    helper.schedule.started(name)
    helper.schedule.gave_up(name)
    assert helper.schedule.next() is None


def test_a_part_that_could_not_be_listed_is_looked_at_again_before_the_worker_ends() -> None:
    helper = Helper("fails", 3000)
    helper.finish(*helper.names[1:])
    failures = 2
    listed = helper.memory.list

    def fail(prefix: str = "") -> Iterator[ObjectInfo]:
        nonlocal failures
        if failures and prefix.endswith("part-000"):
            failures -= 1
            raise StorageError("away")
        return listed(prefix)

    helper.memory.list = fail  # type: ignore[method-assign]
    found = helper.find(most_ticks=60)
    assert found is not None
    assert found.ref.name == helper.names[0]


def test_a_look_that_fails_is_not_repeated_at_once() -> None:
    """The first one had no pause after it, so a worker asked a store that was away as fast as it could."""
    helper = Helper("away", 3000)

    def fail(prefix: str = "") -> Iterator[ObjectInfo]:
        raise StorageError("away")

    helper.memory.list = fail  # type: ignore[method-assign]
    for _ in range(20):
        helper.schedule.next()
        helper.tick(seconds=0.2)
    assert helper.store.requests["list"] == 1
    helper.tick(seconds=11.0)
    assert helper.store.requests["list"] == 2


def test_chunks_that_a_look_found_long_ago_are_not_tried() -> None:
    helper = Helper("stale", 50)
    helper.tick()
    assert helper.schedule.next() is not None
    helper.finish(*helper.names)
    helper.clock.sleep(LONG)
    assert helper.schedule.next() is None
    helper.tick()
    assert helper.find(most_ticks=30) is None


def test_a_helper_notices_that_its_open_chunk_was_published_while_it_has_others_to_open() -> None:
    helper = Helper("published", 50)
    helper.tick()
    found = helper.schedule.next()
    assert found is not None
    name = found.ref.name
    helper.schedule.started(name)
    helper.finish(name)
    assert helper.tick(name, seconds=11.0) == [name]


def test_a_worker_with_enough_rows_looks_at_no_part_of_a_large_run() -> None:
    helper = Helper("busy", 5000)
    for _ in range(20):
        helper.tick("part-000000", seconds=11.0)
    assert helper.store.requests["list"] == 0


def test_of_many_claims_a_helper_reads_some_and_watches_the_same_ones() -> None:
    helper = Helper("sample", 500)
    for index, name in enumerate(helper.names):
        helper.claim(name, f"other-{index}")
    helper.schedule.next()
    helper.tick()
    assert helper.store.requests["get"] == 2 * MOST_SAMPLED
    assert not helper.schedule.is_finished  # none of them has been seen to beat
    for index, _ in enumerate(helper.names):
        record = worker_record(
            id=f"other-{index}", epoch=1, nonce="n", lease_seconds=LEASE_SECONDS, beat=7
        )
        key = layout.worker_key(record.id)
        helper.memory.replace(key, codec.encode(record), helper.memory.get(key).etag)
    helper.tick(seconds=11.0)
    assert helper.store.requests["get"] == 4 * MOST_SAMPLED
    assert helper.schedule.is_finished  # those that it watches have


def test_a_chunk_left_to_its_helper_is_tried_with_one_helper_more_after_each_lease() -> None:
    helper = Helper("left", 1)
    [name] = helper.names
    helper.claim(name, "slow", rows_done=10, busy_seconds=100.0)
    key = layout.worker_key("slow")
    for num_times in range(3):
        found = helper.find(most_ticks=30)
        assert found is not None
        assert (found.owner_rate, found.other_helpers) == (0.1, num_times)
        helper.schedule.started(name)
        helper.schedule.held_by_other(name)
        for beat in range(11):
            helper.tick(seconds=10.0)
            assert helper.schedule.next() is None
            rows = 10 + 20 * num_times + beat
            record = worker_record(
                id="slow", epoch=1, beat=rows, rows_done=rows, busy_seconds=10.0 * rows
            )
            helper.memory.replace(key, codec.encode(record), helper.memory.get(key).etag)
        helper.tick(seconds=10.0)
