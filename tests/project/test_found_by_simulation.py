"""Bugs that the simulation found, each as the shortest scene that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import making
from batchinfer.core import layout
from batchinfer.core.errors import AccessDenied, EngineDied, Interrupted, NoProgress, StorageError
from batchinfer.worker.worker_config import Limits
from simulation.oracle import RUN
from simulation.scheduler import Process
from simulation.stage import Stage, when


def saved_lines(stage: Stage) -> set[int]:
    """Lines that checkpoint segments hold a finished row of."""
    lines = set()
    for data in stage.objects(layout.CHECKPOINTS).values():
        records = [json.loads(line) for line in data.splitlines()]
        lines |= {record["line"] for record in records if "ok" in record}
    return lines


class TestSavingAfterAnEngineDied:
    """Nobody waits for a worker whose engine died. It gave up after the grace period, with rows still to be saved."""

    @pytest.fixture
    def stage(self) -> Iterator[Stage]:
        with Stage([["a", "b", "c", "poison", "e"]]) as made:
            made.engine.max_in_flight = 2
            yield made

    @staticmethod
    def run(
        stage: Stage, outage_seconds: float, monkeypatch: pytest.MonkeyPatch, **options: float
    ) -> tuple[Exception | None, float]:
        """Let no checkpoint through for some time after the death. Returns the error and the seconds to the end."""
        died: list[float] = []
        monkeypatch.setattr(stage, "died", lambda _rows: died.append(stage.scheduler.now))

        def hook(_number: int, method: str, key: str, _process: Process) -> str | None:
            is_away = died and stage.scheduler.now < died[0] + outage_seconds
            return (
                "refused" if is_away and "checkpoints/" in key and method == "put_object" else None
            )

        ending = stage.run(hook=hook, checkpoint_seconds=1000.0, **options)
        return ending.error, stage.scheduler.now - died[0]

    def test_it_takes_its_time(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        error, _ = self.run(stage, 50.0, monkeypatch, lease_seconds=12.0)
        assert isinstance(error, EngineDied)
        assert stage.finished
        assert saved_lines(stage) == {line for _, line in stage.finished}

    def test_it_does_not_take_for_ever(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        error, seconds = self.run(stage, 1e6, monkeypatch, lease_seconds=3.0)
        assert isinstance(error, EngineDied)
        assert 25 < seconds < 60
        assert not saved_lines(stage)

    def test_a_stop_ends_it_within_the_grace(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage.scheduler.after(30.0, lambda: stage.stop(Interrupted("stopped")))
        error, seconds = self.run(stage, 1e6, monkeypatch, lease_seconds=12.0)
        assert isinstance(error, EngineDied)
        assert seconds < 50

    def test_refused_permissions_end_it(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **_options: object) -> None:
            raise AccessDenied("403")

        monkeypatch.setattr("batchinfer.ledger.checkpoints.write_segment", refuse)
        error, seconds = self.run(stage, 0.0, monkeypatch, lease_seconds=12.0)
        assert isinstance(error, EngineDied)
        assert seconds < 20


def test_a_worker_without_a_chunk_of_its_own_knows_where_the_others_lie(tmp_path: Path) -> None:
    """With --limit the own manifest may hold nothing; KeyError at the first chunk of another worker."""
    job, run = tmp_path / "job", tmp_path / "run"
    making.make_job(job, rows=20, per_chunk=10, workers=2)
    result = making.run_worker_here(job, run, "--limit", "5", index=1)
    assert result["request_count"] == 5


def test_a_chunk_that_was_published_but_not_tidied_up_was_not_published_from_a_closed_file() -> (
    None
):
    """A look around saw our own marker, so the chunk's files went while its publishing was to be tried again."""
    with Stage([["mine"], ["theirs"]], num_workers=2) as stage:
        stage.let_another_hold("part-00001", beats=1)
        stage.network.pause_seconds = 1.0
        refused = when(
            lambda method, key: method == "delete_objects" and "part-00000" in key,
            "refused",
            times=3,
        )
        limits = Limits(storage_retry_seconds=0.1)
        assert stage.run(hook=refused, lease_seconds=4.0, limits=limits).is_success


