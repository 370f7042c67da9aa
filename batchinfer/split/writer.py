"""Writes a job to a store: chunks, then manifests, then job.json. Without job.json, the place holds no job.

What an earlier command left that was killed, or had other options, is replaced until job.json is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from batchinfer.core import codec, layout, units
from batchinfer.core.errors import (
    AlreadyExists,
    ConfigError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.core.records import Chunk, Job
from batchinfer.ledger.inventory import in_parallel
from batchinfer.ledger.jobs import chunk_key, decode_job, identity, is_absolute, manifest_chunks
from batchinfer.split.files import is_local
from batchinfer.split.sources import Sources, references
from batchinfer.storage import Store
from batchinfer.storage.opening import local_path
from batchinfer.storage.scratch import Scratch, scratch_errors

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger(__name__)

_THREADS = 4
_ZSTD_LEVEL = 3
_USUAL_ROWS, _USUAL_BYTES = 2000, 4 << 20
"""Most rows of a chunk, and about its most bytes of the sources, if no option says its size. A worker on one GPU does
some ten to fifty rows in a second, fewer if they are long."""
_CHUNKS_PER_WORKER, _FEWEST_PER_WORKER, _FEW_ROWS = 50, 4, 20
_MOST_CHUNKS = 100_000
_MOST_IDS = 10_000_000
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


class _Rows:
    """Cuts the rows of sources into chunks, and notes what is odd about them."""

    def __init__(self, sources: Sources) -> None:
        self._blocks = sources.blocks()
        self._lines, self._num_left = io.BytesIO(), 0
        self._ids: pl.Series | None = None
        self.num_broken = 0

    def take(self, count: int) -> Iterator[bytes]:
        """Yield the lines of the next rows, some at a time."""
        while count:
            if not self._num_left:
                self._next_block()
            taken = min(count, self._num_left)
            is_all = taken == self._num_left
            yield self._lines.read() if is_all else b"".join(itertools.islice(self._lines, taken))
            self._num_left, count = self._num_left - taken, count - taken

    def _next_block(self) -> None:
        block = next(self._blocks)
        self._lines, self._num_left = io.BytesIO(block.lines), block.num_rows
        self.num_broken += block.num_broken
        if len(block.ids) and (self._ids is None or len(self._ids) < _MOST_IDS):
            import polars as pl

            hashes = pl.Series(block.ids, dtype=pl.Binary).drop_nulls().hash()
            self._ids = hashes if self._ids is None else self._ids.append(hashes)

    def num_repeated(self) -> int:
        """Return the number of rows whose id an earlier row has, by hashes, among the first `_MOST_IDS` ids."""
        return 0 if self._ids is None else len(self._ids) - self._ids.n_unique()


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

    rows, before, chunks = _Rows(sources), len(job.chunks), list[Chunk]()

    def built(scratch: Scratch) -> Iterator[tuple[Chunk, Path]]:
        for index, (first, stop) in enumerate(itertools.pairwise(bounds), before):
            name = layout.chunk_name(index, before + len(bounds) - 1)
            path = scratch.new_path(name)
            sha256 = _write_file(path, rows.take(stop - first), job.compression)
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
        broken_lines=job.broken_lines + rows.num_broken,
        duplicate_ids=job.duplicate_ids + rows.num_repeated(),
    )


def _write_file(path: Path, pieces: Iterable[bytes], compression: str) -> str:
    """Write a chunk's file, and return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _packed(pieces) if compression == "zstd" else pieces:
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    import zstandard

    packer = zstandard.ZstdCompressor(_ZSTD_LEVEL).compressobj()
    yield from map(packer.compress, pieces)
    yield packer.flush()


def _another(store: Store) -> InputError:
    return InputError(
        f"{store.url}: another split wrote here at the same time, expected to be alone",
        hint="run the same command again: it tells whether the job there is the one you want",
    )


def complete_job(store: Store, job: Job) -> None:
    """Check that the job's chunks are there, remove others of `split`, write the manifests and, last, job.json.

    Raises:
        InputError: Another split wrote to the same place meanwhile.
    """
    _require_chunks(store, job)
    write_manifests(store, job)
    _require_chunks(store, job)  # another split may have replaced some of them meanwhile
    try:
        store.create(layout.JOB_KEY, codec.encode_pretty(job))
    except AlreadyExists as error:
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


