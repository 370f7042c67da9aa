"""A run.json that is removed by hand. Workers of the same configuration make it anew, and go on."""

from __future__ import annotations

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError
from simulation.oracle import RUN

from .base import Injection


class RemovedRuns(Injection):
    """Removes run.json, in runs whose workers all have one configuration."""

    NAME = "runs"
    SHARE = 0.0  # until a worker that opens chunks while run.json is missing takes up the rows in checkpoints, too
    MOST_STRIKES = 3
    removed = b""

    def strike(self) -> str:
        server = self.scene.server
        if RUN + layout.RUN_KEY not in server.objects or self.scene.plot.has_other_config:
            return ""
        self.removed = server.objects[RUN + layout.RUN_KEY].data
        server.delete(RUN + layout.RUN_KEY)
        return "run.json is removed"

    def calm(self) -> None:
        if self.removed and RUN + layout.RUN_KEY not in self.scene.server.objects:
            self.scene.server.put(RUN + layout.RUN_KEY, self.removed)

    def explains(self, error: BatchinferError) -> bool:
        is_about_it = layout.RUN_KEY in error.message or "no run there" in error.message
        return bool(self.num_strikes) and isinstance(error, InputError) and is_about_it
