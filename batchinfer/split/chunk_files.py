"""Builds chunk files in a local folder, in this process or in several. Computes their sha256 while writing.

A chunk's bytes depend on its rows and the compression, not on the number of processes or on how readers group rows into
blocks.
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
"""Largest number of rows in a zstd frame, and uncompressed bytes at which a frame ends."""
_ZSTD_LEVEL = 3
_TURN_ROWS = 20_000
"""Fewest rows of a turn (see `build_in_processes`). The last turn may have fewer."""
_USUAL_ROWS, _USUAL_BYTES = 2000, 4 << 20
"""Largest number of rows of a chunk, and about its largest size in bytes of the sources, if no option says its size:
about a minute of a worker. One on one GPU does some ten to fifty rows in a second, fewer if they are long."""
_CHUNKS_PER_WORKER, _LEAST_CHUNKS_PER_WORKER = 50, 4
"""Chunks that each worker gets at least, and those that it gets even if a chunk has fewer than `_FEW_ROWS` rows then.

Workers take whole chunks of each other, so at the end of a run a slow worker keeps the others waiting for a chunk.
"""
_FEW_ROWS = 20
_MOST_CHUNKS = 100_000
_HASH_BYTES = 8
_SORTED_HASHES = 4 << 20
"""Number of id hashes that are sorted at once, on average at most. More hashes are sorted in several passes."""
_PR_SET_PDEATHSIG = 1


class ChunkRange(NamedTuple):
    """A chunk to build: its name, the number of its first row in the job, and the number of its rows."""

    name: str
    first_row: int
    rows: int


class BuiltChunk(NamedTuple):
    """A chunk whose file is complete in the local folder.

    `id_path` is a second file with the hashes of the rows' own ids, or None if no row has one.
    """

    chunk: Chunk
    path: Path
    id_path: Path | None
    odd: Oddities


class BuildSettings(NamedTuple):
    """Everything that each building process needs: the counted sources, the local folder and the compression."""

    counted: CountedSources
    folder: Path
    compression: str


def usual_num_chunks(counted: CountedSources, rows: int, num_workers: int) -> int:
    """Return the number of chunks for `rows` rows if no option says it.

    A chunk of usual size has at most `_USUAL_ROWS` rows and about `_USUAL_BYTES` of the sources. Chunks are larger if
    there would be more than `_MOST_CHUNKS`, and smaller if a worker would get fewer than `_CHUNKS_PER_WORKER`. There
    are never more chunks than rows.
    """
    all_rows = sum(item.rows for item in counted.files)
    all_bytes = sum(item.found.bytes for item in counted.files)
    size = min(_USUAL_ROWS, max(1, _USUAL_BYTES * all_rows // max(1, all_bytes)))
    enough = max(-(-rows // size), min(_CHUNKS_PER_WORKER * num_workers, rows // _FEW_ROWS))
    return min(rows, max(min(enough, _MOST_CHUNKS), _LEAST_CHUNKS_PER_WORKER * num_workers))


def even_chunk_starts(
    rows: int, *, num_chunks: int | None = None, chunk_rows: int | None = None
) -> list[int]:
    """Divide rows into chunks: return the first row of each chunk, followed by the number of all rows.

    Exactly one of `num_chunks` (nearly equal chunks) and `chunk_rows` (equal chunks but the last) is given.

    Raises:
        ConfigError: There would be more chunks than rows.

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


def group_chunk_starts(counted: CountedSources, column: str, starts: Sequence[int]) -> list[int]:
    """Move each chunk's start forward, if necessary, to the next row at which the value of `column` changes.

    Neighbouring rows with the same value are a group, which is never divided between chunks. A value that comes back
    later starts a new group. A group that is longer than a chunk makes one large chunk, so there may be fewer chunks
    than asked for. A row without a value is a group of its own.

    Args:
        counted: The sources.
        column: Name of the column.
        starts: The first row of each chunk, then the number of rows, as `even_chunk_starts` returns them.

    Raises:
        InputError: The sources lack the column, or a source is damaged or has changed since it was counted.
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
    wanted = iter(starts[1:-1])
    start = next(wanted, None)
    row, last = 0, None
    for block in narrow.read(range(counted.rows), Oddities()):
        for value in block.ids or [None] * block.num_rows:
            if start is not None and row >= start and (value is None or value != last):
                moved.append(row)
                while start is not None and start <= row:
                    start = next(wanted, None)
            last = value
            row += 1
        if start is None:
            break
    if len(moved) < len(starts) - 1:
        logger.info(
            "--group-by %s: %d chunks of the %d asked for", column, len(moved), len(starts) - 1
        )
    return [*moved, counted.rows]


def chunk_ranges(starts: Sequence[int]) -> list[ChunkRange]:
    """Return the name and rows of each chunk. `starts` holds each chunk's first row, then the number of all rows."""
    count = len(starts) - 1
    return [
        ChunkRange(
            layout.chunk_name(index, count), starts[index], starts[index + 1] - starts[index]
        )
        for index in range(count)
    ]


