"""One open chunk: its local copy, the state of each row, and the spool, a scratch file that holds the finished rows.

The chunk's own thread (chunk_life.py) opens it, and then writes its finished rows to storage. The worker's main thread
adds finished rows, and the job that builds prompts calls `read_rows`.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchinfer.core import codec
from batchinfer.core.counts import Counts
from batchinfer.core.records import FinishedRow
from batchinfer.ledger.checkpoints import Deaths, add_deaths, batches, count_rows, encode_rows
from batchinfer.ledger.chunk_files import LocalChunk
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.prompts.types import RawRow
from batchinfer.storage.scratch import remove_quietly, scratch_errors

_READ_BYTES = 1 << 17
"""Size in bytes of the buffer with which a local chunk is read."""
_BLOCK_BYTES = 1 << 16
"""Most bytes that are read from a spool at a time, to find the end of a record or to read several payloads at once."""
_NO_TOKENS = Counts()
DEATHS_BEFORE_SUSPICION = 2
"""Engine deaths during a row after which the row is a suspect: it runs with other suspects only, in groups."""
DEATHS_BEFORE_ERROR = 3
"""Least number of engine deaths during a row, one of them while it ran alone, after which the row becomes an error."""
GROUP_SHARE = 4
"""Factor by which a suspect's group gets smaller with every death. To find the one row among n that kills the engine
takes about 2 log2(n) groups at most, as with halves, but half as many engine deaths."""


class RowState(enum.IntEnum):
    """The state of a row of an open chunk: not begun, taken, or finished."""

    TODO = 0
    TAKEN = 1
    """The row was handed out by `read_rows` or `take_suspects` and is not finished yet."""
    DONE = 2


class Suspect(NamedTuple):
    """A row that was in the engine at two or more of its deaths, and waits to run with other suspects only."""

    line: int
    group_limit: int
    """Most suspects, this row included, that may run together."""


@dataclass(slots=True)
class Saved:
    """What storage has of an open chunk's finished rows."""

    keys: list[str] = field(default_factory=list)
    """Keys on storage of those segments of the chunk that this worker has read or written."""
    num_bytes: int = 0
    """Bytes at the beginning of the spool whose rows need no further segment."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Gives the number of the chunk's next segment. This worker's first segment of a chunk has the number 1."""

    def reach(self, num_bytes: int) -> None:
        """Note that storage has the spool's rows up to this byte."""
        self.num_bytes = num_bytes


