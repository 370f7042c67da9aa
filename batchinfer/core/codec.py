"""Encodes and decodes records, and computes checksums, fingerprints and seeds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import MAX_DEPTH, is_deep

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_sorted_encoder = msgspec.json.Encoder(order="deterministic")
_building = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
"""Decoders of the types that `decode` and `convert` have seen."""


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return a new decoder of JSON. All code of this package gets its decoders of classes here, one thread at a time.

    msgspec gathers what it must know of a class when a decoder first meets the class. A second thread that decodes this
    class meanwhile reads a null pointer, and the process dies of SIGSEGV (msgspec 0.22.0).
    """
    with _building:
        return msgspec.json.Decoder(kind)


def convert(value: Any, kind: type[T]) -> T:
    """Convert plain values to a type, as msgspec.convert does, whose errors it raises. Safe for threads."""
    _decoder_of(kind)
    return msgspec.convert(value, kind)


def _decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = json_decoder(kind)
    return found


def encode(record: Any) -> bytes:
    """Encode a record as JSON on one line, without a newline at the end."""
    return _encoder.encode(record)


def encode_pretty(record: Any) -> bytes:
    """Encode a record for people: indented JSON with a newline at the end. The keys of dictionaries are sorted."""
    return msgspec.json.format(_sorted_encoder.encode(record), indent=2) + b"\n"


_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DAMAGED = "if nobody edited it by hand, it is damaged: `batchinfer verify` says how to fix it"


def decode(data: bytes, kind: type[T], *, name: str, hint: str = _DAMAGED) -> T:
    """Decode one stored record of class `kind`.

    Args:
        data: The record as JSON.
        kind: Class of the record.
        name: Name of the record for the error's message, for example its key.
        hint: What the error tells people to do if the record is damaged.

    Raises:
        InputError: `data` cannot be decoded, is nested too deep, or has a newer format version than this program knows.
            The message names `name` and says what is wrong.
    """
    cause: Exception | None = None
    try:
        record = _decoder_of(kind).decode(data)
        if not is_deep(data):
            return record
        what = f"nested deeper than {MAX_DEPTH} levels"
    except _DECODE_ERRORS as error:
        what, cause = "empty" if not data else str(error), error
        if "<=" in what and "`$.format_version`" in what:
            hint = "upgrade batchinfer: a later one wrote it"
    raise InputError(
        f"{name}: not a readable {kind.__name__.lower().removesuffix('record')} record ({what})",
        hint=hint,
    ) from cause


def sha256(data: bytes | memoryview) -> str:
    """Compute the sha256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(file: BinaryIO) -> str:
    """Compute the sha256 of a file from its current position to its end, in hexadecimal."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # any binary file will do


def fingerprint(config: dict[str, Any]) -> str:
    """Compute a short hash of a run's configuration. The order of keys does not change it.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(_sorted_encoder.encode(config)).hexdigest()[:32]


def row_seeds(run_seed: int, chunk: str) -> Callable[[int], int]:
    """Return a function that computes a row's seed, a number of 63 bits, from its line in this chunk (promise P9).

    >>> row_seeds(0, "part-00000")(1) == row_seeds(0, "part-00000")(1)
    True
    """
    shared = hashlib.blake2b(f"{run_seed}\0{chunk}\0".encode(), digest_size=8)

    def seed(line: int) -> int:
        digest = shared.copy()
        digest.update(b"%d" % line)
        return int.from_bytes(digest.digest(), "big") >> 1

    return seed


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a JSON Lines file, each without its newline.

    Only newlines end lines; a carriage return does not. After a final newline there is no further, empty line.
    """
    for line in file:
        yield line[:-1] if line.endswith(b"\n") else line


def raw(data: bytes) -> msgspec.Raw:
    """Wrap bytes that are JSON already, so that `encode` embeds them unchanged."""
    return msgspec.Raw(data)
