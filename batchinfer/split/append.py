"""`split --append`: adds sources to a finished job, as new chunks after the old ones.

Runs of the job stay as they are: no chunk changes, and the job keeps its identity. job.json is replaced when the new
chunks are complete, and only if nobody else has replaced it: a command that is killed has appended everything or
nothing, and of two at once one appends and the other is refused. Appended chunks have names by their content, so that
what a killed command left is used by the same command, and is in nobody else's way.
"""

from __future__ import annotations

import logging
import re

import msgspec

from batchinfer.core import codec, layout, units
from batchinfer.core.errors import InputError, PreconditionFailed
from batchinfer.core.records import Job
from batchinfer.ledger.jobs import decode_job, identity, is_absolute
from batchinfer.split.sources import Sources
from batchinfer.split.writer import even_bounds, write_chunks, write_manifests
from batchinfer.storage import Store

logger = logging.getLogger(__name__)


def is_part_of(job: Job, sources: Sources) -> bool:
    """Whether sources have all files of a job, and so all of its rows, and others."""
    num_new = len(sources.without(job).files)
    num_files = sum(file.rows > 0 for file in job.files)
    return job.limit is None and num_new > 0 and len(sources.files) - num_new >= num_files


def append(store: Store, sources: Sources, *, num_chunks: int | None) -> Job:
    """Append those files of the sources to the job that it does not have, and return the job.

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
    complete_manifests(store)
    return job


def complete_manifests(store: Store) -> None:
    """Make the manifests list all chunks of the job, also if another command appends to it meanwhile."""
    etag = ""
    while etag != store.stat(layout.JOB_KEY).etag:
        data, etag = store.get(layout.JOB_KEY)
        write_manifests(store, decode_job(data, store.url))


def _check_fits(url: str, job: Job, new: Sources) -> None:
    """Raise InputError if new files have other columns than the job, or may have rows that are in it already."""
    if job.limit is not None or any(is_absolute(chunk.file or "") for chunk in job.chunks):
        option = "--by-reference" if job.limit is None else f"--limit {job.limit}"
        raise InputError(
            f"{url}: was made with {option}, so nothing can be appended",
            hint="make another job of the new sources",
        )
    known = {_address(file.url) for file in job.files}
    for file in new.files:
        if _address(file.url) in known:
            raise InputError(
                f"{file.url}: has changed since its rows became a part of the job, expected only new files",
                hint="put the new rows into a file of their own; if all its rows are new, rename it",
            )
    new.require("the job", job.columns)
    more = set(new.columns).difference(job.columns)
    if more and all(each.format != "jsonl" for each in [*job.sources, *new.sources]):
        raise InputError(
            f"{new.files[0].url}: has a column {min(more)!r}, which the job lacks",
            hint=f"take the job's columns: --columns '{','.join(job.columns)}', or make another job",
        )


def _address(url: str) -> str:
    """Return what names a file: its URL, for a file of the Hub without the revision."""
    return re.sub(r"^(hf://[^@]+)@[^/]+", r"\1", url)
