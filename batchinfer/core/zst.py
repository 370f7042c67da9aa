"""Reading zstd files of any number of frames. Unlike zstandard's own reader it takes no cut file for a whole one."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

_READ_BYTES = 32 << 10
_FEED_BYTES = 1 << 10
"""Decompressed at once: four bytes can stand for 128 KiB, so these for 32 MiB, however repetitive a file is."""


class ZstdFile(io.RawIOBase):
    """Decompresses frame after frame, in bounded memory. Does not close `raw`.

    Raises:
        EOFError: the last frame is cut short.
        zstandard.ZstdError: it is no zstd, or damaged.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        super().__init__()
        self._raw = raw
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._compressed = memoryview(b"")
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase says."""
        while not self._plain:
            if not self._compressed:
                self._compressed = memoryview(self._raw.read(_READ_BYTES))
                if not self._compressed:
                    if self._frame is not None:
                        raise EOFError("the last zstd frame ends early")
                    return 0
            if self._frame is None:
                self._frame = self._new_frame()
            piece = self._compressed[:_FEED_BYTES]
            self._plain = memoryview(self._frame.decompress(piece))
            num_used = len(piece)
            if self._frame.eof:
                num_used -= len(self._frame.unused_data)
                self._frame = None
            self._compressed = self._compressed[num_used:]
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count
