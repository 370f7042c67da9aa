"""job.json and manifests: which chunks a worker has to do, and where they are stored.

A job in a bucket may have been written by other people. So no key in it may have a "..", and its chunks must lie in the
job's own bucket. A job in a local folder may name chunks anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

from batchinfer.core import codec, layout, units
from batchinfer.core.errors import ConfigError, InputError, ObjectNotFound, near
from batchinfer.core.records import Chunk, Job
from batchinfer.core.shell import quote
from batchinfer.storage import Store
from batchinfer.storage.opening import split_url

logger = logging.getLogger(__name__)

OpenStore = Callable[[str], Store]

_TABLES = ("parquet", "csv", "text")
"""Source formats in which every row has the same columns, so that job.json lists them all."""
_MAX_SHOWN = 30
"""Most columns that a message names."""


class ChunkRef(NamedTuple):
    """One chunk to do.

    `rows` and `sha256` come from job.json; None while a job is being made. `rows_to_do` is the number of rows to do,
    counted from the first: with ``--limit`` perhaps fewer. `generation` is the generation of the marker that will be
    published: 0, or more if error rows are done again. Then `base` is the generation whose answered rows are kept.
    """

    name: str
    root: str
    key: str
    first_row: int = 0
    rows: int | None = None
    sha256: str | None = None
    rows_to_do: int = 0
    generation: int = 0
    base: int | None = None


class Assignment(NamedTuple):
    """A worker's own chunks in manifest order, and the job they belong to."""

    chunks: list[ChunkRef]
    job: Job
    job_url: str
    job_sha256: str


def load_job(url: str, open_store: OpenStore, *, hint: str = "") -> tuple[Job, str] | None:
    """Read the job.json below `url`. Return it with its `identity`, or None if it does not exist.

    Args:
        url: URL of the job.
        open_store: Opens its store.
        hint: Advice in the error for a damaged job.json. Default: how to make the job anew.

    Raises:
        InputError: job.json is damaged, has a newer format version, or its numbers contradict each other.
    """
    try:
        data = open_store(url).get(layout.JOB_KEY).data
    except ObjectNotFound:
        return None
    job = decode_job(data, url, hint=hint)
    return job, identity(job, data)


def no_job(url: str) -> InputError:
    """Return the error for a URL where no job is. The hint tells what it may be instead, by its name."""
    folder, _, name = url.rstrip("/").rpartition("/")
    if name == layout.JOB_KEY:
        hint = f"name its folder: --job {quote(folder or '.')}"
    elif job := layout.job_above(url):
        hint = f"this is the place of a run; its job is --job {quote(job)}"
    elif name.endswith(".txt"):
        hint = f"a list of chunks goes by --manifest {quote(url)}"
    else:
        hint = "check the place; a new one is made of your data: batchinfer split SOURCE… --output JOB, then --job JOB"
    return InputError(f"{url}: no job.json there", hint=hint)


def decode_job(data: bytes, url: str, *, hint: str = "") -> Job:
    """Decode and check the content of the job.json below `url`. Raises as `load_job` does."""
    name, hint = f"{url}/{layout.JOB_KEY}", hint or split_again(url)
    job = codec.decode(data, Job, name=name, hint=hint)
    problem = _contradiction(job)
    if problem:
        raise InputError(f"{name}: {problem}", hint=hint)
    return job


def identity(job: Job, data: bytes) -> str:
    """Return the sha256 by which runs know a job: that of its first job.json, before any data were appended.

    `data` is the content of the job.json from which `job` was decoded.
    """
    return job.first_sha256 or codec.sha256(data)


def _contradiction(job: Job) -> str:
    """Return what is wrong with the chunks or the numbers of a job.json, or "". Its chunks must hold each row once."""
    row = 0
    names: set[str] = set()
    for chunk in job.chunks:
        if not layout.is_chunk_name(chunk.name):
            return f"{chunk.name!r} is no name of a chunk"
        if ".." in chunk_key(job, chunk).split("/"):
            return f"{chunk.file!r} leaves the job"
        if chunk.name in names:
            return f"it lists the chunk {chunk.name} twice"
        if chunk.first_row != row:
            return f"{chunk.name} begins at row {chunk.first_row}, expected {row}, where the chunk before it ends"
        names.add(chunk.name)
        row += chunk.rows
    if row != job.rows:
        return f"its chunks have {row} rows together, expected the {job.rows} rows of the job"
    if job.num_workers > max(1, len(job.chunks)):
        return f"it has {job.num_workers} workers for {units.many(len(job.chunks), 'chunk')}"
    return ""


