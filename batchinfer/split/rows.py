"""What is taken of the rows of a source, and some rows as the lines of a chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import raw_members
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
    ids: Sequence[bytes | None] | pl.Series = ()
    """The rows' ids from a column, if one was chosen; None for a row without."""
    num_broken: int = 0
    """Number of rows that are no JSON object."""

    def first(self, count: int) -> Block:
        """Return only its first rows."""
        lines = self.lines.split(b"\n", count)[:count]
        num_broken = sum(raw_members(line) is None for line in lines)
        return Block(count, b"\n".join([*lines, b""]), self.ids[:count], num_broken)


def refuse_columns(names: Collection[str], where: str) -> None:
    """Raise InputError if a column is there twice, or has a name that `split` gives to a column of its own."""
    for name in ("_row", "_id"):
        if name in names:
            raise InputError(
                f"{where}: has a column {name!r}, which is a name of split's own columns",
                hint="answers of an earlier run? narrow the source; else rename it in the source, or leave it out: "
                "batchinfer split --columns A,B,…",
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(
            f"{where}: column {twice[0]!r} is there twice, expected unique names",
            hint="rename one of them and write the file again; in --columns, name it once",
        )
