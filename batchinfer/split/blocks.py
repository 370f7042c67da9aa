"""Types and functions that the readers of parquet, JSON Lines and CSV share: counted files, blocks of rows, ids."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.records import Record
from batchinfer.split.source_files import FoundFile

ROW_FIELD, ID_FIELD = "_row", "_id"
OWN_FIELDS = frozenset({ROW_FIELD, ID_FIELD})
"""Columns that `split` writes into every row. If a source has columns of these names, they are renamed."""
_BATCH_REQUEST = frozenset({"custom_id", "method", "url", "body"})

_encoder = msgspec.json.Encoder()


class CountedFile(Record, frozen=True, kw_only=True):
    """A source file whose rows have been counted, with the positions from which a reader can start."""

    found: FoundFile
    format: str
    """Format of the file: parquet, jsonl or csv."""
    rows: int
    columns: list[str]
    marks: list[tuple[int, int]]
    """Places to start reading: (row, byte offset) of some rows in JSON Lines, (row, 0) of each row group in parquet,
    (0, 0) in CSV."""
    digest: str
    """sha256 of the decompressed content (JSON Lines, CSV) or of the footer (parquet)."""
    crc32: str = ""
    """CRC-32 of a local parquet file, 8 hexadecimal digits; "" for others, or if it was not asked for."""
    byte_columns: list[str] = []
    """Columns whose values are bytes or contain bytes. Bytes become base64 text in the rows."""
    delimiter: str = ","
    """Character between the fields of a record in CSV."""
    blank_lines: int = 0
    """Number of blank lines in JSON Lines and CSV, which are no rows."""
    schema: bytes = b""
    """Arrow schema of a parquet file's columns in Arrow's IPC form, without metadata; empty for other formats."""


class ColumnChoice(Record, frozen=True, kw_only=True):
    """The columns that `split` keeps (None: all), and the column whose value becomes the row's `_id` ("": none).

    `renamed` holds the names that `_row` and `_id` of a source get in the rows. `columns` and `id_column` are names in
    the source.
    """

    columns: list[str] | None = None
    id_column: str = ""
    renamed: dict[str, str] = {}

    def name_in_rows(self, column: str) -> str:
        """Return the name that a source's column gets in the rows."""
        return self.renamed.get(column, column)


class RowBlock(Protocol):
    """Some consecutive rows.

    `ids` holds the `_id` that each row gets from a column of the source (see `id_text`), or None for a row that gets
    none. If no row gets one, `ids` itself is None.
    """

    ids: Sequence[str | None] | None
    num_rows: int

    def encode(self, start: int, stop: int) -> bytes:
        """Return rows `start` to `stop` (exclusive) of the block as lines, each with its newline."""
        ...


class EncodedBlock:
    """A block of rows that are encoded lines already, each with its newline."""

    def __init__(self, lines: list[bytes], ids: Sequence[str | None] | None) -> None:
        self.ids = ids
        self.num_rows = len(lines)
        self._lines = lines

    def encode(self, start: int, stop: int) -> bytes:
        """See `RowBlock.encode`."""
        return b"".join(self._lines[start:stop])


class PythonBlock:
    """A block of rows as Python objects, which `encode` turns into JSON lines."""

    def __init__(self, rows: list[Any], ids: Sequence[str | None] | None) -> None:
        self.ids = ids
        self.num_rows = len(rows)
        self._rows = rows

    def encode(self, start: int, stop: int) -> bytes:
        """See `RowBlock.encode`."""
        whole = start == 0 and stop == self.num_rows
        return _encoder.encode_lines(self._rows if whole else self._rows[start:stop])


@dataclass(slots=True)
class Oddities:
    """Facts about the rows read that `split` warns of at its end, such as the number of values that became null."""

    nulls: Counter[str] = field(default_factory=Counter)
    """Number of NaN and infinite values that became null, by column."""
    broken_lines: int = 0
    """Number of rows whose line is not a JSON object."""
    first_broken: str = ""
    """File and line number of the first line that is no JSON object, or ""."""
    encodings: Counter[str] = field(default_factory=Counter)
    """Number of lines that are not UTF-8 but would be JSON objects in another encoding, by this encoding."""
    first_encoded: str = ""
    """File and line number of the first line in another encoding, or ""."""
    renamed: set[str] = field(default_factory=set)
    """Those of the names `_row` and `_id` that kept columns have in their source."""

    def add(self, later: Oddities) -> None:
        """Add the counts of rows that come after those counted here."""
        self.nulls.update(later.nulls)
        self.broken_lines += later.broken_lines
        self.first_broken = self.first_broken or later.first_broken
        self.encodings.update(later.encodings)
        self.first_encoded = self.first_encoded or later.first_encoded
        self.renamed |= later.renamed

    def take(self) -> Oddities:
        """Return what was found so far, and forget it."""
        taken = dataclasses.replace(self)
        empty = Oddities()
        for one in dataclasses.fields(self):
            setattr(self, one.name, getattr(empty, one.name))
        return taken


def is_batch_request(columns: Sequence[str]) -> bool:
    """Return whether these columns include all keys of an OpenAI batch request."""
    return _BATCH_REQUEST.issubset(columns)


def kept_columns(all_columns: Sequence[str], choice: ColumnChoice) -> list[str]:
    """Return the columns to write, in the order of --columns, or of the source if --columns is not given."""
    return list(all_columns if choice.columns is None else choice.columns)


def names_for_own(columns: Sequence[str]) -> dict[str, str]:
    """Return the names that a source's `_row` and `_id` get in the rows, different from all names in `columns`.

    >>> names_for_own(["_id", "_source_row"])
    {'_row': '_source_source_row', '_id': '_source_id'}
    """
    names = {}
    for name in (ROW_FIELD, ID_FIELD):
        free = f"_source{name}"
        while free in columns:
            free = f"_source{free}"
        names[name] = free
    return names


def id_text(value: Any, row: int) -> str:
    """Return the `_id` made from a value: a text as it is, any other value as JSON. None gives the row's number."""
    if isinstance(value, str):
        return value
    if value is None:
        return str(row)
    return _encoder.encode(value).decode()


def no_such_column(name: str, columns: Sequence[str], *, where: str, option: str) -> InputError:
    """Return the error for a column that is missing. It suggests similar names among `columns`, if there are any."""
    near = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
    known = ", ".join(columns[:30]) + (", …" if len(columns) > 30 else "")
    return InputError(
        f"{where}: has no column {name!r} (from {option}), expected one of: {known or '(none)'}",
        hint=f"did you mean {', '.join(near)}?"
        if near
        else f"name a column of the source with {option}",
    )