def test_rows_taken_up_from_checkpoints_were_not_written_to_another_one() -> None:
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


def test_a_repair_looks_at_several_chunks_at_once() -> None:
    """Each counted as all of its rows, so one was opened after the other, whatever the bucket's delay."""
    num_chunks = 40
    with Stage([[f"say {index}"] * 300 for index in range(num_chunks)]) as stage:
        assert stage.run(within_seconds=10_000).is_success
        stage.network.weather.latency_seconds = 1.0
        began = stage.scheduler.now
        assert stage.run(retry_errors=True).is_success
        # Five requests a chunk, of one and a half seconds on the average.
        assert stage.scheduler.now - began < 4 * num_chunks


def test_rows_of_a_chunk_that_cannot_be_published_were_not_paid_for_at_every_start() -> None:
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
            assert result is not None
            assert (result["rows_resumed"], result["request_count"]) == (resumed, 3 - resumed)
        assert isinstance(stage.run(hook=refused, max_attempts=1, **options).error, NoProgress)
        assert stage.run(**options).is_success


def test_a_worker_whose_bucket_went_away_for_good_did_not_wait_for_ever() -> None:
    """What was complete waited for a fresh heartbeat, and that for the bucket; now it ends with 34."""
    with Stage([["mine"] * 6]) as stage:

        def hook(_number: int, _method: str, _key: str, _process: object) -> str | None:
            return "refused" if stage.scheduler.now > 2.5 else None

        ending = stage.run(hook=hook, lease_seconds=6.0, within_seconds=200)
        assert isinstance(ending.error, StorageError)
        assert ending.error.exit_status == 34


def test_a_complete_chunk_was_saved_before_it_was_published() -> None:
    """A segment was on its way when the worker had to end; publishing then took the rest of its grace in vain."""
    with Stage([[f"say {index}" for index in range(4)]]) as stage:
        stage.engine.max_in_flight = 2
        stage.engine.row_seconds = 0.5

        def hook(_number: int, method: str, key: str, _process: object) -> float | None:
            if method == "put_object" and layout.CHECKPOINTS in key:
                return max(0.0, 5.5 - stage.scheduler.now)  # the reply takes up to as long again
            return 500.0 if method == "put_object" and layout.OUTPUTS in key else None

        stage.scheduler.after(4.5, lambda: stage.stop(Interrupted("stopped")))
        stage.run(hook=hook, checkpoint_seconds=0.5)
        assert len(stage.finished) == 4
        assert saved_lines(stage) == {0, 1, 2, 3}


def test_a_start_that_finds_all_done_lists_the_markers_once() -> None:
    with Stage([["mine"], ["theirs"]]) as stage:
        assert stage.run("w0").is_success
        listings = []

        def note(_number: int, method: str, key: str, _process: Process) -> None:
            if method == "list_objects_v2" and key.startswith(RUN + layout.OUTPUTS):
                listings.append(key)

        assert stage.run("w1", hook=note).is_success
        assert len(listings) == 1


def test_an_owner_that_was_back_when_its_turn_came_kept_its_claims() -> None:
    """Its chunks, seen to have lapsed, waited for room, and were taken for minutes after its heart beat again."""
    theirs = [f"part-{index:05d}" for index in range(1, 13)]
    with Stage([["mine"], *[["say so"] * 30 for _ in theirs]], num_workers=13) as stage:
        stage.engine.max_in_flight = 2
        stage.let_another_hold(*theirs, beats=1)
        stage.scheduler.after(13.0, stage.let_another_hold)
        taken: list[set[str]] = []

        def look() -> None:
            claims = stage.objects(layout.CLAIMS).items()
            taken.append({key for key, data in claims if json.loads(data)["worker"] == "w0"})

        for second in range(13, 60):
            stage.scheduler.after(second, look)
        manifest = layout.worker_manifest(0, 13)
        assert stage.run(manifest=manifest, within_seconds=400.0).is_success
        assert taken[0]
        assert set().union(*taken) == taken[0]
