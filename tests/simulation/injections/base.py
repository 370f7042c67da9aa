"""What all kinds of injections have in common: when they strike, and what they may touch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from batchinfer.core.errors import BatchinferError
from simulation.oracle import Oracle
from simulation.scheduler import Scheduler
from simulation.storage import Network, Server


class Scene(Protocol):
    """What an injection sees of its scenario."""

    seed: int
    plot: Any
    scheduler: Scheduler
    server: Server
    network: Network
    oracle: Oracle
    live: list[Any]
    has_room: Callable[[str], bool] | None


class Injection:
    """One kind of mishap in one seed. It strikes some times a day, and `calm` takes back what would last."""

    NAME: ClassVar[str]
    SHARE: ClassVar[float] = 0.08
    """Share of the seeds that have this kind."""
    MOST_STRIKES: ClassVar[int] = 5
    """Largest number of strikes in a day."""

    @classmethod
    def is_drawn(cls, seed: int) -> bool:
        """Whether a seed has this kind."""
        return random.Random(f"is {cls.NAME} {seed}").random() < cls.SHARE

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.chance = random.Random(f"{self.NAME} {scene.seed}")
        self.num_strikes = 0

    def begin(self, seconds: float) -> None:
        """Strike some times within so many seconds from now."""
        for _ in range(self.chance.randint(1, self.MOST_STRIKES)):
            self.after(self.chance.random() * seconds, self._strike)

    def after(self, seconds: float, action: Any) -> None:
        """Do something later, in this injection's own order."""
        self.scene.scheduler.after(seconds, action, self.chance)

    def calm(self) -> None:
        """Take back what would keep a run from its end."""

    def explains(self, error: BatchinferError) -> bool:
        """Whether a worker may end with this error because of what has been injected."""
        del error
        return False

    def strike(self) -> str:
        """Do it once. Returns what was done, for the trace; "" if nothing could be."""
        raise NotImplementedError

    def _strike(self) -> None:
        done = self.strike()
        if done:
            self.num_strikes += 1
            self.scene.scheduler.log("outside", done)
