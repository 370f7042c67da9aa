"""`batchinfer worker --engine echo` whose rows finish in steps, as those of a GPU do. For `bookkeeping.py`.

The echo engine by itself gives every row back at its own moment, and the worker's loop would turn for each of them.
Here the time of each row ends with a step, so that all rows of one step come together.
"""

from __future__ import annotations

import math
import sys
import time

from batchinfer.cli.main import main
from batchinfer.core.records import Call
from batchinfer.engines import echo
from batchinfer.engines.engine_config import EngineConfig

STEP_SECONDS = 0.025
latency_of = echo.latency_of


def stepped_latency_of(call: Call, config: EngineConfig) -> float:
    """Return the seconds until the step ends in which a call that runs from now on finishes."""
    now = time.monotonic()
    end = now + latency_of(call, config)
    return math.ceil(end / STEP_SECONDS) * STEP_SECONDS - now


if __name__ == "__main__":
    echo.latency_of = stepped_latency_of
    sys.exit(main(["worker", *sys.argv[1:]]))
