"""`batchinfer split`: turns data sets into a job: JSON Lines chunks, one manifest for each worker, and job.json.

job.json is written last, when all chunks and manifests are complete. A folder without job.json is not a job, so a split
that was killed can simply be run again.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from batchinfer.cli.help import SectionCommand
from batchinfer.cli.ranks import check_rank, rank_options
from batchinfer.cli.settings import common_options
from batchinfer.core import codec, layout, units
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job, Record, SourceFile
from batchinfer.storage import Store

if TYPE_CHECKING:
    from batchinfer.split.chunk_files import ChunkRange
    from batchinfer.split.job_writer import JobWriter
    from batchinfer.split.sources import CountedSources, Oddities

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


class SplitConfig(Record, frozen=True, kw_only=True):
    """Options of `split`. If neither `num_chunks` nor `chunk_rows` is set, the size of the chunks is chosen.

    If `columns` is None, all columns are kept. `limit` is the largest number of rows from all sources together. If
    `delimiter` is empty, it is found in each CSV file. If `scratch_dir` is None, chunks are built in the system's
    temporary folder.
    """

    sources: list[str]
    output: str
    first_rows: int | None = None
    """Number of rows of an extra chunk before the others. `batchinfer run` sets it; `split` has no such option."""
    num_chunks: int | None = None
    chunk_rows: int | None = None
    num_workers: int = 1
    columns: list[str] | None = None
    id_column: str = ""
    group_by: str = ""
    limit: int | None = None
    delimiter: str = ""
    compression: str = "none"
    processes: int = 1
    append: bool = False
    overwrite: bool = False
    rank: int | None = None
    """Index of this process among `num_ranks` that build the job together. None: it builds the job alone."""
    num_ranks: int | None = None
    scratch_dir: str | None = None


def run_split(config: SplitConfig, *, store: Store) -> dict[str, Any]:
    """Split the sources into a job at the store's root.

    If the store holds a finished job of the same sources and shape, nothing is changed, unless `overwrite` is set.
    After a split that was killed before it wrote job.json, this one replaces the objects whose bytes differ. Two splits
    must not write to one place at the same time.

    Args:
        config: The options.
        store: The store at `config.output`.

    Returns:
        The result object; its `status` is "done" or "unchanged".

    Raises:
        ConfigError: Options contradict each other, or ask for more chunks or workers than the rows allow.
        InputError: A source cannot be used, or the output holds another job or runs.
    """
    from batchinfer.split import chunk_files
    from batchinfer.split.job_writer import read_job, refuse_newer, remove_job
    from batchinfer.split.sources import ColumnChoice, count_sources

    started = time.monotonic()
    _check_options(config)
    if config.append:
        from batchinfer.split.append import run_append

        return run_append(config, store=store)
    choice = ColumnChoice(columns=config.columns, id_column=config.id_column)
    counted = count_sources(
        config.sources,
        choice=choice,
        limit=config.limit,
        delimiter=config.delimiter,
        with_checksums=True,
    )
    counted.check_apart(config.output)
    first, num_chunks = config.first_rows or 0, config.num_chunks
    if num_chunks is None and config.chunk_rows is None:
        num_chunks = chunk_files.usual_num_chunks(counted, counted.rows - first, config.num_workers)
    rest = chunk_files.even_chunk_starts(
        counted.rows - first, num_chunks=num_chunks, chunk_rows=config.chunk_rows
    )
    starts = [0] * bool(first) + [first + start for start in rest]
    draft = _draft_job(config, counted, num_chunks)
    if config.overwrite:
        refuse_newer(store)
    elif (existing := read_job(store, hint=_made_anew(config))) is not None:
        is_all = _have_same_files(existing, draft)
        check_same(existing if is_all else _first_part(existing), draft, config)
        logger.info(
            "%s: finished before with the same sources and shape, nothing changed", config.output
        )
        return make_result("unchanged", config, existing, {}, time.monotonic() - started)
    _check_no_runs(store, config)
    if config.group_by:
        starts = chunk_files.group_chunk_starts(counted, config.group_by, starts)
    _check_workers(config, len(starts) - 1)
    ranges = chunk_files.chunk_ranges(starts)
    if config.rank is not None:
        from batchinfer.split.ranks import Shared, run_rank

        return run_rank(Shared(config, store, counted, draft, ranges))
    if config.overwrite:
        remove_job(store)
    job, odd = _write(config, store, counted, draft, ranges)
    warn(odd, job)
    return make_result("done", config, job, odd.nulls, time.monotonic() - started)


def renamed_columns(odd: Oddities, counted: CountedSources) -> dict[str, str] | msgspec.UnsetType:
    """Return the field `renamed` of job.json."""
    names = {name: counted.choice.name_in_rows(name) for name in sorted(odd.renamed)}
    return names or msgspec.UNSET


def warn(odd: Oddities, job: Job) -> None:
    """Log a warning for each fact about the rows that a user may not expect. `job` holds the counts of these rows."""
    for name, source_name in job.source_names.items():
        logger.warning(
            "column %r: rows have a %s of the job's own, so the source's is kept as %r; `collect` gives its name back",
            *(source_name, source_name, name),
        )
    for column, count in sorted(odd.nulls.items()):
        logger.warning("column %r: %d NaN or infinite values became null", column, count)
    if job.blank_lines:
        logger.warning("blank lines of the sources, which are no rows: %d", job.blank_lines)
    if odd.broken_lines:
        logger.warning(
            "lines that are no JSON object, each of which becomes an error row: %d; the first is %s",
            odd.broken_lines,
            odd.first_broken,
        )
    if odd.encodings:
        from batchinfer.split.first_bytes import convert_hint

        encoding = odd.encodings.most_common(1)[0][0]
        logger.warning(
            "%d of these lines are not UTF-8, but perhaps %s; the first is %s; %s",
            *(odd.encodings.total(), encoding, odd.first_encoded, convert_hint(encoding)),
        )
    if job.duplicate_ids:
        logger.warning(
            "%d of %d rows have an _id (of OpenAI requests the custom_id) that an earlier row has; their answers "
            "are told apart by their order, and by _row where an output line has it",
            job.duplicate_ids,
            job.rows,
        )


# --------------------------------------------------------------------------- the wanted job


def _check_options(config: SplitConfig) -> None:
    if config.num_chunks is not None and config.chunk_rows is not None:
        raise ConfigError(
            "--num-chunks, --chunk-rows: both are given, expected one or none",
            hint="leave both out for chunks of a good size",
        )
    if config.append and (config.overwrite or config.limit is not None or config.group_by):
        names = [name for name in ("overwrite", "limit", "group_by") if getattr(config, name)]
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ConfigError(
            f"{options}: not together with --append", hint="leave it out, or make another job"
        )
    check_rank(
        config.rank,
        config.num_ranks,
        refused={"--append": config.append, "--overwrite": config.overwrite},
        hint="name another --output, or let one process do it, without --rank and --of",
    )
    if not all(source.strip() for source in config.sources):
        raise ConfigError(
            "SOURCE '': names nothing, expected a file, a folder, a glob or a URL",
            hint="an unset variable of the shell? The present folder is `.`",
        )
    if config.columns is not None and not config.columns:
        raise ConfigError(
            "--columns: names no column, expected at least one",
            hint="leave it out to keep all columns",
        )


def _check_workers(config: SplitConfig, num_chunks: int) -> None:
    if config.num_workers > num_chunks:
        raise ConfigError(
            f"--num-workers {config.num_workers}: more than the {units.many(num_chunks, 'chunk')}, "
            "expected a chunk for each",
            hint=f"use --num-workers {num_chunks} or fewer, or make smaller chunks",
        )


def _draft_job(config: SplitConfig, counted: CountedSources, num_chunks: int | None) -> Job:
    """Return job.json without the chunks, and without what is counted while they are built."""
    shape = {
        "first_rows": config.first_rows,
        "num_chunks": num_chunks,
        "chunk_rows": config.chunk_rows,
    }
    return Job(
        format_version=FORMAT_VERSION,
        sources=counted.sources,
        columns=counted.columns,
        schema=counted.schema,
        rows=counted.rows,
        blank_lines=counted.blank_lines or msgspec.UNSET,
        chunks=[],
        num_workers=config.num_workers,
        id_column=config.id_column,
        group_by=config.group_by,
        limit=config.limit,
        compression=config.compression,
        shape={name: number for name, number in shape.items() if number is not None},
    )


# --------------------------------------------------------------------------- the existing job


def check_same(existing: Job, wanted: Job, config: SplitConfig) -> None:
    """Raise InputError unless `existing` is the job that this split would make.

    Files are compared by size, number of rows and checksums, not by name.
    If no option says the size of chunks, any size will do.
    """
    differences = []
    if not _have_same_files(existing, wanted):
        differences.append("the source's files")
    names = ["rows", "columns", "shape", "num_workers", "id_column", "group_by", "compression"]
    if config.num_chunks is None and config.chunk_rows is None:
        names.remove("shape")
    for name in names:
        before, now = getattr(existing, name), getattr(wanted, name)
        if before != now:
            differences.append(f"{name} ({_shown(before)} there, {_shown(now)} here)")
    if differences:
        raise InputError(
            f"{config.output}: holds a finished job that differs in {'; '.join(differences)}",
            hint="name another --output, or add --overwrite to replace that job",
        )


def _made_anew(config: SplitConfig) -> str:
    """Return the command line that makes the job again with the same options, to replace a damaged one."""
    plain = SplitConfig(sources=[], output="")
    words = ["batchinfer split", *map(shlex.quote, config.sources)]
    for name, value in msgspec.structs.asdict(config).items():
        if name not in (
            "sources",
            "overwrite",
            "first_rows",
            "rank",
            "num_ranks",
        ) and value != getattr(plain, name):
            text = ",".join(value) if isinstance(value, list) else str(value).replace("\t", "tab")
            words.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    return " ".join([*words, "--overwrite"])


def _first_part(job: Job) -> Job:
    """Return a job as it was before data were appended to it, except for the numbers that were counted."""
    if not job.appends:
        return job
    end = job.appends[0]
    return msgspec.structs.replace(
        job,
        sources=job.sources[: end.first_source],
        chunks=job.chunks[: end.first_chunk],
        rows=end.first_row,
    )


def _have_same_files(job: Job, other: Job) -> bool:
    """Whether the files of two jobs are the same, in the same order."""
    files, others = (
        [file for source in each.sources for file in source.files] for each in (job, other)
    )
    return len(files) == len(others) and all(map(SourceFile.is_same_as, files, others))


def _shown(value: Any) -> str:
    text = codec.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}…"


def _check_no_runs(store: Store, config: SplitConfig) -> None:
    """Raise InputError if any run is below the job, because its outputs belong to the chunks that are there now.

    All objects are listed only if there are chunks. A place without chunks may be any folder, with many other files.
    """
    key = next((item.key for item in store.list(layout.RUNS)), "")
    folder: str | None = layout.RUNS if key else None
    if not key and next(iter(store.list(layout.CHUNKS)), None) is not None:
        found = ((item.key, layout.run_above(item.key)) for item in store.list())
        key, folder = next((pair for pair in found if pair[1] is not None), ("", None))
    if folder is not None:
        place = f"{config.output.rstrip('/')}/{folder}"
        raise InputError(
            f"{config.output}: has runs ({key}), expected none under a job that is split anew",
            hint="name another --output" + (f", or remove {place} first" if folder else ""),
        )


# --------------------------------------------------------------------------- writing the job


def _write(
    config: SplitConfig, store: Store, counted: CountedSources, draft: Job, ranges: list[ChunkRange]
) -> tuple[Job, Oddities]:
    """Build and publish the chunks, then the manifests, then job.json. Returns the job and its oddities."""
    from batchinfer.split.job_writer import JobWriter

    with progress(counted.rows) as advance:
        writer = JobWriter(store, config.compression, advance)
        chunks, odd, duplicates = publish_chunks(config, writer, counted, ranges, draft.compression)
        job = completed(draft, counted, chunks, odd, duplicates)
        writer.finish(job)
    return job, odd


def completed(
    draft: Job, counted: CountedSources, chunks: list[Chunk], odd: Oddities, duplicates: int
) -> Job:
    """Return job.json: the draft with its chunks and what was counted while they were built."""
    return msgspec.structs.replace(
        draft,
        chunks=chunks,
        null_floats=odd.nulls.total(),
        broken_lines=odd.broken_lines,
        duplicate_ids=duplicates,
        renamed=renamed_columns(odd, counted),
    )


def publish_chunks(
    config: SplitConfig,
    writer: JobWriter,
    counted: CountedSources,
    ranges: list[ChunkRange],
    compression: str,
) -> tuple[list[Chunk], Oddities, int]:
    """Build and publish chunks. Returns them, their oddities, and the number of rows whose id an earlier row has."""
    from batchinfer.split import chunk_files
    from batchinfer.split.sources import Oddities
    from batchinfer.storage.scratch import Scratch

    odd = Oddities()
    id_paths: list[Path] = []
    chunks: list[Chunk] = []
    with contextlib.closing(Scratch(config.scratch_dir)) as scratch:
        settings = chunk_files.BuildSettings(counted, scratch.folder, compression)
        built = chunk_files.build_with(settings, ranges, config.processes)
        for item in writer.publish(built):
            chunks.append(item.chunk)
            odd.add(item.odd)
            if item.id_path is not None:
                id_paths.append(item.id_path)
        return chunks, odd, chunk_files.count_duplicates(id_paths)


@contextlib.contextmanager
def progress(rows: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of finished rows. It moves a bar on a terminal, or logs now and then."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=rows, unit=" rows", desc="split", file=sys.stderr) as bar:
            yield bar.update
        return
    done, shown = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if time.monotonic() - shown >= _LOG_SECONDS:
            shown = time.monotonic()
            logger.info("%d of %d rows split", done, rows)

    yield advance


def make_result(
    status: str, config: SplitConfig, job: Job, nulls: dict[str, int], seconds: float
) -> dict[str, Any]:
    """Make the JSON object that `split` prints as its last line."""
    return {
        "status": status,
        "job": config.output,
        "rows": job.rows,
        "columns": job.columns,
        "chunks": len(job.chunks),
        "workers": job.num_workers,
        "bytes": sum(chunk.bytes for chunk in job.chunks),
        "null_floats": job.null_floats,
        "null_floats_by_column": nulls,
        "broken_lines": job.broken_lines,
        "blank_lines": job.blank_lines or 0,
        "duplicate_ids": job.duplicate_ids,
        "seconds": round(seconds, 3),
    }


# --------------------------------------------------------------------------- command line


def _parse_columns(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> list[str] | None:
    if value is None:
        return None
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


def parse_delimiter(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str:
    """Return the delimiter that a text of --delimiter means, "" if the option is not given."""
    if value in ("tab", "\\t"):
        return "\t"
    if value and (len(value) > 1 or value in '"\r\n'):
        raise click.BadParameter(
            f"{value!r} is not one character (or 'tab') that may divide fields"
        )
    return value or ""


def config_of(context: click.Context) -> SplitConfig:
    """Return the config that the options of a command line mean.

    Raises:
        ConfigError: They contradict each other.
    """
    config = SplitConfig(**{**context.params, "sources": list(context.params["sources"])})
    _check_options(config)
    return config


@click.command("split", cls=SectionCommand)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--output",
    metavar="JOB",
    required=True,
    help="Folder or URL of the job; made if it is not there.",
)
@click.option(
    "--num-chunks",
    type=click.IntRange(min=1),
    help="Make so many chunks, even to one row. Default: chunks of about a minute, at least 50 a worker.",
)
@click.option(
    "--chunk-rows", type=click.IntRange(min=1), help="Put so many rows in each chunk but the last."
)
@click.option(
    "--num-workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Write a manifest for each of so many workers.",
)
@click.option(
    "--columns",
    callback=_parse_columns,
    metavar="A,B",
    help="Keep only these columns. Default: all.",
)
@click.option(
    "--id-column",
    default="",
    metavar="COLUMN",
    help="Column whose value names a row (_id). Default: custom_id of OpenAI batch requests, else the row number.",
)
@click.option(
    "--group-by",
    default="",
    metavar="COLUMN",
    help="Keep neighbouring rows with the same value in one chunk; chunks then differ more in size.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Take only the first N rows."
)
@click.option(
    "--delimiter",
    callback=parse_delimiter,
    metavar="CHARACTER",
    help="Character between the fields of CSV, or `tab`. Default: found in each file.",
)
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"]),
    default="none",
    show_default=True,
    help="How chunks are stored.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Build chunks in so many processes. The chunks are the same.",
)
@click.option(
    "--append",
    is_flag=True,
    help="Add the sources to the job that is there: new chunks after the old ones. Files it has already are left out.",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace the job that is there, unless a run is below it."
)
@rank_options(
    "Build only the I-th part of the chunks, from 0; the last of --of N such processes completes the job."
)
@click.option(
    "--scratch-dir",
    metavar="DIR",
    help="Local folder to build chunks in. Default: the system's temporary one.",
)
@common_options
def command(**_options: Any) -> dict[str, Any]:
    """Split data sets into JSONL chunks and per-worker manifests.

    SOURCE is a file, a folder, a glob, or a URL (s3://, gs://, hf://datasets/org/name[@revision][/path]) of parquet,
    JSON Lines or CSV. Running the same command again is safe: a finished job is left alone, a killed one is completed.

    Several machines can split a large data set together: each runs the command with --rank I --of N, in any order. The
    job is the same as that of one process.

    With --append, runs of the job stay as they are, and the workers' next start does the new chunks.
    """
    from batchinfer.storage.opening import check_writable, open_store

    config = config_of(click.get_current_context())
    check_writable(config.output, option="--output")
    return run_split(config, store=open_store(config.output))
