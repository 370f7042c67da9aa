"""``batchinfer report``: a run as one HTML page that opens anywhere, finished or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from batchinfer import __version__
from batchinfer.cli.settings import common_options
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import AlreadyExists, ConfigError, ObjectNotFound
from batchinfer.core.records import Record
from batchinfer.ledger.jobs import split_name
from batchinfer.ledger.snapshot import RunReader
from batchinfer.runs.overview import overview
from batchinfer.runs.pages import render_page
from batchinfer.runs.prices import price_options, price_source
from batchinfer.runs.samples import read_samples
from batchinfer.storage import Store


class ReportConfig(Record, frozen=True, kw_only=True):
    """What `report` is asked. `output` is a path or URL; `num_samples` rows of each of two chunks are shown."""

    run: str
    output: str
    job: str = ""
    price_per_hour: float | None = None
    prices: str = ""
    is_spot: bool | None = None
    num_samples: int = 4


def run_report(
    config: ReportConfig, *, open_store: Callable[[str], Store], clock: Clock
) -> dict[str, Any]:
    """Look at a run and write its page. A page that lies there already is replaced, whole.

    Raises:
        InputError: there is no such run, or it cannot be read.
    """
    store = open_store(config.run)
    prices = price_source(config.price_per_hour, Path(config.prices) if config.prices else None)
    snapshot = RunReader(store, open_store, clock, config.job).read()
    seen = overview(snapshot, prices, is_spot=config.is_spot)
    samples = (
        read_samples(store, snapshot, open_store, num_rows=config.num_samples)
        if config.num_samples
        else []
    )
    page = render_page(snapshot, seen, samples, version=__version__).encode()
    put_page(config.output, page, open_store)
    return {
        "report": config.output,
        "bytes": len(page),
        "run": seen.run,
        "state": seen.state,
        "chunks_done": seen.chunks.done,
        "chunks_total": seen.chunks.total,
        "rows_done": seen.rows.done,
        "rows_total": seen.rows.total,
    }


def put_page(url: str, page: bytes, open_store: Callable[[str], Store]) -> None:
    """Create the page, or replace the one that lies there."""
    folder, name = split_name(url)
    if not name or name.startswith("."):
        raise ConfigError(f"--output {url!r}: names no file", hint="add a name: -o report.html")
    store = open_store(folder)
    try:
        store.create(name, page)
    except AlreadyExists:
        try:
            store.replace(name, page, store.stat(name).etag)
        except ObjectNotFound:
            raise ConfigError(
                f"--output {url}: is a folder, expected a file",
                hint=f"name a file in it: -o {url.rstrip('/')}/report.html",
            ) from None


@click.command("report")
@click.argument("run")
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    help="Where to write the page: a path or URL. A page that is there is replaced.",
)
@click.option("--job", default="", help="URL of the job, where run.json does not lead to it.")
@click.option(
    "--num-samples",
    type=click.IntRange(0, 50),
    default=4,
    show_default=True,
    help="Rows to show of each of two chunks; 0 for none, where answers should not be seen.",
)
@price_options
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Write the run at RUN as one HTML page: progress, time line, lengths, errors, cost, settings, answers.

    The page needs no network and runs no script; it can be mailed or put into a bucket.
    """
    from batchinfer.storage.opening import open_store

    prices = options.pop("prices")
    config = ReportConfig(prices=str(prices) if prices else "", **options)
    return run_report(config, open_store=open_store, clock=SystemClock())
