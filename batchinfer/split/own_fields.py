"""What the readers of all formats share: counted files, the choice of columns, and blocks of rows on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.core.errors import InputError
from batchinfer.core.records import Record
from batchinfer.split.files import FoundFile

if TYPE_CHECKING:
    import polars as pl


class Counted(Record, frozen=True, kw_only=True):
    """What the first look at a file finds. Of JSON Lines, `columns` are those of the first rows."""

    rows: int
    columns: list[str]
    digest: str
    """sha256 of the decompressed content, of parquet of the footer."""


class Part(Record, frozen=True, kw_only=True):
    """A file to read. Its rows are numbered from `first_row`."""

    found: FoundFile
    counted: Counted
    columns: list[str] | None
    """Columns to keep, in this order; None for all."""
    delimiter: str
    id_column: str = ""
    """Column whose values become `_id`; empty for row numbers."""
    first_row: int = 0

    @property
    def names(self) -> list[str]:
        """The columns that the rows of a table keep."""
        return self.counted.columns if self.columns is None else self.columns


class Block(NamedTuple):
    """Some consecutive rows."""

    num_rows: int
    encode: Callable[[int, int], bytes]
    """Returns the rows from one index to another (exclusive) as lines, each with its newline."""
    ids: Sequence[bytes] | pl.Series = ()
    """The ids that rows have from a column."""
    num_broken: int = 0
    """Number of rows that are no JSON object."""


def lines_block(lines: list[bytes], ids: Sequence[bytes] = (), num_broken: int = 0) -> Block:
    """Return a block of lines, each with its newline."""
    return Block(len(lines), lambda start, stop: b"".join(lines[start:stop]), ids, num_broken)


def refuse_own_fields(names: Iterable[str], where: str) -> None:
    """Raise InputError if a column has a name that `split` gives to a column of its own.

    `names` are looked up twice: a list, a dictionary or the like.
    """
    for name in ("_row", "_id"):
        if name in names:
            raise InputError(
                f"{where}: has a column {name!r}, which is a name of split's own columns",
                hint="answers of an earlier run? narrow the source; else rename it in the source, or leave it out: "
                "--columns A,B,…",
            )
