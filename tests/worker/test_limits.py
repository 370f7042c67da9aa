"""--max-cost and --max-hours: a worker ends with status 3 near its limit, and goes on with a higher one."""

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import LimitReached
from batchinfer.core.records import Worker
from simulation.stage import Stage

COST = {"price_per_hour": 36.0, "max_cost": 0.6}
"""A cent a second: a minute's worth."""


@pytest.fixture
def stage():
    """A job that takes two hundred seconds, a row in two."""
    with Stage([["row"] * 100]) as made:
        made.engine.max_in_flight, made.engine.row_seconds = 1, 2.0
        yield made


def up_seconds(stage: Stage) -> float:
    key = layout.statistics_key("w0")
    return codec.decode(stage.objects()[key], Worker, name=key).up_seconds


@pytest.mark.parametrize("limit", [COST, {"max_hours": 1 / 60}])
def test_a_worker_ends_at_its_limit_and_goes_on_with_a_higher_one(stage, limit):
    for minutes in (1, 2):
        higher = {name: value * minutes for name, value in limit.items() if "max" in name}
        ending = stage.run(**limit | higher)
        assert isinstance(ending.error, LimitReached)
        assert ending.error.exit_status == 3
        assert 60 * minutes <= up_seconds(stage) < 60 * minutes + 25
        result = ending.error.result
        [name] = higher
        assert result[name] == higher[name]
        assert result[name.removeprefix("max_")] >= higher[name]
    assert len(stage.finished) == len(set(stage.finished))


def test_a_limit_is_seen_between_two_heartbeats(stage):
    ending = stage.run(lease_seconds=3600.0, within_seconds=6000.0, **COST)
    assert isinstance(ending.error, LimitReached)
    assert up_seconds(stage) < 85


def test_with_the_limit_that_it_has_reached_a_worker_generates_nothing_and_tries_nothing_in_vain(
    stage,
):
    stage.run(**COST)
    num_finished = len(stage.finished)
    for _ in range(3):
        assert isinstance(stage.run(max_attempts=2, **COST).error, LimitReached)
    assert len(stage.finished) == num_finished
