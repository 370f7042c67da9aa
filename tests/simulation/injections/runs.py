"""A run.json that is removed or replaced by hand.

Where it is removed, workers of the same configuration make it anew, and go on. Where it is another run's, they end with
exit status 2, until somebody puts it back.
"""

from __future__ import annotations

import msgspec

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError, RunMismatch
from simulation.oracle import FOREIGN, RUN

from .base import Injection

KEY = RUN + layout.RUN_KEY


class LostRuns(Injection):
    """Removes run.json, or puts another run's in its place, in runs whose workers all have one configuration."""

    NAME = "runs"
    MOST_STRIKES = 3
    original = b""
    replaced_at = float("inf")
    """Virtual time since which run.json is another run's; infinite while it is not."""
    has_replaced = False

    def strike(self) -> str:
        server = self.scene.server
        is_there = KEY in server.objects and not self._is_replaced
        if not is_there or self.scene.plot.has_other_config:
            return ""
        self.original = server.objects[KEY].data
        server.delete(KEY)
        if self.chance.random() < 0.5:
            return "run.json is removed"
        server.put(KEY, another_run(self.original))
        self.replaced_at, self.has_replaced = self.scene.scheduler.now, True
        seconds = self.chance.random() * 2 * self.scene.plot.lease_seconds
        self.after(seconds, self._put_back)
        return f"run.json is another run's for {seconds:.1f} s"

    def calm(self) -> None:
        self._put_back()
        if self.original and KEY not in self.scene.server.objects:
            self.scene.server.put(KEY, self.original)

    def explains(self, error: BatchinferError) -> bool:
        if isinstance(error, RunMismatch):
            return self.has_replaced
        is_about_it = layout.RUN_KEY in error.message or "no run there" in error.message
        return bool(self.num_strikes) and isinstance(error, InputError) and is_about_it

    @property
    def _is_replaced(self) -> bool:
        return self.replaced_at != float("inf")

    def _put_back(self) -> None:
        if self._is_replaced:
            self.replaced_at = float("inf")
            self.scene.server.put(KEY, self.original)


def another_run(data: bytes) -> bytes:
    """Return the run.json of a run of the same job with another temperature."""
    run = msgspec.json.decode(data)
    run["config"]["prompt"]["body"]["temperature"] = 0.9
    run["fingerprint"] = FOREIGN
    return msgspec.json.encode(run)
