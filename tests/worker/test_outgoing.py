"""A checkpoint of many bytes is several segments, each of whole records, and all of them are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import Interrupted, StorageError, Superseded
from batchinfer.ledger.checkpoints import FinishedRow, Segments
from batchinfer.ledger.chunk_files import LocalChunk
from batchinfer.ledger.claims import Lease
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.storage.memory import MemoryStore
from batchinfer.worker import outgoing
from batchinfer.worker.background import Priority
from batchinfer.worker.chunk import OpenChunk, Spool
from batchinfer.worker.config import Environment, Limits, RunAccess
from batchinfer.worker.outgoing import Checkpointer
from fakes import FakeClock, worker_record
from simulation.scenario import simulate
from simulation.scheduler import Process
from simulation.stage import Stage, when

SEGMENT_BYTES = 600
"""Of some 200 bytes a record."""
PROMPTS = [[f"say {index}" for index in range(40)]]
FOUR_UPLOADS = Limits(max_publishing=4)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(outgoing, "_SEGMENT_BYTES", SEGMENT_BYTES)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def records(stage: Stage) -> list[list[bytes]]:
    """The records of every segment, without its first line."""
    found = stage.objects(layout.CHECKPOINTS).values()
    return [data.splitlines(keepends=True)[1:] for data in found]


def test_one_checkpoint_is_written_in_parts_until_nothing_is_left_of_it() -> None:
    dies = when(lambda method, key: method == "put_object" and "outputs/" in key, "dies_before")
    with Stage(PROMPTS) as stage:
        # The only other checkpoint would be of the complete chunk, which is published instead.
        ending = stage.run(hook=dies, checkpoint_rows=20, checkpoint_seconds=1000.0)
        assert ending.is_killed
        parts = records(stage)
        assert 20 <= sum(len(part) for part in parts) < 40
        assert len(parts) > 3
        for part in parts:
            assert part
            assert sum(len(record) for record in part[:-1]) < SEGMENT_BYTES
        again = stage.run()
        assert again.result["rows_resumed"] == sum(len(part) for part in parts)


def test_a_worker_that_is_stopped_writes_all_parts() -> None:
    with Stage(PROMPTS) as stage:
        stage.engine.max_in_flight = 2
        stage.scheduler.after(8.0, lambda: stage.stop(Interrupted("stopped")))
        stage.run(checkpoint_seconds=1000.0)
        assert len(records(stage)) > 3
        assert sum(len(part) for part in records(stage)) == len(stage.finished) > 5
        assert len({record for part in records(stage) for record in part}) == len(stage.finished)


class SlowUploads:
    """A hook for `Stage.run`: every upload of an output takes a minute."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.process: Process | None = None

    def __call__(self, _number: int, method: str, key: str, process: Process) -> float | None:
        if method == "put_object" and layout.OUTPUTS in key:
            self.keys.append(key)
            self.process = process
            return 60.0
        return None

    def kill(self) -> None:
        """Kill the worker."""
        assert self.process is not None
        self.process.kill()


def test_a_worker_that_is_stopped_while_all_threads_upload_outputs_saves_its_rows() -> None:
    """Its checkpoints waited behind the uploads until the grace period was over."""
    uploads = SlowUploads()
    with Stage([["say", "say"]] * 12) as stage:
        stage.scheduler.after(12.0, lambda: stage.stop(Interrupted("stopped")))
        stage.run(hook=uploads, limits=FOUR_UPLOADS, checkpoint_seconds=1000.0)
        assert len(uploads.keys) == 4
        assert len(stage.finished) > 2 * len(uploads.keys)
        assert len({each for part in records(stage) for each in part}) == len(stage.finished)


def test_a_checkpoint_does_not_wait_for_uploads() -> None:
    uploads = SlowUploads()
    finished: list[int] = []
    with Stage([["say"]] * 8 + [[f"say {index}" for index in range(1000)]]) as stage:
        stage.engine.max_in_flight = 4
        stage.scheduler.after(20.0, lambda: finished.append(len(stage.finished)))
        stage.scheduler.after(30.0, uploads.kill)
        assert stage.run(hook=uploads, limits=FOUR_UPLOADS, checkpoint_seconds=5.0).is_killed
        assert len(uploads.keys) == 4
        assert finished[0] > 20
        assert sum(len(part) for part in records(stage)) >= finished[0] - len(uploads.keys)


