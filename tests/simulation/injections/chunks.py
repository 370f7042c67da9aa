"""Chunks of the job that are edited or removed after the split, and put back some time later."""

from __future__ import annotations

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError, StorageError
from simulation.oracle import JOB

from .base import Injection, Scene


class EditedChunks(Injection):
    """Edits or removes a chunk. No row of the edited text may ever be answered."""

    NAME = "chunks"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.originals: dict[str, bytes] = {}

    def strike(self) -> str:
        server, chance = self.scene.server, self.chance
        keys = server.keys(JOB + layout.CHUNKS)
        if not keys:  # all of them are removed at the moment
            return ""
        key = chance.choice(keys)
        if key in self.originals and server.objects[key].data != self.originals[key]:
            return ""
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
        self.after(chance.random() * 2 * self.scene.plot.lease_seconds, lambda: self._restore(key))
        return f"{key} is {what}"

    def calm(self) -> None:
        for key in self.originals:
            self._restore(key)

    def explains(self, error: BatchinferError) -> bool:
        return bool(self.num_strikes) and isinstance(error, StorageError | InputError)

    def _restore(self, key: str) -> None:
        self.scene.server.put(key, self.originals[key])
