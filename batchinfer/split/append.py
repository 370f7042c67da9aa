"""`split --append`: adds sources to a finished job, as new chunks after the old ones.

Runs of the job stay as they are: no chunk changes, and the job keeps its identity. job.json is replaced when the new
chunks are complete, and only if nobody else has replaced it. So a command that is killed has appended everything or
nothing, and of two commands at once one appends and the other is refused. Chunks of a command that did not come to its
end stay; the same command uses them when it runs again, and no other command touches them.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections import defaultdict
from typing import Any

import msgspec

from batchinfer.core import codec, layout, units
from batchinfer.core.errors import ConfigError, InputError, ObjectNotFound
from batchinfer.core.records import Append, Job, SourceFile
from batchinfer.core.redaction import redact
from batchinfer.ledger.jobs import decode_job, identity
from batchinfer.split import chunk_files
from batchinfer.split.blocks import CountedFile
from batchinfer.split.command import (
    SplitConfig,
    make_result,
    progress,
    publish_chunks,
    renamed_columns,
    warn,
)
from batchinfer.split.job_writer import JobWriter, replace_manifests
from batchinfer.split.source_files import parse_hub_url
from batchinfer.split.sources import ColumnChoice, CountedSources, count_sources, source_file
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_MAX_SHOWN = 3


def run_append(config: SplitConfig, *, store: Store) -> dict[str, Any]:
    """Append the sources to the job at the store's root. Files that the job has already are left out.

    Args:
        config: The options.
        store: The store at `config.output`.

    Returns:
        The result object of `split`, and what was appended. Its `status` is "unchanged" if there was nothing new.

    Raises:
        ConfigError: An option contradicts the job, or asks for more chunks than the new rows allow.
        InputError: There is no job, a source cannot be used or does not fit the job, or another command has changed the
            job meanwhile.
    """
    started = time.monotonic()
    try:
        data, etag = store.get(layout.JOB_KEY)
    except ObjectNotFound:
        raise InputError(
            f"{config.output}: no job.json there, expected a job to append to",
            hint="make the job first, without --append",
        ) from None
    job = decode_job(data, store.url)
    _check_job(config, job)
    choice = ColumnChoice(columns=config.columns, id_column=job.id_column)
    counted = count_sources(
        config.sources, choice=choice, delimiter=config.delimiter, with_checksums=True
    )
    counted.check_apart(config.output)
    new = new_files(counted, job)
    num_known = _say_left_out(counted, job)
    if not new.rows:
        replace_manifests(store, job, etag)
        result = make_result("unchanged", config, job, {}, time.monotonic() - started)
        return result | _appended(config, job, 0, 0, num_known)
    check_alike(new, job)
    ranges = _chunk_ranges(config, job, new)
    with progress(new.rows) as advance:
        writer = JobWriter(store, job.compression, advance, appends=True)
        chunks, odd, duplicates = publish_chunks(config, writer, new, ranges, job.compression)
        part = msgspec.structs.replace(
            job,
            rows=new.rows,
            chunks=chunks,
            null_floats=odd.nulls.total(),
            broken_lines=odd.broken_lines,
            duplicate_ids=duplicates,
            blank_lines=new.blank_lines or msgspec.UNSET,
            schema=new.schema,
            renamed=renamed_columns(odd, new),
        )
        longer = _joined(job, part, new, identity(job, data))
        writer.finish_append(longer, etag)
    warn(odd, part)
    result = make_result("done", config, longer, odd.nulls, time.monotonic() - started)
    return result | _appended(config, longer, new.rows, len(chunks), num_known)


def new_files(counted: CountedSources, job: Job) -> CountedSources:
    """Return the sources without the files that the job has already. Their rows get the numbers after the job's.

    Files are compared by size, number of rows and checksums.

    Raises:
        InputError: A file has another content than when it became a part of the job, so that rows of it may be in the
            job already.
    """
    known = _KnownFiles(job)
    addresses = {_address(file.url) for file in known.files}
    new = counted.only(lambda item: known.find(item) is None, first_row=job.rows)
    for item in new.files:
        url = redact(item.found.url)
        if item.rows and _address(url) in addresses:
            raise InputError(
                f"{url}: has changed since its rows became a part of the job, expected only new files",
                hint="put the new rows into a file of their own; if all its rows are new, rename it",
            )
    return new


def complete_manifests(store: Store) -> None:
    """Make the manifests list all chunks of the job, if a command was killed before it did so."""
    data, etag = store.get(layout.JOB_KEY)
    replace_manifests(store, decode_job(data, store.url), etag)


def has_files_of(job: Job, counted: CountedSources) -> bool:
    """Whether the sources have all of the job's files with rows. False for a job made with --limit."""
    there = _KnownFiles(counted)
    known = _KnownFiles(job).files
    return job.limit is None and all(there.has(file) for file in known if file.rows)


