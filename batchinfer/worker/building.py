"""Reads the next rows of open chunks and builds their calls: what `stream` lets background threads do."""

from __future__ import annotations

from typing import NamedTuple

from batchinfer.prompts import Prepared, PromptBuilder, RawRow
from batchinfer.worker.chunk import OpenChunk


class BuiltRows(NamedTuple):
    """Rows of one chunk whose calls were built."""

    chunk: OpenChunk
    rows: list[Prepared]


def build(
    builder: PromptBuilder, chunks: list[OpenChunk], max_rows: int, max_bytes: int
) -> list[BuiltRows]:
    """Read the next rows of the chunks and build their calls. Runs on a background thread.

    No more rows are read once `max_rows` rows or `max_bytes` bytes of rows have been read.
    """
    batch: list[BuiltRows] = []
    for chunk in chunks:
        rows = chunk.read_rows(max_rows, max_bytes)
        if rows:
            batch.append(_build(builder, chunk, rows))
            max_rows -= len(rows)
            max_bytes -= sum(len(row.data) for row in rows)
        if max_rows <= 0 or max_bytes <= 0:
            break
    return batch


def build_suspects(
    builder: PromptBuilder, parts: list[tuple[OpenChunk, set[int]]]
) -> list[BuiltRows]:
    """Read the rows of these lines of each chunk and build their calls. Runs on a background thread."""
    return [_build(builder, chunk, chunk.read_lines(lines)) for chunk, lines in parts]


def _build(builder: PromptBuilder, chunk: OpenChunk, rows: list[RawRow]) -> BuiltRows:
    return BuiltRows(chunk, builder.build(chunk.name, chunk.ref.first_row, rows))


def num_bytes_of(prepared: Prepared) -> int:
    """Return the bytes of memory that a row takes while it waits and while it is in the engine, about."""
    if prepared.call is not None:
        return len(prepared.call.body)
    return _size(prepared.draft)


def _size(value: object) -> int:
    """Return the characters of the texts in a body that is not encoded yet."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8
