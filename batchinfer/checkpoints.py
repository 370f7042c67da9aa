"""Checkpoint segments: the finished rows of an unfinished chunk, so that any worker can go on from them.

A segment is written once, whole, under a key of its own, and removed after the chunk's marker. Any copy of a row is
right, so segments of several workers may overlap; the first copy read is taken.

The same records fill the local spool, so writing a checkpoint is copying a slice of a file.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from batchinfer import layout
from batchinfer.errors import ObjectNotFound
from batchinfer.records import Record
from batchinfer.storage import Store

logger = logging.getLogger(__name__)


class FinishedRow(Record, frozen=True, kw_only=True, gc=False):
    """One finished row. `output` stays last: it is cut out of the encoded record by position."""

    line: int
    ok: bool
    code: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output: msgspec.Raw


class DeathNote(Record, frozen=True, kw_only=True):
    """A row that was in flight when an engine died."""

    line: int
    engine_deaths: int


class _Line(Record, frozen=True, kw_only=True):
    """Either of the two, as read."""

    line: int
    ok: bool = False
    code: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_deaths: int = 0
    output: msgspec.Raw = msgspec.Raw()


class Resumed(NamedTuple):
    """What the segments of one chunk hold. `vanished`: one disappeared while read, so someone has published."""

    rows: dict[int, FinishedRow]
    deaths: dict[int, int]
    keys: list[str]
    vanished: bool


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)


def encode_row(row: FinishedRow) -> tuple[bytes, int]:
    """Return the record as one line with its newline, and the offset of `output` in it."""
    data = _encoder.encode(row)
    return data + b"\n", len(data) - 1 - memoryview(row.output).nbytes


def encode_deaths(lines: list[int]) -> bytes:
    """A segment that notes one engine death for each of these lines."""
    return b"".join(
        _encoder.encode(DeathNote(line=line, engine_deaths=1)) + b"\n" for line in lines
    )


def chunks_with_segments(store: Store) -> set[str]:
    """Names of all chunks that have segments: one listing."""
    found = (layout.parse_segment(info.key) for info in store.list(layout.CHECKPOINTS))
    return {segment[0] for segment in found if segment is not None}


def read_segments(store: Store, name: str, num_lines: int) -> Resumed:
    """Read every segment of a chunk. Read-only.

    A line that cannot be read, or is not of this chunk, is left out with a warning: its row is generated again.
    """
    rows: dict[int, FinishedRow] = {}
    deaths: dict[int, int] = {}
    keys: list[str] = []
    vanished = False
    for info in store.list(layout.checkpoint_prefix(name)):
        if layout.parse_segment(info.key) is None:
            logger.warning("%s: not a checkpoint segment, left alone", info.key)
            continue
        try:
            data = store.get(info.key).data
        except ObjectNotFound:
            vanished = True
            continue
        keys.append(info.key)
        for text in data.split(b"\n"):
            if text:
                _read_line(text, info.key, num_lines, rows, deaths)
    return Resumed(rows, deaths, keys, vanished)


def _read_line(
    text: bytes, key: str, num_lines: int, rows: dict[int, FinishedRow], deaths: dict[int, int]
) -> None:
    try:
        found = _decoder.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        logger.warning("%s: unreadable record (%s); its row is generated again", key, error)
        return
    if not 0 <= found.line < num_lines:
        logger.warning(
            "%s: line %d is not in the chunk of %d; left out", key, found.line, num_lines
        )
    elif found.engine_deaths:
        deaths[found.line] = deaths.get(found.line, 0) + found.engine_deaths
    elif found.line not in rows and bytes(found.output)[:1] == b"{":
        rows[found.line] = FinishedRow(
            line=found.line,
            ok=found.ok,
            code=found.code,
            finish_reason=found.finish_reason,
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
            completion_tokens=found.completion_tokens,
            output=found.output,
        )


def write_segment(store: Store, key: str, data: bytes) -> None:
    """Create one segment. A lost reply is settled by the store; keys are never reused, since epochs only grow."""
    store.create(key, data)
