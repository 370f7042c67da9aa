"""Listings that lag behind: they show the bucket as it was, while every object can be read as it is."""

from __future__ import annotations

from batchinfer.core.errors import BatchinferError

from .base import Injection


class LaggingListings(Injection):
    """Listings of all processes are some seconds old, now and then."""

    NAME = "listings"

    def strike(self) -> str:
        chance, lease_seconds = self.chance, self.scene.plot.lease_seconds
        lag_seconds = chance.random() * chance.choice([0.3, 2.0, 6.0]) * lease_seconds
        self.scene.server.lag_seconds = lag_seconds
        self.after(chance.random() * 3 * lease_seconds, self.calm)
        return f"listings lag behind by {lag_seconds:.1f} s"

    def explains(self, error: BatchinferError) -> bool:
        # A young run is not on the listing yet.
        return bool(self.num_strikes) and "no run there" in error.message

    def calm(self) -> None:
        self.scene.server.lag_seconds = 0.0
