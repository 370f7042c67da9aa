"""Uploads in parts: from some moment on, nearly every output is large enough to go up in several requests."""

from __future__ import annotations

from simulation.storage import ALL_WHOLE

from .base import Injection


class UploadsInParts(Injection):
    """Lowers the size from which a file goes up in parts, for good. A night or a clean may find uploads unfinished."""

    NAME = "parts"
    MOST_STRIKES = 1

    def strike(self) -> str:
        network = self.scene.network
        if network.multipart_bytes != ALL_WHOLE:
            return ""
        network.multipart_bytes = 100
        network.part_bytes = self.chance.choice([50, 200, 1000])
        return f"files go up in parts of {network.part_bytes} bytes"
