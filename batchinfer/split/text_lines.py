r"""Reads JSON Lines and text. Lines end with the byte \n only, and a final \n makes no row.

A JSON line is copied byte for byte, with `_row` and `_id` before its closing brace. What is no JSON object is copied as
it is, a blank line too: the worker makes an error row of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import raw_members
from batchinfer.split.files import FoundFile, damaged, opened
from batchinfer.split.own_fields import Block, Counted, Part, lines_block, refuse_own_fields

TEXT_COLUMN = "prompt"
"""Name of the only column of a text's rows."""
_BLOCK_BYTES = 4 << 20
SAMPLE_LINES = 1000
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"


def count_lines(found: FoundFile, _delimiter: str) -> Counted:
    """Read a whole file, to find the number of its lines, its sha256, and the columns of the first rows."""
    digest, rows, columns = hashlib.sha256(), 0, [TEXT_COLUMN]
    with opened(found.url) as file:
        while lines := file.readlines(_BLOCK_BYTES):
            if not rows and found.format == "jsonl":
                columns = sample_columns(lines, found.url)
            rows += len(_rows_of(lines, found))
            for line in lines:
                digest.update(line)
    return Counted(rows=rows, columns=columns, digest=digest.hexdigest())


def sample_columns(lines: list[bytes], url: str) -> list[str]:
    """Return the columns of the first rows of JSON Lines.

    Raises:
        InputError: None of them is a JSON object, so the file is of another form.
    """
    names: dict[str, None] = {}
    objects = [raw_members(line.removeprefix(_BOM)) for line in lines[:SAMPLE_LINES]]
    for members in objects:
        names.update(dict.fromkeys(members or ()))
    if all(members is None for members in objects):
        is_array = lines[0].removeprefix(_BOM).lstrip(_SPACE).startswith(b"[")
        what = "is a JSON array" if is_array else f"holds no JSON object in {len(objects)} lines"
        raise InputError(
            f"{url}: {what}, expected one object on each line, in UTF-8",
            hint=f"convert it: jq -c {'.[]' if is_array else '.'!r} FILE > rows.jsonl",
        )
    return list(names)


def has_column(url: str, name: str) -> bool:
    """Whether a row of JSON Lines has a column. Reads up to the first one."""
    with opened(url) as file:
        return any(name in (raw_members(line) or ()) for line in file)


def read_lines(part: Part) -> Iterator[Block]:
    """Yield the rows of JSON Lines or text."""
    convert = _text_block if part.found.format == "text" else _json_block
    row = part.first_row
    with opened(part.found.url) as file:
        while lines := file.readlines(_BLOCK_BYTES):
            if row == part.first_row:
                lines[0] = lines[0].removeprefix(_BOM)
            lines = _rows_of(lines, part.found)
            yield convert(part, lines, row)
            row += len(lines)


def _rows_of(lines: list[bytes], found: FoundFile) -> list[bytes]:
    """Return the lines that are rows. A blank line of text is none; in JSON Lines it is a broken row."""
    return [line for line in lines if line.strip()] if found.format == "text" else lines


def _text_block(part: Part, lines: list[bytes], first_row: int) -> Block:
    done = []
    for row, line in enumerate(lines, first_row):
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            place = f"row {row - part.first_row} is not UTF-8: {error.reason}"
            raise damaged(part.found.url, place) from error
        done.append(msgspec.json.encode({TEXT_COLUMN: text, "_row": row, "_id": str(row)}) + b"\n")
    return lines_block(done)


def _json_block(part: Part, lines: list[bytes], first_row: int) -> Block:
    done, ids, num_broken = [], [], 0
    for row, line in enumerate(lines, first_row):
        members = raw_members(line)
        if members is None:
            num_broken += 1
            done.append(line.removesuffix(b"\n") + b"\n")
            continue
        if part.columns is None:
            refuse_own_fields(members, f"{part.found.url}, line {row - part.first_row + 1}")
            body = line.rstrip(_SPACE)[:-1]
        else:
            kept = {name: members[name] for name in part.columns if name in members}
            body = msgspec.json.encode(kept)[:-1]
        own = _id_of(members.get(part.id_column))
        if own is not None:
            ids.append(own.strip(b'"'))
        comma = b"" if body.strip(_SPACE) == b"{" else b","
        tail = b'"_row":%d,"_id":%b}\n' % (row, b'"%d"' % row if own is None else own)
        done.append(body + comma + tail)
    return lines_block(done, ids, num_broken)


def _id_of(value: msgspec.Raw | None) -> bytes | None:
    """Return a row's own id as a JSON string, for values that are no string their JSON text; None without a value."""
    text = bytes(value or b"null")
    if text == b"null":
        return None
    return text if text.startswith(b'"') else msgspec.json.encode(text.decode())
