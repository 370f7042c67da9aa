"""Bugs that the simulation found, each as the shortest scene that shows it."""

import json

import pytest

import making
from batchinfer.core import layout
from batchinfer.core.errors import EngineDied, Interrupted, NoProgress, StorageError
from batchinfer.worker.worker_config import Limits
from simulation.scheduler import Process
from simulation.stage import Stage, when


def saved_lines(stage: Stage) -> set[int]:
    """Lines that checkpoint segments hold a finished row of."""
    lines = set()
    for data in stage.objects(layout.CHECKPOINTS).values():
        records = [json.loads(line) for line in data.splitlines()]
        lines |= {record["line"] for record in records if "ok" in record}
    return lines


@pytest.mark.parametrize(
    ("outage_seconds", "lease_seconds", "stop_seconds", "least", "most"),
    [
        (50.0, 12.0, None, 50, 600),
        (1e6, 3.0, None, 25, 60),
        (1e6, 12.0, 30.0, 0, 50),
    ],
    ids=["takes its time", "not for ever", "ends within the grace of a stop"],
)
def test_rows_were_not_given_up_after_the_grace_when_the_engine_had_died(
    outage_seconds, lease_seconds, stop_seconds, least, most, monkeypatch
):
    """Nobody waits for a worker whose engine died, so the bucket may be away for some time after the death."""
    died: list[float] = []

    def hook(_number: int, method: str, key: str, _process: Process) -> str | None:
        is_away = died and stage.scheduler.now < died[0] + outage_seconds
        return "refused" if is_away and "checkpoints/" in key and method == "put_object" else None

    with Stage([["a", "b", "c", "poison", "e"]]) as stage:
        stage.engine.max_in_flight = 2
        monkeypatch.setattr(stage, "died", lambda _rows: died.append(stage.scheduler.now))
        if stop_seconds is not None:
            stage.scheduler.after(stop_seconds, lambda: stage.stop(Interrupted("stopped")))
        ending = stage.run(hook=hook, checkpoint_seconds=1000.0, lease_seconds=lease_seconds)
        assert isinstance(ending.error, EngineDied)
        assert least <= stage.scheduler.now - died[0] < most
        assert stage.finished
        is_saved = saved_lines(stage) == {line for _, line in stage.finished}
        assert is_saved == (outage_seconds == 50.0)


def test_a_worker_without_a_chunk_of_its_own_knows_where_the_others_lie(tmp_path):
    """With --limit the own manifest may hold nothing; KeyError at the first chunk of another worker."""
    job, run = tmp_path / "job", tmp_path / "run"
    making.make_job(job, rows=20, per_chunk=10, workers=2)
    result = making.run_worker_here(job, run, "--limit", "5", index=1)
    assert result["request_count"] == 5


def test_rows_taken_up_from_checkpoints_were_not_written_to_another_one():
    with Stage([[f"say {index}" for index in range(40)]]) as stage:
        stage.scheduler.after(5.0, lambda: stage.stop(Interrupted("stopped")))
        stage.engine.max_in_flight = 2
        stage.run(checkpoint_seconds=0.5)
        before = saved_lines(stage)
        assert 0 < len(before) < 40
        stage.scheduler.after(5.0, lambda: stage.stop(Interrupted("stopped")))
        stage.run(checkpoint_seconds=0.5)
        written = [
            json.loads(line)["line"]
            for data in stage.objects(layout.CHECKPOINTS).values()
            for line in data.splitlines()[1:]
        ]
        assert len(written) > len(before)
        assert len(written) == len(set(written))


def test_rows_of_a_chunk_that_cannot_be_published_were_not_paid_for_at_every_start():
    """A complete chunk was in no checkpoint, so each start did its rows again, and that counted as progress."""
    with Stage([["say a", "say b", "say c"]]) as stage:
        refused = when(
            lambda method, key: method != "get_object" and "outputs/part-00000" in key, "refused"
        )
        options = {
            "checkpoint_seconds": 1000.0,
            "limits": Limits(storage_attempts=1, storage_retry_seconds=0.1),
        }
        for resumed in (0, 3):
            ending = stage.run(hook=refused, **options)
            assert isinstance(ending.error, StorageError)
            result = ending.error.result
            assert (result["rows_resumed"], result["request_count"]) == (resumed, 3 - resumed)
        assert isinstance(stage.run(hook=refused, max_attempts=1, **options).error, NoProgress)
        assert stage.run(**options).is_success


def test_a_worker_whose_bucket_went_away_for_good_did_not_wait_for_ever():
    """What was complete waited for a fresh heartbeat, and that for the bucket; now it ends with 34."""
    with Stage([["mine"] * 6]) as stage:

        def hook(_number: int, _method: str, _key: str, _process: object) -> str | None:
            return "refused" if stage.scheduler.now > 2.5 else None

        ending = stage.run(hook=hook, lease_seconds=6.0, within_seconds=200)
        assert isinstance(ending.error, StorageError)
        assert ending.error.exit_status == 34
