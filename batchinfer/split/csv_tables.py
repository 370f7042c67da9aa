"""Counts and reads CSV files with a header line, by RFC 4180 (quoted values may hold newlines), and TSV files.

CSV has no types, so every value stays text: "007" keeps its zeros. Empty lines are not rows. Fields are divided by a
comma, a semicolon, a tab or a bar, as the first records show, or by what --delimiter names. The parser is Python's,
because pyarrow's accepts a quote that is never closed and must be told the size of the largest record.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from batchinfer.core import units
from batchinfer.core.errors import InputError
from batchinfer.split import first_bytes, source_files
from batchinfer.split.arrow_values import make_record_type
from batchinfer.split.blocks import (
    ID_FIELD,
    OWN_FIELDS,
    ROW_FIELD,
    ColumnChoice,
    CountedFile,
    Oddities,
    PythonBlock,
    RowBlock,
    id_text,
    is_batch_request,
    kept_columns,
    no_such_column,
)
from batchinfer.split.source_files import FoundFile

_BLOCK_ROWS = 1000
_BLOCK_CHARS = 1 << 20
_LONGEST_FIELD = 1 << 30
_DELIMITERS = (",", ";", "\t", "|")
_NO_DELIMITERS = " _-.\"'\r\n"
_EXCEL_LINE = re.compile(r"sep=.\r?\n", re.IGNORECASE)
_SAMPLE_BYTES, _SAMPLE_RECORDS = 1 << 18, 100
"""Largest part of a file in which the delimiter is looked for: bytes, and records."""


class _Hashing(io.RawIOBase):
    """A stream that computes the sha256 of what is read through it."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        self.digest.update(data)
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def _records(found: FoundFile, delimiter: str) -> Iterator[tuple[Iterator[list[str]], _Hashing]]:
    """Open a file. Yields its records, and the stream that computes its sha256. An empty line is an empty record."""
    csv.field_size_limit(_LONGEST_FIELD)
    with source_files.open_stream(found) as stream:
        raw = _Hashing(stream)
        text = io.TextIOWrapper(io.BufferedReader(raw, 1 << 20), "utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            yield reader, raw
        except UnicodeDecodeError as error:
            encoding = first_bytes.guess_encoding(error.object)
            raise InputError(
                f"{found.url}: near line {reader.line_num + 1}: not UTF-8, but perhaps {encoding} ({error.reason})",
                hint=first_bytes.convert_hint(encoding),
            ) from error
        except csv.Error as error:
            raise source_files.damaged(
                found.url, f"near line {reader.line_num}: {error}"
            ) from error


def count(found: FoundFile, delimiter: str = "") -> CountedFile:
    """Read the whole file once, to find the number of records, the sha256 and the column names.

    Args:
        found: The file.
        delimiter: Character between the fields of a record; "" to find it.

    Raises:
        OtherFormat: The file is parquet or JSON Lines.
        InputError: A record has more or fewer fields than the header, the header has a name twice, or the file is
            not UTF-8 or not CSV; or several delimiters fit.
    """
    with source_files.open_stream(found) as stream:
        head = stream.read(_SAMPLE_BYTES)
    first_bytes.check_start(found, head, "csv")
    delimiter = delimiter or _find_delimiter(found, head)
    rows = num_blank = 0
    header: list[str] = []
    with _records(found, delimiter) as (records, raw):
        for record in records:
            if not record:
                num_blank += 1
            elif not header:
                header = record
            elif len(record) == len(header):
                rows += 1
            else:
                raise InputError(
                    f"{found.url}: record {rows + 1} has {units.many(len(record), 'field')}, expected the header's "
                    f"{len(header)}, with {show_delimiter(delimiter)} between fields",
                    hint="quote fields that hold it or a line break; to name another: --delimiter …",
                )
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise InputError(
            f"{found.url}: column {twice!r} is there twice in the header, expected unique names",
            hint="rename one of them",
        )
    return CountedFile(
        found=found,
        format="csv",
        rows=rows,
        columns=header,
        marks=[(0, 0)],
        digest=raw.digest.hexdigest(),
        blank_lines=num_blank,
        delimiter=delimiter,
    )


def usual_delimiter(url: str) -> str:
    r"""Return the delimiter that a file's URL suggests: a tab if the file's name ends in .tsv, else a comma.

    An ending for compression may follow.

    >>> [
    ...     usual_delimiter(url)
    ...     for url in ("a.TSV.gz", "https://host/a.tsv?v=2", "s3://b/x.tsv/a.csv")
    ... ]
    ['\t', '\t', ',']
    """
    name = url.lower()
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0]
    for ending in first_bytes.PACKED:
        name = name.removesuffix(ending)
    return "\t" if name.endswith(".tsv") else ","


def show_delimiter(delimiter: str) -> str:
    """Return a delimiter as messages and the option --delimiter name it."""
    return "tab" if delimiter == "\t" else repr(delimiter)