class OpenChunk:
    """A chunk that this worker has opened and not closed yet."""

    def __init__(
        self,
        ref: ChunkRef,
        local: LocalChunk,
        spool: Spool,
        *,
        num_rows: int,
        started: float,
        claim_etag: str = "",
    ) -> None:
        self.ref = ref
        self.local = local
        self.num_rows = num_rows
        self.spool = spool
        self.started = started
        self.counts = Counts()
        self._state = bytearray(num_rows)
        self.num_left = num_rows
        self.claim_etag = claim_etag
        self.deaths: dict[int, Deaths] = {}
        """Engine deaths during which a row was in the engine, by the row's line."""
        self.saved = Saved()
        self.num_unread = num_rows
        """Unfinished rows that `read_rows` has not reached yet."""
        self._reader: BinaryIO | None = None
        self._cursor = 0
        """Line that `read_rows` reads next."""

    @property
    def name(self) -> str:
        """The chunk's name."""
        return self.ref.name

    @property
    def bytes_per_line(self) -> int:
        """Mean number of bytes of a line of the local copy."""
        return max(1, self.local.size_bytes // max(1, self.local.num_lines))

    def read_rows(self, max_rows: int, max_bytes: int) -> list[RawRow]:
        """Read the next unfinished rows from the local copy and mark them taken, until one of the limits is reached.

        Suspects are left out: they run later, without other rows. Only one thread may call this method at a time, and
        no rows may be adopted meanwhile.
        """
        rows: list[RawRow] = []
        size = 0
        with scratch_errors(self.local.path.parent):
            if self._reader is None:
                self._reader = self.local.path.open("rb", buffering=_READ_BYTES)
            while self._cursor < self.num_rows and len(rows) < max_rows and size < max_bytes:
                line, data = self._cursor, self._reader.readline()
                self._cursor += 1
                if self._state[line] != RowState.TODO:
                    continue
                self.num_unread -= 1
                if not self.is_suspect(line):
                    self._state[line] = RowState.TAKEN
                    rows.append(RawRow(line, data))
                    size += len(data)
        return rows

    def note_deaths(self, lines: Iterable[int], rows_in_flight: int) -> None:
        """Note that an engine died with the rows of these lines, among `rows_in_flight` rows of all chunks.

        Rows that are suspects now count as not begun, so that `suspects` returns them.
        """
        for line in lines:
            add_deaths(self.deaths, line, 1, rows_in_flight)
            if self._state[line] == RowState.TAKEN and self.is_suspect(line):
                self._state[line] = RowState.TODO

    def is_suspect(self, line: int) -> bool:
        """Whether the row was in the engine at so many deaths that it may be their cause."""
        deaths = self.deaths.get(line)
        return deaths is not None and deaths.number >= DEATHS_BEFORE_SUSPICION

    def is_culprit(self, line: int) -> bool:
        """Whether the row counts as the cause of the engine's deaths.

        It was in the engine at DEATHS_BEFORE_ERROR deaths or more, and was alone there at one of them.
        """
        deaths = self.deaths.get(line)
        if deaths is None or deaths.number < DEATHS_BEFORE_ERROR:
            return False
        return deaths.fewest_rows == 1

    def suspects(self) -> list[Suspect]:
        """Return the suspects that are not begun, in the order of their lines."""
        return [
            Suspect(line, max(1, -(-deaths.fewest_rows // GROUP_SHARE)))
            for line, deaths in sorted(self.deaths.items())
            if self.is_suspect(line) and self._state[line] == RowState.TODO
        ]

    def take_suspects(self, lines: Iterable[int]) -> None:
        """Mark the rows of these lines taken. `read_lines` reads them."""
        for line in lines:
            self._state[line] = RowState.TAKEN

    def read_lines(self, wanted: Container[int]) -> list[RawRow]:
        """Read the rows of these lines from the local copy, from its beginning. Any thread may call it."""
        with scratch_errors(self.local.path.parent), self.local.path.open("rb") as file:
            return [
                RawRow(index, line)
                for index, line in enumerate(codec.lines(file))
                if index in wanted
            ]

    def finish(self, rows: list[FinishedRow]) -> list[FinishedRow]:
        """Write finished rows to the spool and return them, without rows that were finished before.

        If a row finishes twice, the first result stays.
        """
        fresh: list[FinishedRow] = []
        for row in rows:
            before = self._state[row.line]
            if before != RowState.DONE:
                self._state[row.line] = RowState.DONE
                fresh.append(row)
                if before == RowState.TODO and row.line >= self._cursor:
                    self.num_unread -= 1  # `read_rows` will skip this adopted row
        if fresh:
            self.spool.append(*encode_rows(fresh))
            self.counts = self.counts.plus(count_rows(fresh))
            self.num_left -= len(fresh)
        return fresh

    def adopt(self, rows: Iterable[FinishedRow], tokens: Counts = _NO_TOKENS) -> None:
        """Write to the spool the rows that an earlier start or another worker finished.

        The rows are taken in batches, because all rows of a chunk may be larger than the memory.

        Args:
            rows: The rows.
            tokens: The sums of their tokens, if the rows do not tell them.
        """
        self.counts = self.counts.plus(tokens)
        for batch in batches(rows):
            resumed = Counts(rows_resumed=len(self.finish(batch)))
            self.counts = self.counts.plus(resumed)

    def adopt_segments(
        self, keys: Iterable[str], deaths: dict[int, Deaths], *, holds_every_row: bool
    ) -> None:
        """Note the segments on storage whose rows were given to `adopt`.

        Args:
            keys: The segments' keys.
            deaths: Engine deaths during which a row was in the engine, by the row's line.
            holds_every_row: Whether these segments, and the output that is repaired, hold all rows that are in the
                spool now. If so, the chunk's next segment starts with the first row that finishes from now on.
        """
        self.saved.keys.extend(keys)
        self.deaths = deaths
        if holds_every_row:
            self.saved.reach(self.spool.size_bytes)

    @property
    def has_unsaved_rows(self) -> bool:
        """Whether finished rows are on the local disk only, in no segment on storage."""
        return self.saved.num_bytes < self.spool.size_bytes

    def close(self) -> None:
        """Remove the local copy and the spool. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self.spool.close()
        remove_quietly(self.local.path)


class Spool:
    """A scratch file with the finished rows of one chunk, in the order in which they finish.

    Each row is a record, which is one line of JSON. A record contains the row's output line, its payload. The place of
    each payload in the file is kept in memory, 16 bytes a row, so that `payloads` can return them in line order. One
    thread appends. A background job may `read` meanwhile, up to the `size_bytes` that the spool had when the job began.
    """

    def __init__(self, path: Path, num_lines: int) -> None:
        self._path = path
        with scratch_errors(path.parent):
            self._file: BinaryIO = path.open("w+b", buffering=0)
        self._offsets = array("q", bytes(8 * num_lines))
        self._lengths = array("q", bytes(8 * num_lines))
        self.size_bytes = 0

    def append(self, records: bytes, payloads: list[tuple[int, int, int]]) -> None:
        """Add whole records to the end of the file.

        `payloads` says where each record's payload is: (line of the row, byte offset in `records`, bytes).
        """
        with scratch_errors(self._path.parent):
            view = memoryview(records)
            while view:
                view = view[self._file.write(view) :]
        base = self.size_bytes
        for line, offset, length in payloads:
            self._offsets[line] = base + offset
            self._lengths[line] = length
        self.size_bytes = base + len(records)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes of the spool from offset `start` up to, but not including, offset `end`."""
        parts = []
        with scratch_errors(self._path.parent):
            while start < end:
                part = os.pread(self._file.fileno(), end - start, start)
                if not part:
                    raise OSError(errno.EIO, "spool ended early", str(self._path))
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def record_end(self, place: int) -> int:
        """Return the first end of a record at or after offset `place`, so that no segment cuts a record in two."""
        place, end = place - 1, self.size_bytes
        while place < end:
            block = self.read(place, min(place + _BLOCK_BYTES, end))
            newline = block.find(b"\n")
            if newline >= 0:
                return place + newline + 1
            place += len(block)
        return end

    def payloads(self) -> Iterator[bytes]:
        """Yield the payload of every line in line order.

        The spool is read in blocks. Rows finish roughly in line order, so most payloads are in the block that was read
        last and need no further read.
        """
        fileno = self._file.fileno()
        block, start, end = b"", 0, 0
        for offset, length in zip(self._offsets, self._lengths, strict=True):
            if offset >= end and length < _BLOCK_BYTES:
                block, start = os.pread(fileno, _BLOCK_BYTES, offset), offset
                end = start + len(block)
            place = offset - start
            if place >= 0 and offset + length <= end:
                yield block[place : place + length]
            else:
                yield os.pread(fileno, length, offset)

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._file.close()
        remove_quietly(self._path)
