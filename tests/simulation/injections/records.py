"""Worker records that vanish or are damaged: by hand, by a bucket's lifecycle rule, by a half-restored backup."""

from __future__ import annotations

from batchinfer.core import layout
from simulation.oracle import RUN

from .base import Injection


class WorkerRecords(Injection):
    """Removes or damages a worker's record, while its worker runs, is frozen, or is between two starts."""

    NAME = "records"

    def strike(self) -> str:
        server, chance = self.scene.server, self.chance
        keys = server.keys(RUN + layout.WORKERS)
        if not keys:
            return ""
        key = chance.choice(keys)
        self.scene.oracle.record_struck(key.removeprefix(RUN))
        what = chance.choice(["removed", "removed", "cut short", "another text", "empty"])
        if what == "removed":
            server.delete(key)
        else:
            data = server.objects[key].data
            ruins = {"cut short": data[: len(data) // 2], "another text": b"[1]", "empty": b""}
            server.put(key, ruins[what])
        return f"{key} is {what}"
