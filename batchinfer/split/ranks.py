"""`split --rank I --of N`: several processes, on any machines, each build a range of the chunks of one job.

A rank builds its range in a few slices, and creates a record of each slice below ``parts/`` once the slice's chunks
are durable. The rank that finds the records of all ranks there writes the manifests and job.json, as a single process
would, and removes the records. Nothing is overwritten: all ranks write the same bytes, so ranks may be killed and
repeated, and several of them may finish the job at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout, units
from batchinfer.core.errors import AlreadyExists, InputError, ObjectNotFound
from batchinfer.core.records import Chunk, Job, Record
from batchinfer.ledger.inventory import in_parallel
from batchinfer.split import chunk_files
from batchinfer.split.chunk_files import BuiltChunk, ChunkRange
from batchinfer.split.command import (
    SplitConfig,
    check_same,
    completed,
    make_result,
    progress,
    warn,
)
from batchinfer.split.job_writer import JobWriter, read_job
from batchinfer.split.sources import CountedSources, Oddities
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, scratch_errors

logger = logging.getLogger(__name__)

_SLICES_PER_RANK, _MOST_SLICES = 16, 4096
"""Slices of one rank, and about the most of all ranks. A rank that is killed loses the slice that it was at."""


class SliceRecord(Record, frozen=True, kw_only=True):
    """Content of a slice's record: its chunks as job.json lists them, and what was noticed while they were built."""

    chunks: list[Chunk]
    nulls: dict[str, int]
    broken_lines: int
    first_broken: str
    encodings: dict[str, int]
    first_encoded: str
    renamed: list[str]
    has_ids: bool
    """Whether an object beside this one holds the hashes of the rows' own ids."""


