"""Tells from a file's first bytes what the file is, since names and encodings are not always what they should be."""

from __future__ import annotations

import json
import re

from batchinfer.core.errors import InputError
from batchinfer.split.source_files import MAGIC_PARQUET, FoundFile

HEAD_BYTES = 64
"""Number of bytes that are read to tell a format."""
PACKED = (".gz", ".zst", ".zstd")
"""Endings of files that are decompressed while they are read."""
_MAGIC = {MAGIC_PARQUET: "parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[\s*)?\{\s*["}]')


class OtherFormat(Exception):
    """A file is not of the format that its name tells, but of another one that `split` reads: `format`."""

    def __init__(self, format_: str) -> None:
        super().__init__(format_)
        self.format = format_


def format_of(head: bytes) -> str:
    """Return the format that a file's first bytes tell: parquet, jsonl, gzip, zstd, or "" for any other.

    >>> format_of(b'{"prompt": 1}'), format_of(b"prompt,answer")
    ('jsonl', '')
    """
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    return "jsonl" if _JSON.match(head) else ""


def check_start(found: FoundFile, head: bytes, kind: str) -> None:
    """Check that a file does not begin as one of another format than `kind`, nor as text in UTF-16 or UTF-32.

    Args:
        found: The file.
        head: The first bytes of its content, after decompression.
        kind: Format that the file's name tells.

    Raises:
        OtherFormat: The file has another format that `split` reads.
        InputError: The content is compressed, is parquet inside a compressed file, or is UTF-16 or UTF-32 text.
    """
    actual = format_of(head)
    name = found.url.rsplit("/", 1)[-1]
    is_packed = name.lower().endswith(PACKED)
    if actual in ("gzip", "zstd") or (actual == "parquet" and is_packed):
        ending = {"gzip": ".gz", "zstd": ".zst"}.get(actual, "")
        can_rename = ending and kind != "parquet" and not is_packed
        raise InputError(
            f"{found.url}: holds {actual} data, expected {kind}",
            hint=f"rename it to {name}{ending}" if can_rename else "unpack it first",
        )
    if actual and actual != kind:
        raise OtherFormat(actual)
    encoding = json.detect_encoding(head[:4]).upper()
    if kind != "parquet" and not encoding.startswith("UTF-8"):
        raise InputError(
            f"{found.url}: starts as {encoding} text does, expected UTF-8",
            hint=f"convert it: iconv -f {encoding} -t UTF-8 {name} > utf8.{kind}",
        )


def guess_encoding(data: bytes) -> str:
    """Return the most likely encoding of text that is not UTF-8, by the name that iconv knows.

    The bytes 80 to 9F are letters and signs in Windows-1252, and controls in Latin-1, which texts do not have. Nearly
    all bytes mean something in both, so this is a guess.
    """
    return "WINDOWS-1252" if any(0x80 <= byte <= 0x9F for byte in data) else "LATIN1"


def convert_hint(encoding: str) -> str:
    """Return the advice for a file that is not UTF-8."""
    return f"if the whole file is {encoding}, convert it: iconv -f {encoding} -t UTF-8 FILE > NEW"
