"""One configuration per run, also where run.json is removed or replaced: a run of two is refused, never a success."""

from typing import Any

import msgspec
import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import RunMismatch
from batchinfer.core.records import Marker, Run
from making import finished_chunks, read_marker
from simulation.machine import prompt_config
from simulation.oracle import RUN
from simulation.scenario import own_manifest
from simulation.stage import Ending, Stage

OTHER = {"prompt": prompt_config(0.7)}


@pytest.fixture
def stage():
    with Stage([["a"] * 6, ["b"] * 6, ["c"] * 6], num_workers=3, seed=1) as made:
        made.engine.max_in_flight = 6
        yield made


def run_first(stage: Stage, num_chunks: int = 1) -> None:
    """Do the first chunk only, or all three."""
    assert stage.run("w9", manifest=own_manifest(0)).is_success
    assert set(markers(stage)) == {"part-00000"}
    stage.scheduler.now += 1000.0
    assert num_chunks == 1 or stage.run().is_success


def markers(stage: Stage) -> dict[str, Marker]:
    store = stage.outside().open_store(stage.run_url)
    return {name: read_marker(store, name) for name in finished_chunks(store)}


def stored_run(stage: Stage) -> Run:
    return codec.decode(stage.objects()[layout.RUN_KEY], Run, name="run.json")


def remove_run(stage: Stage) -> None:
    stage.server.delete(RUN + layout.RUN_KEY)


def replace_run(stage: Stage) -> None:
    """Put the run.json of the same job with another temperature."""
    run = stored_run(stage)
    config = run.config | {"prompt": msgspec.to_builtins(prompt_config(0.7))}
    changed = msgspec.structs.replace(run, config=config, fingerprint=codec.fingerprint(config))
    stage.put(layout.RUN_KEY, codec.encode_pretty(changed))


def assert_refused(ending: Ending, *words: str) -> None:
    error = ending.error
    assert isinstance(error, RunMismatch)
    assert error.exit_status == 2
    for word in words:
        assert word in error.message + error.hint


def assert_does_nothing(stage: Stage, *words: str, **options: Any) -> None:
    """A worker with other options is refused, takes no row and writes no output."""
    before, num_taken = stage.objects(layout.OUTPUTS), len(stage.taken)
    assert_refused(stage.run(**OTHER, **options), *words, "clean", "--redo")
    assert stage.objects(layout.OUTPUTS) == before
    assert len(stage.taken) == num_taken


@pytest.mark.parametrize("num_done", [1, 3])
def test_a_removed_run_goes_on_with_the_same_options_alone(stage, num_done):
    """Where nothing was left to do, nobody compared the options: any worker said SUCCESS."""
    run_first(stage, num_done)
    run, num_taken = stored_run(stage), len(stage.taken)
    remove_run(stage)
    assert_does_nothing(stage, "part-00000", "--output")
    assert layout.RUN_KEY not in stage.objects()
    assert stage.run().is_success
    assert stored_run(stage).fingerprint == run.fingerprint
    assert {marker.fingerprint for marker in markers(stage).values()} == {run.fingerprint}
    assert len(stage.taken) == num_taken + 6 * (3 - num_done)


@pytest.mark.parametrize("num_done", [1, 3])
def test_a_replaced_run_does_not_go_on(stage, num_done):
    run_first(stage, num_done)
    replace_run(stage)
    stage.engine.load_seconds, began = 100.0, stage.scheduler.now
    assert_does_nothing(stage, *markers(stage))
    assert stage.scheduler.now < began + 50, "it waited for the engine"


def test_a_run_that_is_complete_and_mixed_is_no_success(stage):
    assert stage.run().is_success
    first, name = stored_run(stage), layout.marker_key("part-00001")
    remove_run(stage)
    marker = msgspec.structs.replace(markers(stage)["part-00001"], fingerprint="another")
    stage.put(name, codec.encode(marker))
    assert_refused(stage.run(), "another", first.fingerprint)


def test_a_run_that_went_on_after_it_was_replaced_is_no_success(stage):
    """Markers of the replaced run were younger than run.json: the next worker said SUCCESS over them."""
    stage.engine.row_seconds = 5.0
    stage.scheduler.after(8.0, lambda: replace_run(stage))
    assert_refused(stage.run(manifest=layout.worker_manifest(0, 3)))
    assert markers(stage)
    assert_does_nothing(stage, *markers(stage))


def test_a_chunk_that_another_worker_did_with_other_options_is_no_success(stage):
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
