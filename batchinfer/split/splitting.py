"""`batchinfer split`: turns data sets into a job: JSON Lines chunks, one manifest for each worker, and job.json.

job.json is written last, when all chunks and manifests are complete. A folder without job.json is not a job, so a split
that was killed can simply be run again.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import click
import msgspec

from batchinfer.cli.config_commands import config_command
from batchinfer.core import layout, units
from batchinfer.core.errors import ConfigError, InputError, ObjectNotFound
from batchinfer.core.option_help import FIRST, NO_OPTION, Count, Opt
from batchinfer.core.records import Job, Record
from batchinfer.ledger.jobs import decode_job, identity, is_absolute
from batchinfer.split import writer
from batchinfer.split.files import is_local
from batchinfer.split.sources import Sources, count_listed, count_sources
from batchinfer.storage import Store
from batchinfer.storage.opening import local_path, open_store

logger = logging.getLogger(__name__)

_ANEW = "run the same command with --overwrite to make the job anew"


class SplitConfig(Record, frozen=True, kw_only=True):
    """Options of `split`."""

    sources: Annotated[Sequence[str], NO_OPTION]
    output: Annotated[str, Opt(short="-o", metavar="JOB", is_first=True)]
    """Folder or URL of the job; made if it is not there."""
    num_chunks: Annotated[Count | None, FIRST] = None
    """Make so many chunks. Default: chunks of about a minute, at least 50 for each worker."""
    num_workers: Annotated[Count, FIRST] = 1
    """Write a manifest for each of so many workers."""
    columns: Annotated[list[str] | None, Opt(form="names", metavar="A,B")] = None
    """Keep only these columns. Default: all."""
    id_column: Annotated[str, Opt(metavar="COLUMN")] = ""
    """Column whose value names a row (_id); _row: its number. Default: id, of OpenAI batch requests custom_id, else
    _row."""
    limit: Annotated[Count | None, FIRST] = None
    """Take only the first N rows."""
    delimiter: Annotated[str, Opt(form="delimiter", metavar="CHARACTER")] = ""
    """Character between the values of CSV, or `tab`. Default: a comma, in .tsv files a tab."""
    compression: Literal["none", "zstd"] = "none"
    """How chunks are stored."""
    append: bool = False
    """Add the sources to the job that is there: new chunks after the old ones. Files it has already are left out."""
    by_reference: Annotated[str, Opt(metavar="LIST")] = ""
    """Make a job of the JSON Lines files that LIST names, a path or URL a line, without copying: each is a chunk."""
    overwrite: bool = False
    """Replace the job that is there, unless a run is below it."""
    border: Annotated[int, NO_OPTION] = 0
    """A row at which a chunk begins, besides the others. `batchinfer run` sets it; `split` has no such option."""


def run_split(
    config: SplitConfig, *, store: Store, counted: Sources | None = None
) -> dict[str, Any]:
    """Split the sources into a job at the store's root.

    If the store holds a finished job of the same sources and options, nothing is changed, unless `overwrite` is set.
    After a split that was killed before it wrote job.json, this one replaces the objects whose bytes differ. Two splits
    must not write to one place at the same time.

    Args:
        config: The options.
        store: The store at `config.output`.
        counted: The sources, if they have been counted with these options.

    Returns:
        The result object; its `status` is "done" or "unchanged".

    Raises:
        ConfigError: Options contradict each other, or ask for more chunks or workers than the rows allow.
        InputError: A source cannot be used, or the output holds another job or runs.
    """
    started = time.monotonic()
    _check_options(config)
    there, etag = _existing(config, store)
    if config.append and there is None:
        raise InputError(
            f"{config.output}: no job.json there, expected a job to append to",
            hint="make the job first, without --append",
        )
    if config.by_reference:
        counted = count_listed(config.by_reference)
    elif counted is None:
        counted = count_sources(
            config.sources,
            columns=config.columns,
            id_column="_row" if config.append else config.id_column,
            limit=config.limit,
            delimiter=config.delimiter,
        )
    counted.check_apart(config.output)
    if config.append and there:
        counted = counted.named_by(there.id_column)
    job = _make(config, there, etag, store, counted)
    rows, chunks = (there.rows, len(there.chunks)) if there else (0, 0)
    is_new = job.rows > rows
    if not is_new:
        logger.info("%s: holds these rows already, nothing changed", config.output)
    if is_new and job.duplicate_ids:
        logger.warning(
            "%d of %d rows have an _id (column %r) that an earlier row has; _row still tells their answers apart; if "
            "another column tells rows apart: --id-column COLUMN",
            *(job.duplicate_ids, job.rows, job.id_column),
        )
    if is_new and job.broken_lines:
        logger.warning("lines that are no JSON object, and become error rows: %d", job.broken_lines)
    appended = {"rows_appended": job.rows - rows, "chunks_appended": len(job.chunks) - chunks}
    return {
        "status": "done" if is_new else "unchanged",
        "job": config.output,
        "rows": job.rows,
        "columns": job.columns,
        "chunks": len(job.chunks),
        "workers": job.num_workers,
        "bytes": sum(chunk.bytes for chunk in job.chunks),
        "broken_lines": job.broken_lines,
        "duplicate_ids": job.duplicate_ids,
        **(appended | {"generation": job.generation} if config.append else {}),
        "seconds": round(time.monotonic() - started, 3),
    }


def _existing(config: SplitConfig, store: Store) -> tuple[Job | None, str]:
    """Return the job that is there and its etag; None if there is none, or --overwrite replaces it."""
    if config.overwrite:
        return None, ""
    try:
        data, etag = store.get(layout.JOB_KEY)
    except ObjectNotFound:
        return None, ""
    job = decode_job(data, store.url, hint="" if config.append else _ANEW)
    return msgspec.structs.replace(job, first_sha256=identity(job, data)), etag


def _check_options(config: SplitConfig) -> None:
    if bool(config.sources) == bool(config.by_reference):
        hint = "name the data: batchinfer split data/ --output job"
        raise ConfigError("SOURCE, --by-reference: expected one of them", hint=hint)
    if not all(source.strip() for source in config.sources):
        raise ConfigError(
            "SOURCE '': names nothing, expected a file, a folder, a glob or a URL",
            hint="an unset variable of the shell? The present folder is `.`",
        )
    of_new_chunks = ("limit", "id_column", "compression")
    refused = {
        "append": ("overwrite", "num_workers", *of_new_chunks),
        "by_reference": ("append", "columns", "delimiter", "num_chunks", *of_new_chunks),
    }
    usual = SplitConfig(sources=[], output="")
    for option, names in refused.items():
        for name in names if getattr(config, option) else ():
            if getattr(config, name) != getattr(usual, name):
                this, other = (f"--{each.replace('_', '-')}" for each in (name, option))
                raise ConfigError(f"{this}: not together with {other}", hint=f"leave {this} out")


def _make(config: SplitConfig, there: Job | None, etag: str, store: Store, counted: Sources) -> Job:
    """Make the job, or append to the one that is there, unless that holds all rows already."""
    new = counted.without(there) if there and config.append else counted
    job = msgspec.structs.replace(
        new.as_job(),
        num_workers=config.num_workers,
        limit=config.limit,
        compression=config.compression,
    )
    if there and config.append:
        _check_fits(store.url, there, new)
        text = "%s of new files: to be appended to the %d that are there"
        logger.info(text, units.many(new.rows, "row"), there.rows)
        job = msgspec.structs.replace(
            there,
            sources=[*there.sources, *job.sources],
            rows=there.rows + new.rows,
            generation=there.generation + 1,
        )
    elif there:
        _check_same(config, there, job)
    if there and not (config.append and new.rows):
        if there.generation:
            writer.write_manifests(store, there)  # an append may have been killed before
        return there
    bounds: list[int] = []
    if not config.by_reference:
        num_bytes = sum(file.bytes for file in new.files)
        usual = writer.usual_num_chunks(new.rows, num_bytes, job.num_workers)
        _check_most("--num-chunks", config.num_chunks or usual, new.rows, "row")
        bounds = sorted({*writer.even_bounds(new.rows, config.num_chunks or usual), config.border})
    _check_most("--num-workers", config.num_workers, len(bounds[1:]) or len(new.files), "chunk")
    if not there:
        _refuse_runs(store, config.output)
    job = writer.refer_to(job, new) if config.by_reference else job
    if config.overwrite:
        store.delete([layout.JOB_KEY])
    job = job if config.by_reference else writer.write_chunks(store, job, new, bounds)
    writer.complete_job(store, job, etag)
    return job


def _check_most(option: str, number: int, most: int, what: str) -> None:
    if number > most:
        hint = f"use {option} {most} or fewer"
        raise ConfigError(f"{option} {number}: more than the {units.many(most, what)}", hint=hint)


def _check_same(config: SplitConfig, existing: Job, wanted: Job) -> None:
    """Raise InputError unless `existing` is the job that this split would make, perhaps with data appended to it.

    Files that are copied are compared by their content, not by their names; those by reference by both. If no option
    says the number of chunks, any will do.
    """
    files, there = ([file.content for file in job.files] for job in (wanted, existing))
    is_same = files == there
    if existing.generation:  # what it began with, or all that it has now
        is_same = files == there[: len(files)] or {*files} == {*there}
    pairs = {
        name: (getattr(existing, name), getattr(wanted, name))
        for name in ("columns", "num_workers", "id_column", "compression", "limit")
    }
    if config.num_chunks and not existing.generation:
        pairs["chunks"] = len(existing.chunks), config.num_chunks
    different = [f"{name} ({a} there, {b} here)" for name, (a, b) in pairs.items() if a != b]
    different += [] if is_same else ["the sources' files"]
    urls, known = ([file.url for file in job.files] for job in (wanted, existing))
    if config.by_reference and urls != known[: len(urls)]:
        different.append("the places of files by reference")
    if different:
        raise InputError(
            f"{config.output}: holds a finished job that differs in {'; '.join(different)}",
            hint="name another --output, or add --overwrite to replace that job",
        )


def _check_fits(url: str, job: Job, new: Sources) -> None:
    """Raise InputError if new files have other columns than the job, or may have rows that are in it already."""
    if job.limit is not None:
        hint = "make another job of the new sources"
        raise InputError(f"{url}: was made with --limit, so nothing can be appended", hint=hint)
    urls = [file.url for file in job.files]
    known = set(map(_canonical, urls))
    # job.json does not say of which folder its relative paths are.
    ends = tuple(re.sub(r"^(\.\.?/)*", "/", url) for url in urls if not is_absolute(url))
    for file in new.files:
        spelled = [_canonical(file.url)]
        if is_local(file.url) and is_absolute(file.url):
            spelled.append(os.path.normpath(local_path(file.url)))
        if spelled[0] in known or any(is_absolute(n) and n.endswith(ends) for n in spelled):
            raise InputError(
                f"{file.url}: has the name of a file of the job and other rows, expected only new files",
                hint="put the new rows into a file of their own; if all its rows are new, rename it; if it is CSV that "
                "has not changed, give the --delimiter that the job was made with",
            )
    new.require("the job", job.columns)
    formats = {source.format for source in job.sources} | {file.format for file in new.files}
    theirs = {name for file in new.files for name in file.columns if name in new.columns}
    if (more := theirs - {*job.columns}) and "jsonl" not in formats:
        raise InputError(
            f"{url}: lacks the column {min(more)!r}, which new files have",
            hint=f"take the job's columns: --columns '{','.join(job.columns)}', or make another job",
        )


def _canonical(url: str) -> str:
    """Return what names a file, whatever its bytes are: its real path, or its URL without the Hub's revision."""
    if is_local(url):
        return os.path.realpath(local_path(url))
    return re.sub(r"^(hf://[^@]+)@[^/]+", r"\1", url)


