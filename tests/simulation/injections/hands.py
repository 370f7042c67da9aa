"""Objects that are edited, removed or replaced from outside: chunks, workers' records, run.json."""

from typing import Any

import msgspec

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError, RunMismatch, StorageError
from simulation.oracle import FOREIGN, JOB, RUN

from .base import Injection

RUN_JSON = RUN + layout.RUN_KEY


class EditedChunks(Injection):
    """Edits or removes a chunk, and puts it back some time later. No row of the edited text may ever be answered."""

    NAME = "chunks"
    CAUSES = (StorageError, InputError)

    def __init__(self, scene: Any) -> None:
        super().__init__(scene)
        self.originals: dict[str, bytes] = {}

    def strike(self) -> str:
        server, chance = self.scene.server, self.chance
        keys = server.keys(JOB + layout.CHUNKS)
        if not keys:  # all of them are removed at the moment
            return ""
        key = chance.choice(keys)
        data = self.originals.setdefault(key, server.objects[key].data)
        edits = {
            "edited": data.replace(b"say", b"SAY"),
            "cut short": data[: len(data) // 2],
            "longer": data + data.splitlines(keepends=True)[0],
            "empty": b"",
        }
        what = chance.choice(["removed", *edits])
        server.delete(key)
        if what in edits:
            server.put(key, edits[what])
        self.after(self.leases(2), lambda: server.put(key, data))
        return f"{key} is {what}"

    def calm(self) -> None:
        for key, data in self.originals.items():
            self.scene.server.put(key, data)


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
        data = server.objects[key].data
        ruins = {"cut short": data[: len(data) // 2], "another text": b"[1]", "empty": b""}
        what = chance.choice(["removed", "removed", *ruins])
        if what == "removed":
            server.delete(key)
        else:
            server.put(key, ruins[what])
        return f"{key} is {what}"


class LostRuns(Injection):
    """Removes run.json, or puts another run's in its place, in runs whose workers all have one configuration.

    Where it is removed, workers of the same configuration make it anew, and go on. Where it is another run's, they end
    with exit status 2, until somebody puts it back.
    """

    NAME = "runs"
    MOST_STRIKES = 3
    original = b""
    is_replaced = has_replaced = False

    def strike(self) -> str:
        server = self.scene.server
        is_there = RUN_JSON in server.objects and not self.is_replaced
        if not is_there or self.scene.plot.has_other_config:
            return ""
        self.original = server.objects[RUN_JSON].data
        server.delete(RUN_JSON)
        if self.chance.random() < 0.5:
            return "run.json is removed"
        server.put(RUN_JSON, another_run(self.original))
        self.is_replaced = self.has_replaced = True
        seconds = self.leases(2)
        self.after(seconds, self._put_back)
        return f"run.json is another run's for {seconds:.1f} s"

    def calm(self) -> None:
        self._put_back()
        if self.original and RUN_JSON not in self.scene.server.objects:
            self.scene.server.put(RUN_JSON, self.original)

    def causes(self, error: BatchinferError) -> bool:
        if isinstance(error, RunMismatch):
            return self.has_replaced
        is_about_it = layout.RUN_KEY in error.message or "no run there" in error.message
        return isinstance(error, InputError) and is_about_it

    def _put_back(self) -> None:
        if self.is_replaced:
            self.is_replaced = False
            self.scene.server.put(RUN_JSON, self.original)


def another_run(data: bytes) -> bytes:
    """Return the run.json of a run of the same job with another temperature."""
    run = msgspec.json.decode(data)
    run["config"]["prompt"]["body"]["temperature"] = 0.9
    run["fingerprint"] = FOREIGN
    return msgspec.json.encode(run)
