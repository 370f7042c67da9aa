"""Two workers do one chunk, each from its own end, and take up what the other has done."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.records import Claim
from batchinfer.engines.config import EngineConfig
from batchinfer.ledger.checkpoints import FinishedRow, encode_rows, write_segment
from batchinfer.ledger.chunk_files import LocalChunk
from batchinfer.ledger.claims import Claims, Held, Lease
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Publisher, build_output
from batchinfer.storage import Store
from batchinfer.storage.memory import MemoryStore
from batchinfer.storage.scratch import Scratch
from batchinfer.worker import opening
from batchinfer.worker.chunk import OpenChunk, Spool
from batchinfer.worker.config import RunAccess
from batchinfer.worker.open_chunks import Demand, OpenChunks
from batchinfer.worker.opening import AlreadyDone, FoundRows, HeldByOther, Opener
from batchinfer.worker.sharing import Found, Sharing
from fakes import FakeClock, marker_record, nonces, worker_record
from simulation.machine import EngineTraits
from simulation.stage import Stage, Started

NAME = "part-00000"
NUM_ROWS = 50
LEASE_SECONDS = 120.0
names = itertools.count()


def finished(*lines: int) -> list[FinishedRow]:
    return [FinishedRow(line=n, ok=True, output=codec.raw(b'{"_row":%d}' % n)) for n in lines]


# --------------------------------------------------------------------------- rows from the last to the first


@pytest.fixture
def helped(tmp_path: Path) -> Iterator[OpenChunk]:
    path = tmp_path / "chunk"
    path.write_text("".join(f"line {n} {'x' * (n % 7)}\n" for n in range(NUM_ROWS)))
    ref = ChunkRef(name=NAME, root="job", key="chunk.jsonl")
    chunk = OpenChunk(
        ref,
        LocalChunk(path, NUM_ROWS, "", path.stat().st_size),
        Spool(tmp_path / "spool", NUM_ROWS),
        num_rows=NUM_ROWS,
        started=0.0,
        is_help=True,
    )
    yield chunk
    chunk.close()


@pytest.mark.parametrize(("max_rows", "max_bytes"), [(7, 1000), (16, 1000), (50, 30), (1, 1)])
def test_a_helper_begins_with_the_last_row_and_gets_each_row_once(
    helped: OpenChunk, max_rows: int, max_bytes: int
) -> None:
    lines: list[int] = []
    while helped.num_unread:
        rows = helped.read_rows(max_rows, max_bytes)
        assert 0 < len(rows) <= max_rows
        assert all(row.data.startswith(f"line {row.line_index} ".encode()) for row in rows)
        lines += [row.line_index for row in rows]
    assert lines == list(reversed(range(NUM_ROWS)))
    assert not helped.read_rows(max_rows, max_bytes)


def test_a_helper_leaves_out_rows_that_were_taken_up_before_or_since(helped: OpenChunk) -> None:
    helped.adopt(finished(0, 48, 49))
    assert helped.num_unread == 47
    assert [row.line_index for row in helped.read_rows(2, 1000)] == [47, 46]
    helped.adopt(finished(1, 45, 47))  # 47 is in the engine
    assert (helped.num_unread, helped.num_left) == (43, 44)
    left = list(itertools.chain.from_iterable(iter(lambda: helped.read_rows(9, 1000), [])))
    assert [row.line_index for row in left] == list(range(44, 1, -1))
    assert helped.num_unread == 0
    assert not helped.finish(finished(47))


# --------------------------------------------------------------------------- what others have done of an open chunk


class Run:
    """A run of one chunk, and the parts of one worker, `w0`, that open it."""

    def __init__(self, tmp_path: Path, num_rows: int = 10) -> None:
        number = next(names)
        self.clock = FakeClock()
        self.store: Store = MemoryStore(f"memory://sharing-{number}")
        job = MemoryStore(f"memory://sharing-job-{number}")
        data = b"{}\n" * num_rows
        job.create(layout.chunk_file(NAME, "none"), data)
        self.sha256 = codec.sha256(data)
        self.ref = ChunkRef(
            NAME, job.url, layout.chunk_file(NAME, "none"), rows=num_rows, sha256=self.sha256
        )
        self.lease = Lease(self.store, "w0", self.clock, lease_seconds=LEASE_SECONDS, nonce="mine")
        self.lease.take(lambda _: worker_record())
        self.scratch = Scratch(tmp_path / "scratch")
        self.publisher = Publisher(
            self.store, is_safe=True, nonce="mine", require_lease=lambda: None
        )
        claims = Claims(self.store, self.lease, self.clock, new_nonce=nonces())
        access = SimpleNamespace(
            store=self.store,
            lease=self.lease,
            claims=claims,
            publisher=self.publisher,
            scratch=self.scratch,
        )
        self.opener = Opener(cast("RunAccess", access), {job.url: job}, {NAME})
        self.opener.join("f")

    def write(self, writer: str, number: int, *lines: int, fingerprint: str = "f") -> str:
        key = layout.segment_key(NAME, 1, writer, number, len(lines))
        rows = encode_rows(finished(*lines))[0]
        write_segment(self.store, key, rows, chunk_sha256=self.sha256, fingerprint=fingerprint)
        return key

    def begin(self, worker_id: str) -> Held:
        """Let a worker be alive. Returns its claim of the chunk."""
        record = worker_record(id=worker_id, epoch=1, nonce="n", lease_seconds=LEASE_SECONDS)
        self.store.create(layout.worker_key(worker_id), codec.encode(record))
        return Held(Claim(worker=worker_id, epoch=1, nonce="n"), "")

    def open(self) -> OpenChunk:
        chunk = self.opener.open(self.ref, now=0.0)
        assert isinstance(chunk, OpenChunk)
        return chunk

    def segments(self) -> list[str]:
        return [info.key for info in self.store.list(layout.CHECKPOINTS)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.scratch.close()


def test_a_look_finds_what_others_have_written_since_the_opening(run: Run) -> None:
    run.write("w1.n", 1, 9)
    chunk = run.open()
    run.write("w1.n", 1 + 1, 8, 7)
    run.write("w0.mine", 1, 0)
    run.write("w2.n", 1, 3, fingerprint="another")
    found = run.opener.look_at_others(chunk, chunk.segment_keys)
    assert isinstance(found, FoundRows)
    assert [row.line for row in found.rows] == [8, 7]
    assert len(found.keys) == 2
    chunk.segment_keys.extend(found.keys)
    assert run.opener.look_at_others(chunk, chunk.segment_keys) == FoundRows([], [], False)
    chunk.close()


def test_a_look_reads_so_many_bytes_and_the_next_one_the_rest(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_MOST_FOUND_BYTES", 500)
    chunk = run.open()
    keys = [run.write("w1.n", number, number) for number in (1, 2, 3, 4)]
    lines: list[int] = []
    looks = 0
    while len(chunk.segment_keys) < len(keys):
        found = run.opener.look_at_others(chunk, chunk.segment_keys)
        assert isinstance(found, FoundRows)
        assert found.is_cut == (len(chunk.segment_keys) + len(found.keys) < len(keys))
        lines += [row.line for row in found.rows]
        chunk.segment_keys.extend(found.keys)
        looks += 1
    assert lines == [1, 2, 3, 4]
    assert 1 < looks < 4
    chunk.close()


@pytest.mark.parametrize("is_published", [True, False])
def test_segments_that_are_gone_mean_done_if_there_is_a_marker(
    run: Run, is_published: bool
) -> None:
    chunk = run.open()
    key = run.write("w0.mine", 1, 0)
    chunk.note_segment(key, 0)
    if is_published:
        built = build_output(run.scratch.new_path("output"), iter([b"{}"] * 10))
        marker = marker_record(chunk=run.ref.key, chunk_sha256=run.sha256, rows_ok=10)
        run.publisher.publish(built, marker, chunk=NAME, leftovers=[key])
        assert isinstance(run.opener.look_at_others(chunk, [key]), AlreadyDone)
    else:
        run.store.delete([key])
        assert run.opener.look_at_others(chunk, [key]) == FoundRows([], [], False)
    chunk.close()


# --------------------------------------------------------------------------- who helps


@pytest.mark.parametrize(("rate", "is_left"), [(0.1, True), (0.0, False), (0.02, False)])
def test_a_chunk_that_its_owner_will_soon_have_finished_is_left_alone(
    run: Run, rate: float, is_left: bool
) -> None:
    """Four rows take the owner 40 s at the first rate. It looks for help every 30 s."""
    owner = run.begin("w1")
    key = run.write("w1.n", 1, 0, 1, 2, 3, 4, 5)
    opened = run.opener.open_backup(run.ref, owner, now=0.0, owner_rate=rate)
    if is_left:
        assert opened == HeldByOther(owner)
        assert run.segments() == [key]  # the announcement is gone
    else:
        assert isinstance(opened, OpenChunk)
        assert [row.line_index for row in opened.read_rows(10, 1000)] == [9, 8, 7, 6]
        assert len(run.segments()) == 2
        opened.close()


def test_so_many_helpers_of_one_chunk_and_no_more(run: Run) -> None:
    owner = run.begin("w1")
    for worker_id in ("w2", "w3"):
        run.begin(worker_id)
        run.write(f"{worker_id}.n", 0)
    for others in (0, 1):
        opened = run.opener.open_backup(run.ref, owner, now=0.0, other_helpers=others)
        assert isinstance(opened, HeldByOther)
        assert opened.held.claim.worker in ("w2", "w3")
    opened = run.opener.open_backup(run.ref, owner, now=0.0, other_helpers=2)
    assert isinstance(opened, OpenChunk)
    opened.close()


# --------------------------------------------------------------------------- whole workers


def start_owner_and_helper(stage: Stage) -> tuple[Started, Started]:
    """Let a slow worker begin the only chunk, and a fast one come when the slow one has written checkpoints."""
    stage.engine = EngineTraits(max_in_flight=1, row_seconds=4.0, step_seconds=0.5)
    owner = stage.start("w0", checkpoint_seconds=2.0)
    stage.scheduler.run(30.0, lambda: bool(stage.objects(layout.CHECKPOINTS)))
    stage.engine = EngineTraits(max_in_flight=1, row_seconds=1.0, step_seconds=0.2)
    helper = stage.start("w1", checkpoint_seconds=2.0)
    return owner, helper


def test_owner_and_helper_meet_and_few_rows_are_done_twice() -> None:
    with Stage([["say"] * 60]) as stage:
        owner, helper = start_owner_and_helper(stage)
        stage.scheduler.run(1000.0, lambda: owner.is_over and helper.is_over)
        assert [each.endings[0].error for each in (owner, helper)] == [None, None]
        times = Counter(stage.finished)
        assert len(times) == 60
        assert sum(times.values()) < 60 + 12
        results = [each.endings[0].result for each in (owner, helper)]
        assert sorted(result["chunks_done"] for result in results) == [0, 1]
        for result in results:
            if result["chunks_done"]:
                assert result["request_count"] + result["rows_resumed"] == 60
        output = stage.objects(layout.OUTPUTS)[layout.OUTPUTS + f"{NAME}.jsonl"]
        assert output.count(b"\n") == 60
        assert not stage.objects(layout.CHECKPOINTS)
        for each in (owner, helper):
            each.process.kill()


def test_rows_are_taken_in_only_while_no_job_reads_rows() -> None:
    """The job changes states of rows in a thread of its own: a row would count as finished twice."""
    is_building = False
    seen: Counter[bool] = Counter()
    real_tick, real_share = OpenChunks.tick, Sharing.tick

    def tick(self: OpenChunks, demand: Demand) -> list[str]:
        nonlocal is_building
        is_building = demand.is_building
        seen[is_building] += 1
        return real_tick(self, demand)

    def share(self: Sharing, chunks: Any) -> Found:
        assert not is_building
        return real_share(self, chunks)

    with (
        Stage([["say"] * 60]) as stage,
        mock.patch.object(OpenChunks, "tick", tick),
        mock.patch.object(Sharing, "tick", share),
    ):
        assert stage.run().is_success
    assert seen[True]
    assert seen[False]


def test_a_worker_claims_no_second_chunk_while_the_rows_of_the_first_suffice() -> None:
    """It claimed one in the moment in which the first was open. Others cannot take what a slow worker has claimed."""
    with Stage([["say"] * 40] * 3) as stage:
        stage.engine = EngineTraits(max_in_flight=4, row_seconds=2.0)
        worker = stage.start(engine=EngineConfig(engine="sim", model="sim", max_num_seqs=4))
        stage.scheduler.run(600.0, lambda: len(stage.finished) >= 8)
        assert len(stage.finished) == 8
        assert len(stage.objects(layout.CLAIMS)) == 1
        worker.process.kill()
