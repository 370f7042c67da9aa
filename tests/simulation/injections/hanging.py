"""Main loops that hang while every other thread of their worker goes on, its heart among them."""

from __future__ import annotations

from batchinfer.core.errors import BatchinferError, StorageError

from .base import Injection


class Hangs(Injection):
    """Lets a worker's engine not come back to its main loop, for some leases or for ever."""

    NAME = "hangs"
    MOST_STRIKES = 3

    def strike(self) -> str:
        running = [start for start in self.scene.live if start.process.hung_until <= 0]
        if not running:
            return ""
        process = self.chance.choice(running).process
        seconds = self.chance.choice([0.5, 2.0, 6.0, float("inf")]) * self.scene.plot.lease_seconds
        process.hang(seconds)
        return f"the main loop of {process.name} hangs for {seconds:.1f} s"

    def explains(self, error: BatchinferError) -> bool:
        return bool(self.num_strikes) and isinstance(error, StorageError)
