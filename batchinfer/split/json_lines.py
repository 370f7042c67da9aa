r"""Counts and reads JSON Lines files, plain, gzip or zstd. Lines are copied, with `_row` and `_id` added at the end.

Numbers, escapes and key order stay byte for byte. A line is encoded anew only if columns are chosen or if it has a
`_row` or `_id` of its own, which get other names. Even then values keep their text, except in lines that are nested
very deep. NaN and infinite values, which Python's json module writes and JSON lacks, become null. A line that is no
JSON object is copied unchanged, and the worker makes an error row of it. Lines end at the byte "\n" alone; a blank line
is no row.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import read_object
from batchinfer.core.redaction import redact
from batchinfer.split import first_bytes, source_files
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
)
from batchinfer.split.source_files import FoundFile

_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 8 << 20
"""Fewest bytes between two remembered positions. At each of them a line starts, so a reader can begin there."""
_SAMPLE_LINES = 100
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_is_blank = bytes.isspace
_TEXT_OR_CONSTANT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|NaN|-?Infinity')

_any_decoder = msgspec.json.Decoder()
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def count(found: FoundFile) -> CountedFile:
    """Read the whole file once, to find the number of lines, the sha256, the marks, and the keys of the first objects.

    Raises:
        OtherFormat: The file is parquet.
        InputError: The file is a JSON array, UTF-16 or UTF-32, or is compressed and damaged or wrongly named.
    """
    is_seekable = not found.url.lower().endswith(first_bytes.PACKED)
    digest = hashlib.sha256()
    marks = [(0, 0)]
    rows = num_blank = size = 0
    columns: list[str] = []
    with source_files.open_stream(found) as stream:
        while lines := stream.readlines(_BLOCK_BYTES):
            block = b"".join(lines)
            digest.update(block)
            if not size:
                _check_start(found, block)
                lines[0] = lines[0].removeprefix(_BOM)
                columns = _sample_keys(lines)
            blank = sum(map(_is_blank, lines))
            rows += len(lines) - blank
            num_blank += blank
            size += len(block)
            if is_seekable and size - marks[-1][1] >= _MARK_BYTES:
                marks.append((rows, size))
    return CountedFile(
        found=found,
        format="jsonl",
        rows=rows,
        columns=columns,
        marks=marks,
        digest=digest.hexdigest(),
        blank_lines=num_blank,
    )


def _check_start(found: FoundFile, head: bytes) -> None:
    first_bytes.check_start(found, head, "jsonl")
    if head.removeprefix(_BOM).lstrip(_SPACE)[:1] == b"[":
        raise InputError(
            f"{found.url}: is a JSON array, expected one JSON object a line",
            hint=f"convert it: jq -c '.[]' {found.url.rsplit('/', 1)[-1]} > rows.jsonl",
        )


def _sample_keys(lines: list[bytes]) -> list[str]:
    names: dict[str, None] = {}
    for line in lines[:_SAMPLE_LINES]:
        names.update(dict.fromkeys(_decode_object(line).value or ()))
    return list(names)


def refuse_without_object(files: list[CountedFile]) -> None:
    """Raise InputError if no line of any file is a JSON object. Stops reading at the first one that is."""
    first: _Decoded | None = None
    for item in files:
        with source_files.open_stream(item.found) as stream:
            for line in stream:
                decoded = _decode_object(line.removeprefix(_BOM))
                if decoded.value is not None:
                    return
                if not first and not _is_blank(line):
                    first = decoded
    what = ""
    hint = "make objects of JSON strings with jq -c '{prompt: .}', of lines of text with jq -cR '{prompt: .}'"
    if first is not None and first.encoding:
        what = f"but would be one in {first.encoding} instead of UTF-8, "
        hint = first_bytes.convert_hint(first.encoding)
    elif first is not None and first.line.strip(_SPACE) == b"{":
        hint = "if objects take several lines each, convert the file: jq -c . FILE > rows.jsonl"
    raise InputError(
        f"{files[0].found.url}: no line is a JSON object, {what}expected one on each line",
        hint=hint,
    )


def find_keys(item: CountedFile, wanted: set[str]) -> set[str]:
    """Return which of these keys any object of the file has. Stops reading once all are found."""
    missing = set(wanted)
    with source_files.open_stream(item.found) as stream:
        for line in stream:
            if any(name.encode() in line for name in missing) or b"\\u" in line:
                missing -= (_decode_object(line).value or {}).keys()
            if not missing:
                break
    return wanted - missing


def read(
    item: CountedFile, rows: range, first_row: int, choice: ColumnChoice, odd: Oddities
) -> Iterator[RowBlock]:
    """Yield the lines of one file whose indices are in `rows`, in order; see `parquet.read` for the arguments.

    Raises:
        InputError: The file is damaged, or changed since its count; or a line has a column of the name that its `_row`
            or `_id` gets.
    """
    source_files.check_unchanged(item.found)
    mark_row, offset = max(mark for mark in item.marks if mark[0] <= rows.start)
    splice = _Splicer(item, choice, odd, first_row - rows.start)
    skip, row, left = rows.start - mark_row, first_row, len(rows)
    with source_files.open_stream(item.found, offset) as stream:
        for lines in _line_lists(stream, offset, has_blank=item.blank_lines > 0):
            part = lines[skip : skip + left]
            skip -= min(skip, len(lines))
            if part:
                yield splice.block(part, row)
            row += len(part)
            left -= len(part)
            if not left:
                break
    if left:
        raise source_files.changed(item.found.url)
    source_files.check_unchanged(item.found)


def _line_lists(stream: BinaryIO, offset: int, *, has_blank: bool) -> Iterator[list[bytes]]:
    """Yield the lines that are rows, in lists of about a megabyte. `offset` is the stream's position in the file."""
    is_start = offset == 0
    while lines := stream.readlines(_BLOCK_BYTES):
        if is_start:
            lines[0] = lines[0].removeprefix(_BOM)
            is_start = False
        yield [line for line in lines if not _is_blank(line)] if has_blank else lines