def split_again(url: str) -> str:
    """Return the hint that says how to replace a damaged job.json. Pure."""
    return (
        f"make it anew: batchinfer split SOURCE… --output {quote(url.rstrip('/'))} --overwrite, with the options it "
        "was made with; if it has runs, split into another place and copy job.json from there (equal sources give "
        "equal bytes)"
    )


def check_columns(
    job: Job, needed: Mapping[str, Sequence[str]], optional: Mapping[str, Sequence[str]]
) -> None:
    """Refuse columns that the rows of a job do not have, before a GPU is paid to make nothing but error rows.

    Of JSON Lines `split` may have looked only at the first rows, and later ones may have more columns. An optional
    column that is missing there only causes a warning. So does a name that `split` has taken for a column of its own.

    Args:
        job: The content of job.json.
        needed: Names of columns without which a row fails, by option. ``*`` and empty names are not checked.
        optional: Names of columns that a row may lack, by option.

    Raises:
        ConfigError: a needed column is not in job.json, or an optional one is not and all sources are tables.
    """
    if not job.sources or not job.columns:
        return
    is_certain = all(source.format in _TABLES for source in job.sources)
    known = {*job.columns, "_row", "_id"}
    columns = ", ".join(job.columns[:_MAX_SHOWN]) + (", …" if len(job.columns) > _MAX_SHOWN else "")
    for option, names in [*needed.items(), *optional.items()]:
        for name in names:
            if not name or name == "*" or name in known:
                continue
            said = f"{option} {name}: in no row that split looked at, expected one of: {columns}"
            said += near(name, job.columns)
            if is_certain or option in needed:
                hint = "correct the name, or split again with --columns, which looks for it in every row"
                raise ConfigError(said, hint=hint)
            logger.warning("%s", said)


def chunk_key(job: Job, chunk: Chunk) -> str:
    """Key of the file of one of a job's chunks; its path or URL if the job was made by reference."""
    return chunk.file or layout.chunk_file(chunk.name, job.compression)


