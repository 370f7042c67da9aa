"""One configuration per run, also where run.json is removed or replaced: a run of two is refused, never a success."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import Interrupted, RunMismatch
from batchinfer.core.records import Marker, RowKey, Run
from simulation.machine import prompt_config
from simulation.oracle import RUN
from simulation.scenario import own_manifest
from simulation.stage import Ending, Stage

OTHER = {"prompt": prompt_config(0.7)}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage([["a"] * 6, ["b"] * 6, ["c"] * 6], num_workers=3, seed=1) as made:
        made.engine.max_in_flight = 6
        yield made


def run_first(stage: Stage) -> None:
    """Do the first chunk only."""
    assert stage.run("w9", manifest=own_manifest(0)).is_success
    assert set(markers(stage)) == {"part-00000"}
    stage.scheduler.now += 1000.0


def markers(stage: Stage) -> dict[str, Marker]:
    found = {}
    for key, data in stage.objects(layout.OUTPUTS).items():
        parsed = layout.parse_marker(key)
        if parsed is not None:
            found[parsed[0]] = codec.decode(data, Marker, name=key)
    return found


def stored_run(stage: Stage) -> Run:
    return codec.decode(stage.objects()[layout.RUN_KEY], Run, name="run.json")


def other_run(stage: Stage) -> bytes:
    """The run.json of the same job with another temperature."""
    run = stored_run(stage)
    config = run.config | {"prompt": msgspec.to_builtins(prompt_config(0.7))}
    changed = msgspec.structs.replace(run, config=config, fingerprint=codec.fingerprint(config))
    return codec.encode_pretty(changed)


def assert_refused(ending: Ending, *words: str) -> None:
    error = ending.error
    assert isinstance(error, RunMismatch)
    assert error.exit_status == 2
    for word in words:
        assert word in error.message + error.hint


class TestAtTheStart:
    def test_a_removed_run_does_not_go_on_with_other_options(self, stage: Stage) -> None:
        run_first(stage)
        stage.server.delete(RUN + layout.RUN_KEY)
        before = stage.objects(layout.OUTPUTS)
        num_taken = len(stage.taken)
        assert_refused(stage.run(**OTHER), "part-00000", "clean", "--redo", "--output")
        assert stage.objects(layout.OUTPUTS) == before
        assert layout.RUN_KEY not in stage.objects()
        assert len(stage.taken) == num_taken

    def test_a_removed_run_goes_on_with_the_same_options(self, stage: Stage) -> None:
        run_first(stage)
        run = stored_run(stage)
        stage.server.delete(RUN + layout.RUN_KEY)
        assert stage.run().is_success
        assert stored_run(stage).fingerprint == run.fingerprint
        assert {marker.fingerprint for marker in markers(stage).values()} == {run.fingerprint}

    def test_a_replaced_run_does_not_go_on(self, stage: Stage) -> None:
        run_first(stage)
        stage.put(layout.RUN_KEY, other_run(stage))
        before = stage.objects(layout.OUTPUTS)
        num_taken = len(stage.taken)
        stage.engine.load_seconds = 100.0
        began = stage.scheduler.now
        assert_refused(stage.run(**OTHER), "part-00000")
        assert stage.scheduler.now < began + 50, "it waited for the engine"
        assert stage.objects(layout.OUTPUTS) == before
        assert len(stage.taken) == num_taken

    def test_a_run_that_is_complete_and_mixed_is_no_success(self, stage: Stage) -> None:
        run_first(stage)
        first = stored_run(stage)
        assert stage.run().is_success
        stage.put(layout.RUN_KEY, other_run(stage))
        assert_refused(stage.run(**OTHER), "part-00000", "part-00001")
        stage.server.delete(RUN + layout.RUN_KEY)
        name = layout.marker_key("part-00001")
        marker = msgspec.structs.replace(markers(stage)["part-00001"], fingerprint="another")
        stage.put(name, codec.encode(marker))
        assert_refused(stage.run(), "another", first.fingerprint)

    def test_a_run_that_went_on_after_it_was_replaced_is_no_success(self, stage: Stage) -> None:
        """Markers of the replaced run were younger than run.json: the next worker said SUCCESS over them."""
        stage.engine.row_seconds = 5.0
        stage.scheduler.after(8.0, lambda: stage.put(layout.RUN_KEY, other_run(stage)))
        assert_refused(stage.run(manifest=layout.worker_manifest(0, 3)))
        before = set(markers(stage))
        assert before
        num_taken = len(stage.taken)
        assert_refused(stage.run(**OTHER), *before, "clean", "--redo")
        assert len(stage.taken) == num_taken

    def test_only_markers_of_the_own_manifest_are_read(self, stage: Stage) -> None:
        run_first(stage)
        assert stage.run(manifest=own_manifest(1)).is_success
        read = set()

        def hook(_number: int, method: str, key: str, _process: object) -> None:
            if method == "get_object" and layout.MARKER_SUFFIX in key:
                read.add(layout.parse_marker(key.removeprefix(RUN)))

        assert stage.run(hook=hook, manifest=own_manifest(2)).is_success
        assert read == {("part-00002", 0)}

    def test_a_complete_run_whose_run_json_is_gone_gets_it_again_from_the_same_options_alone(
        self, stage: Stage
    ) -> None:
        """Nothing was left to do, so that nobody compared the options: any worker said SUCCESS."""
        assert stage.run().is_success
        run = stage.objects().pop(layout.RUN_KEY)
        stage.server.delete(RUN + layout.RUN_KEY)
        num_taken = len(stage.taken)
        assert_refused(stage.run(**OTHER), "part-00000", "clean", "--redo")
        assert layout.RUN_KEY not in stage.objects()
        assert stage.run().is_success
        assert stored_run(stage).fingerprint == codec.decode(run, Run, name="run.json").fingerprint
        assert len(stage.taken) == num_taken


class TestRepair:
    def test_rows_of_another_configuration_are_not_taken_into_a_repair(self) -> None:
        """Where a store has no preconditions, a marker may be younger than a run.json of another configuration."""
        with Stage([["a", "", "b"]]) as stage:
            assert stage.run().is_success
            marker, key = markers(stage)["part-00000"], layout.marker_key("part-00000")
            stage.put(layout.RUN_KEY, other_run(stage))
            stage.scheduler.now += 10.0
            stage.put(key, codec.encode(marker))
            before = stage.objects(layout.OUTPUTS)
            assert_refused(stage.run(retry_errors=True, **OTHER), "part-00000", "clean", "--redo")
            assert stage.objects(layout.OUTPUTS) == before


class TestCheckpoints:
    """run.json tells whose they are. Where it was removed, the worker knows it once its engine has loaded."""

    def save_some(self, stage: Stage) -> set[RowKey]:
        """Do some rows of the first chunk, and remove run.json. Returns the rows that are in checkpoints."""
        stage.engine.max_in_flight = 2
        stage.scheduler.after(4.0, lambda: stage.stop(Interrupted("stopped")))
        stage.run(checkpoint_seconds=0.2)
        assert not markers(stage)
        stage.server.delete(RUN + layout.RUN_KEY)
        saved = {
            (key.split("/")[1], codec.decode(line, dict, name=key)["line"])
            for key, data in stage.objects(layout.CHECKPOINTS).items()
            for line in data.splitlines()[1:]
        }
        assert {chunk for chunk, _ in saved} == {"part-00000"}
        stage.taken.clear()
        stage.engine.load_seconds = 20.0
        return saved

    def test_rows_that_are_saved_are_not_done_again_after_run_json_was_removed(
        self, stage: Stage
    ) -> None:
        saved = self.save_some(stage)
        assert stage.run().is_success
        assert len(stage.taken) == 18 - len(saved)
        assert not saved & set(stage.taken)

    def test_rows_of_another_configuration_are_not_taken_over_after_run_json_was_removed(
        self, stage: Stage
    ) -> None:
        self.save_some(stage)
        assert stage.run(**OTHER).is_success
        assert len(stage.taken) == 18


class TestAtTheEnd:
    def test_a_run_that_is_replaced_while_a_worker_runs_is_no_success(self, stage: Stage) -> None:
        stage.engine.row_seconds = 5.0
        stage.scheduler.after(8.0, lambda: stage.put(layout.RUN_KEY, other_run(stage)))
        assert_refused(stage.run(), "temperature", "while this worker ran")

    def test_a_run_that_is_removed_while_a_worker_runs_is_put_back(self, stage: Stage) -> None:
        stage.engine.row_seconds = 5.0
        before: list[Run] = []

        def remove() -> None:
            before.append(stored_run(stage))
            stage.server.delete(RUN + layout.RUN_KEY)

        stage.scheduler.after(8.0, remove)
        assert stage.run().is_success
        assert [stored_run(stage)] == before

    def test_a_chunk_that_another_worker_did_with_other_options_is_no_success(
        self, stage: Stage
    ) -> None:
        """That worker was there first, and did not see that run.json was replaced before it published its chunk."""
        run_first(stage)
        marker = markers(stage)["part-00000"]
        output = stage.objects()[layout.output_key(marker.output)]
        stage.engine.row_seconds = 5.0

        def publish() -> None:
            stage.put(layout.output_key("part-00002.aaaa.jsonl"), output)
            foreign = msgspec.structs.replace(
                marker, output="part-00002.aaaa.jsonl", fingerprint="another"
            )
            stage.put(layout.marker_key("part-00002"), codec.encode(foreign))

        stage.scheduler.after(6.0, publish)
        assert_refused(stage.run(), "part-00002", "another")

    def test_a_stop_is_still_a_stop(self, stage: Stage) -> None:
        stage.engine.row_seconds = 5.0
        stage.scheduler.after(8.0, lambda: stage.stop(Interrupted("stopped")))
        assert isinstance(stage.run().error, Interrupted)
