"""Counts and reads CSV files with a header line, by RFC 4180 (quoted values may hold newlines), and TSV files.

CSV has no types, so every value stays text: "007" keeps its zeros. Empty lines are not rows. The parser is Python's,
because pyarrow's accepts a quote that is never closed and must be told the size of the largest record.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from batchinfer.core.errors import InputError
from batchinfer.split import source_files
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
def _records(found: FoundFile) -> Iterator[tuple[Iterator[list[str]], _Hashing]]:
    """Open a file. Yields its records (header first, no empty lines) and the stream with its sha256."""
    csv.field_size_limit(_LONGEST_FIELD)
    name = found.url.lower()
    delimiter = "\t" if name.partition(".tsv")[1] else ","
    with source_files.open_stream(found) as stream:
        raw = _Hashing(stream)
        text = io.TextIOWrapper(io.BufferedReader(raw, 1 << 20), "utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            yield (record for record in reader if record), raw
        except UnicodeDecodeError as error:
            raise InputError(
                f"{found.url}: near line {reader.line_num + 1}: not UTF-8 ({error.reason})",
                hint="convert it: iconv -f LATIN1 -t UTF-8",
            ) from error
        except csv.Error as error:
            raise source_files.damaged(
                found.url, f"near line {reader.line_num}: {error}"
            ) from error


def count(found: FoundFile) -> CountedFile:
    """Read the whole file once, to find the number of records, the sha256 and the column names.

    Raises:
        InputError: A record has more or fewer fields than the header, the header has a name twice, or the file is
            not UTF-8 or not CSV.
    """
    rows = 0
    with _records(found) as (records, raw):
        header = next(records, [])
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise InputError(
                f"{found.url}: column {twice!r} is there twice in the header, expected unique names",
                hint="rename one of them",
            )
        for rows, record in enumerate(records, 1):
            if len(record) != len(header):
                raise InputError(
                    f"{found.url}: record {rows} has {len(record)} fields, expected the header's {len(header)}",
                    hint="quote fields that hold the delimiter or a line break",
                )
    return CountedFile(
        found=found,
        format="csv",
        rows=rows,
        columns=header,
        marks=[(0, 0)],
        digest=raw.digest.hexdigest(),
    )


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
    with _records(item.found) as (records, _):
        wanted = itertools.islice(records, 1 + rows.start, 1 + rows.stop)
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