def manifest_chunks(job: Job) -> dict[str, list[Chunk]]:
    """Return the chunks of every manifest of a job, by the manifest's key: all.txt and one for each worker. Pure.

    The numbers of chunks of any two workers differ by at most one.
    """
    ends = [len(job.chunks) * place // job.num_workers for place in range(job.num_workers + 1)]
    return {
        layout.ALL_MANIFEST: job.chunks,
        **{
            layout.worker_manifest(index, job.num_workers): job.chunks[
                ends[index] : ends[index + 1]
            ]
            for index in range(job.num_workers)
        },
    }


def job_chunks(job: Job, url: str, limit: int | None = None) -> dict[str, ChunkRef]:
    """Return every chunk of a job by name, in order; with `limit`, only those that hold its first `limit` rows."""
    chunks: dict[str, ChunkRef] = {}
    for chunk in job.chunks:
        if limit is not None and chunk.first_row >= limit:
            break
        key = chunk_key(job, chunk)
        root, key = split_name(key) if is_absolute(key) else (url, key)
        chunks[chunk.name] = ChunkRef(
            name=chunk.name,
            root=root,
            key=key,
            first_row=chunk.first_row,
            rows=chunk.rows,
            sha256=chunk.sha256,
            rows_to_do=chunk.rows if limit is None else min(chunk.rows, limit - chunk.first_row),
        )
    return chunks


def rows_by_chunk(job: Job, limit: int | None = None) -> dict[str, int]:
    """Return the number of rows to do in each chunk by name; with `limit`, only those of the job's first rows."""
    return {name: ref.rows_to_do for name, ref in job_chunks(job, "", limit).items()}


def rank_manifests(job: Job, rank: int, num_ranks: int) -> list[str]:
    """Return the keys of the manifests that rank `rank` (counted from 0) of `num_ranks` has to do.

    These are the worker manifests whose index is `rank` modulo `num_ranks`. If there is only one rank, it does all.txt.

    Raises:
        InputError: The rank is not in 0 to `num_ranks` - 1, or the job has no manifest for it.
    """
    if not 0 <= rank < num_ranks:
        raise InputError(f"rank {rank}: expected 0 to {num_ranks - 1}")
    if num_ranks == 1:
        return [layout.ALL_MANIFEST]
    keys = [
        layout.worker_manifest(index, job.num_workers)
        for index in range(rank, job.num_workers, num_ranks)
    ]
    if not keys:
        raise InputError(
            f"rank {rank} of {num_ranks}: the job has only {job.num_workers} worker manifests",
            hint=f"start at most {job.num_workers} workers, or split again with --num-workers {num_ranks}",
        )
    return keys


def read_assignment(
    manifests: Sequence[str],
    *,
    job_url: str | None,
    limit: int | None = None,
    open_store: OpenStore,
) -> Assignment:
    """Find the chunks that manifests (paths or URLs) assign to a worker. Read-only.

    The job's own manifests follow from job.json and are not read: after `split --append` they may be older than it.

    Raises:
        InputError: A manifest is missing, empty or not a list of paths, or names a chunk that is not in the job. Or the
            job is not told, or its job.json is missing or damaged.
    """
    base = job_url.rstrip("/") if job_url else _job_of(manifests[0])
    if not base:
        raise InputError(
            f"{manifests[0]}: does not lie in the manifests/ of a job, so its job must be named",
            hint="pass --job JOB, too; JSON Lines that exist become a job by `batchinfer split --by-reference LIST`",
        )
    are_own = {manifest: _job_of(manifest) == base for manifest in manifests}
    found = load_job(base, open_store)
    if found is None:
        raise no_job(base)
    job, sha256 = found
    if "://" not in base:  # the URL is recorded in run.json, which is read from other folders
        base = open_store(base).url
    own = manifest_chunks(job)
    lines: dict[str, str] = {}
    for manifest in manifests:
        key = layout.MANIFESTS + split_name(manifest)[1]
        if are_own[manifest] and key in own:
            named = [chunk_key(job, chunk) for chunk in own[key]]
        else:
            named = _read_lines(manifest, open_store)
        lines |= dict.fromkeys(named, manifest)
    if split_url(base)[0] != "file":
        _refuse_references(job, base)
    return Assignment(_resolve(lines, job, base, limit), job, base, sha256)


def is_absolute(path: str) -> bool:
    """Whether a manifest's line or a chunk's key is an absolute path or a URL."""
    return path.startswith("/") or "://" in path


def split_name(path: str) -> tuple[str, str]:
    """Split a path or URL into its folder and the key of its last component there.

    >>> split_name("s3://b/m/x.txt"), split_name("x.txt"), split_name("/x.txt")
    (('s3://b/m', 'x.txt'), ('.', 'x.txt'), ('/', 'x.txt'))
    >>> split_name("file:///m%20n/x%20y.txt")  # a key is not percent-encoded
    ('file:///m%20n', 'x y.txt')
    """
    folder, slash, name = path.rpartition("/")
    is_encoded = path.lower().startswith("file://")
    return folder or slash or ".", unquote(name) if is_encoded else name


def _job_of(manifest: str) -> str | None:
    """Return the URL of the job whose manifests/ folder holds this manifest; None if it is in no such folder."""
    folder, _, _ = manifest.rpartition("/")
    if folder == "manifests":
        return "."
    return folder.removesuffix("/manifests") if folder.endswith("/manifests") else None


def _read_lines(manifest: str, open_store: OpenStore) -> list[str]:
    folder, name = split_name(manifest.rstrip("/"))
    try:
        text = open_store(folder).get(name).data.decode()
    except ObjectNotFound:
        hint = "`batchinfer split` writes them to JOB/manifests/; a job itself is named by --job"
        raise InputError(f"{manifest}: no such manifest", hint=hint) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{manifest}: not a text file ({error})", hint="give one chunk path a line"
        ) from error
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise InputError(f"{manifest}: no chunk in it", hint="give one chunk path a line")
    return lines


def _refuse_references(job: Job, base: str) -> None:
    """Refuse a job in a bucket whose chunks are elsewhere: who wrote it may not have the right to read them."""
    for chunk in job.chunks:
        file = chunk.file or ""
        if is_absolute(file) and not is_beside(file, base):
            raise InputError(
                f"{base}/{layout.JOB_KEY}: names {file}, which is not in the job's bucket",
                hint="copy the files into that bucket, or let `batchinfer split` copy the rows",
            )


def is_beside(url: str, other: str) -> bool:
    """Whether two URLs lie in the same bucket, or both name local folders."""
    return _bucket(url) == _bucket(other)


def _bucket(url: str) -> tuple[str, str]:
    scheme, rest = split_url(url)
    if scheme == "file":
        return scheme, ""
    depth = 3 if scheme == "hf" else 1  # datasets/org/name
    return {"r2": "s3"}.get(scheme, scheme), "/".join(rest.split("/")[:depth])


def _resolve(lines: Mapping[str, str], job: Job, base: str, limit: int | None) -> list[ChunkRef]:
    """Return the chunks that lines name, except those beyond the limit. `lines`: the manifest of each line."""
    refs = job_chunks(job, base, limit)
    names = {chunk_key(job, chunk): chunk.name for chunk in job.chunks}
    for line, manifest in lines.items():
        if line not in names:
            raise InputError(
                f"{manifest}: names {line!r}, which is no chunk of the job {base}",
                hint="use a manifest of this job (JOB/manifests/), or pass the --job it belongs to",
            )
    return [refs[names[line]] for line in lines if names[line] in refs]