# --------------------------------------------------------------------------- building


def build(settings: BuildSettings, ranges: Sequence[ChunkRange]) -> Iterator[BuiltChunk]:
    """Build consecutive chunks in this process, reading each row once. The caller removes their files.

    Raises:
        InputError: See `CountedSources.read`.
        ScratchFull: The local folder is full.
    """
    if not ranges:
        return
    with _no_collector():
        yield from _build(settings, ranges)


def build_with(
    settings: BuildSettings, ranges: Sequence[ChunkRange], processes: int
) -> Iterator[BuiltChunk]:
    """Build consecutive chunks in so many processes, as far as that makes sense. See `build` for what it raises."""
    if processes > 1 and len(ranges) > 1 and settings.counted.is_shared:
        return build_in_processes(settings, ranges, processes)
    return build(settings, ranges)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Turn Python's garbage collector off: it would spend time on searching many row objects, which form no cycles."""
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
    # All rows have been read. The loop lets the reader run to its end, where it checks that the file has not changed.
    for _ in blocks:
        pass


def build_in_processes(
    settings: BuildSettings, ranges: Sequence[ChunkRange], processes: int
) -> Iterator[BuiltChunk]:
    """Build consecutive chunks in several processes, and yield them in order.

    The chunks are divided into turns. A turn is a series of consecutive chunks that one process builds. It ends with
    the chunk that brings it to `_TURN_ROWS` rows and to or past the end of a row group. At most two turns for each
    process are submitted at a time, to limit the space that finished chunks take in the local folder.

    Raises:
        InputError: See `CountedSources.read`.
        ScratchFull: The local folder is full.
        StorageError: A process was killed.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    turns = collections.deque(_turns(settings.counted, ranges))
    pending: collections.deque[Future[list[BuiltChunk]]] = collections.deque()
    # New processes are spawned, not forked. A forked process would lack the threads that pyarrow and storage clients
    # have started, and could hang.
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
    """Yield the turns: lists of consecutive chunks, each of which one process builds.

    A turn ends near the end of a row group, because a row group divided between two processes is decoded twice.
    """
    group_starts = counted.row_group_starts()
    group_start = next(group_starts, counted.end_row)
    turn: list[ChunkRange] = []
    rows = 0
    for chunk_range in ranges:
        turn.append(chunk_range)
        rows += chunk_range.rows
        end = chunk_range.first_row + chunk_range.rows
        has_crossed = False
        while group_start <= end and group_start < counted.end_row:
            has_crossed = has_crossed or group_start > turn[0].first_row
            group_start = next(group_starts, counted.end_row)
        if rows >= _TURN_ROWS and has_crossed:
            yield turn
            turn, rows = [], 0
    if turn:
        yield turn


_settings: BuildSettings | None = None


def _start_process(settings: BuildSettings, parent: int) -> None:
    """Set up a process of the pool: it is killed when its parent ends (on Linux), and ignores Ctrl-C."""
    import ctypes
    import signal

    global _settings  # noqa: PLW0603 - set once a process, instead of being sent with every turn
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
    """Writes the file of one chunk, compressed if the settings say so, and computes the file's sha256."""

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
        """Add whole lines. `ids` are the ids of their rows, None for a row without an id of its own."""
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
        """Complete the file and return its description. `odd` holds the counts of the rows read for this chunk."""
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
    """Count the rows whose id an earlier row has. Memory holds about `_SORTED_HASHES` hashes, more if many are equal.

    `id_paths` are the files with the 64-bit hashes of ids. Only hashes are compared. Among a billion different ids the
    chance that any two have the same hash is a few per cent.
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