def refuse_other_columns(job: Job, counted: CountedSources) -> None:
    """Raise InputError if the job has other columns than the sources."""
    if set(job.columns) != set(counted.columns):
        raise InputError(
            f"the job there has the columns {', '.join(job.columns)}, the sources {', '.join(counted.columns)}"
        )


class _KnownFiles:
    """The files of a job or of sources, by their content."""

    def __init__(self, whole: Job | CountedSources) -> None:
        self.files = [file for source in whole.sources for file in source.files]
        self._by_digest: defaultdict[str, list[SourceFile]] = defaultdict(list)
        for file in self.files:
            self._by_digest[file.digest].append(file)

    def find(self, item: CountedFile) -> SourceFile | None:
        """Return a file with the content of this one; None if there is none."""
        return self._find(source_file(item))

    def has(self, file: SourceFile) -> bool:
        """Whether a file has the content of this one."""
        return self._find(file) is not None

    def _find(self, wanted: SourceFile) -> SourceFile | None:
        found = self._by_digest[wanted.digest]
        return next((file for file in found if file.is_same_as(wanted)), None)


def _say_left_out(counted: CountedSources, job: Job) -> int:
    """Log which files are left out because the job has them. Returns their number."""
    known = _KnownFiles(job)
    left_out = [
        (item, there)
        for item in counted.files
        if item.rows and (there := known.find(item)) is not None
    ]
    for item, there in left_out:
        url = redact(item.found.url)
        if url != there.url:
            logger.warning(
                "%s: has the same content as %s in the job; it is left out", url, there.url
            )
    if left_out:
        names = ", ".join(redact(item.found.url) for item, _ in left_out[:_MAX_SHOWN])
        more = ", …" if len(left_out) > _MAX_SHOWN else ""
        logger.info(
            "%s in the job already, and left out: %s%s",
            *(units.many(len(left_out), "file"), names, more),
        )
    return len(left_out)


def _address(url: str) -> tuple[str, ...]:
    """Return what names a file: its URL, for a file of the Hub without the revision."""
    if not url.startswith("hf://"):
        return (url,)
    dataset = parse_hub_url(url)
    return dataset.repo, dataset.path


def check_alike(new: CountedSources, job: Job) -> None:
    """Refuse files of other formats than the job's, and files with other columns.

    Raises:
        InputError: A file differs. The message names it and what differs.
    """
    formats = {source.format for source in job.sources}
    names_in_source = job.source_names
    expected = {names_in_source.get(name, name) for name in job.columns}
    for item in new.files:
        if not item.rows:
            continue
        url = redact(item.found.url)
        if item.format not in formats:
            raise InputError(
                f"{url}: is {item.format}, the job's sources are {', '.join(sorted(formats))}",
                hint="convert it, or make another job of it",
            )
        columns = set(item.columns if new.choice.columns is None else new.choice.columns)
        lacking = expected - columns
        if lacking and item.format == "jsonl":
            from batchinfer.split import json_lines

            lacking -= json_lines.find_keys(item, lacking)
        if lacking:
            raise InputError(
                f"{url}: lacks columns of the job: {', '.join(sorted(lacking))}",
                hint="name its columns like the job's, or make another job of it",
            )
        if more := columns - expected:
            kept = ",".join(names_in_source.get(name, name) for name in job.columns)
            raise InputError(
                f"{url}: has columns that the job lacks: {', '.join(sorted(more))}",
                hint=f"leave them out with --columns {shlex.quote(kept)}, or make another job of it",
            )


