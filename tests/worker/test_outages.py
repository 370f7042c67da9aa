"""A store that fails for a while, in scenes over the simulated store: what a worker gives up, and when."""

from __future__ import annotations

import pytest

from batchinfer.core.errors import StorageError
from batchinfer.worker.worker_config import Limits
from simulation.oracle import JOB
from simulation.stage import Stage
from simulation.storage import Hook

DAMAGED = JOB + "chunks/part-00000.jsonl"
IMPATIENT = Limits(storage_attempts=2, storage_retry_seconds=0.5)


def refuse(stage: Stage, part: str, *, until_seconds: float) -> Hook:
    """Requests for these keys fail until then."""

    def hook(_number: int, _method: str, key: str, _process: object) -> str | None:
        return "refused" if part in key and stage.scheduler.now < until_seconds else None

    return hook


@pytest.mark.parametrize("key", ["outputs/part-00000", "chunks/part-00000"])
def test_a_chunk_is_not_given_up_while_there_are_rows_to_generate(key: str) -> None:
    """It was after a few tries, and the worker ended with 34 although the store had come back long before its end."""
    with Stage([["short"], [f"say {index}" for index in range(60)]]) as stage:
        stage.engine.max_in_flight = 2
        hook = refuse(stage, key, until_seconds=20.0)
        assert stage.run(hook=hook, limits=IMPATIENT).is_success
        assert stage.scheduler.now > 20.0


@pytest.mark.parametrize("key", ["outputs/part-00000", "chunks/part-00000"])
def test_a_chunk_is_given_up_once_nothing_else_is_left(key: str) -> None:
    with Stage([["short"], [f"say {index}" for index in range(60)]]) as stage:
        stage.engine.max_in_flight = 2
        hook = refuse(stage, key, until_seconds=float("inf"))
        ending = stage.run(hook=hook, limits=IMPATIENT)
        assert isinstance(ending.error, StorageError)
        assert ending.error.exit_status == 34
        assert len(stage.objects("outputs/")) == 2  # of the other chunk


def test_a_chunk_that_arrived_damaged_is_fetched_once_more() -> None:
    """A damaged transfer ended the worker with 34; a chunk that is damaged in the store still does."""
    with Stage([["say a"], ["say b"]]) as stage:
        good = stage.server.objects[DAMAGED].data
        stage.server.put(DAMAGED, b"{}\n")
        stage.scheduler.after(4.0, lambda: stage.server.put(DAMAGED, good))
        assert stage.run(limits=Limits(storage_retry_seconds=8.0)).is_success
    with Stage([["say a"], ["say b"]]) as stage:
        stage.server.put(DAMAGED, b"{}\n")
        ending = stage.run()
        assert isinstance(ending.error, StorageError)
        assert ending.error.exit_status == 34
        assert "restore it" in ending.error.message, "what to do with it"
        assert "part-00000" in ending.error.message
        assert "sha256" in ending.error.message
        assert len(stage.objects("outputs/")) == 2  # of the other chunk