# --------------------------------------------------------------------------- one line


class _Decoded(NamedTuple):
    """A decoded line. `value` is its object, or None if the line is no JSON object in UTF-8.

    In a line that is nested too deep for Python, the deep values are `msgspec.Raw`.

    `line` is the line, with null in place of NaN and infinite values; `nulls` counts these by column. If the line is
    not UTF-8 but an object in another encoding, `encoding` names that one.
    """

    value: dict[str, Any] | None
    line: bytes
    nulls: dict[str, int] = {}
    encoding: str = ""


def _decode_object(line: bytes) -> _Decoded:
    try:
        value = _any_decoder.decode(line)
    except RecursionError:
        return _Decoded(read_object(line), line)
    except _REFUSED:
        return _decode_odd(line)
    return _Decoded(value if isinstance(value, dict) else None, line)


class _Constant:
    """Stands for NaN, Infinity and -Infinity in a decoded line."""


def _decode_odd(line: bytes) -> _Decoded:
    """Decode a line that msgspec refuses.

    msgspec refuses lone surrogates, numbers too large for a float, and text that is no JSON, such as NaN and
    infinities, which Python's json module writes and reads.
    """
    constants: list[str] = []

    def note(name: str) -> type[_Constant]:
        constants.append(name)
        return _Constant

    try:
        value = json.loads(line.decode(), parse_constant=note)
    except UnicodeDecodeError:
        return _Decoded(None, line, encoding=_other_encoding(line))
    except ValueError:
        return _Decoded(None, line)
    except RecursionError:
        return _Decoded(read_object(line), line)
    if not isinstance(value, dict):
        return _Decoded(None, line)
    if not constants:
        return _Decoded(value, line)
    nulls = {name: number for name, item in value.items() if (number := _num_constants(item))}
    line = _TEXT_OR_CONSTANT.sub(_constant_to_null, line)
    return _Decoded(_decode_object(line).value, line, nulls)


def _constant_to_null(match: re.Match[bytes]) -> bytes:
    return match[0] if match[0].startswith(b'"') else b"null"


def _num_constants(value: Any) -> int:
    """Count the constants in a decoded value at any depth."""
    count, rest = 0, [value]
    while rest:
        one = rest.pop()
        if one is _Constant:
            count += 1
        elif isinstance(one, dict | list):
            rest += one.values() if isinstance(one, dict) else one
    return count


def _other_encoding(line: bytes) -> str:
    """Return the likely encoding of a line that is not UTF-8 if it is a JSON object in that encoding, else ""."""
    encoding = first_bytes.guess_encoding(line)
    try:
        is_object = isinstance(json.loads(line.decode(encoding)), dict)
    except (ValueError, RecursionError):
        return ""
    return encoding if is_object else ""


