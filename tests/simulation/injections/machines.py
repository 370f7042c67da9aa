"""What befalls the machine of a worker: its clock, its scratch disk, its main loop."""

from typing import Any

from batchinfer.core.errors import ScratchFull, StorageError

from .base import Injection


class SteppingClocks(Injection):
    """Sets the wall clock of a worker's machine forth or back, by up to hours. Monotonic clocks go on as they were."""

    NAME = "clocks"

    def strike(self) -> str:
        if not self.scene.live:
            return ""
        start = self.chance.choice(self.scene.live)
        seconds = self.chance.choice([-1, 1]) * 10 ** self.chance.uniform(0, 4)
        start.environment.clock.step(seconds)
        return f"the wall clock of {start.process.name} is set by {seconds:+.0f} s"


class FullDisks(Injection):
    """Fills the scratch disk of one worker for a while."""

    NAME = "disks"
    CAUSES = (ScratchFull,)

    def __init__(self, scene: Any) -> None:
        super().__init__(scene)
        self.full: dict[str, float] = {}

    def strike(self) -> str:
        if not self.scene.live:
            return ""
        process = self.chance.choice(self.scene.live).process
        seconds = self.leases(0.5, 3.0)
        self.full[process.name] = self.scene.scheduler.now + seconds
        process.trouble(self.full[process.name])
        return f"the scratch disk of {process.name} is full for {seconds:.1f} s"

    def calm(self) -> None:
        self.full.clear()

    def has_room(self, process_name: str) -> bool:
        return self.full.get(process_name, 0.0) <= self.scene.scheduler.now


class Hangs(Injection):
    """Lets a worker's engine not come back to its main loop, for some leases or for ever. All its threads go on."""

    NAME = "hangs"
    MOST_STRIKES = 3
    CAUSES = (StorageError,)

    def strike(self) -> str:
        running = [start for start in self.scene.live if start.process.hung_until <= 0]
        if not running:
            return ""
        process = self.chance.choice(running).process
        seconds = self.chance.choice([0.5, 2.0, 6.0, float("inf")]) * self.scene.plot.lease_seconds
        process.hang(seconds)
        return f"the main loop of {process.name} hangs for {seconds:.1f} s"