def _check_job(config: SplitConfig, job: Job) -> None:
    """Refuse a job to which nothing can be appended, and options that contradict the job."""
    if job.group_by or job.limit is not None:
        option = f"--group-by {job.group_by}" if job.group_by else f"--limit {job.limit}"
        reason = (
            "a group of its last rows could go on in the new ones"
            if job.group_by
            else "it has only a part of its sources"
        )
        raise InputError(
            f"{config.output}: was made with {option}: {reason}, so nothing can be appended",
            hint="make another job of the new sources",
        )
    plain = SplitConfig(sources=[], output="")
    differences = []
    for name in ("num_workers", "id_column", "compression"):
        there, here = getattr(job, name), getattr(config, name)
        if here not in (there, getattr(plain, name)):
            shown = codec.encode(there).decode()
            differences.append(f"--{name.replace('_', '-')} {here} (the job has {shown})")
    if differences:
        raise ConfigError(
            f"{', '.join(differences)}: cannot change when data are appended",
            hint="leave it out: the job's own is taken",
        )


def _chunk_ranges(
    config: SplitConfig, job: Job, new: CountedSources
) -> list[chunk_files.ChunkRange]:
    """Divide the new rows into chunks that are at most as large as the job's largest, or as the user asks.

    Unless the user asks, there is at least one chunk for each worker, if there are enough rows.
    """
    num_chunks = config.num_chunks
    if num_chunks is None and config.chunk_rows is None:
        size = max(chunk.rows for chunk in job.chunks)
        num_chunks = max(-(-new.rows // size), min(new.rows, job.num_workers))
    starts = chunk_files.even_chunk_starts(
        new.rows, num_chunks=num_chunks, chunk_rows=config.chunk_rows
    )
    before = len(job.chunks)
    total = before + len(starts) - 1
    ranges = [
        chunk_files.ChunkRange(
            layout.chunk_name(before + index, total), job.rows + start, starts[index + 1] - start
        )
        for index, start in enumerate(starts[:-1])
    ]
    taken = {chunk.name for chunk in job.chunks} & {each.name for each in ranges}
    if taken:
        raise InputError(
            f"{config.output}: its chunks are not numbered as `split` numbers them ({min(taken)} is no new name)",
            hint="make another job of the new sources",
        )
    return ranges


def _joined(job: Job, part: Job, new: CountedSources, first_sha256: str) -> Job:
    """Return a job with a part appended. `part` describes the new rows alone; `first_sha256` is the job's identity."""
    start = Append(first_source=len(job.sources), first_chunk=len(job.chunks), first_row=job.rows)
    schema: str | msgspec.UnsetType = msgspec.UNSET
    if job.schema and part.schema:
        from batchinfer.split.parquet import merge_schemas

        schema = merge_schemas(job.schema, part.schema)
    appends = [*(job.appends or []), start]
    return msgspec.structs.replace(
        job,
        sources=[*job.sources, *new.sources],
        rows=job.rows + part.rows,
        chunks=[*job.chunks, *part.chunks],
        null_floats=job.null_floats + part.null_floats,
        broken_lines=job.broken_lines + part.broken_lines,
        duplicate_ids=job.duplicate_ids + part.duplicate_ids,
        blank_lines=(job.blank_lines or 0) + (part.blank_lines or 0) or msgspec.UNSET,
        schema=schema,
        renamed={**(job.renamed or {}), **(part.renamed or {})} or msgspec.UNSET,
        generation=len(appends),
        first_sha256=first_sha256,
        appends=appends,
    )


def _appended(
    config: SplitConfig, job: Job, rows: int, chunks: int, num_known: int
) -> dict[str, Any]:
    logger.info(
        "%s, generation %d: %s appended in %s; it has %s now",
        config.output,
        job.generation or 0,
        units.many(rows, "row"),
        units.many(chunks, "chunk"),
        units.many(job.rows, "row"),
    )
    return {
        "generation": job.generation or 0,
        "rows_appended": rows,
        "chunks_appended": chunks,
        "files_left_out": num_known,
    }