def test_chunks_that_wait_for_their_upload_are_checkpointed_and_further_ones_opened() -> None:
    """A complete chunk that waited for a thread got no checkpoint, and no thread was left to open a chunk."""
    uploads = SlowUploads()
    with Stage([["say"]] * 20) as stage:
        stage.scheduler.after(50.0, uploads.kill)
        assert stage.run(hook=uploads, limits=FOUR_UPLOADS, checkpoint_seconds=5.0).is_killed
        assert len(stage.finished) == 20
        assert sum(len(part) for part in records(stage)) == 20 - len(uploads.keys)
        assert len(uploads.keys) == 4


class Hands:
    """A background whose work is done when the test says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def submit(self, work: Callable[[], Any], *, priority: Priority) -> _Done:
        self.work.append(work)
        return _Done(work)


class _Done:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def is_done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._work()


def open_chunk(folder: Path, name: str, num_rows: int, num_done: int | None = None) -> OpenChunk:
    chunk = OpenChunk(
        ChunkRef(name=name, root="job", key=f"{name}.jsonl"),
        LocalChunk(folder / name, num_rows, "a" * 64),
        Spool(folder / f"{name}.spool", num_rows),
        num_rows=num_rows,
        started=0.0,
    )
    finish(chunk, *range(num_rows if num_done is None else num_done))
    return chunk


def finish(chunk: OpenChunk, *lines: int) -> None:
    output = codec.raw(b'{"text":"%s"}' % (b"x" * 150))
    chunk.finish([FinishedRow(line=line, ok=True, output=output) for line in lines])


def checkpointer_with(
    hands: Hands,
    store: MemoryStore,
    clock: FakeClock | None = None,
    require: Callable[[], None] = lambda: None,
) -> Checkpointer:
    lease = SimpleNamespace(epoch=1, writer="w0", require=require)
    run = cast("RunAccess", SimpleNamespace(store=store, lease=lease))
    environment = SimpleNamespace(background=hands, clock=clock or FakeClock())
    return Checkpointer(run, cast("Environment", environment), lambda _chunk: True)


def test_a_chunk_that_is_asked_for_while_its_parts_are_written_is_written_once(
    tmp_path: Path,
) -> None:
    """With all hands busy it waited to be written, then its first part came back: it was begun twice."""
    hands = Hands()
    store = MemoryStore("memory://asked-twice")
    checkpointer = checkpointer_with(hands, store)
    checkpointer.join("f")
    long = open_chunk(tmp_path, "long", 12)
    chunks = [long, *(open_chunk(tmp_path, f"short-{index}", 1) for index in range(3))]
    checkpointer.ask(chunks)
    assert len(hands.work) == 4
    checkpointer.ask([long])
    checkpointer.tick()
    assert len(hands.work) == 5
    while checkpointer.is_busy:
        checkpointer.tick()
    assert long.checkpointed_bytes == long.spool.size_bytes
    found = Segments(
        store, "long", chunk_sha256="a" * 64, fingerprint=lambda: "f", first_row=0, num_lines=12
    )
    assert [row.line for row in found.rows()] == list(range(12))
    assert found.keys == long.segment_keys
    assert len(found.keys) == 4
    for chunk in chunks:
        chunk.close()


def test_a_checkpoint_that_is_due_while_deaths_are_noted_follows_at_once(tmp_path: Path) -> None:
    """It was left out, and so the chunk's rows waited for another interval."""
    checkpointer = checkpointer_with(Hands(), MemoryStore("memory://deaths"))
    checkpointer.join("f")
    chunk = open_chunk(tmp_path, "chunk", 4, 3)
    checkpointer.note_deaths(chunk, [3], 1)
    checkpointer.ask([chunk])
    assert not chunk.checkpointed_bytes
    checkpointer.tick()
    checkpointer.tick()
    assert chunk.checkpointed_bytes == chunk.spool.size_bytes
    assert not checkpointer.is_busy
    chunk.close()


def test_no_segment_is_begun_between_two_heartbeats_that_are_far_apart(tmp_path: Path) -> None:
    """Each segment was refused at once and tried again at once, with a line in the log each time."""
    hands, clock = Hands(), FakeClock()
    store = MemoryStore("memory://lapsed")
    lease = Lease(store, "w0", clock, lease_seconds=6.0, nonce="n")
    lease.take(lambda _: worker_record())
    checkpointer = checkpointer_with(hands, store, clock, lease.require)
    clock.sleep(7.0)
    chunk = open_chunk(tmp_path, "chunk", 3)
    for _ in range(10):
        checkpointer.ask([chunk])
        checkpointer.tick()
    assert not hands.work
    assert checkpointer.is_busy
    lease.renew(worker_record())
    checkpointer.tick()
    checkpointer.tick()
    assert chunk.checkpointed_bytes == chunk.spool.size_bytes
    assert not checkpointer.is_busy
    chunk.close()


