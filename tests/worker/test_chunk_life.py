"""A checkpoint of many bytes is several segments, each of whole records, and all of them are written."""

import pytest

from batchinfer.core import layout
from batchinfer.core.errors import Interrupted, StorageError
from batchinfer.worker import chunk, chunk_life
from batchinfer.worker.worker_config import Limits
from simulation.scenario import simulate
from simulation.stage import Stage

SEGMENT_BYTES = 600
"""Of some 200 bytes a record."""
PROMPTS = [[f"say {index}" for index in range(40)]]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(chunk_life, "_SEGMENT_BYTES", SEGMENT_BYTES)
    monkeypatch.setattr(chunk, "_BLOCK_BYTES", 50)


def records(stage: Stage) -> list[list[bytes]]:
    """The records of every segment, without its first line."""
    found = stage.objects(layout.CHECKPOINTS).values()
    return [data.splitlines(keepends=True)[1:] for data in found]


def test_a_worker_that_is_stopped_writes_all_parts_before_its_last_rows_come_and_after_them():
    """The machine may be gone before they come (P5)."""
    at_the_stop: list[int] = []
    with Stage(PROMPTS, seed=1) as stage:
        stage.engine.max_in_flight, stage.engine.row_seconds = 2, 2.0
        stage.scheduler.after(18.5, lambda: stage.stop(Interrupted("stopped")))
        stage.scheduler.after(19.5, lambda: at_the_stop.extend(map(len, records(stage))))
        stage.run(checkpoint_seconds=1000.0)
        assert len(at_the_stop) > 2
        assert sum(at_the_stop) == len(stage.finished) - 2
        assert sum(len(part) for part in records(stage)) == len(stage.finished)
        assert len({record for part in records(stage) for record in part}) == len(stage.finished)
        assert all(sum(map(len, part[:-1])) < SEGMENT_BYTES for part in records(stage))


def test_chunks_that_wait_for_their_upload_are_checkpointed_and_further_ones_opened(monkeypatch):
    """A complete chunk that waited for a thread got no checkpoint, and no thread was left to open a chunk."""
    uploads: list[str] = []
    tried: set[str] = set()
    write = chunk_life._write

    def hook(_number, method, key, _process):
        if method != "put_object" or layout.OUTPUTS not in key:
            return None
        uploads.append(key)
        return 60.0

    def write_at_second_try(chunk, *rest):
        if chunk.name not in tried:
            tried.add(chunk.name)
            raise StorageError("away for a moment")
        write(chunk, *rest)

    monkeypatch.setattr(chunk_life, "_write", write_at_second_try)
    with Stage([["say"]] * 20) as stage:
        stage.scheduler.after(50.0, stage.kill)
        limits = Limits(max_publishing=4)
        assert stage.run(hook=hook, limits=limits, checkpoint_seconds=5.0).is_killed
        assert len(stage.finished) == 20
        assert sum(len(part) for part in records(stage)) == 20 - len(uploads)
        assert len(uploads) == 4


def test_promises_hold_with_small_segments():
    assert not any(simulate(seed).violation for seed in range(920_000, 920_025))
