"""Checkpoint segments: the finished rows of an unfinished chunk, so that any worker can go on from them.

A segment is an object that is written once and whole, under a key of its own. It is removed once the chunk has its
marker. Segments of several workers may hold the same row: every copy is right, and the first copy that is read is
taken. A worker's local spool file holds the same records, so the rows of a segment are a copy of a slice of the spool.

A segment's first line holds the sha256 of the chunk, the fingerprint of the run, and the sha256 of the lines after it.
The sha256 of the chunk keeps rows that answer an old text out of a chunk that was edited. The fingerprint keeps rows of
an old configuration out of a run whose run.json was removed and made anew. The sha256 of the lines keeps out what was
changed on storage.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.counts import Counts
from batchinfer.core.errors import ObjectNotFound
from batchinfer.core.records import FinishedRow, Record, Usage
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_BATCH_ROWS = 1000
_BATCH_BYTES = 2 << 20
"""Bytes of output after which a batch ends; the memory that a batch takes is about four times that."""


_TOKENS = Usage.__struct_fields__


def count_rows(rows: Sequence[FinishedRow]) -> Counts:
    """Return the sums over finished rows."""
    failed = [row for row in rows if not row.ok]
    ok = [row for row in rows if row.ok] if failed else rows
    return Counts(
        rows_ok=len(ok),
        rows_error=len(failed),
        **{name: sum([getattr(row, name) or 0 for row in rows]) for name in _TOKENS},
        errors=dict(Counter([row.code for row in failed])),
        finish_reasons=dict(Counter([row.finish_reason for row in ok if row.finish_reason])),
    )


class Deaths(NamedTuple):
    """The engine deaths during one row."""

    number: int
    fewest_rows: int
    """Smallest number of rows, this row included, that were in the engine at one of these deaths."""


def add_deaths(deaths: dict[int, Deaths], line: int, number: int, rows_in_flight: int) -> None:
    """Add engine deaths during a row to those of all rows, by line."""
    before = deaths.get(line, Deaths(0, rows_in_flight))
    deaths[line] = Deaths(before.number + number, min(before.fewest_rows, rows_in_flight))


class _Header(Record, frozen=True, kw_only=True):
    """A segment's first line. `sha256` is that of all bytes after this line."""

    chunk_sha256: str
    fingerprint: str
    sha256: str


_encoder = msgspec.json.Encoder()
_decoder = codec.json_decoder(FinishedRow)
_header_decoder = codec.json_decoder(_Header)
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


def encode_rows(rows: Sequence[FinishedRow]) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Encode rows as lines of JSON.

    Returns:
        The bytes, and for each row a tuple: the row's line number in the chunk, the offset of its `output` in these
        bytes, and the length of `output`.
    """
    data = _encoder.encode_lines(rows)
    payloads = []
    end = -1
    for row in rows:
        end = data.index(b"\n", end + 1)
        length = memoryview(row.output).nbytes
        # Nothing but the record's closing brace follows the payload.
        payloads.append((row.line, end - 1 - length, length))
    return data, payloads


def encode_deaths(lines: list[int], rows_in_flight: int) -> bytes:
    """Return one encoded note of an engine's death for each line number in `lines`.

    Args:
        lines: Lines of the chunk that were in the engine.
        rows_in_flight: Number of rows of all chunks that were in the engine.
    """
    return _encoder.encode_lines(
        [FinishedRow(line=line, engine_deaths=1, rows_in_flight=rows_in_flight) for line in lines]
    )


class Segments:
    """The segments of one chunk, read one after the other. Read-only.

    Iterate over `rows()` once. The attributes are complete when the iteration has ended.

    A segment that does not begin with this chunk's sha256 and the run's fingerprint, or whose bytes were changed, is
    left out. A row that is in no other segment is then generated again.

    Args:
        store: The run's store.
        name: Name of the chunk.
        chunk_sha256: Checksum of the chunk as it is stored now.
        fingerprint: The run's.
    """

    def __init__(self, store: Store, name: str, *, chunk_sha256: str, fingerprint: str) -> None:
        self._store = store
        self._name = name
        self._wanted = chunk_sha256, fingerprint
        self.deaths: dict[int, Deaths] = {}
        """Engine deaths noted for a row, by the row's line number."""
        self.keys_with_errors: list[str] = []
        """Keys of those segments in which a row has no answer, but an error."""
        self.keys: list[str] = []
        """Keys of all segments that were read, also outdated ones. All are deleted once the chunk has its marker."""
        self.has_vanished = False
        """Whether a listed segment was gone when it was to be read, as after another worker published the chunk."""

    def rows(self) -> Iterator[FinishedRow]:
        """Yield every finished row. A row that is in several segments comes several times.

        Only one segment's bytes are in memory at a time.
        """
        for info in self._store.list(layout.checkpoint_prefix(self._name)):
            if layout.parse_segment(info.key) is not None:
                yield from self.rows_of(info.key)

    def rows_of(self, key: str) -> Iterator[FinishedRow]:
        """Yield the finished rows of one segment."""
        try:
            data = self._store.get(key).data
        except ObjectNotFound:
            self.has_vanished = True
            return
        self.keys.append(key)
        file = io.BytesIO(data)
        try:
            header = _header_decoder.decode(file.readline())
        except _UNREADABLE:
            header = None
        if (
            header is None
            or (header.chunk_sha256, header.fingerprint) != self._wanted
            or not _is_whole(header, memoryview(data)[file.tell() :])
        ):
            logger.warning(
                "%s: is of another text or configuration, or was changed; its rows are generated again",
                key,
            )
            return
        for text in codec.lines(file):
            found = _decoder.decode(text)
            if found.engine_deaths:
                add_deaths(self.deaths, found.line, found.engine_deaths, found.rows_in_flight)
            else:
                if not found.ok and key not in self.keys_with_errors[-1:]:
                    self.keys_with_errors.append(key)
                yield found


def _is_whole(header: _Header, records: memoryview) -> bool:
    return codec.sha256(records) == header.sha256


def batches(rows: Iterable[FinishedRow]) -> Iterator[list[FinishedRow]]:
    """Group the rows into lists, each of which ends at `_BATCH_ROWS` rows or `_BATCH_BYTES` bytes of output."""
    batch: list[FinishedRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += memoryview(row.output).nbytes
        if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_segment(
    store: Store, key: str, records: bytes, *, chunk_sha256: str, fingerprint: str
) -> None:
    """Create one segment: the header line, then `records`.

    The store may safely repeat the create after a lost reply, because no other segment gets the same key: the key
    contains the nonce of this start of the worker and the segment's number.
    """
    header = _encoder.encode(
        _Header(chunk_sha256=chunk_sha256, fingerprint=fingerprint, sha256=codec.sha256(records))
    )
    store.create(key, b"".join((header, b"\n", records)))
