"""Writes a job to a store: chunks, then manifests, then job.json. Without job.json, the place holds no job.

What an earlier command left that was killed, or had other options, is replaced until job.json is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    AlreadyExists,
    ConfigError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.core.records import Chunk, Job
from batchinfer.ledger.jobs import chunk_key, is_absolute, manifest_chunks
from batchinfer.split.rows import Block
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, scratch_errors

if TYPE_CHECKING:
    from batchinfer.split.sources import Sources

_THREADS = 4
_ZSTD_LEVEL = 3
_USUAL_ROWS, _USUAL_BYTES = 2000, 4 << 20
"""Most rows of a chunk, and about its most bytes of the sources, if no option says its size. A worker on one GPU does
some ten to fifty rows in a second, fewer if they are long."""
_CHUNKS_PER_WORKER, _FEWEST_PER_WORKER, _FEW_ROWS = 50, 4, 20
_MOST_CHUNKS = 100_000
_MOST_IDS = 10_000_000


def usual_num_chunks(rows: int, num_bytes: int, num_workers: int) -> int:
    """Return the number of chunks if no option says it: a chunk is about a minute of one worker's time.

    There are at least 50 for each worker, so that workers end together, unless a chunk would have fewer than 20 rows:
    then at least 4. There are at most 100,000 in all.

    >>> usual_num_chunks(1_000_000, 0, 4), usual_num_chunks(1000, 0, 4), usual_num_chunks(10**10, 0, 4)
    (500, 50, 100000)
    """
    enough = max(-(-rows // _USUAL_ROWS), -(-num_bytes // _USUAL_BYTES))
    enough = max(enough, min(_CHUNKS_PER_WORKER * num_workers, rows // _FEW_ROWS))
    return min(rows, max(min(enough, _MOST_CHUNKS), _FEWEST_PER_WORKER * num_workers))


def even_bounds(rows: int, num_chunks: int) -> list[int]:
    """Return the first row of each chunk, then the number of all rows.

    Raises:
        ConfigError: There would be more chunks than rows.

    >>> even_bounds(10, 3)
    [0, 3, 6, 10]
    """
    if num_chunks > rows:
        raise ConfigError(
            f"--num-chunks {num_chunks}: more than the {rows} rows, expected at least one row a chunk",
            hint=f"use --num-chunks {rows} or fewer",
        )
    return [index * rows // num_chunks for index in range(num_chunks + 1)]


class Written(NamedTuple):
    """Chunks that are on the store, and what their rows are like."""

    chunks: list[Chunk]
    num_broken: int
    """Number of rows that are no JSON object."""
    num_repeated: int
    """Number of rows with an id that an earlier row has."""


class _Repeats:
    """Counts ids that earlier rows have, by their hashes, among the first `_MOST_IDS`: memory holds no more."""

    def __init__(self) -> None:
        self._hashes = [np.empty(0, np.uint64)]
        self._num = 0

    def add(self, ids: Any) -> None:
        """Note the ids of some rows: a list of bytes or a series of polars."""
        if len(ids) and self._num < _MOST_IDS:
            self._hashes.append(pl.Series(ids, dtype=pl.Binary).hash().to_numpy())
            self._num += len(ids)

    def count(self) -> int:
        """Return the number of rows whose id an earlier row has."""
        return self._num - np.unique(np.concatenate(self._hashes)).size


class _ChunkFile:
    """A chunk that grows in a scratch file."""

    def __init__(self, path: Path, compression: str) -> None:
        self.path, self._bytes, self._digest = path, 0, hashlib.sha256()
        self._compressor: Any = None
        if compression == "zstd":
            import zstandard

            self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
        self._file = path.open("wb")

    def write(self, lines: bytes) -> None:
        """Add whole lines."""
        self._put(self._compressor.compress(lines) if self._compressor else lines)

    def finish(self, name: str, first_row: int, rows: int) -> Chunk:
        """Complete the file and return its description."""
        if self._compressor:
            self._put(self._compressor.flush())
        self._file.close()
        sha256 = self._digest.hexdigest()
        return Chunk(name=name, first_row=first_row, rows=rows, bytes=self._bytes, sha256=sha256)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)


def write_chunks(
    sources: Sources,
    bounds: Sequence[int],
    names: Sequence[str],
    publish: Callable[[Chunk, Path], Chunk],
    *,
    compression: str,
    advance: Callable[[int], object],
) -> Written:
    """Build chunks one after the other in a scratch folder, and publish several at a time.

    Args:
        sources: The rows.
        bounds: The first row of each chunk, counted from the first of the sources, then the number of all rows.
        names: Names of the chunks.
        publish: Publishes the file of a chunk; returns the chunk as job.json is to have it.
        compression: "none" or "zstd".
        advance: Called with the number of rows of each chunk that is published.

    Raises:
        InputError: See `Sources.blocks`, `Sources.check_unchanged`.
        ScratchFull: The scratch folder is full.
    """
    with contextlib.closing(Scratch()) as scratch, scratch_errors(scratch.folder):
        repeats, waiting, chunks = _Repeats(), deque[Future[Chunk]](), list[Chunk]()
        num_broken = 0

        def take() -> None:
            chunks.append(waiting.popleft().result())
            advance(chunks[-1].rows)

        with ThreadPoolExecutor(_THREADS) as pool:
            blocks = sources.blocks()
            block, used = Block(0, lambda _start, _stop: b""), 0
            for name, (first, stop) in zip(names, itertools.pairwise(bounds), strict=True):
                file = _ChunkFile(scratch.new_path(name), compression)
                left = stop - first
                while left:
                    if used == block.num_rows:
                        block, used = next(blocks), 0
                        repeats.add(block.ids)
                        num_broken += block.num_broken
                    count = min(left, block.num_rows - used)
                    file.write(block.encode(used, used + count))
                    used, left = used + count, left - count
                chunk = file.finish(name, sources.first_row + first, stop - first)
                waiting.append(pool.submit(publish, chunk, file.path))
                while len(waiting) > _THREADS:
                    take()
            while waiting:
                take()
        if sources.is_whole:  # then the last file is to have no more rows
            next(blocks, None)
        sources.check_unchanged()
        return Written(chunks, num_broken, repeats.count())


def publish_chunk(store: Store, compression: str, chunk: Chunk, path: Path) -> Chunk:
    """Create a chunk from its scratch file, in place of what a command left that did not come to its end."""
    key = layout.chunk_file(chunk.name, compression)
    try:
        store.create_file(key, path, is_final=True)
    except AlreadyExists:
        with contextlib.suppress(ObjectNotFound):
            store.stat(layout.JOB_KEY)
            raise _another(store) from None
        store.delete([key])
        store.create_file(key, path, is_final=True)
    path.unlink()
    return chunk


def _another(store: Store) -> InputError:
    return InputError(
        f"{store.url}: another split wrote here at the same time, expected to be alone",
        hint="run the same command again: it tells whether the job there is the one you want",
    )


def complete_job(store: Store, job: Job) -> None:
    """Remove what is not of the job, check that its chunks are there, write the manifests and, last, job.json.

    Raises:
        InputError: Another split wrote to the same place meanwhile.
    """
    there = {item.key: item.bytes for item in store.list(layout.CHUNKS)}
    own = (chunk for chunk in job.chunks if not is_absolute(chunk_key(job, chunk)))
    wanted = {chunk_key(job, chunk): chunk.bytes for chunk in own}
    store.delete([key for key in there if key not in wanted])
    if any(there.get(key) != size for key, size in wanted.items()):
        raise _another(store)
    write_manifests(store, job)
    try:
        store.create(layout.JOB_KEY, codec.encode_pretty(job))
    except AlreadyExists as error:
        raise _another(store) from error


def write_manifests(store: Store, job: Job) -> None:
    """Write the manifests of a job, and remove others."""
    manifests = manifest_chunks(job)
    stale = [item.key for item in store.list(layout.MANIFESTS) if item.key not in manifests]
    store.delete(stale)
    for key, chunks in manifests.items():
        _set(store, key, "".join(f"{chunk_key(job, chunk)}\n" for chunk in chunks).encode())


def _set(store: Store, key: str, data: bytes) -> None:
    """Create or replace an object, whoever else does so meanwhile."""
    while True:
        try:
            store.create(key, data)
            return
        except AlreadyExists:
            with contextlib.suppress(PreconditionFailed, ObjectNotFound):
                store.replace(key, data, store.stat(key).etag)
                return
