r"""Counts and reads JSON Lines files, plain, gzip or zstd. Lines are copied, with `_row` and `_id` added at the end.

Numbers, escapes and key order stay byte for byte. A line is encoded anew only if columns are chosen or if it has a
`_row` or `_id` of its own, which get other names; even then the values stay as they are. A line that is no JSON object
is copied unchanged, and the worker makes an error row of it. Lines end at the byte "\n" alone.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.redaction import redact
from batchinfer.split import source_files
from batchinfer.split.blocks import (
    ID_FIELD,
    OWN_FIELDS,
    ROW_FIELD,
    ColumnChoice,
    CountedFile,
    EncodedBlock,
    Oddities,
    RowBlock,
    id_text,
    is_batch_request,
    kept_columns,
)
from batchinfer.split.source_files import FoundFile

_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 8 << 20
"""Fewest bytes between two remembered positions. At each of them a row starts, so a reader can begin there."""
_SAMPLE_LINES = 100
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"

_any_decoder = msgspec.json.Decoder()
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def count(found: FoundFile) -> CountedFile:
    """Read the whole file once, to find the number of lines, the sha256, the marks, and the keys of the first objects.

    Raises:
        InputError: The file is a JSON array, UTF-16, or a damaged compressed file.
    """
    is_seekable = not found.url.lower().endswith((".gz", ".zst", ".zstd"))
    digest = hashlib.sha256()
    marks = [(0, 0)]
    rows = size = 0
    head = last = b""
    with source_files.open_stream(found) as stream:
        while block := stream.read(_BLOCK_BYTES):
            if len(head) < _BLOCK_BYTES:
                head += block
            digest.update(block)
            rows += block.count(b"\n")
            newline = block.rfind(b"\n")
            if is_seekable and newline >= 0 and size + newline + 1 - marks[-1][1] >= _MARK_BYTES:
                marks.append((rows, size + newline + 1))
            size += len(block)
            last = block
    if last and not last.endswith(b"\n"):
        rows += 1
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        name = found.url.rsplit("/", 1)[-1]
        raise InputError(
            f"{found.url}: starts as UTF-16 text does, expected UTF-8",
            hint=f"convert it: iconv -f UTF-16 -t UTF-8 {name} > utf8.jsonl",
        )
    head = head.removeprefix(_BOM)
    if head.lstrip(_SPACE)[:1] == b"[":
        raise InputError(
            f"{found.url}: is a JSON array, expected one JSON object a line",
            hint=f"convert it: jq -c '.[]' {found.url.rsplit('/', 1)[-1]} > rows.jsonl",
        )
    return CountedFile(
        found=found,
        format="jsonl",
        rows=rows,
        columns=_sample_keys(head),
        marks=marks,
        digest=digest.hexdigest(),
    )


def _sample_keys(head: bytes) -> list[str]:
    names: dict[str, None] = {}
    for line in head.split(b"\n")[:_SAMPLE_LINES]:
        names.update(dict.fromkeys(_decode_object(line) or ()))
    return list(names)


def has_object(item: CountedFile) -> bool:
    """Return whether any line of the file is a JSON object. Stops reading at the first one."""
    with source_files.open_stream(item.found) as stream:
        return any(_decode_object(line.removeprefix(_BOM)) is not None for line in stream)


def find_keys(item: CountedFile, wanted: set[str]) -> set[str]:
    """Return which of these keys any object of the file has. Stops reading once all are found."""
    missing = set(wanted)
    with source_files.open_stream(item.found) as stream:
        for line in stream:
            if any(name.encode() in line for name in missing) or b"\\u" in line:
                missing -= (_decode_object(line) or {}).keys()
            if not missing:
                break
    return wanted - missing


def read(
    item: CountedFile, rows: range, first_row: int, choice: ColumnChoice, odd: Oddities
) -> Iterator[RowBlock]:
    """Yield the lines of one file whose indices are in `rows`, in order; see `parquet.read` for the arguments.

    Raises:
        InputError: The file is damaged, or changed since its count.
    """
    source_files.check_unchanged(item.found)
    mark_row, offset = max(mark for mark in item.marks if mark[0] <= rows.start)
    splice = _Splicer(choice)
    row, left = first_row, len(rows)
    with source_files.open_stream(item.found, offset) as stream:
        for _ in itertools.islice(stream, rows.start - mark_row):
            pass
        for lines in _line_lists(stream, left):
            if rows.start == 0 and left == len(rows):
                lines[0] = lines[0].removeprefix(_BOM)
            try:
                block = splice.block(lines, row)
            except _NameTaken as taken:
                line = taken.row - first_row + rows.start + 1
                raise InputError(
                    f"{item.found.url}, line {line}: has both {taken.name!r} and {taken.new_name!r}, the name that "
                    f"its {taken.name!r} gets in the rows, expected one of them",
                    hint="rename one of them in the source, or leave one out with --columns",
                ) from taken
            odd.renamed |= splice.renamed
            if splice.broken:
                odd.first_broken = odd.first_broken or redact(
                    f"{item.found.url}, line {splice.broken[0] - first_row + rows.start + 1}"
                )
                odd.broken_lines += len(splice.broken)
            yield block
            row += len(lines)
            left -= len(lines)
    if left:
        raise source_files.changed(item.found.url)
    source_files.check_unchanged(item.found)


def _line_lists(stream: BinaryIO, count: int) -> Iterator[list[bytes]]:
    """Yield the next `count` lines, or all if the file has fewer, in lists of about a megabyte."""
    while count and (lines := stream.readlines(_BLOCK_BYTES)):
        yield lines[:count]
        count -= len(lines[:count])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _decode_object(line: bytes) -> dict[str, Any] | None:
    """Return the line's object, or None if the line is no JSON object in UTF-8.

    msgspec refuses lone surrogates and numbers too large for a float. Such lines are read with the standard library.
    """
    try:
        value = _any_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(line.decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


class _NameTaken(Exception):
    """A row has a column of the name that its `_row` or `_id` would get."""

    def __init__(self, row: int, name: str, new_name: str) -> None:
        super().__init__(name)
        self.row, self.name, self.new_name = row, name, new_name


class _Splicer:
    """Converts lines: adds `_row` and `_id`, and leaves out the columns that are not chosen."""

    def __init__(self, choice: ColumnChoice) -> None:
        self._choice = choice
        self.broken: list[int] = []
        """Row numbers of the lines in the last block that are no JSON object."""
        self.renamed: set[str] = set()
        """Names that were renamed in any line so far."""

    def block(self, lines: list[bytes], first_row: int) -> RowBlock:
        """Convert some consecutive lines. `first_row` is the row number in the job of the first line."""
        self.broken = []
        done: list[bytes] = []
        ids: list[str | None] = []
        for row, line in enumerate(lines, first_row):
            new_line, name = self._convert(line, row)
            done.append(new_line)
            ids.append(name)
        return EncodedBlock(done, ids if any(name is not None for name in ids) else None)

    def _convert(self, line: bytes, row: int) -> tuple[bytes, str | None]:
        value = _decode_object(line)
        if value is None:
            self.broken.append(row)
            return (line if line.endswith(b"\n") else line + b"\n"), None
        name = None
        if self._choice.id_column:
            name = id_text(value.get(self._choice.id_column), row)
        elif is_batch_request(list(value)):
            name = id_text(value["custom_id"], row)
        text = str(row) if name is None else name
        if self._choice.columns is not None or not OWN_FIELDS.isdisjoint(value):
            body = self._pick(line, value, row)
        else:
            body = line.rstrip(_SPACE)[:-1].rstrip(_SPACE)
        comma = b"" if body.lstrip(_SPACE) == b"{" else b","
        tail = f'{ROW_FIELD}":{row},"{ID_FIELD}":'.encode()
        return b"".join((body, comma, b'"', tail, _encode_text(text), b"}\n")), name

    def _pick(self, line: bytes, value: dict[str, Any], row: int) -> bytes:
        """Return the object with only the kept columns, each by its name in the rows, without the closing brace.

        Values stay byte for byte, except in a line with a lone surrogate, which is written anew.
        """
        names = {name: name for name in kept_columns(list(value), self._choice) if name in value}
        for name in OWN_FIELDS.intersection(names):
            new_name = names[name] = self._choice.name_in_rows(name)
            self.renamed.add(name)
            if new_name in names:
                raise _NameTaken(row, name, new_name)
        try:
            raw = _raw_decoder.decode(line)
            return _encoder.encode({new: raw[name] for name, new in names.items()})[:-1]
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
        ):  # the line has a lone surrogate; see `_decode_object`
            return json.dumps({new: value[name] for name, new in names.items()}).encode()[:-1]


def _encode_text(text: str) -> bytes:
    try:
        return _encoder.encode(text)
    except (
        UnicodeEncodeError
    ):  # a lone surrogate, which UTF-8 cannot hold and JSON only as an escape
        return json.dumps(text).encode()
