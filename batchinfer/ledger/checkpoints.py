"""Checkpoint segments: the finished rows of an unfinished chunk, so that any worker can go on from them.

A segment is written once, whole, under a key of its own, and removed after the chunk's marker. Segments of several
workers may overlap: every copy of a row is right, and the first that is read is taken. The local spool holds the same
records, so a checkpoint is a copy of a slice of the spool. A segment's first line holds the sha256 of the chunk and the
fingerprint of the run: a chunk that was edited must not get rows generated from its old text, and a run whose run.json
was removed must not get rows of its old configuration.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import ObjectNotFound
from batchinfer.core.records import Record
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_BATCH_ROWS = 1000
_BATCH_BYTES = 2 << 20
"""Bytes of rows in one batch; the memory that a batch takes is about four times that."""


class FinishedRow(Record, frozen=True, kw_only=True, gc=False):
    """One finished row. `output` must stay the last field: it is cut out of the encoded record by position."""

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
    """A finished row or a death note, as read from a segment."""

    line: int
    ok: bool = False
    code: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_deaths: int = 0
    output: msgspec.Raw = msgspec.Raw()


class _Header(Record, frozen=True, kw_only=True):
    """A segment's first line."""

    chunk_sha256: str
    fingerprint: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)
_header_decoder = msgspec.json.Decoder(_Header)
_UNREADABLE = (
    msgspec.DecodeError,
    msgspec.ValidationError,
    UnicodeDecodeError,
    RecursionError,
)


def encode_rows(rows: Sequence[FinishedRow]) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Encode rows as lines.

    Also return for each (the row's line in the chunk, offset of `output` in the bytes, its length).
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


def encode_deaths(lines: list[int]) -> bytes:
    """Return records that note one engine death for each of these lines."""
    return b"".join(
        _encoder.encode(DeathNote(line=line, engine_deaths=1)) + b"\n" for line in lines
    )


class Segments:
    """The segments of one chunk, read one after the other. Read-only.

    Iterate over `rows()` once; the attributes are complete when the iteration has ended.

    A line that cannot be read, or is outside the chunk, is left out with a warning, and its row is generated again. A
    segment that does not begin with this chunk's sha256 and the run's fingerprint is left out as a whole.

    Args:
        store: The run's store.
        name: x
        chunk_sha256: Checksum of the chunk as it is stored now.
        fingerprint: Returns the run's fingerprint, "" while it has none. Called only once a segment is found, since
            run.json is always written before the first segment.
        num_lines: Number of the chunk's rows that are to be done (fewer than it has with --limit).
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        chunk_sha256: str,
        fingerprint: Callable[[], str],
        num_lines: int,
    ) -> None:
        self._store = store
        self._name = name
        self._chunk_sha256 = chunk_sha256
        self._fingerprint = fingerprint
        self._num_lines = num_lines
        self.deaths: dict[int, int] = {}
        """Number of engine deaths, by line."""
        self.keys: list[str] = []
        """Keys of all segments found, outdated ones included: all are deleted after the chunk's marker."""
        self.num_outdated = 0
        """Number of segments left out: made from another text than the chunk has now, or with another configuration."""
        self.has_vanished = False
        """Whether a segment disappeared during the reading, which means that somebody has published the chunk."""

    def rows(self) -> Iterator[FinishedRow]:
        """Yield every finished row; a line may come more than once. Holds one segment's bytes at a time."""
        for info in self._store.list(layout.checkpoint_prefix(self._name)):
            if layout.parse_segment(info.key) is None:
                logger.warning("%s: not a checkpoint segment, left alone", info.key)
            else:
                yield from self._rows_of(info.key)
        if self.num_outdated:
            logger.warning(
                "%s: %d checkpoint segments answer another text than the chunk has now, "
                "or are of another configuration than the run's; their rows are generated again",
                self._name,
                self.num_outdated,
            )

    def _rows_of(self, key: str) -> Iterator[FinishedRow]:
        try:
            file = io.BytesIO(self._store.get(key).data)
        except ObjectNotFound:
            self.has_vanished = True
            return
        self.keys.append(key)
        lines = codec.lines(file)
        if not self._is_current(next(lines, b"")):
            self.num_outdated += 1
            return
        for text in lines:
            row = self._read_line(text, key)
            if row is not None:
                yield row

    def _is_current(self, first_line: bytes) -> bool:
        try:
            header = _header_decoder.decode(first_line)
        except _UNREADABLE:
            return False
        return (
            header.chunk_sha256 == self._chunk_sha256
            and bool(header.fingerprint)
            and header.fingerprint == self._fingerprint()
        )

    def _read_line(self, text: bytes, key: str) -> FinishedRow | None:
        try:
            found = _decoder.decode(text)
        except _UNREADABLE as error:
            logger.warning("%s: unreadable record (%s); its row is generated again", key, error)
            return None
        if not 0 <= found.line < self._num_lines:
            logger.warning(
                "%s: line %d is not in the chunk of %d; left out", key, found.line, self._num_lines
            )
        elif found.engine_deaths:
            self.deaths[found.line] = self.deaths.get(found.line, 0) + found.engine_deaths
        elif bytes(found.output)[:1] == b"{":
            return FinishedRow(
                line=found.line,
                ok=found.ok,
                code=found.code,
                finish_reason=found.finish_reason,
                prompt_tokens=found.prompt_tokens,
                cached_tokens=found.cached_tokens,
                completion_tokens=found.completion_tokens,
                output=found.output,
            )
        return None


def batches(rows: Iterable[FinishedRow]) -> Iterator[list[FinishedRow]]:
    """Group the rows into lists of bounded size in memory."""
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
    """Create one segment.

    If a reply is lost, the store repeats the create safely: keys are never reused, as epochs only grow.
    """
    header = _encoder.encode(_Header(chunk_sha256=chunk_sha256, fingerprint=fingerprint))
    store.create(key, b"".join((header, b"\n", records)))
