"""Rows that kill the engine are found among the rows beside them, in few engine starts, across restarts."""

import json
import math

import pytest

from batchinfer.core import layout
from batchinfer.core.errors import EngineDied
from simulation.machine import POISON
from simulation.stage import Stage

NUM_ROWS = 1000


@pytest.mark.parametrize("place", [0, 617, NUM_ROWS - 1])
def test_one_row_that_kills_the_engine_among_a_thousand_is_found_in_minutes(place):
    """All thousand ran one at a time, which took an hour."""
    texts = [f"{POISON if row == place else 'say'} {row}" for row in range(NUM_ROWS)]
    with Stage([texts[first : first + 300] for first in range(0, NUM_ROWS, 300)]) as stage:
        stage.engine.max_in_flight = NUM_ROWS
        stage.engine.kills_at_once = True
        while not (ending := stage.run(within_seconds=6000.0)).is_success:  # as SkyPilot does
            assert isinstance(ending.error, EngineDied)
        outputs = [data for key, data in stage.objects(layout.OUTPUTS).items() if ".jsonl" in key]
        lines = [json.loads(line) for data in outputs for line in data.splitlines()]
        failed = {line["_row"]: line["error"]["code"] for line in lines if "error" in line}
        assert failed == {place: "engine_crash"}
        assert len(stage.deaths) <= 2 + math.ceil(math.log2(NUM_ROWS) / 2)
        assert stage.deaths[-1] == [(f"part-{place // 300:05}", place % 300)]
        groups = 2 * math.ceil(math.log2(NUM_ROWS))
        assert len(stage.taken) <= 2 * NUM_ROWS + groups * NUM_ROWS / 4
        assert stage.scheduler.now < 300.0
