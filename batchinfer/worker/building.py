"""Reads the next rows of open chunks and builds their requests: what `stream` lets background threads do."""

from __future__ import annotations

import sys
from typing import NamedTuple

from batchinfer.prompts import Prepared, PromptBuilder, RawRow
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.repeats import repeat_key

_TOKEN_BYTES = 36
"""Bytes of memory that a token takes: a number, and its place in a list."""


class BuiltRows(NamedTuple):
    """Rows of one chunk whose prompts were built, and the bytes of memory that each row takes."""

    chunk: OpenChunk
    rows: list[Prepared]
    num_bytes: list[int]
    repeat_keys: list[bytes | None]
    """Keys of the rows by `repeats.repeat_key`; None for a row that neither leads nor follows."""


def build(
    builder: PromptBuilder,
    chunks: list[OpenChunk],
    max_rows: int,
    max_bytes: int,
    *,
    dedupe: bool = False,
) -> list[BuiltRows]:
    """Read the next rows of the chunks and build their requests. Runs on a background thread.

    No more rows are read once `max_rows` rows or `max_bytes` bytes of rows have been read.
    """
    batch: list[BuiltRows] = []
    for chunk in chunks:
        rows = chunk.read_rows(max_rows, max_bytes)
        if rows:
            batch.append(_build(builder, chunk, rows, dedupe=dedupe))
            max_rows -= len(rows)
            max_bytes -= sum(len(row.data) for row in rows)
        if max_rows <= 0 or max_bytes <= 0:
            break
    return batch


def build_suspects(
    builder: PromptBuilder, parts: list[tuple[OpenChunk, set[int]]]
) -> list[BuiltRows]:
    """Read the rows of these lines of each chunk and build their requests. Runs on a background thread.

    A suspect neither leads nor follows.
    """
    return [_build(builder, chunk, chunk.read_lines(lines)) for chunk, lines in parts]


def _build(
    builder: PromptBuilder, chunk: OpenChunk, rows: list[RawRow], *, dedupe: bool = False
) -> BuiltRows:
    prepared_rows = builder.build(chunk.name, chunk.ref.first_row, rows)
    num_bytes = [
        _num_bytes_of(row, prepared) for row, prepared in zip(rows, prepared_rows, strict=True)
    ]
    keys = [repeat_key(prepared) if dedupe else None for prepared in prepared_rows]
    return BuiltRows(chunk, prepared_rows, num_bytes, keys)


def _num_bytes_of(row: RawRow, prepared: Prepared) -> int:
    """Return the bytes of memory that a row takes while it waits and while it is in the engine, about."""
    request = prepared.request
    if request is None:
        return 0
    if request.text is not None:
        return max(sys.getsizeof(request.text), len(row.data))
    num_tokens = sum([len(each.token_ids or ()) for each in request.prompts])
    is_text_held = any(
        part is not None
        for part in (
            request.messages,
            prepared.source,
            prepared.body,
            prepared.prompt,
            prepared.media,
        )
    )
    return _TOKEN_BYTES * num_tokens + (len(row.data) if is_text_held else 0)
