"""Two workers do one chunk, each from its own end, and take up what the other has done."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists, StorageError
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
from batchinfer.worker.outgoing import PublishQueue
from batchinfer.worker.sharing import Found, Sharing
from fakes import Done, FakeClock, marker_record, worker_record
from simulation.machine import EngineTraits
from simulation.oracle import JOB
from simulation.stage import Stage, Started, when

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


def output_of(stage: Stage) -> bytes:
    """The only output there is."""
    (data,) = (data for key, data in stage.objects().items() if layout.chunk_of_output(key))
    return data


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
        self.publisher = Publisher(self.store, nonce="mine", require_lease=lambda: None)
        claims = Claims(self.store, self.lease, self.clock)
        access = SimpleNamespace(
            store=self.store,
            lease=self.lease,
            claims=claims,
            publisher=self.publisher,
            scratch=self.scratch,
        )
        self.opener = Opener(cast("RunAccess", access), {job.url: job}, {NAME})
        self.opener.join("f")
        environment = SimpleNamespace(clock=self.clock, background=SimpleNamespace(submit=Done))
        self.sharing = Sharing(cast("RunAccess", access), cast("Any", environment), self.opener)

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

    def publish(self, *leftovers: str) -> None:
        built = build_output(self.scratch.new_path("output"), iter([b"{}"] * 10))
        marker = marker_record(chunk=self.ref.key, chunk_sha256=self.sha256, rows_ok=10)
        self.publisher.publish(built, marker, chunk=NAME, leftovers=list(leftovers))

    def look(self, chunk: OpenChunk) -> Found:
        """Let the time until the next look pass, and take in what it finds."""
        self.sharing.tick({NAME: chunk})
        self.clock.sleep(LEASE_SECONDS)
        self.sharing.tick({NAME: chunk})
        return self.sharing.tick({NAME: chunk})

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
    monkeypatch.setattr(opening, "_MOST_FOUND_BYTES", 700)
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
        run.publish(key)
        assert isinstance(run.opener.look_at_others(chunk, [key]), AlreadyDone)
    else:
        run.store.delete([key])
        assert run.opener.look_at_others(chunk, [key]) == FoundRows([], [], False)
    chunk.close()


def test_a_repair_takes_over_no_error_rows_of_others(run: Run) -> None:
    """It does the error rows again; those of others come from the same first try."""
    failed = FinishedRow(line=2, ok=False, output=codec.raw(b"{}"), code="bad")
    chunk = run.open()
    for generation, expected in ((0, [1, 2]), (1, [1])):
        chunk.generation = generation
        key = layout.segment_key(NAME, 1, f"w{generation + 1}.n", 1, 2)
        rows = encode_rows([*finished(1), failed])[0]
        write_segment(run.store, key, rows, chunk_sha256=run.sha256, fingerprint="f")
        found = run.opener.look_at_others(chunk, [])
        assert isinstance(found, FoundRows)
        assert [row.line for row in found.rows] == expected
        run.store.delete([key])
    chunk.close()


# --------------------------------------------------------------------------- what becomes of it


def test_rows_of_others_are_taken_up_and_each_segment_is_read_once(run: Run) -> None:
    chunk = run.open()
    key = run.write("w1.n", 1, 8, 9)
    assert run.look(chunk) == Found([], [], [])
    assert (chunk.num_left, chunk.segment_keys) == (8, [key])
    run.store.delete([key])  # a second look at it would fail
    run.write("w1.n", 2, 7)
    run.look(chunk)
    assert chunk.num_left == 7
    chunk.close()


def test_a_worker_whose_chunk_is_shared_saves_its_rows_for_the_other_one(run: Run) -> None:
    chunk = run.open()
    run.write("w1.n", 1, 9)
    run.look(chunk)
    run.clock.sleep(LEASE_SECONDS)
    assert run.sharing.tick({NAME: chunk}).to_checkpoint == [chunk]
    chunk.close()


def test_a_chunk_is_complete_with_the_last_row_of_another_worker(run: Run) -> None:
    chunk = run.open()
    run.write("w1.n", 1, *range(10))
    assert run.look(chunk).complete == [NAME]
    assert not chunk.num_left
    assert run.look(chunk) == Found([], [], [])
    chunk.close()


def test_a_chunk_that_another_worker_has_published_is_named(run: Run) -> None:
    chunk = run.open()
    key = run.write("w1.n", 1, 9)
    run.look(chunk)
    run.publish(key)
    assert run.look(chunk).published == [NAME]
    chunk.close()


def test_what_a_look_finds_of_a_chunk_closed_meanwhile_is_dropped(run: Run) -> None:
    """The chunk may be open again, with other rows in its spool; a closed one's spool is gone."""
    first = run.open()
    run.write("w1.n", 1, 9)
    run.sharing.tick({NAME: first})
    run.clock.sleep(LEASE_SECONDS)
    run.sharing.tick({NAME: first})
    first.close()
    run.store.delete([layout.claim_key(NAME)])
    again = run.open()
    num_left = again.num_left
    assert run.sharing.tick({NAME: again}) == Found([], [], [])
    assert (first.num_left, again.num_left) == (10, num_left)
    again.close()


