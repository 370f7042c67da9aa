"""Wall clocks that are set, by hours, while a worker runs. Monotonic clocks go on as they were."""

from __future__ import annotations

from .base import Injection


class SteppingClocks(Injection):
    """Sets the wall clock of a worker's machine forth or back."""

    NAME = "clocks"

    def strike(self) -> str:
        if not self.scene.live:
            return ""
        start = self.chance.choice(self.scene.live)
        seconds = self.chance.choice([-1, 1]) * 10 ** self.chance.uniform(0, 4)
        start.environment.clock.step(seconds)
        return f"the wall clock of {start.process.name} is set by {seconds:+.0f} s"
