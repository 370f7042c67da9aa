"""`batchinfer collect`: write a run's verified answers in input order, as a table or in a form that programs know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batchinfer.cli.help import SectionCommand
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.collect.collecting import run_collect
from batchinfer.collect.options import FORMATS, SHARD_ROWS, CollectConfig
from batchinfer.core import layout
from batchinfer.core.clock import SystemClock

_SHOWN = 10


@click.command("collect", cls=SectionCommand)
@click.argument("run")
@click.argument("dest")
@click.option(
    "--where",
    default="",
    metavar="SQL",
    help="Only rows that fulfil a condition over the table's columns, such as 'error_code IS NOT NULL'.",
)
@click.option(
    "--sample",
    type=click.IntRange(1),
    help="Only N rows, drawn at random from those that --where leaves.",
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
    "--with-source",
    is_flag=True,
    help="Join the source's columns: from parquet files that are there unchanged, else from the job's chunks.",
)
@click.option("--columns", metavar="A,B", help="With --with-source: only these columns of it.")
@click.option(
    "--answer-json/--no-answer-json",
    default=None,
    help="Columns answer_… of answers that are JSON.  [default: where the run asks the model for JSON]",
)
@click.option(
    "--shard-rows",
    type=click.IntRange(1),
    default=SHARD_ROWS,
    show_default=True,
    help="Rows a file, where DEST is a folder.",
)
@click.option("--partial", is_flag=True, help="Collect what there is of an unfinished run.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier collect left at DEST.")
@click.option(
    "--private/--public",
    "is_private",
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
def command(**options: Any) -> dict[str, Any]:
    """Collect the verified answers of the run at RUN into DEST, in input order: as a table, or in another form.

    DEST is a folder (path or URL), one file (….parquet, ….jsonl, ….csv), or hf://datasets/org/name. Only outputs that
    a marker vouches for are read, and their checksums are compared. An unfinished run is refused without --partial.
    """
    from batchinfer.storage.opening import open_store

    columns, scratch_dir = options.pop("columns"), options.pop("scratch_dir")
    changed = {
        "run": layout.without_slash(options["run"]),
        "dest": layout.without_slash(options["dest"]),
        "format": options["format"] or "",
        "columns": [name.strip() for name in columns.split(",")] if columns else None,
        "manifests": list(options["manifests"]),
        "scratch_dir": str(scratch_dir) if scratch_dir else None,
    }
    config = CollectConfig(**options | changed)
    result = run_collect(config, open_store=open_store, clock=SystemClock())
    for name in result["missing"][:_SHOWN]:
        say(f"missing: {name}")
    return result