def test_a_bucket_that_is_away_during_a_look_ends_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = run.open()
    run.write("w1.n", 1, 9)
    with monkeypatch.context() as patch:
        patch.setattr(run.opener, "look_at_others", mock.Mock(side_effect=StorageError("away")))
        assert run.look(chunk) == Found([], [], [])
    run.look(chunk)
    assert chunk.num_left == 9
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


def test_a_chunk_that_is_published_while_help_is_announced_is_done(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to the announcement is lost, and the owner has removed it by the time it is sent again."""
    owner = run.begin("w1")

    def create(key: str, data: bytes) -> str:
        monkeypatch.undo()
        run.store.create(key, data)
        run.publish(key)
        raise AlreadyExists(f"{key}: exists with other bytes")

    monkeypatch.setattr(run.store, "create", create)
    opened = run.opener.open_backup(run.ref, owner, now=0.0)
    assert isinstance(opened, AlreadyDone)
    assert run.segments() == []


# --------------------------------------------------------------------------- whole workers


def start_owner_and_helper(stage: Stage, checkpoint_seconds: float) -> tuple[Started, Started]:
    """Let a slow worker begin the only chunk, and a fast one come after the slow one's first row."""
    stage.engine = EngineTraits(max_in_flight=1, row_seconds=4.0, step_seconds=0.5)
    owner = stage.start("w0", checkpoint_seconds=checkpoint_seconds)
    stage.scheduler.run(30.0, lambda: bool(stage.finished))
    stage.engine = EngineTraits(max_in_flight=1, row_seconds=1.0, step_seconds=0.2)
    helper = stage.start("w1", checkpoint_seconds=checkpoint_seconds)
    return owner, helper


@pytest.mark.parametrize("checkpoint_seconds", [2.0, 500.0])
def test_owner_and_helper_meet_and_few_rows_are_done_twice(checkpoint_seconds: float) -> None:
    """An owner that would save its rows too late for its helper saves them as soon as it sees the helper."""
    with Stage([["say"] * 60]) as stage:
        owner, helper = start_owner_and_helper(stage, checkpoint_seconds)
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
        output = output_of(stage)
        assert output.count(b"\n") == 60
        # One may have been on its way while the other worker published the chunk.
        assert len(stage.objects(layout.CHECKPOINTS)) <= 1
        for each in (owner, helper):
            each.process.kill()


@pytest.mark.parametrize("row_seconds", [10_000.0, 15.0])
def test_a_worker_publishes_a_chunk_whose_last_rows_another_one_has_saved(
    row_seconds: float,
) -> None:
    """All rows are in its own engine, too, and are finished there never, or while it publishes the chunk."""
    queued: list[str] = []
    real_add = PublishQueue.add

    def add(self: PublishQueue, chunk: OpenChunk) -> None:
        queued.append(chunk.name)
        real_add(self, chunk)

    with Stage([["say"] * 8]) as stage, mock.patch.object(PublishQueue, "add", add):
        stage.engine = EngineTraits(max_in_flight=8, row_seconds=row_seconds)
        stage.network.hook = when(
            lambda method, key: (
                method == "put_object" and layout.OUTPUTS in key and key.endswith(".jsonl")
            ),
            30.0,
        )
        worker = stage.start("w0")
        stage.scheduler.run(60.0, lambda: len(stage.taken) == 8)
        chunk = stage.server.objects[JOB + layout.chunk_file(NAME, "none")].data
        text = b'{"_row":%d,"_id":"%d","text":"yes"}'
        rows = [FinishedRow(line=n, ok=True, output=codec.raw(text % (n, n))) for n in range(8)]
        store = MemoryStore("memory://sharing-by-hand")
        fingerprint = json.loads(stage.objects()["run.json"])["fingerprint"]
        key = layout.segment_key(NAME, 1, "w9.n", 1, 8)
        write_segment(
            store,
            key,
            encode_rows(rows)[0],
            chunk_sha256=codec.sha256(chunk),
            fingerprint=fingerprint,
        )
        stage.put(key, store.get(key)[0])
        stage.scheduler.run(200.0, lambda: worker.is_over)
        assert worker.endings[0].error is None
        assert worker.endings[0].result["chunks_done"] == 1
        assert output_of(stage).count(b"yes") == 8
        assert not stage.objects(layout.CHECKPOINTS)
        assert queued == [NAME]
        assert bool(stage.finished) == (row_seconds == 15.0)
        worker.process.kill()


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
        worker = stage.start(
            engine=EngineConfig(engine="sim", model="sim", server_args=["--max-num-seqs", "4"])
        )
        stage.scheduler.run(600.0, lambda: len(stage.finished) >= 8)
        assert len(stage.finished) == 8
        assert len(stage.objects(layout.CLAIMS)) == 1
        worker.process.kill()
