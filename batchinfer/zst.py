"""Reading zstd files of any number of frames. Unlike zstandard's own reader it takes no cut file for a whole one."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

_READ_BYTES = 32 << 10


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
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase says."""
        while not self._plain:
            if not self._compressed:
                self._compressed = self._raw.read(_READ_BYTES)
                if not self._compressed:
                    if self._frame is not None:
                        raise EOFError("the last zstd frame ends early")
                    return 0
            if self._frame is None:
                self._frame = self._new_frame()
            self._plain = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count
