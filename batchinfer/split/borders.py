"""Where chunks end: row numbers at which each starts, and one past the last row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from batchinfer.core import layout
from batchinfer.core.errors import ConfigError
from batchinfer.split.chunk_files import Span
from batchinfer.split.sources import Oddities, Plan, View

logger = logging.getLogger(__name__)


def even(rows: int, *, num_chunks: int | None = None, chunk_rows: int | None = None) -> list[int]:
    """Borders of a number of chunks, or of chunks of a size; exactly one of the two is given.

    Raises:
        ConfigError: More chunks than rows.

    >>> even(10, num_chunks=3)
    [0, 3, 6, 10]
    >>> even(10, chunk_rows=4)
    [0, 4, 8, 10]
    """
    if chunk_rows is not None:
        return [*range(0, rows, chunk_rows), rows]
    assert num_chunks is not None
    if num_chunks > rows:
        raise ConfigError(
            f"--num-chunks {num_chunks}: more than the {rows} rows, expected at least one row a chunk",
            hint=f"use --num-chunks {rows} or fewer",
        )
    return [index * rows // num_chunks for index in range(num_chunks + 1)]


def between_groups(plan: Plan, column: str, borders: Sequence[int]) -> list[int]:
    """Move each border forward to where the column's value changes. Reads that column once.

    Only neighbouring rows are kept together: a value that comes back later starts a new group. A group longer than a
    chunk swallows the borders in it, so there may be fewer chunks than asked for. A row without a value is a group.

    Raises:
        InputError: The sources have no such column, or one is damaged or changed since it was counted.
    """
    plan.require_column("--group-by", column)
    narrow = Plan(
        sources=plan.sources,
        inputs=plan.inputs,
        bases=plan.bases,
        view=View(columns=[], id_column=column),
        rows=plan.rows,
        columns=[],
    )
    moved = [0]
    wanted = iter(borders[1:-1])
    border = next(wanted, None)
    row, last = 0, None
    for block in narrow.read(range(plan.rows), Oddities()):
        for value in block.ids or [None] * block.num_rows:
            if border is not None and row >= border and (value is None or value != last):
                moved.append(row)
                while border is not None and border <= row:
                    border = next(wanted, None)
            last = value
            row += 1
        if border is None:
            break
    if len(moved) < len(borders) - 1:
        logger.info(
            "--group-by %s: %d chunks of the %d asked for", column, len(moved), len(borders) - 1
        )
    return [*moved, plan.rows]


def spans(borders: Sequence[int]) -> list[Span]:
    """The chunks between borders."""
    count = len(borders) - 1
    return [
        Span(layout.chunk_name(index, count), borders[index], borders[index + 1] - borders[index])
        for index in range(count)
    ]
