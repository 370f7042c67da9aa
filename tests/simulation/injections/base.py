"""What all kinds of injections have in common: when they strike, and what they may touch."""

import random
from typing import Any, ClassVar

from batchinfer.core.errors import BatchinferError
from simulation.scheduler import Process


class Injection:
    """One kind of mishap in one seed. It strikes some times a day, and `calm` takes back what would last."""

    NAME: ClassVar[str]
    SHARE: ClassVar[float] = 0.08
    """Share of the seeds that have this kind."""
    MOST_STRIKES: ClassVar[int] = 5
    """Largest number of strikes in a day."""
    CAUSES: ClassVar[tuple[type[BatchinferError], ...]] = ()
    """Errors with which a process may end because of what is injected."""

    def __init__(self, scene: Any) -> None:
        self.scene = scene
        # A stream of its own: until it strikes, a seed goes as it would without it.
        self.chance = random.Random(f"{self.NAME} {scene.seed}")
        self.num_strikes = 0

    def begin(self, seconds: float) -> None:
        """Strike some times within so many seconds from now."""
        for _ in range(self.chance.randint(1, self.MOST_STRIKES)):
            self.after(self.chance.random() * seconds, self._strike)

    def after(self, seconds: float, action: Any) -> None:
        """Do something later, in this injection's own order."""
        self.scene.scheduler.after(seconds, action, self.chance)

    def leases(self, *most: float) -> float:
        """Draw a number of seconds, up to one of these numbers of leases."""
        return self.chance.random() * self.chance.choice(most) * self.scene.plot.lease_seconds

    def calm(self) -> None:
        """Take back what would keep a run from its end."""

    def explains(self, error: BatchinferError) -> bool:
        """Whether a process may end with this error because of what has been injected."""
        return bool(self.num_strikes) and self.causes(error)

    def causes(self, error: BatchinferError) -> bool:
        """Whether what is injected may have this error as its consequence."""
        return isinstance(error, self.CAUSES)

    def has_room(self, process_name: str) -> bool:
        """Whether a process can write to its scratch folder."""
        del process_name
        return True

    def note_output(self, process: Process) -> None:
        """Told of a worker that has just put an output, and not yet its marker."""

    def strike(self) -> str:
        """Do it once. Returns what was done, for the trace; "" if nothing could be."""
        raise NotImplementedError

    def _strike(self) -> None:
        done = self.strike()
        if done:
            self.num_strikes += 1
            self.scene.scheduler.log("outside", done)
