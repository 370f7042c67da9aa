r"""Reads JSON Lines, CSV and text. Lines end with the byte \n only, and a final \n makes no row.

A JSON line is copied byte for byte, with `_row` and `_id` before its closing brace. What is no JSON object is copied as
it is, a blank line too: the worker makes an error row of it. Records of CSV and lines of text become JSON lines first.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import raw_members
from batchinfer.split import files
from batchinfer.split.files import Block, DataFile, Wanted, refuse_columns

TEXT_COLUMN = "prompt"
"""Name of the only column of a text's rows."""
_SAMPLE_LINES = 1000
_BATCH_BYTES = 4 << 20
_ROW_BYTES = 4 << 10
"""What each row of CSV and text counts in a batch besides its length."""
_VALUE_BYTES = 64 << 20
"""Longest value of CSV: a quote that is not closed makes one value of the rest of the file."""
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"


def count_rows(file: DataFile, wanted: Wanted) -> DataFile:
    """Read a whole file, to find the number of its rows, their sha256, and the columns of the first ones."""
    digest, rows, columns = hashlib.sha256(), 0, list[str]()
    for lines in batches(file, wanted):
        columns = columns or _sample_columns(lines, file.url)
        rows += len(lines)
        for line in lines:
            digest.update(line)
    return msgspec.structs.replace(file, rows=rows, columns=columns, digest=digest.hexdigest())


def _sample_columns(lines: list[bytes], url: str) -> list[str]:
    """Return the columns of the first rows of JSON Lines.

    Raises:
        InputError: None of them is a JSON object, so the file is of another form.
    """
    objects = list(map(raw_members, lines[:_SAMPLE_LINES]))
    is_array = lines[0].strip() == b"["
    if is_array or all(members is None for members in objects):
        is_array |= lines[0].lstrip().startswith(b"[")
        what = "is a JSON array" if is_array else f"holds no JSON object in {len(objects)} lines"
        raise InputError(
            f"{url}: {what}, expected one object on each line, in UTF-8",
            hint=f"convert it: jq -c {'.[]' if is_array else '.'!r} FILE > rows.jsonl",
        )
    return list(dict.fromkeys(name for members in objects for name in members or ()))


def has_column(url: str, name: str) -> bool:
    """Whether a row of JSON Lines has a column. Reads up to the first one."""
    with files.opened(url) as there:
        return any(name in (raw_members(line) or ()) for line in there)


def encode(lines: list[bytes], file: DataFile, wanted: Wanted, row: int, first: int) -> Block:
    """Return rows as lines. `row` is the number of the first of them, and `first` that of the file's first."""
    done, ids, num_broken = [], [], 0
    for number, line in enumerate(lines, row):
        members = raw_members(line)
        own = _id_of((members or {}).get(wanted.id_column)) if wanted.id_column else None
        if wanted.id_column:
            ids.append(own and own.strip(b'"'))
        if members is None:
            num_broken += 1
            done.append(line.removesuffix(b"\n") + b"\n")
        else:
            body = _body(members, line, wanted, f"{file.url}, line {number - first + 1}")
            tail = b'"_row":%d,"_id":%b}\n' % (number, b'"%d"' % number if own is None else own)
            done.append(body + tail)
    return Block(len(lines), b"".join(done), ids, num_broken)


def _body(members: dict[str, msgspec.Raw], line: bytes, wanted: Wanted, where: str) -> bytes:
    """Return a JSON object as far as its end, with a comma after the last member."""
    if wanted.columns is None:
        if "_row" in members or "_id" in members:
            refuse_columns(members, where)
        body = line.rstrip()[:-1]
    else:
        kept = {name: members[name] for name in wanted.columns if name in members}
        body = msgspec.json.encode(kept)[:-1]
    return body if body.strip() == b"{" else body + b","


def _id_of(value: msgspec.Raw | None) -> bytes | None:
    """Return a row's own id as a JSON string, for values that are no string their JSON text; None without a value."""
    text = bytes(value or b"null")
    if text == b"null":
        return None
    return text if text.startswith(b'"') else msgspec.json.encode(text.decode())


def batches(file: DataFile, wanted: Wanted) -> Iterator[list[bytes]]:
    """Yield the rows as JSON lines, some at a time.

    Raises:
        InputError: The file cannot be read to its end. Stores have given less than there is, without a word.
    """
    with files.opened(file.url) as there:
        if there.peek(len(_BOM)).startswith(_BOM):
            there.read(len(_BOM))
        if file.format == "jsonl":
            yield from iter(lambda: there.readlines(_BATCH_BYTES), [])
        else:
            records = _records(file, wanted, map(bytes.decode, there))
            lines, size, encoder = list[bytes](), 0, msgspec.json.encode
            for record in records:
                lines.append(line := encoder(record) + b"\n")
                size += len(line) + _ROW_BYTES
                if size >= _BATCH_BYTES:
                    yield lines
                    lines, size = [], 0
            if lines:
                yield lines
        # Of a file that was counted before, the number of rows tells that it has changed.
        is_plain = not files.packing_of(file.url)
        if is_plain and not file.digest and there.tell() < file.bytes:
            raise files.damaged(file.url, f"{there.tell()} of {file.bytes} bytes came")


def _records(file: DataFile, wanted: Wanted, texts: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of CSV or text by the names of their columns. Blank lines are no rows."""
    if file.format == "text":
        for text in texts:
            if text.strip(_SPACE):
                yield {TEXT_COLUMN: text.removesuffix("\n").removesuffix("\r")}
        return
    csv.field_size_limit(_VALUE_BYTES)
    delimiter = wanted.delimiter or ("\t" if files.ending(file.url) == ".tsv" else ",")
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    try:
        records = filter(None, reader)
        header = next(records, [])
        refuse_columns(filter(wanted.takes, header), file.url)
        for record in records:
            if len(record) != len(header):
                what = f"{len(record)} values, expected the header's {len(header)}"
                raise InputError(
                    f"{file.url}, line {reader.line_num}: {what}",
                    hint="quote values with a delimiter or a newline in them, or see --delimiter",
                )
            yield dict(zip(header, record, strict=True))
    except csv.Error as error:
        raise InputError(
            f"{file.url}: is no CSV at line {reader.line_num} ({error}), perhaps a quote is open, or \\r ends lines",
            hint='close it, and write quotes within quoted values twice: ""; end lines in \\n',
        ) from error