def _cut(line: bytes) -> dict[str, str]:
    """Return the text of each value of a JSON object that msgspec refuses because of a lone surrogate."""
    text = line.decode()
    decode = json.JSONDecoder().raw_decode
    values = {}
    end = text.index("{")
    while text[end] != "}":
        name, end = decode(text, _after_space(text, end + 1))
        start = _after_space(text, text.index(":", end) + 1)
        _, end = decode(text, start)
        values[name] = text[start:end]
        end = _after_space(text, end)
    return values


def _after_space(text: str, index: int) -> int:
    """Return the index of the first character from `index` on that is no white space."""
    while text[index] in " \t\r\n":
        index += 1
    return index


def _join(values: dict[str, str]) -> bytes:
    """Return a JSON object without its closing brace. `values` are JSON texts."""
    return ("{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in values.items())).encode()


class _Splicer:
    """Converts lines: adds `_row` and `_id`, and leaves out the columns that are not chosen.

    Args:
        item: The file.
        choice: The columns to keep, and the column whose values become `_id`.
        odd: Counts to which the oddities of the lines are added.
        file_row: Number in the job of the file's first row.
    """

    def __init__(
        self, item: CountedFile, choice: ColumnChoice, odd: Oddities, file_row: int
    ) -> None:
        self._item = item
        self._choice = choice
        self._odd = odd
        self._file_row = file_row

    def block(self, lines: list[bytes], first_row: int) -> RowBlock:
        """Convert some consecutive lines. `first_row` is the row number in the job of the first line."""
        done: list[bytes] = []
        ids: list[str | None] = []
        for row, line in enumerate(lines, first_row):
            new_line, name = self._convert(line, row)
            done.append(new_line)
            ids.append(name)
        return EncodedBlock(done, ids if any(name is not None for name in ids) else None)

    def _convert(self, line: bytes, row: int) -> tuple[bytes, str | None]:
        try:
            value = _any_decoder.decode(line)
        except _REFUSED:
            odd = _decode_odd(line)
            value, line = odd.value, odd.line
            self._note(odd, row)
        if not isinstance(value, dict):
            self._note_broken(row)
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

    def _note(self, decoded: _Decoded, row: int) -> None:
        odd = self._odd
        for name, number in decoded.nulls.items():
            if self._choice.columns is None or name in self._choice.columns:
                odd.nulls[name] += number
        if decoded.encoding:
            odd.encodings[decoded.encoding] += 1
            odd.first_encoded = odd.first_encoded or redact(self._place(row))

    def _note_broken(self, row: int) -> None:
        self._odd.broken_lines += 1
        self._odd.first_broken = self._odd.first_broken or redact(self._place(row))

    def _place(self, row: int) -> str:
        """Return the file and the line of a row."""
        note = " (blank lines not counted)" if self._item.blank_lines else ""
        return f"{self._item.found.url}, line {row - self._file_row + 1}{note}"

    def _pick(self, line: bytes, value: dict[str, Any], row: int) -> bytes:
        """Return the object with only the kept columns, each by its name in the rows, without the closing brace."""
        wanted = self._choice.columns
        names = {name: name for name in (value if wanted is None else wanted) if name in value}
        if not OWN_FIELDS.isdisjoint(names):
            names = self._rename(names, row)
        try:
            raw = _raw_decoder.decode(line)
        except RecursionError:  # the values that are nested too deep are `msgspec.Raw`
            return _encoder.encode({new: value[name] for name, new in names.items()})[:-1]
        except (msgspec.DecodeError, UnicodeDecodeError):
            texts = _cut(line)
            return _join({new: texts[name] for name, new in names.items()})
        return _encoder.encode({new: raw[name] for name, new in names.items()})[:-1]

    def _rename(self, names: dict[str, str], row: int) -> dict[str, str]:
        """Return the names that a row's columns get, by their names in the source: new ones for `_row` and `_id`."""
        for name in OWN_FIELDS.intersection(names):
            self._odd.renamed.add(name)
            new_name = self._choice.name_in_rows(name)
            if new_name in names:
                raise InputError(
                    f"{self._place(row)}: has both {name!r} and {new_name!r}, the name that its {name!r} gets in the "
                    "rows, expected one of them",
                    hint="rename one of them in the source, or leave one out with --columns",
                )
        return {name: self._choice.name_in_rows(name) for name in names}


def _encode_text(text: str) -> bytes:
    try:
        return _encoder.encode(text)
    except (
        UnicodeEncodeError
    ):  # a lone surrogate, which UTF-8 cannot hold and JSON only as an escape
        return json.dumps(text).encode()
