"""Chunk files, built in a local folder: hashed while they are written, one after the other or in several processes.

Bytes depend on the rows alone: neither on the number of processes nor on how the sources' batches fall.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from batchinfer.core import layout
from batchinfer.core.errors import ConfigError, StorageError
from batchinfer.core.records import Chunk
from batchinfer.split.sources import ColumnChoice, CountedSources, Oddities
from batchinfer.storage.scratch import scratch_errors

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

FRAME_ROWS = 1000
FRAME_BYTES = 8 << 20
"""A zstd frame holds so many rows, or fewer where they are large; frames can be read on their own."""
_ZSTD_LEVEL = 3
_TURN_ROWS = 20_000
"""Rows a process takes at once, at least, and up to the next row group's end."""
_HASH_BYTES = 8
_SORTED_HASHES = 4 << 20
_PR_SET_PDEATHSIG = 1


class ChunkRange(NamedTuple):
    """One chunk to build: its rows in the job."""

    name: str
    first_row: int
    rows: int


class BuiltChunk(NamedTuple):
    """A chunk's file in the local folder, and another with the hashes of its rows' own ids, if any has one."""

    chunk: Chunk
    path: Path
    id_path: Path | None
    odd: Oddities


class BuildSettings(NamedTuple):
    """What every process that builds needs."""

    counted: CountedSources
    folder: Path
    compression: str


