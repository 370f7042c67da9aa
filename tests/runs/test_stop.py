"""Workers that were stopped or killed: `status`, `verify` and the next start say the same as the bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import layout
from batchinfer.core.errors import InputError, StopRequested
from batchinfer.runs.status import RunConfig, run_status
from batchinfer.runs.stop import StopConfig, run_stop
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage.opening import open_store
from simulation.stage import Stage, when


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Eight chunks, of which a worker does two rows at a time."""
    with Stage([[f"say {row}" for row in range(10)]] * 8) as made:
        made.engine.max_in_flight = 2
        yield made


def stop(stage: Stage, *, resume: bool = False) -> dict[str, Any]:
    outside = stage.outside()
    config = StopConfig(run=stage.run_url, resume=resume)
    return run_stop(config, store=outside.open_store(stage.run_url), clock=outside.clock)


def test_status_verify_and_the_next_start_agree_after_a_kill(stage: Stage) -> None:
    """The worker is killed long after its last heartbeat, with chunks done and rows checkpointed since."""
    killing = when(
        lambda _, key: stage.scheduler.now > 12.0 and "checkpoints/" in key, "dies_after"
    )
    assert stage.run(hook=killing, checkpoint_seconds=0.5, lease_seconds=120.0).is_killed
    done = sum(layout.parse_marker(key) is not None for key in stage.objects(layout.OUTPUTS))
    checkpointed = {
        (key.split("/")[1], json.loads(line)["line"])
        for key, data in stage.objects(layout.CHECKPOINTS).items()
        for line in data.splitlines()[1:]
        if layout.marker_key(key.split("/")[1]) not in stage.objects()
    }
    assert 0 < done < 8
    assert checkpointed
    stage.scheduler.run(stage.scheduler.now + 200.0)  # until the worker counts as gone
    how = stage.outside()._asdict()
    rows = run_status(RunConfig(run=stage.run_url), **how).rows
    sound = run_verify(VerifyConfig(run=stage.run_url), **how).result["rows_ok"]
    assert rows.done == sound == 10 * done
    assert rows.in_progress == len(checkpointed)
    assert rows.waiting == 80 - rows.done - rows.in_progress
    result = stage.run().result
    assert (result["rows_resumed"], result["request_count"]) == (rows.in_progress, rows.waiting)


def test_a_running_worker_ends_with_3_and_none_starts_before_the_run_is_resumed(
    stage: Stage,
) -> None:
    stage.scheduler.after(5.0, lambda: stop(stage))
    error = stage.run(checkpoint_seconds=0.5).error
    assert isinstance(error, StopRequested)
    assert error.exit_status == 3
    first = stage.objects()[layout.STOP_KEY]
    assert json.loads(first)["requested"]
    assert isinstance(stage.run().error, StopRequested)
    assert (stop(stage)["stopped"], stop(stage)["was_stopped"]) == (True, True)
    assert stage.objects()[layout.STOP_KEY] == first, "a second request changes nothing"
    assert stop(stage, resume=True)["was_stopped"] is True
    assert stop(stage, resume=True)["was_stopped"] is False
    assert stage.run().result["rows_resumed"] > 0


def test_a_run_that_has_only_begun_can_be_stopped_and_what_is_no_run_cannot(
    tmp_path: Path, call: Any
) -> None:
    for key in (layout.worker_key("w0"), layout.launch_key("x")):
        run = tmp_path / key
        open_store(str(run)).create(key, b"{}")
        assert call("stop", run).status == 0
        assert Path(run, layout.STOP_KEY).exists()
    nowhere = call("stop", tmp_path / "nowhere")
    assert (nowhere.status, "no run there" in nowhere.err) == (InputError.exit_status, True)
    assert not (tmp_path / "nowhere").exists()
