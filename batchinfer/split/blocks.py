"""What the readers share: what is asked of a source, and rows on their way into chunks."""

from __future__ import annotations

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
"""Written by us in every row. A source's own values under these names are left out (`--id-column _id` keeps the id)."""
_BATCH_REQUEST = frozenset({"custom_id", "method", "url", "body"})

_encoder = msgspec.json.Encoder()


class CountedFile(Record, frozen=True, kw_only=True):
    """One counted file of a source, with what a reader needs to start anywhere in it.

    `marks` holds (row, byte offset) of some rows in JSON Lines, and (row, 0) of every row group in parquet.
    `digest` is the sha256 of the content (JSON Lines, CSV) or of the footer (parquet). `byte_columns` are those whose
    values hold bytes, which become base64.
    """

    found: FoundFile
    format: str
    rows: int
    columns: list[str]
    marks: list[tuple[int, int]]
    digest: str
    byte_columns: list[str] = []


class ColumnChoice(Record, frozen=True, kw_only=True):
    """What to keep of each row: the named columns (None: all), and the column that names rows ("": none)."""

    columns: list[str] | None = None
    id_column: str = ""


class RowBlock(Protocol):
    """Some consecutive rows. `ids` has one entry a row, None where the row has no id of its own."""

    ids: Sequence[str | None] | None
    num_rows: int

    def encode(self, start: int, stop: int) -> bytes:
        """JSON lines of rows [start, stop), each with its newline."""
        ...


class EncodedBlock:
    """Rows that are JSON lines already, each with its newline."""

    def __init__(self, lines: list[bytes], ids: Sequence[str | None] | None) -> None:
        self.ids = ids
        self.num_rows = len(lines)
        self._lines = lines

    def encode(self, start: int, stop: int) -> bytes:
        """See `RowBlock.encode`."""
        return b"".join(self._lines[start:stop])


class ObjectBlock:
    """Rows as Python objects that msgspec can encode."""

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
    """What a reader met that the chunks do not show as it was, or that will be error rows."""

    nulls: Counter[str] = field(default_factory=Counter)
    """NaN and infinities that became null, by column."""
    broken_lines: int = 0
    """Lines that are no JSON object."""
    first_broken: str = ""
    """Where the first of them is."""

    def add(self, later: Oddities) -> None:
        """Count what was met in later rows, too."""
        self.nulls.update(later.nulls)
        self.broken_lines += later.broken_lines
        self.first_broken = self.first_broken or later.first_broken

    def take(self) -> Oddities:
        """Return what was met so far, and begin anew."""
        taken = Oddities(self.nulls, self.broken_lines, self.first_broken)
        self.nulls, self.broken_lines, self.first_broken = Counter(), 0, ""
        return taken


def is_batch_request(columns: Sequence[str]) -> bool:
    """Whether these are the keys of an OpenAI batch request."""
    return _BATCH_REQUEST.issubset(columns)


def kept_columns(all_columns: Sequence[str], choice: ColumnChoice) -> list[str]:
    """Columns to write, in the source's order without --columns, else in the order of --columns."""
    wanted = all_columns if choice.columns is None else choice.columns
    return [name for name in wanted if name not in OWN_FIELDS]


def id_text(value: Any, row: int) -> str:
    """The `_id` of a row: text as it is, other values as JSON, the row's number where there is none."""
    if isinstance(value, str):
        return value
    if value is None:
        return str(row)
    return _encoder.encode(value).decode()


def no_such_column(name: str, columns: Sequence[str], *, where: str, option: str) -> InputError:
    """The error for a column that is not there, with the names that come near."""
    near = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
    known = ", ".join(columns[:30]) + (", …" if len(columns) > 30 else "")
    return InputError(
        f"{where}: has no column {name!r} (from {option}), expected one of: {known or '(none)'}",
        hint=f"did you mean {', '.join(near)}?"
        if near
        else f"name a column of the source with {option}",
    )
