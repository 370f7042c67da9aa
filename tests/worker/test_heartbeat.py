"""When a worker's own record tells it to go on, and when to give up."""

from unittest.mock import Mock

import pytest

from batchinfer.core import layout
from batchinfer.core.errors import Interrupted, NoProgress, StopRequested, StorageError
from batchinfer.worker.heartbeat import Heartbeat
from fakes import worker_record
from simulation.stage import Ending, Stage, when


@pytest.fixture
def stage():
    with Stage([["mine"] * 5, ["theirs"] * 5]) as made:
        yield made


@pytest.fixture
def heartbeat(store, clock):
    """The heartbeat of a worker whose lease does as the test says."""
    telemetry = Mock(up_to_date=worker_record, latest=worker_record())
    return Heartbeat(store, Mock(worker_id="a", lease_seconds=60.0), telemetry, Mock(), clock)


def run(stage: Stage, *, kill_after: float | None = None, max_attempts: int = 2) -> Ending:
    """One start that may be killed."""
    if kill_after is not None:
        stage.scheduler.after(kill_after, stage.kill)
    return stage.run(max_attempts=max_attempts, within_seconds=1000.0)


def test_a_worker_that_is_stopped_while_it_loads_goes_on(stage):
    stage.engine.load_seconds = 1e6
    for error in [Interrupted("preempted"), StopRequested("stopped")] * 2:
        stage.scheduler.after(20.0, lambda error=error: stage.stop(error))
        assert run(stage).error is error
    stage.engine.load_seconds = 1.0
    assert run(stage).is_success


@pytest.mark.parametrize("is_loading", [False, True])
def test_machines_that_vanish_are_replaced_without_end_unless_they_are_gone_while_they_load(
    stage, *, is_loading
):
    stage.let_another_hold("part-00000", "part-00001")
    stage.engine.load_seconds = 1e6 if is_loading else 1.0
    for _ in range(2 if is_loading else 4):
        assert run(stage, kill_after=60.0).is_killed
    if is_loading:
        for _ in range(2):  # a start that is refused does not count
            assert isinstance(run(stage).error, NoProgress)
            record = stage.objects()[layout.statistics_key("w0")]
            assert record.count(b'"reason":"NoProgress') == record.count(b"NoProgress") == 1
        assert run(stage, kill_after=60.0, max_attempts=3).is_killed


def test_a_start_that_only_waits_does_not_count_however_it_ends(stage):
    stage.let_another_hold("part-00000", "part-00001")
    for _ in range(3):
        stage.scheduler.after(60.0, lambda: stage.stop(StorageError("away")))
        assert isinstance(run(stage).error, StorageError)


def test_heartbeats_that_take_longer_than_the_lease_end_the_worker():
    """Each was written, so nothing was wrong, and nothing could ever be published."""
    with Stage([["mine"] * 50]) as stage:

        def is_beat(method: str, key: str) -> bool:
            return method == "put_object" and layout.WORKERS in key and stage.scheduler.now > 1

        ending = stage.run(hook=when(is_beat, 8.0), within_seconds=200.0)
    assert isinstance(ending.error, StorageError)
    assert ending.error.exit_status == 34
    assert "was written in time" in ending.error.message
    assert "--lease-seconds" in ending.error.hint


def test_a_machine_that_was_frozen_after_an_outage_goes_on(heartbeat, clock):
    lease = heartbeat.lease
    lease.renew.return_value = lease.is_held.return_value = False
    heartbeat.beat()
    clock.sleep(1800.0)
    for num_requests in (0, 0, 1):
        heartbeat.turned()
        heartbeat.beat()
        assert heartbeat._stopper.request.call_count == num_requests


@pytest.mark.parametrize("is_held", [True, False])
def test_a_heartbeat_that_a_freeze_held_up_leaves_the_statistics_of_a_newer_start(
    heartbeat, store, is_held
):
    lease = heartbeat.lease
    lease.renew.return_value, lease.is_held.return_value = True, is_held
    heartbeat.beat()
    assert [info.key for info in store.list()] == [layout.statistics_key("a")] * is_held


def test_an_outage_that_has_passed_does_not_count_for_a_late_heartbeat_hours_later(
    heartbeat, clock
):
    lease = heartbeat.lease
    for is_held in (False, False, False, True, False):
        clock.sleep(7200.0 if is_held else 15.0)
        lease.renew.return_value = lease.is_held.return_value = is_held
        heartbeat.turned()
        heartbeat.beat()
    heartbeat._stopper.request.assert_not_called()
