"""`batchinfer collect`: write a run's verified answers in input order, as a table or as the output lines themselves.

A table goes to files or to a data set on the Hub.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from batchinfer import __version__
from batchinfer.cli.ranks import rank_options
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.collect.destinations import (
    Collected,
    Destination,
    FileDestination,
    FolderDestination,
    suffix_of,
)
from batchinfer.collect.files import FORMATS, LINES
from batchinfer.collect.hub_destination import HubDestination
from batchinfer.collect.lines import Concatenation
from batchinfer.collect.ranks import RankFiles, check_ranks
from batchinfer.collect.reader import Reader
from batchinfer.collect.selection import Selection, format_of, select
from batchinfer.collect.table import HALF, SHARD_ROWS, CollectConfig, Collecting, Collection
from batchinfer.core import codec, layout, units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.ledger.audit import MISSING
from batchinfer.ledger.jobs import OpenStore, split_name
from batchinfer.ledger.runs import job_sha256_of
from batchinfer.storage import Store
from batchinfer.storage.hub_data_set import open_hub
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_SHOWN = 10
_LISTED = 1000
_OTHER_FILES = (".json", ".ndjson", ".txt", ".tsv", ".pq", ".arrow", ".xlsx", ".gz", ".zst", ".zip")
"""Endings of names that look like files, but that `collect` does not write.

A DEST with such an ending is refused. Otherwise it would be taken for the name of a folder.
"""


def run_collect(config: CollectConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Collect one run, or several over one job. Nothing in the runs is changed.

    Data at DEST is replaced only if `overwrite` is set, or if an unfinished `collect` left it there. Every file at DEST
    is whole or absent. A crash may leave finished files in a folder without `_COLLECTED`, and on a side branch on the
    Hub. The same command can then be run again. The same run, options and version give the same bytes.

    Raises:
        ConfigError: the options do not fit together, or DEST is inside a run or the job.
        InputError: there is no such run, the runs are of different jobs, or DEST holds other data.
        RunUnsound: chunks are missing or damaged, and `partial` is not set or no chunk is done.
    """
    started = clock.monotonic()
    kind, stores, selections = choose(config, open_store=open_store, clock=clock)
    scratch = Scratch(config.scratch_dir)
    try:
        dest = _open_dest(config, kind, scratch, open_store)
        key = _key(config, kind, selections)
        done = dest.prepare(key)
        if done is not None:
            status, record = "UNCHANGED", done
        else:
            collection = _make_collection(config, kind, stores, selections, scratch, open_store)
            if config.rank is not None:
                assert isinstance(dest, FolderDestination)
                rows = sum(selection.num_rows for selection in selections)
                store = open_store(config.dest)
                ranks = RankFiles(config, store, dest, collection, rows=rows, key=key)
                written = ranks.write()
                if written is None:
                    return _part_result(config, clock.monotonic() - started)
                record = written
            else:
                record = collection.write(dest, key)
                dest.finish(record, lambda: collection.card(record))
            status = "PARTIAL" if record.missing else "SUCCESS"
        result = _result(status, config, kind, selections, record, clock.monotonic() - started)
        if isinstance(dest, HubDestination):
            result["commit"] = dest.commit
        return result
    finally:
        scratch.close()


def choose(
    config: CollectConfig, *, open_store: OpenStore, clock: Clock
) -> tuple[str, list[Store], list[Selection]]:
    """Return the format to write, and the stores and sound chunks of the runs. Raises as `run_collect`. Read-only."""
    kind = check_options(config)
    stores = [open_store(url) for url in config.runs]
    selections = [
        select(store, open_store, now=clock.now(), job_url=config.job, manifests=config.manifests)
        for store in stores
    ]
    _refuse_other_jobs(config, selections, kind)
    for url, selection in zip(config.runs, selections, strict=True):
        _refuse_gaps(config, url, selection)
    _refuse_inside(config, selections[0])
    return kind, stores, selections


def _part_result(config: CollectConfig, seconds: float) -> dict[str, Any]:
    """Return the result of a rank whose files are there, while other ranks lack some."""
    return {
        "status": "PART",
        "run": config.run,
        "dest": config.dest,
        "rank": config.rank,
        "of": config.num_ranks,
        "missing": [],
        "run_time_sec": round(seconds, 3),
    }


