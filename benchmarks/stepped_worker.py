"""`batchinfer worker --engine echo` whose rows finish in steps, as those of a GPU do. For `bookkeeping.py`.

The echo engine by itself gives every row back at its own moment, and the worker's loop would turn for each of them.
Here the engine's clock stands still within a step, so that all rows of one step come together.
"""

from __future__ import annotations

import math
import sys
import time

from batchinfer.cli.main import main
from batchinfer.engines import echo_engine

STEP_SECONDS = 0.025


class StepClock:
    """A clock that moves from one step to the next."""

    def monotonic(self) -> float:
        """When the step that is under way began."""
        return math.floor(time.monotonic() / STEP_SECONDS) * STEP_SECONDS

    def sleep(self, seconds: float) -> None:
        """Wait for the step in which that time is over, at least for the next one."""
        end = self.monotonic() + max(seconds, STEP_SECONDS)
        # A little more, so that no rounding leaves it before the step.
        time.sleep(max(0.0, end - time.monotonic()) + 1e-4)


class SteppedEngine(echo_engine.EchoEngine):
    """The echo engine by that clock."""

    def __init__(self, config: echo_engine.EngineConfig | None = None) -> None:
        super().__init__(config, StepClock())


if __name__ == "__main__":
    echo_engine.EchoEngine = SteppedEngine  # type: ignore[misc]
    sys.exit(main(["worker", *sys.argv[1:]]))
