"""`batchinfer collect`: write a run's verified answers in input order, as a table or in a form that programs know."""

from __future__ import annotations

from typing import Any

import click

from batchinfer.cli.help import SectionCommand
from batchinfer.cli.options import options as options_from
from batchinfer.cli.options import values_of
from batchinfer.cli.settings import common_options
from batchinfer.collect.collect_config import CollectConfig
from batchinfer.collect.collecting import run_collect
from batchinfer.core import layout
from batchinfer.core.clock import SystemClock


@click.command("collect", cls=SectionCommand)
@click.argument("run")
@click.argument("dest")
@options_from(CollectConfig)
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Collect the verified answers of the run at RUN into DEST, in input order: as a table, or in another form.

    DEST is a folder (path or URL), one file (….parquet, ….jsonl, ….csv), or hf://datasets/org/name. Only outputs that
    a marker vouches for are read, and their checksums are compared. An unfinished run is refused without --partial.
    """
    from batchinfer.storage.opening import open_store

    places = {name: layout.without_slash(options[name]) for name in ("run", "dest")}
    config = CollectConfig(**values_of(CollectConfig, options) | places)
    return run_collect(config, open_store=open_store, clock=SystemClock())