def _make_collection(
    config: CollectConfig,
    kind: str,
    stores: list[Store],
    selections: list[Selection],
    scratch: Scratch,
    open_store: OpenStore,
) -> Collecting:
    readers = [
        Reader(
            selection,
            store,
            open_store,
            scratch,
            is_partial=config.partial,
            picking=config.picking,
            name=name,
        )
        for name, store, selection in zip(run_names(config.runs), stores, selections, strict=True)
    ]
    if kind == LINES:
        return Concatenation(config, readers, scratch)
    return Collection(config, kind, readers, scratch)


# --------------------------------------------------------------------------- what is asked


def check_options(config: CollectConfig) -> str:
    """Check that the options fit together, and return the format to write.

    Raises:
        ConfigError: The options contradict each other, or do not fit DEST.
    """
    suffix = suffix_of(config.dest)
    if not suffix and config.dest.lower().endswith(_OTHER_FILES):
        endings = ", ".join(dict.fromkeys(FORMATS.values()))
        raise ConfigError(
            f"{config.dest}: is named like a file, expected a name in {endings}, or a folder",
            hint="for JSON Lines: answers.jsonl",
        )
    by_name = next((name for name, ending in FORMATS.items() if ending == suffix), "")
    if config.format and suffix and FORMATS[config.format] != suffix:
        raise ConfigError(
            f"--format {config.format}: but DEST is named {config.dest}",
            hint="leave --format out, or name a folder",
        )
    if suffix and config.shard_rows is not None:
        raise ConfigError(
            f"--shard-rows: {config.dest} is one file", hint="name a folder to have several files"
        )
    if config.columns is not None and not config.with_source:
        raise ConfigError("--columns: needs --with-source", hint="add --with-source")
    kind = config.format or by_name or "parquet"
    if config.csv_safe and kind != "csv":
        raise ConfigError(f"--csv-safe: DEST is {kind}", hint="add --format csv, or leave it out")
    if kind == LINES:
        _check_lines(config)
    if config.seed is not None and config.sample is None:
        raise ConfigError("--seed: needs --sample", hint="add --sample N, or leave --seed out")
    config.picking  # noqa: B018 - refuses conditions that cannot be read
    check_ranks(config, is_folder=not suffix and not config.dest.startswith("hf://"))
    return kind


def run_names(urls: list[str]) -> list[str]:
    """Return the names of runs in the column `run`: the last parts of their URLs, or the URLs if two are equal.

    A single run needs no name.

    >>> run_names(["s3://b/job/runs/small", "s3://b/job/runs/large"]), run_names(["a/run", "b/run"])
    (['small', 'large'], ['a/run', 'b/run'])
    """
    if len(urls) == 1:
        return [""]
    names = [url.rpartition("/")[2] for url in urls]
    return names if len(set(names)) == len(names) else urls


def _check_lines(config: CollectConfig) -> None:
    """Refuse options that do not fit --format lines, which copies output lines unchanged."""
    asked = {
        "--with-source": config.with_source,
        "--explode": config.explode,
        "--answer-json": config.answer_json,
        "--embedding-dtype": config.embedding_dtype,
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{option}: --format {LINES} leaves the output lines as they are",
                hint="choose another --format; the worker's --keep puts columns into the lines",
            )
    if config.dest.startswith("hf://"):
        raise ConfigError(
            f"{config.dest}: takes a table, not --format {LINES}", hint="choose another --format"
        )


def _refuse_other_jobs(config: CollectConfig, selections: list[Selection], kind: str) -> None:
    from batchinfer.storage.opening import is_inside

    first = selections[0]
    for url, other in zip(config.more_runs, selections[1:], strict=True):
        if job_sha256_of(other.run) != job_sha256_of(first.run):
            raise InputError(
                f"{config.run} and {url}: are runs over different jobs, so their rows are not the same",
                hint="collect each into a DEST of its own",
            )
        formats = [format_of(selection.run) for selection in (first, other)]
        if kind == LINES and formats[0] != formats[1]:
            raise ConfigError(
                f"--format {LINES}: {config.run} has lines of the format {formats[0]}, {url} of {formats[1]}",
                hint="choose another --format",
            )
    for url, other_url in itertools.combinations(config.runs, 2):
        if is_inside(url, other_url) and is_inside(other_url, url):
            also = "" if url == other_url else f", also as {other_url}"
            raise ConfigError(f"{url}: is named twice{also}", hint="name each run once")


