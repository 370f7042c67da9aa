"""A store that fails for a while, in scenes over the simulated store: what a worker gives up, and when."""

from typing import Any

import pytest

from batchinfer.core.errors import LeaseLapsed, StorageError
from batchinfer.ledger.publishing import publish
from batchinfer.worker import chunk_life
from batchinfer.worker.worker_config import Limits
from simulation.oracle import JOB
from simulation.stage import Stage, when

DAMAGED = JOB + "chunks/part-00000.jsonl"
IMPATIENT = Limits(storage_attempts=2, storage_retry_seconds=0.5)


@pytest.mark.parametrize("part", ["outputs/part-00000", "chunks/part-00000"])
@pytest.mark.parametrize("until_seconds", [20.0, float("inf")])
def test_a_chunk_is_not_given_up_while_there_are_rows_to_generate(part, until_seconds):
    """It was after a few tries, and the worker ended with 34 although the store had come back long before its end."""
    with Stage([["short"], [f"say {index}" for index in range(60)]]) as stage:
        stage.engine.max_in_flight = 2
        away = when(lambda _, key: part in key and stage.scheduler.now < until_seconds, "refused")
        ending = stage.run(hook=away, limits=IMPATIENT)
        assert stage.scheduler.now > 20.0
        if until_seconds == 20.0:
            assert ending.is_success
        else:
            assert isinstance(ending.error, StorageError)
            assert ending.error.exit_status == 34
            assert len(stage.objects("outputs/")) == 2  # of the other chunk


def test_a_chunk_that_arrived_damaged_is_fetched_once_more():
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
        assert [b'"worker":""' in claim for claim in stage.objects("claims/").values()] == [True]
        assert len(stage.objects("outputs/")) == 2  # of the other chunk


def test_late_heartbeats_during_uploads_give_no_chunk_up(monkeypatch):
    lapses = iter(range(20))

    def publish_late(*given: Any, **named: Any) -> Any:
        if next(lapses, None) is not None:
            raise LeaseLapsed("late")
        return publish(*given, **named)

    monkeypatch.setattr(chunk_life, "publish", publish_late)
    with Stage([["a"]]) as stage:
        assert stage.run(within_seconds=6000.0, limits=IMPATIENT).is_success


def test_who_has_given_a_chunk_up_waits_for_none_that_others_hold():
    """It ends with an error anyhow, and its start again looks for them."""
    with Stage([["mine"], ["theirs"]]) as stage:
        stage.let_another_hold("part-00001")
        away = when(lambda _, key: "outputs/part-00000" in key, "refused")
        ending = stage.run(hook=away, limits=IMPATIENT)
        assert isinstance(ending.error, StorageError)
        assert "part-00000" in ending.error.message
        assert not stage.objects("outputs/")
