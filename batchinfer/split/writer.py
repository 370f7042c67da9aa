"""Writes a job to a store: chunks, then manifests, then job.json. Without job.json, the place holds no job.

What an earlier command left that was killed, or had other options, is replaced until job.json is there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    AlreadyExists,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.core.json_text import raw_members
from batchinfer.core.records import Chunk, Job
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import in_parallel
from batchinfer.ledger.jobs import ChunkRef, chunk_key, is_absolute, manifest_chunks, split_name
from batchinfer.split.sources import Sources
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from batchinfer.storage.scratch import Scratch, scratch_errors

logger = logging.getLogger(__name__)

_THREADS = 4
_USUAL_ROWS, _USUAL_BYTES = 2000, 4 << 20
"""Most rows of a chunk, and about its most bytes of the sources, if no option says its size. A worker on one GPU does
some ten to fifty rows in a second, fewer if they are long."""
_CHUNKS_PER_WORKER, _FEWEST_PER_WORKER, _FEW_ROWS = 50, 4, 20
_MOST_CHUNKS = 100_000
_MOST_IDS = 10_000_000
"""About the most ids of which it is found out how many repeat, by their hashes."""
_OWN_KEY = re.compile(
    r"chunks/part-\d{5,}(\.[0-9a-f]{12})?\.jsonl(\.zst)?|manifests/(all|worker-\d{5,}|first-\d+)\.txt"
)
"""Keys that `split` writes, and `run`. What else lies in their folders is not theirs to remove."""


def usual_num_chunks(rows: int, num_bytes: int, num_workers: int) -> int:
    """Return the number of chunks if no option says it: a chunk is about a minute of one worker's time.

    There are at least 50 for each worker, so that workers end together, unless a chunk would have fewer than 20 rows:
    then at least 4. There are at most 100,000 in all.

    >>> [usual_num_chunks(rows, 0, 1) for rows in (3, 999, 100_001, 10**10)]
    [3, 49, 51, 100000]
    >>> (
    ...     usual_num_chunks(1000, 0, 16),
    ...     usual_num_chunks(1000, 0, 4),
    ... )  # where that gives each worker four
    (64, 50)
    >>> (
    ...     usual_num_chunks(10**6, 3 << 30, 16),
    ...     usual_num_chunks(1000, 1 << 30, 1),
    ... )  # of 4 rows of a megabyte
    (800, 256)
    """
    enough = max(-(-rows // _USUAL_ROWS), -(-num_bytes // _USUAL_BYTES))
    enough = max(enough, min(_CHUNKS_PER_WORKER * num_workers, rows // _FEW_ROWS))
    return min(rows, max(min(enough, _MOST_CHUNKS), _FEWEST_PER_WORKER * num_workers))


def even_bounds(rows: int, num_chunks: int) -> list[int]:
    """Return the first row of each chunk, then the number of all rows.

    >>> even_bounds(10, 3)
    [0, 3, 6, 10]
    """
    return [index * rows // num_chunks for index in range(num_chunks + 1)]


def write_chunks(store: Store, job: Job, sources: Sources, bounds: Sequence[int]) -> Job:
    """Build chunks one after the other in a scratch folder, publish several at a time, and add them to a job.

    Chunks that are appended to others have names by their content.

    Args:
        store: The job's place.
        job: The job, whose chunks and sources come before.
        sources: The rows.
        bounds: The first row of each chunk, counted from the first of the sources, then the number of all rows.

    Returns:
        The job with the new chunks, and with what is odd about their rows.

    Raises:
        InputError: See `Sources.blocks`, `Sources.check_unchanged`. Or another split has completed a job meanwhile.
        ScratchFull: The scratch folder is full.
    """
    from tqdm import tqdm

    before, chunks, blocks = len(job.chunks), list[Chunk](), sources.blocks(bounds)
    num_broken, ids = 0, None

    def lines(count: int) -> Iterator[bytes]:
        nonlocal num_broken, ids
        while count:
            block = next(blocks)
            num_broken += block.num_broken
            if len(block.ids) and (ids is None or len(ids) < _MOST_IDS):
                import polars as pl  # it takes a tenth of a second, and many jobs have no ids

                hashes = pl.Series(block.ids, dtype=pl.Binary).drop_nulls().hash()
                ids = hashes if ids is None else ids.append(hashes)
            yield block.lines
            count -= block.num_rows

    def built(scratch: Scratch) -> Iterator[tuple[Chunk, Path]]:
        for index, (first, stop) in enumerate(itertools.pairwise(bounds), before):
            name = layout.chunk_name(index, before + len(bounds) - 1)
            path = scratch.new_path(name)
            sha256 = _write_file(path, lines(stop - first), job.compression)
            chunk = Chunk(
                name=name,
                first_row=sources.first_row + first,
                rows=stop - first,
                bytes=path.stat().st_size,
                sha256=sha256,
                file=layout.chunk_file(name, job.compression, sha256[:12]) if before else UNSET,
            )
            yield chunk, path

    def publish(pair: tuple[Chunk, Path]) -> Chunk:
        chunk, path = pair
        if not before:  # it may replace what a command left that did not come to its end
            with contextlib.suppress(ObjectNotFound):
                store.stat(layout.JOB_KEY)
                raise _another(store)
        store.put_file(chunk_key(job, chunk), path)
        path.unlink()
        return chunk

    with (
        contextlib.closing(Scratch()) as scratch,
        scratch_errors(scratch.folder),
        tqdm(total=sources.rows, unit=" rows", desc="split", disable=None) as bar,  # on a terminal
    ):
        for chunk in in_parallel(publish, built(scratch), _THREADS):
            chunks.append(chunk)
            bar.update(chunk.rows)
    sources.check_unchanged()
    return msgspec.structs.replace(
        job,
        chunks=[*job.chunks, *chunks],
        broken_lines=job.broken_lines + num_broken,
        duplicate_ids=job.duplicate_ids + (0 if ids is None else len(ids) - ids.n_unique()),
    )


def _write_file(path: Path, pieces: Iterable[bytes], compression: str) -> str:
    """Write a chunk's file, and return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _packed(pieces) if compression == "zstd" else pieces:
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    import zstandard

    packer = zstandard.ZstdCompressor().compressobj()
    yield from map(packer.compress, pieces)
    yield packer.flush()