class Shared(NamedTuple):
    """One job that ranks build together. `draft` is its job.json without what is counted while chunks are built."""

    config: SplitConfig
    store: Store
    counted: CountedSources
    draft: Job
    ranges: list[ChunkRange]

    @property
    def plan(self) -> str:
        """Hash of all that decides the job's bytes. Ranks with other options or sources have another one."""
        what = {
            "job": msgspec.to_builtins(self.draft),
            "chunks": [tuple(one) for one in self.ranges],
            "ranks": self.config.num_ranks,
        }
        return codec.fingerprint(what)[:16]

    def slices(self) -> list[list[list[ChunkRange]]]:
        """Return the slices of each rank: lists of consecutive chunks. A rank has none if there are too few chunks."""
        num_ranks = self.config.num_ranks or 1
        most = max(1, min(_SLICES_PER_RANK, _MOST_SLICES // num_ranks))
        return [
            [part for part in _parts(own, min(most, len(own))) if part]
            for own in _parts(self.ranges, num_ranks)
        ]


def _parts(chunks: list[ChunkRange], number: int) -> list[list[ChunkRange]]:
    """Divide a list into so many parts of nearly equal length.

    >>> [len(part) for part in _parts([ChunkRange("a", 0, 1)] * 5, 3)]
    [1, 2, 2]
    """
    bounds = [len(chunks) * index // max(1, number) for index in range(number + 1)]
    return [chunks[start:stop] for start, stop in pairwise(bounds)]


def run_rank(shared: Shared) -> dict[str, Any]:
    """Build this rank's chunks, unless they are there, and finish the job if all chunks are there.

    Returns:
        The result object of `split`. Its `status` is "part" if other ranks have not built their chunks yet.

    Raises:
        InputError: A chunk is there with other bytes: another split wrote to the same place.
    """
    started = time.monotonic()
    config, store, plan = shared.config, shared.store, shared.plan
    assert config.rank is not None
    of_ranks = shared.slices()
    first = sum(map(len, of_ranks[: config.rank]))
    num_slices, own = sum(map(len, of_ranks)), of_ranks[config.rank]
    there = _slices_there(store, plan)
    todo = [(index, part) for index, part in enumerate(own, first) if index not in there]
    with progress(sum(one.rows for _, part in todo for one in part)) as advance:
        writer = JobWriter(store, shared.draft.compression, advance, is_shared=True)
        for index, part in todo:
            _build(shared, writer, index, part, plan)
    job, odd = read_job(store), Oddities()
    lacking = 0
    if job is None:
        lacking = num_slices - len(_slices_there(store, plan))
        finished = None if lacking else _finish(shared, writer, num_slices, plan)
        if finished is None:
            job = read_job(store)  # another rank may just have finished it, and removed the records
        else:
            job, odd = finished
    if job is None:
        _warn_of_others(store, plan)
        seconds = time.monotonic() - started
        return _partial(config, [one for part in own for one in part], lacking, seconds)
    store.delete([item.key for item in store.list(layout.PARTS)])
    check_same(job, shared.draft, config)  # ranks with other options may have finished theirs
    warn(odd, job)
    return make_result("done", config, job, odd.nulls, time.monotonic() - started)


def _partial(
    config: SplitConfig, own: list[ChunkRange], lacking: int, seconds: float
) -> dict[str, Any]:
    """Return the result of a rank that is not the last one."""
    rows = sum(one.rows for one in own)
    logger.info(
        "rank %d of %d: its %s with %s are there; other ranks lack %s of the job",
        *(config.rank, config.num_ranks, units.many(len(own), "chunk"), units.many(rows, "row")),
        units.many(lacking, "slice"),
    )
    return {
        "status": "part",
        "job": config.output,
        "rank": config.rank,
        "of": config.num_ranks,
        "rows": rows,
        "chunks": len(own),
        "seconds": round(seconds, 3),
    }


def _warn_of_others(store: Store, plan: str) -> None:
    """Warn of records of ranks that build another job, which this rank and they would wait for in vain."""
    prefix = layout.part_prefix(plan)
    if other := next(
        (info.key for info in store.list(layout.PARTS) if not info.key.startswith(prefix)), ""
    ):
        logger.warning(
            "%s/%s: is of ranks with another --of, other options or other sources; all ranks must have the same",
            *(store.url, other),
        )


def _slices_there(store: Store, plan: str) -> set[int]:
    """Return the indices of the slices that are complete."""
    keys = (item.key for item in store.list(layout.part_prefix(plan)))
    return {int(Path(key).stem) for key in keys if key.endswith(".json")}


# --------------------------------------------------------------------------- one rank's chunks


def _build(
    shared: Shared, writer: JobWriter, index: int, part: list[ChunkRange], plan: str
) -> None:
    """Build one slice, and record it when its chunks are durable.

    Each slice is read on its own. A block of rows that reaches into the next slice would be counted in both, if the
    next one were read again after a kill.
    """
    config = shared.config
    with contextlib.closing(Scratch(config.scratch_dir)) as scratch:
        compression = shared.draft.compression
        settings = chunk_files.BuildSettings(shared.counted, scratch.folder, compression)
        built = list(writer.publish(chunk_files.build_with(settings, part, config.processes)))
        _record_slice(shared.store, plan, index, built, scratch)


def _record_slice(
    store: Store, plan: str, index: int, built: list[BuiltChunk], scratch: Scratch
) -> None:
    odd = Oddities()
    for item in built:
        odd.add(item.odd)
    id_paths = [item.id_path for item in built if item.id_path is not None]
    record = SliceRecord(
        chunks=[item.chunk for item in built],
        nulls=dict(odd.nulls),
        broken_lines=odd.broken_lines,
        first_broken=odd.first_broken,
        encodings=dict(odd.encodings),
        first_encoded=odd.first_encoded,
        renamed=sorted(odd.renamed),
        has_ids=bool(id_paths),
    )
    try:
        if id_paths:
            whole = scratch.new_path(f"slice-{index}.ids")
            _join(id_paths, whole)
            store.put_file(layout.part_key(plan, index, "ids"), whole)
            whole.unlink()
        store.create(layout.part_key(plan, index, "json"), codec.encode(record))
    except AlreadyExists as error:
        raise InputError(
            f"{error.message}: other ranks have read other rows, though the sources look alike",
            hint=f"remove {store.url}/{layout.PARTS} and chunks/, and start all ranks again",
        ) from error


def _join(paths: Iterable[Path], whole: Path) -> None:
    with scratch_errors(whole.parent), whole.open("wb") as file:
        for path in paths:
            file.write(path.read_bytes())
            path.unlink()


# --------------------------------------------------------------------------- the job


def _finish(
    shared: Shared, writer: JobWriter, num_slices: int, plan: str
) -> tuple[Job, Oddities] | None:
    """Write the manifests and job.json from the records of all slices. Returns the job and its oddities.

    Returns None if another rank is removing the records, because it has finished the job.
    """
    store = shared.store
    try:
        records = list(
            in_parallel(lambda index: _read_slice(store, plan, index), range(num_slices))
        )
        duplicates = _count_duplicates(shared, records, plan)
    except ObjectNotFound:
        return None
    odd = Oddities()
    for record in records:
        odd.add(
            Oddities(
                nulls=Counter(record.nulls),
                broken_lines=record.broken_lines,
                first_broken=record.first_broken,
                encodings=Counter(record.encodings),
                first_encoded=record.first_encoded,
                renamed=set(record.renamed),
            )
        )
    chunks = [chunk for record in records for chunk in record.chunks]
    job = completed(shared.draft, shared.counted, chunks, odd, duplicates)
    writer.finish(job)
    return job, odd


def _read_slice(store: Store, plan: str, index: int) -> SliceRecord:
    key = layout.part_key(plan, index, "json")
    return codec.decode(store.get(key).data, SliceRecord, name=f"{store.url}/{key}")


def _count_duplicates(shared: Shared, records: list[SliceRecord], plan: str) -> int:
    with contextlib.closing(Scratch(shared.config.scratch_dir)) as scratch:

        def fetch(index: int) -> Path:
            path = scratch.new_path(f"slice-{index}.ids")
            shared.store.download(layout.part_key(plan, index, "ids"), path)
            return path

        wanted = [index for index, record in enumerate(records) if record.has_ids]
        return chunk_files.count_duplicates(list(in_parallel(fetch, wanted)))