# --------------------------------------------------------------------------- append


def append(store: Store, sources: Sources, *, num_chunks: int | None) -> Job:
    """Append those files of the sources to the job that it does not have (`split --append`), and return the job.

    Runs of the job stay as they are: no chunk changes, and the job keeps its identity. job.json is replaced when the
    new chunks are complete, and only if nobody else did so: a command that is killed has appended everything or
    nothing, and of two at once one appends and the other is refused. Appended chunks have names by their content, so
    that what a killed command left is used by the same command, and is in nobody else's way.

    Raises:
        InputError: The files do not fit the job, have changed, or another command has changed the job meanwhile.
    """
    data, etag = store.get(layout.JOB_KEY)
    job = decode_job(data, store.url)
    new = sources.without(job)
    _check_fits(store.url, job, new)
    if left_out := len(sources.files) - len(new.files):
        logger.info("left out %s that the job has", units.many(left_out, "file"))
    if new.rows:
        text = "%s of new files: to be appended to the %d that are there"
        logger.info(text, units.many(new.rows, "row"), job.rows)
        if num_chunks is None:
            largest = max(chunk.rows for chunk in job.chunks)
            num_chunks = max(-(-new.rows // largest), min(new.rows, job.num_workers))
        job = msgspec.structs.replace(
            write_chunks(store, job, new, even_bounds(new.rows, num_chunks)),
            sources=[*job.sources, *new.sources],
            rows=job.rows + new.rows,
            generation=job.generation + 1,
            first_sha256=identity(job, data),
        )
        try:
            store.replace(layout.JOB_KEY, codec.encode_pretty(job), etag)
        except PreconditionFailed as error:
            raise InputError(
                f"{store.url}: another command changed the job meanwhile; nothing was appended to it",
                hint="run the same command again",
            ) from error
    write_manifests(store, job)  # also where a command was killed before
    return job


def _check_fits(url: str, job: Job, new: Sources) -> None:
    """Raise InputError if new files have other columns than the job, or may have rows that are in it already."""
    if job.limit is not None or references(job):
        option = "--by-reference" if job.limit is None else f"--limit {job.limit}"
        raise InputError(
            f"{url}: was made with {option}, so nothing can be appended",
            hint="make another job of the new sources",
        )
    known = {each: file.url for file in job.files for each in _addresses(file.url)[:1]}
    paths = [file.url for file in job.files if not is_absolute(file.url)]
    known |= {re.sub(r"^(\.\.?/)+", "", path): path for path in paths}
    for file in new.files:
        there = next((known[each] for each in _addresses(file.url) if each in known), None)
        if there is not None:
            hint = "put the new rows into a file of their own; if all its rows are new, rename it"
            if file.format == "csv":
                hint += "; if it has not changed, give the --delimiter that the job was made with"
            name = "" if there == file.url else f" as {there}"
            raise InputError(
                f"{file.url}: has changed since its rows became a part of the job{name}, expected only new files",
                hint=hint,
            )
    new.require("the job", job.columns)
    others = {*new.columns} - {*job.columns}
    more = [(file.url, name) for file in new.files for name in file.columns if name in others]
    if more and all(each.format != "jsonl" for each in [*job.sources, *new.sources]):
        raise InputError(
            f"{more[0][0]}: has a column {more[0][1]!r}, which the job lacks",
            hint=f"take the job's columns: --columns '{','.join(job.columns)}', or make another job",
        )


def _addresses(url: str) -> list[str]:
    """Return what names a file, the surest first: a URL without the Hub's revision, or a local path.

    An absolute path may be named by its ends, too: job.json does not say of which folder its relative paths are.
    """
    if not is_local(url):
        return [re.sub(r"^(hf://[^@]+)@[^/]+", r"\1", url)]
    parts = Path(os.path.normpath(url)).parts
    ends = ["/".join(parts[index:]) for index in range(1, len(parts))]
    return [os.path.realpath(local_path(url)), *(ends if is_absolute(url) else [])]