def _another(store: Store) -> InputError:
    return InputError(
        f"{store.url}: another split wrote here at the same time, expected to be alone",
        hint="run the same command again: it tells whether the job there is the one you want",
    )


def refer_to(job: Job, sources: Sources) -> Job:
    """Add files of JSON Lines to a job as its chunks. They are read again, for their checksums."""
    chunks, row, num_broken, store_at = list[Chunk](), 0, 0, functools.cache(open_store)
    with contextlib.closing(Scratch()) as scratch:
        for index, file in enumerate(sources.files):
            root, key = split_name(file.url)
            name = layout.chunk_name(index, len(sources.files))
            local = fetch(store_at(root), ChunkRef(name, root, key), scratch)
            with local.path.open("rb") as lines:
                num_broken += sum(raw_members(line) is None for line in lines)
            local.path.unlink()
            place = {"name": name, "file": file.url, "sha256": local.sha256}
            chunks.append(Chunk(first_row=row, rows=file.rows, bytes=file.bytes, **place))
            row += file.rows
    sources.check_unchanged()
    return msgspec.structs.replace(job, chunks=chunks, broken_lines=num_broken)


def complete_job(store: Store, job: Job, etag: str) -> None:
    """Write the manifests and job.json, which makes the chunks a job.

    Of a new job, whose `etag` is empty, job.json comes last, when all chunks are found to be there and others of
    `split` are removed. After an append job.json is replaced first, as the job is whole before and after it.

    Raises:
        InputError: Another command wrote to the same place meanwhile.
    """
    data = codec.encode_pretty(job)
    try:
        if etag:
            store.replace(layout.JOB_KEY, data, etag)
            write_manifests(store, job)
        else:
            _require_chunks(store, job)
            write_manifests(store, job)
            _require_chunks(store, job)  # another split may have replaced some of them meanwhile
            store.create(layout.JOB_KEY, data)
    except (AlreadyExists, PreconditionFailed) as error:
        raise _another(store) from error


def _require_chunks(store: Store, job: Job) -> None:
    """Raise InputError unless all chunks of the job are there, and then remove others of `split`."""
    there = {item.key: item.bytes for item in store.list(layout.CHUNKS)}
    own = (chunk for chunk in job.chunks if not is_absolute(chunk_key(job, chunk)))
    wanted = {chunk_key(job, chunk): chunk.bytes for chunk in own}
    if any(there.get(key) != size for key, size in wanted.items()):
        raise _another(store)
    store.delete([key for key in there if key not in wanted and _OWN_KEY.fullmatch(key)])


def write_manifests(store: Store, job: Job) -> None:
    """Write the manifests of a job, and remove others of `split`."""
    manifests = manifest_chunks(job)
    stale = (item.key for item in store.list(layout.MANIFESTS) if item.key not in manifests)
    store.delete(list(filter(_OWN_KEY.fullmatch, stale)))
    with contextlib.closing(Scratch()) as scratch:
        for key, chunks in manifests.items():
            path = scratch.new_path("manifest")
            path.write_text("".join(f"{chunk_key(job, chunk)}\n" for chunk in chunks))
            store.put_file(key, path)