def _refuse_runs(store: Store, output: str) -> None:
    """Raise InputError if any run is below the job, because its outputs belong to the chunks that are there now.

    All objects are listed only if there are chunks. A place without chunks may be any folder, with many other files.
    """
    prefix = "" if next(iter(store.list(layout.CHUNKS)), None) is not None else layout.RUNS
    for item in store.list(prefix):
        folder = layout.RUNS if item.key.startswith(layout.RUNS) else layout.run_above(item.key)
        if folder is not None:
            raise InputError(
                f"{output}: has runs ({item.key}), expected none under a job that is split anew",
                hint=f"name another --output, or remove {output.rstrip('/')}/{folder} first",
            )


# --------------------------------------------------------------------------- command line


@config_command("split", SplitConfig, click.argument("sources", metavar="SOURCE...", nargs=-1))
def command(config: SplitConfig) -> dict[str, Any]:
    """Split data sets into JSONL chunks and per-worker manifests.

    SOURCE is a file, a folder, a glob, or a URL (s3://, gs://, az://, hf://datasets/org/name[@revision][/path]) of
    parquet, JSON Lines, CSV or text (a row a line). Running the same command again is safe: a finished job is left
    alone, a killed one is completed.

    With --append, runs of the job stay as they are, and the workers' next start does the new chunks.
    """
    if not config.output:
        hint = "say where: --output job"
        raise ConfigError("--output: missing, expected the job's folder or URL", hint=hint)
    if config.output.startswith("hf://"):
        hint = "use a plain path, s3://, gs:// or az://"
        raise ConfigError(f"--output {config.output}: hf:// can only be read", hint=hint)
    return run_split(config, store=open_store(config.output))