def _refuse_gaps(config: CollectConfig, url: str, selection: Selection) -> None:
    shown = selection.gaps
    if config.partial and selection.sound:
        shown = [gap for gap in shown if gap.kind != MISSING]
    for gap in shown[:_SHOWN]:
        logger.warning("%s: %s: %s", gap.kind, gap.chunk, gap.problem)
    if len(shown) > _SHOWN:
        logger.warning("… and %d chunks more", len(shown) - _SHOWN)
    if len(shown) < len(selection.gaps):
        logger.info(
            "%d of %s not done yet and left out",
            len(selection.gaps) - len(shown),
            units.many(selection.num_chunks, "chunk"),
        )
    if selection.num_foreign:
        logger.warning(
            "%d objects in the run are not batchinfer's; passed over", selection.num_foreign
        )
    if not selection.gaps:
        return
    names = ", ".join(gap.chunk for gap in selection.gaps[:3])
    more = ", …" if len(selection.gaps) > 3 else ""
    what = f"{len(selection.gaps)} of {selection.num_chunks} chunks are not there or not sound ({names}{more})"
    if not selection.sound:
        raise RunUnsound(
            f"{url}: no chunk is done yet",
            hint=f"see how it goes: batchinfer status {url}",
        )
    if not config.partial:
        raise RunUnsound(
            f"{url}: {what}",
            hint="add --partial to collect the others; `batchinfer verify` says how to fix these",
        )


def _refuse_inside(config: CollectConfig, selection: Selection) -> None:
    from batchinfer.storage.opening import is_inside

    for place in filter(None, (*config.runs, selection.job_url)):
        if not config.dest.startswith("hf://") and is_inside(config.dest, place):
            raise ConfigError(
                f"{config.dest}: lies inside {place}, expected a place of its own",
                hint="name another DEST",
            )


def _open_dest(
    config: CollectConfig, kind: str, scratch: Scratch, open_store: OpenStore
) -> Destination:
    suffix = FORMATS[kind]
    if config.dest.startswith("hf://"):
        dataset = open_hub(config.dest, is_private=config.is_private)
        return HubDestination(dataset, scratch.new_path("hub"), suffix, overwrite=config.overwrite)
    if suffix_of(config.dest):
        folder, name = split_name(config.dest)
        return FileDestination(open_store(folder), name, overwrite=config.overwrite)
    return FolderDestination(open_store(config.dest), suffix, overwrite=config.overwrite)


def _key(config: CollectConfig, kind: str, selections: list[Selection]) -> str:
    """Return a hash of what decides the bytes of the files: the outputs, the options and batchinfer's version."""
    runs = [
        {
            "fingerprint": selection.run.fingerprint,
            "outputs": [marker.output_sha256 for _, marker in selection.sound],
            "first_rows": [ref.first_row for ref, _ in selection.sound],
        }
        for selection in selections
    ]
    names = {"names": run_names(config.runs), "more_runs": runs[1:]} if len(runs) > 1 else {}
    picking = {} if config.picking.is_all else {"picking": msgspec.to_builtins(config.picking)}
    return codec.fingerprint(
        {
            "version": __version__,
            **runs[0],
            **names,
            **picking,
            "format": kind,
            "with_source": config.with_source,
            "columns": config.columns,
            "explode": config.explode,
            "shard_rows": config.shard_rows,
            **({"csv_safe": True} if config.csv_safe else {}),
            **({} if config.answer_json is None else {"answer_json": config.answer_json}),
            **({"embedding_dtype": HALF} if config.embedding_dtype == HALF else {}),
        }
    )


def _result(
    status: str,
    config: CollectConfig,
    kind: str,
    selections: list[Selection],
    record: Collected,
    seconds: float,
) -> dict[str, Any]:
    return {
        "status": status,
        "run": config.run,
        **({"runs": config.runs} if config.more_runs else {}),
        "dest": config.dest,
        "format": kind,
        "fingerprint": record.fingerprint,
        "chunks": record.chunks,
        "rows": record.rows,
        "rows_error": record.rows_error,
        "files": len(record.files),
        "file_rows": sum(file.rows for file in record.files),
        "bytes": sum(file.bytes for file in record.files),
        "missing_chunks": len(record.missing),
        "missing": record.missing[:_LISTED],
        "kept_as_text": record.kept_as_text,
        "foreign_objects": sum(selection.num_foreign for selection in selections),
        "run_time_sec": round(seconds, 3),
        "rows_per_sec": round(record.rows / seconds, 1) if seconds > 0 else 0.0,
    }


# --------------------------------------------------------------------------- the command