def even_chunk_starts(
    rows: int, *, num_chunks: int | None = None, chunk_rows: int | None = None
) -> list[int]:
    """Borders of a number of chunks, or of chunks of a size; exactly one of the two is given.

    Raises:
        ConfigError: More chunks than rows.

    >>> even_chunk_starts(10, num_chunks=3)
    [0, 3, 6, 10]
    >>> even_chunk_starts(10, chunk_rows=4)
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


def group_chunk_starts(counted: CountedSources, column: str, borders: Sequence[int]) -> list[int]:
    """Move each border forward to where the column's value changes. Reads that column once.

    Only neighbouring rows are kept together: a value that comes back later starts a new group. A group longer than a
    chunk swallows the borders in it, so there may be fewer chunks than asked for. A row without a value is a group.

    Raises:
        InputError: The sources have no such column, or one is damaged or changed since it was counted.
    """
    counted.require_column("--group-by", column)
    narrow = CountedSources(
        sources=counted.sources,
        files=counted.files,
        bases=counted.bases,
        choice=ColumnChoice(columns=[], id_column=column),
        rows=counted.rows,
        columns=[],
    )
    moved = [0]
    wanted = iter(borders[1:-1])
    border = next(wanted, None)
    row, last = 0, None
    for block in narrow.read(range(counted.rows), Oddities()):
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
    return [*moved, counted.rows]


def chunk_ranges(borders: Sequence[int]) -> list[ChunkRange]:
    """The chunks between borders."""
    count = len(borders) - 1
    return [
        ChunkRange(
            layout.chunk_name(index, count), borders[index], borders[index + 1] - borders[index]
        )
        for index in range(count)
    ]


# --------------------------------------------------------------------------- building


def build(settings: BuildSettings, ranges: Sequence[ChunkRange]) -> Iterator[BuiltChunk]:
    """Build consecutive chunks in this process, reading each row once. The caller removes the files.

    Raises:
        InputError: See `CountedSources.read`.
        ScratchFull: The folder is full.
    """
    if not ranges:
        return
    with _no_collector():
        yield from _build(settings, ranges)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Keep Python from looking for reference cycles: rows are many objects that form none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _build(settings: BuildSettings, ranges: Sequence[ChunkRange]) -> Iterator[BuiltChunk]:
    odd = Oddities()
    rows = range(ranges[0].first_row, ranges[-1].first_row + ranges[-1].rows)
    blocks = settings.counted.read(rows, odd)
    block, used = next(blocks), 0
    for chunk_range in ranges:
        with _ChunkWriter(settings, chunk_range) as writer:
            left = chunk_range.rows
            while left:
                if used == block.num_rows:
                    block, used = next(blocks), 0
                count = min(left, block.num_rows - used)
                ids = block.ids[used : used + count] if block.ids else ()
                writer.write(block.encode(used, used + count), ids)
                used += count
                left -= count
            built = writer.finish(odd.take())
        yield built
    for _ in blocks:  # let the reader make its last check of the file
        pass


def build_in_processes(
    settings: BuildSettings, ranges: Sequence[ChunkRange], processes: int
) -> Iterator[BuiltChunk]:
    """The same, in order, by several processes at once.

    At most two turns a process lie finished in the folder, where a turn is a row group or `_TURN_ROWS` rows.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    turns = collections.deque(_turns(settings.counted, ranges))
    pending: collections.deque[Future[list[BuiltChunk]]] = collections.deque()
    # Not fork: pyarrow and storage clients have threads by now.
    pool = ProcessPoolExecutor(
        min(processes, len(turns)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_process,
        initargs=(settings, os.getpid()),
    )
    try:
        while turns or pending:
            while turns and len(pending) < 2 * processes:
                pending.append(pool.submit(_build_turn, turns.popleft()))
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise StorageError(
            "split: one of its processes was killed, expected it to finish",
            hint="if memory ran out, use fewer --processes; running the same command again is safe",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _turns(counted: CountedSources, ranges: Sequence[ChunkRange]) -> Iterator[list[ChunkRange]]:
    """Runs of chunks that end near a row group's end, as a row group cut in two is decoded twice."""
    borders = counted.row_group_starts()
    border = next(borders, counted.rows)
    turn: list[ChunkRange] = []
    rows = 0
    for chunk_range in ranges:
        turn.append(chunk_range)
        rows += chunk_range.rows
        end = chunk_range.first_row + chunk_range.rows
        has_crossed = False
        while border <= end and border < counted.rows:
            has_crossed = has_crossed or border > turn[0].first_row
            border = next(borders, counted.rows)
        if rows >= _TURN_ROWS and has_crossed:
            yield turn
            turn, rows = [], 0
    if turn:
        yield turn


_settings: BuildSettings | None = None


def _start_process(settings: BuildSettings, parent: int) -> None:
    """Set up a process of the pool: it ends with its parent, and leaves Ctrl-C to it."""
    import ctypes
    import signal

    global _settings  # noqa: PLW0603 - once a process, so that the counted sources are not sent with every turn
    _settings = settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _build_turn(ranges: list[ChunkRange]) -> list[BuiltChunk]:
    assert _settings is not None
    return list(build(_settings, ranges))


class _ChunkWriter:
    """Writes one chunk's file, compressed if asked for, and hashes what it writes."""

    def __init__(self, settings: BuildSettings, chunk_range: ChunkRange) -> None:
        self._range = chunk_range
        self._folder = settings.folder
        self._path = (
            settings.folder / Path(layout.chunk_file(chunk_range.name, settings.compression)).name
        )
        self._id_path = settings.folder / f"{chunk_range.name}.ids"
        with scratch_errors(self._folder):
            self._file = self._path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._id_hashes = bytearray()
        self._frame: list[bytes] = []
        self._frame_bytes = 0
        self._compress: Any = None
        if settings.compression == "zstd":
            import zstandard

            self._compress = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, lines: bytes, ids: Sequence[str | None]) -> None:
        """Add some whole lines, and the ids of the rows that have one of their own."""
        for name in ids:
            if name is not None:
                text = name.encode("utf-8", "surrogatepass")
                self._id_hashes += hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()
        if self._compress is None:
            self._put(lines)
            return
        for line in _split_lines(lines):
            self._frame.append(line)
            self._frame_bytes += len(line)
            if len(self._frame) >= FRAME_ROWS or self._frame_bytes >= FRAME_BYTES:
                self._end_frame()

    def finish(self, odd: Oddities) -> BuiltChunk:
        """Complete the file and describe it."""
        if self._frame:
            self._end_frame()
        id_path = None
        if self._id_hashes:
            id_path = self._id_path
            with scratch_errors(self._folder):
                id_path.write_bytes(self._id_hashes)
        chunk = Chunk(
            name=self._range.name,
            first_row=self._range.first_row,
            rows=self._range.rows,
            bytes=self._bytes,
            sha256=self._digest.hexdigest(),
        )
        return BuiltChunk(chunk, self._path, id_path, odd)

    def _end_frame(self) -> None:
        data = self._compress(b"".join(self._frame))
        self._frame, self._frame_bytes = [], 0
        self._put(data)

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._bytes += len(data)
        rest = memoryview(data)
        with scratch_errors(self._folder):
            while rest:
                rest = rest[self._file.write(rest) :]


def _split_lines(lines: bytes) -> list[bytes]:
    return [line + b"\n" for line in lines.split(b"\n")[:-1]]


def count_duplicates(id_paths: Sequence[Path]) -> int:
    """Count rows whose id an earlier row has, by 64-bit hashes, in memory that does not grow with the rows.

    Two different ids among a billion rows meet in one hash with a chance of a few per cent.
    """
    if not id_paths:
        return 0
    import pyarrow as pa
    import pyarrow.compute as pc

    total = sum(path.stat().st_size for path in id_paths) // _HASH_BYTES
    passes = 1
    while total > passes * _SORTED_HASHES:
        passes *= 2
    duplicates = 0
    for number in range(passes):
        parts = []
        for path in id_paths:
            values = pa.Array.from_buffers(
                pa.uint64(),
                path.stat().st_size // _HASH_BYTES,
                [None, pa.py_buffer(path.read_bytes())],
            )
            if passes > 1:
                mine = pc.equal(pc.bit_wise_and(values, pa.scalar(passes - 1, pa.uint64())), number)
                values = values.filter(mine)
            parts.append(values)
        values = pa.concat_arrays(parts)
        values = values.take(pc.sort_indices(values))
        if len(values) > 1:
            duplicates += pc.sum(
                pc.equal(values.slice(1), values.slice(0, len(values) - 1))
            ).as_py()
    return duplicates