def _find_delimiter(found: FoundFile, head: bytes) -> str:
    """Return the delimiter of a file that begins with `head`.

    It divides the records into equally many fields. If none does, it divides the header; else it is the usual one.

    Raises:
        InputError: Several delimiters fit, an unusual one seems to be used, or the first line is no header but names
            the delimiter for Excel.
    """
    text = head.decode("utf-8-sig", errors="replace")
    if _EXCEL_LINE.match(text):
        raise InputError(
            f"{found.url}: its first line names a delimiter ({text[:5]!r}), expected the names of the columns",
            hint="remove that line, and name the delimiter: --delimiter …",
        )
    is_whole = len(head) < _SAMPLE_BYTES
    widths = {one: _widths(text, one, is_whole=is_whole) for one in _DELIMITERS}
    fitting = [one for one in _DELIMITERS if _are_even(widths[one])]
    usual = usual_delimiter(found.url)
    if len(fitting) > 1 and not (usual == "\t" and usual in fitting):
        names = " and ".join(map(show_delimiter, fitting))
        raise InputError(
            f"{found.url}: {names} each divide every record into equally many fields, expected one delimiter",
            hint="name the right one: --delimiter …",
        )
    # If none fits, the header decides, and `count` refuses the record that does not fit.
    dividing = fitting or [one for one in _DELIMITERS if widths[one] and widths[one][0] > 1]
    if not dividing:
        _refuse_rare_delimiter(found, text, is_whole=is_whole)
    return usual if usual in dividing or not dividing else dividing[0]


def _refuse_rare_delimiter(found: FoundFile, text: str, *, is_whole: bool) -> None:
    """Raise InputError if a file of one column looks divided by a character that is rarely a delimiter."""
    for one in dict.fromkeys(text.partition("\n")[0]):
        if one.isalnum() or one in _NO_DELIMITERS:
            continue
        widths = _widths(text, one, is_whole=is_whole)
        if len(widths) > 1 and _are_even(widths):
            raise InputError(
                f"{found.url}: looks divided by {one!r}, expected a comma, a semicolon, a tab or a bar",
                hint=f"name it: --delimiter {shlex.quote(one)} (or , if the file has one column)",
            )


def _are_even(widths: list[int]) -> bool:
    return len(set(widths)) == 1 and widths[0] > 1


def _widths(text: str, delimiter: str, *, is_whole: bool) -> list[int]:
    """Return how many fields each of the first records has. `is_whole` tells that the text is not cut off."""
    widths: list[int] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for record in itertools.islice(reader, _SAMPLE_RECORDS):
            widths += [len(record)] if record else []
    except csv.Error:
        return widths
    return widths if is_whole or len(widths) == _SAMPLE_RECORDS else widths[:-1]


def read(
    item: CountedFile, rows: range, first_row: int, choice: ColumnChoice, odd: Oddities
) -> Iterator[RowBlock]:
    """Yield the records of one file whose indices are in `rows`, in order; see `parquet.read` for the arguments.

    A quoted value may hold line breaks, so the file is always read from its beginning, whichever row is first.

    Raises:
        InputError: A column is missing; the file is damaged, or changed since its count.
    """
    source_files.check_unchanged(item.found)
    keep = kept_columns(item.columns, choice)
    id_column = choice.id_column or ("custom_id" if is_batch_request(item.columns) else "")
    for option, names in (("--columns", keep), ("--id-column", [id_column] if id_column else [])):
        for name in names:
            if name not in item.columns:
                raise no_such_column(name, item.columns, where=item.found.url, option=option)
    places = [item.columns.index(name) for name in keep]
    id_place = item.columns.index(id_column) if id_column else -1
    odd.renamed |= OWN_FIELDS.intersection(keep)
    names_in_rows = [choice.name_in_rows(name) for name in keep]
    make_row = make_record_type([*names_in_rows, ROW_FIELD, ID_FIELD])
    row = first_row
    with _records(item.found, item.delimiter) as (records, _):
        wanted = itertools.islice(filter(None, records), 1 + rows.start, 1 + rows.stop)
        for part in _parts(wanted):
            numbers = range(row, row + len(part))
            ids = list(map(str, numbers))
            if id_column:
                ids = [
                    id_text(record[id_place], number)
                    for record, number in zip(part, numbers, strict=True)
                ]
            made = [
                make_row(*(record[place] for place in places), number, name)
                for record, number, name in zip(part, numbers, ids, strict=True)
            ]
            yield PythonBlock(made, cast("list[str | None]", ids) if id_column else None)
            row += len(part)
    if row != first_row + len(rows):
        raise source_files.changed(item.found.url)
    source_files.check_unchanged(item.found)


def _parts(records: Iterator[list[str]]) -> Iterator[list[list[str]]]:
    """Yield the records in lists, each limited in records and in characters."""
    part: list[list[str]] = []
    chars = 0
    for record in records:
        part.append(record)
        chars += sum(map(len, record))
        if len(part) >= _BLOCK_ROWS or chars >= _BLOCK_CHARS:
            yield part
            part, chars = [], 0
    if part:
        yield part