def config_of(context: click.Context) -> CollectConfig:
    """Return the config that the options of a command line mean.

    Raises:
        ConfigError: No run is named.
    """
    options = context.params
    is_default_seed = context.get_parameter_source("seed") is ParameterSource.DEFAULT
    columns = options["columns"]
    places: list[str] = [*options["places"], *filter(None, [options["dest"]])]
    *runs, dest = places
    if not runs:
        raise ConfigError(
            f"{dest}: is the only place that is named, expected a run and a DEST",
            hint="batchinfer collect RUN answers.parquet",
        )
    return CollectConfig(
        run=layout.without_slash(runs[0]),
        more_runs=list(map(layout.without_slash, runs[1:])),
        dest=layout.without_slash(dest),
        where=list(options["where"]),
        sample=options["sample"],
        seed=None if is_default_seed else options["seed"],
        format=options["format"] or "",
        with_source=options["with_source"],
        columns=[name.strip() for name in columns.split(",")] if columns else None,
        explode=options["explode"],
        shard_rows=options["shard_rows"],
        csv_safe=options["csv_safe"],
        answer_json=options["answer_json"],
        embedding_dtype=options["embedding_dtype"],
        partial=options["partial"],
        overwrite=options["overwrite"],
        rank=options["rank"],
        num_ranks=options["num_ranks"],
        is_private=options["private"],
        job=options["job"],
        manifests=list(options["manifests"]),
        scratch_dir=str(options["scratch_dir"]) if options["scratch_dir"] else None,
    )


@click.command("collect")
@click.argument("places", metavar="RUN... DEST", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "dest",
    metavar="DEST",
    help="Where to write; every place on the command line is then a run.",
)
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only rows with, for example, status=error, error_code=CODE,CODE or finish_reason!=stop; repeated, all hold.",
)
@click.option(
    "--sample",
    type=click.IntRange(1),
    help="Only N rows of each run, drawn at random from those that --where leaves.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Other numbers draw other rows."
)
@click.option(
    "--format",
    type=click.Choice(list(FORMATS)),
    help="lines: the output lines byte for byte.  [default: by DEST's ending, else parquet]",
)
@click.option(
    "--with-source", is_flag=True, help="Join the source's columns, read from the job's chunks."
)
@click.option("--columns", metavar="A,B", help="With --with-source: only these columns of it.")
@click.option(
    "--explode",
    is_flag=True,
    help="A table row for each answer (choice_index), in place of lists where a row has several.",
)
@click.option(
    "--shard-rows",
    type=click.IntRange(1),
    help=f"Rows of the job a file.  [default: {SHARD_ROWS}]",
)
@click.option(
    "--csv-safe",
    is_flag=True,
    help="Put an apostrophe before texts that a spreadsheet would run as formulas (=, +, -, @).",
)
@click.option(
    "--answer-json/--no-answer-json",
    default=None,
    help="A column answer_json with answers parsed as JSON.  [default: where the run's options constrain them to JSON]",
)
@click.option(
    "--embedding-dtype",
    type=click.Choice(["float32", HALF]),
    help="Type of the numbers of vectors; float16 takes half the space.  [default: float32]",
)
@click.option("--partial", is_flag=True, help="Collect what there is of an unfinished run.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier collect left at DEST.")
@rank_options(
    "Write only the I-th part of the files, from 0; the last of --of N such processes completes the folder."
)
@click.option(
    "--private/--public",
    default=True,
    show_default=True,
    help="Who sees a data set that is made on the Hub.",
)
@click.option(
    "--job", metavar="URL", help="The job, where run.json and the run's place do not tell."
)
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    help="Chunks in order; for a run over a list without a job.json.",
)
@click.option(
    "--scratch-dir", type=click.Path(path_type=Path), help="Local folder for files under way."
)
@common_options
def command(**_options: Any) -> dict[str, Any]:
    """Collect the verified answers of the run at RUN into DEST, in input order: as a table, or as they are.

    DEST is a folder (path or URL), one file (….parquet, ….jsonl, ….csv), or hf://datasets/org/name. Only outputs that
    a marker vouches for are read, and their checksums are compared. An unfinished run is refused without --partial.
    Of several runs over one job, the table has the rows of one after the other, and a first column with the run's name.
    """
    from batchinfer.storage.opening import open_store

    config = config_of(click.get_current_context())
    result = run_collect(config, open_store=open_store, clock=SystemClock())
    for name in result["missing"][:_SHOWN]:
        say(f"missing: {name}")
    return result
