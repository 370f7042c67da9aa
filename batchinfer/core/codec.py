"""Records to bytes and back, checksums, fingerprint; reading zstd. Pure."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

import msgspec

from batchinfer.core.errors import InputError, NewerVersion
from batchinfer.core.records import FORMAT_VERSION

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_sorted_encoder = msgspec.json.Encoder(order="deterministic")


def encode(record: Any) -> bytes:
    """Encode a record as one JSON object without a newline."""
    return _encoder.encode(record)


def encode_pretty(record: Any) -> bytes:
    """Encode a record for people: one indented JSON object with sorted keys and a final newline."""
    return msgspec.json.format(_sorted_encoder.encode(record), indent=2) + b"\n"


_DAMAGED = "if nobody edited it by hand, it is damaged: `batchinfer verify` tells what mends it"


def decode(data: bytes, kind: type[T], *, name: str, hint: str = _DAMAGED) -> T:
    """Decode one stored record. `hint` says what to do if it is damaged.

    Raises:
        NewerVersion: The record has a newer format version, whose fields differ from ours.
        InputError: `data` holds no such record; the message names `name` and the offending field.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        check_version(data, name=name)
        what = "empty" if not data else str(error)
        raise InputError(
            f"{name}: not a readable {kind.__name__.lower()} record ({what})",
            hint=hint,
        ) from error


class _Versioned(msgspec.Struct):
    format_version: int = 0


def check_version(data: bytes, *, name: str) -> None:
    """Refuse a record whose format version is newer than `FORMAT_VERSION`. Data that is no JSON object passes.

    Raises:
        NewerVersion: Its version is newer.
    """
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return
    if version > FORMAT_VERSION:
        raise NewerVersion(
            f"{name}: format version {version}, this batchinfer reads up to {FORMAT_VERSION}",
            hint="upgrade batchinfer",
        )


def sha256(data: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(file: BinaryIO) -> str:
    """Hexadecimal sha256 of a file from its current position."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # any binary file will do


def fingerprint(config: dict[str, Any]) -> str:
    """Short stable hash of a run's configuration: key order does not matter.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(_sorted_encoder.encode(config)).hexdigest()[:32]


def row_seed(run_seed: int, chunk: str, line: int) -> int:
    """Seed of one row: 63 bits computed from the run's seed and the row's key alone (promise P9).

    >>> row_seed(0, "part-00000", 1) == row_seed(0, "part-00000", 1)
    True
    """
    return row_seeds(run_seed, chunk)(line)


def row_seeds(run_seed: int, chunk: str) -> Callable[[int], int]:
    """Return a function from line to `row_seed`. The part that all lines of a chunk share is hashed once."""
    shared = hashlib.blake2b(f"{run_seed}\0{chunk}\0".encode(), digest_size=8)

    def seed(line: int) -> int:
        digest = shared.copy()
        digest.update(b"%d" % line)
        return int.from_bytes(digest.digest(), "big") >> 1

    return seed


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a JSON Lines file, without their newline.

    No other byte splits lines; a final newline adds no line.
    """
    for line in file:
        yield line[:-1] if line.endswith(b"\n") else line


def raw(data: bytes) -> msgspec.Raw:
    """Wrap bytes that are JSON already, so that `encode` embeds them unchanged."""
    return msgspec.Raw(data)


# --------------------------------------------------------------------------- zstd

_READ_BYTES = 32 << 10
_FEED_BYTES = 1 << 10
"""Compressed bytes that are decompressed at once. Four bytes expand to at most 128 KiB, so 1 KiB to at most 32 MiB."""


class ZstdFile(io.RawIOBase):
    """Decompresses a zstd file of any number of frames, in bounded memory. Does not close `raw`.

    zstandard's own reader accepts a file that was cut short; this reader raises.

    Raises:
        EOFError: The last frame is cut short.
        zstandard.ZstdError: The file is damaged, or no zstd file.
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
        """See io.RawIOBase."""
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