def test_a_superseded_start_does_not_wait_for_a_heartbeat(tmp_path: Path) -> None:
    hands = Hands()

    def require() -> None:
        raise Superseded("by a newer start")

    checkpointer = checkpointer_with(hands, MemoryStore("memory://superseded"), None, require)
    chunk = open_chunk(tmp_path, "chunk", 3)
    checkpointer.ask([chunk])
    with pytest.raises(Superseded):
        checkpointer.tick()
    chunk.close()


def test_a_segment_that_failed_is_tried_again_after_a_pause_and_keeps_no_other_waiting(
    tmp_path: Path,
) -> None:
    """Of a full disk, which refuses at once. While a worker saved its rows, it tried again as fast as it could."""
    hands, clock = Hands(), FakeClock()
    store = MemoryStore("memory://full")
    full = ["bad"]
    create = store.create

    def refuse(key: str, data: bytes) -> str:
        if any(name in key for name in full):
            raise StorageError("no space left on device")
        return create(key, data)

    store.create = refuse  # type: ignore[method-assign]
    checkpointer = checkpointer_with(hands, store, clock)
    bad, good = (open_chunk(tmp_path, name, 3) for name in ("bad", "good"))
    for _ in range(10):
        checkpointer.ask([bad])
        checkpointer.tick()
    assert len(hands.work) == 1
    checkpointer.ask([good])
    checkpointer.tick()
    assert good.checkpointed_bytes
    full.clear()
    clock.sleep(1.0)
    while checkpointer.is_busy:
        checkpointer.tick()
    assert bad.checkpointed_bytes == bad.spool.size_bytes
    bad.close()
    good.close()


def test_chunks_that_wait_for_their_checkpoint_come_before_those_asked_for_later(
    tmp_path: Path,
) -> None:
    """The newest came first, and each round forgot the rest: the oldest, of the slowest rows, were never written."""
    hands = Hands()
    store = MemoryStore("memory://in-turn")
    checkpointer = checkpointer_with(hands, store)
    chunks = [open_chunk(tmp_path, f"chunk-{index}", 2, num_done=1) for index in range(9)]
    checkpointer.ask(chunks)
    for chunk in chunks[:4]:
        finish(chunk, 1)
    checkpointer.ask(chunks)
    while checkpointer.is_busy:
        checkpointer.tick()
    order = [info.key.split("/")[1] for info in store.list(layout.CHECKPOINTS)]
    assert sorted(order) == sorted([c.name for c in chunks] + [c.name for c in chunks[:4]])
    assert [chunk.num_segments_begun for chunk in chunks] == [2] * 4 + [1] * 5
    for chunk in chunks:
        chunk.close()


class Lines(logging.Handler):
    """Keeps what is said. Not caplog: what reaches that depends on how tests before have set up logging."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def test_the_log_counts_the_rows_that_the_segment_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were finished while a segment was on its way were counted as safe."""
    logging.disable(logging.NOTSET)
    lines, log = Lines(), logging.getLogger("batchinfer.worker.outgoing")
    monkeypatch.setattr(log, "handlers", [lines])
    monkeypatch.setattr(log, "level", logging.DEBUG)
    checkpointer = checkpointer_with(Hands(), MemoryStore("memory://counted"))
    chunk = open_chunk(tmp_path, "part", 8, num_done=2)
    checkpointer.ask([chunk])
    finish(chunk, 2, 3, 4)
    checkpointer.tick()
    checkpointer.note_deaths(chunk, [5, 6], 9)
    checkpointer.tick()
    chunk.close()
    assert lines.found == [
        "part: checkpoint of 2 rows, 2 of 8 done",
        "checkpoints: 2 more rows are safe",
        "part: noted 2 rows in flight when the engine died",
    ]


def test_checkpoints_are_logged_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable(logging.NOTSET)
    lines, log = Lines(), logging.getLogger("batchinfer.worker.outgoing")
    monkeypatch.setattr(log, "handlers", [lines])
    monkeypatch.setattr(log, "level", logging.INFO)
    clock = FakeClock()
    checkpointer = checkpointer_with(Hands(), MemoryStore("memory://minutes"), clock)
    chunk = open_chunk(tmp_path, "part", 8, num_done=1)
    for line in range(1, 7):
        checkpointer.ask([chunk])
        checkpointer.tick()
        finish(chunk, line)
        clock.seconds += 25
    checkpointer.log_written()
    checkpointer.log_written()
    chunk.close()
    assert lines.found == [f"checkpoints: {rows} more rows are safe" for rows in (1, 3, 2)]


def test_promises_hold_with_small_segments() -> None:
    assert not any(simulate(seed).violation for seed in range(920_000, 920_025))
