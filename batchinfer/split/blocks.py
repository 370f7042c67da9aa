"""What the readers of all formats share: what to take of a row, and blocks of rows on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.core.errors import InputError
from batchinfer.core.records import Record

if TYPE_CHECKING:
    import polars as pl


class Wanted(Record, frozen=True, kw_only=True):
    """What to take of each row."""

    columns: list[str] | None = None
    """Columns to keep, in this order; None for all."""
    id_column: str = ""
    """Column whose values become `_id`; empty for row numbers."""
    delimiter: str = ""
    """Character between the values of CSV; "" for a comma, or a tab in .tsv files."""


class Block(NamedTuple):
    """Some consecutive rows."""

    num_rows: int
    lines: bytes
    """The rows, each with a newline at its end."""
    ids: Sequence[bytes] | pl.Series = ()
    """The ids that rows have from a column."""
    num_broken: int = 0
    """Number of rows that are no JSON object."""


def refuse_columns(names: Iterable[str], where: str) -> None:
    """Raise InputError if a column is there twice, or has a name that `split` gives to a column of its own."""
    seen = set[str]()
    for name in names:
        if name in ("_row", "_id"):
            raise InputError(
                f"{where}: has a column {name!r}, which is a name of split's own columns",
                hint="answers of an earlier run? narrow the source; else rename it in the source, or leave it out: "
                "--columns A,B,…",
            )
        if name in seen:
            raise InputError(
                f"{where}: column {name!r} is there twice, expected unique names",
                hint="rename one of them and write the file again",
            )
        seen.add(name)
