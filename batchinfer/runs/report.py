"""`batchinfer report`: write one HTML page about a run, finished or not. The page needs no other files.

Texts from the bucket may be hostile. Jinja escapes them. The page's content security policy also forbids scripts
and requests, so no script could run even if a text were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from typing import Any

import click

from batchinfer import __version__
from batchinfer.cli.settings import common_options, price_options
from batchinfer.core import codec, units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.counts import Counts
from batchinfer.core.errors import AlreadyExists, ConfigError, ObjectNotFound
from batchinfer.core.prices import Prices
from batchinfer.core.printable import error_code
from batchinfer.core.records import ErrorExample, Record
from batchinfer.ledger.jobs import OpenStore, rows_by_chunk, split_name
from batchinfer.ledger.looks import RunReader, Snapshot, read_newest_markers
from batchinfer.runs.drawing import draw
from batchinfer.runs.launched import with_launches
from batchinfer.runs.overview import (
    Overview,
    add_up,
    overview,
)
from batchinfer.runs.samples import Sample, cut, read_samples
from batchinfer.runs.status import gpus_of, place_of, workers_text
from batchinfer.storage import Store

MAX_WORKER_ROWS = 300
"""Largest number of workers that are listed in the table."""
MAX_SETTINGS = 40_000
"""Largest number of characters that are shown of run.json."""


class ReportConfig(Record, frozen=True, kw_only=True):
    """What to report. `output` is the page's path or URL.

    The page shows up to `num_samples` rows of the first finished chunk, and as many of the last. A failed row of each
    may be added.
    """

    run: str
    output: str
    job: str = ""
    price_per_hour: float | None = None
    is_spot: bool | None = None
    num_samples: int = 4


def run_report(config: ReportConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Read a run and write the page about it. An older page at the same place is replaced.

    Raises:
        InputError: there is no such run, or the run cannot be read.
        ConfigError: the output's URL names no file, or names a folder.
    """
    store = open_store(config.run)
    snapshot = RunReader(store, open_store, clock, config.job).read()
    seen = overview(
        snapshot,
        Prices(config.price_per_hour),
        is_spot=config.is_spot,
        of_markers=_read_totals(store, snapshot),
    )
    seen = with_launches(seen, store)
    num_rows = config.num_samples
    samples = read_samples(store, snapshot, open_store, num_rows=num_rows) if num_rows else []
    num_bytes = put_page(config.output, render_page(snapshot, seen, samples), open_store)
    return {
        "report": config.output,
        "bytes": num_bytes,
        "run": seen.run,
        "state": seen.state,
        "rows_done": seen.rows.done,
        "rows_total": seen.rows.total,
    }


def _read_totals(store: Store, snapshot: Snapshot) -> Counts:
    """Add up every chunk's newest marker, with one request for each. Chunks that are not in the job are left out."""
    known = None if snapshot.job is None else rows_by_chunk(snapshot.job)
    wanted = {
        name: seen for name, seen in snapshot.markers.items() if known is None or name in known
    }
    return add_up(read_newest_markers(store, wanted))


# --------------------------------------------------------------------------- the page


def render_page(snapshot: Snapshot, seen: Overview, samples: list[Sample]) -> str:
    """Return the whole page as HTML."""
    import jinja2

    files = importlib.resources.files("batchinfer.runs") / "templates"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"f": units, "gpus_of": gpus_of, "place_of": place_of}
    environment.filters["cut"] = cut
    style = (files / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    examples: dict[str, ErrorExample] = {}
    for view in seen.workers:
        examples |= {error_code(code): one for code, one in view.record.examples.items()}
    template = environment.from_string((files / "report.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        version=__version__,
        seen=seen,
        tiles=_tiles(seen),
        drawings=draw(snapshot.workers, seen.rows.total),
        workers=seen.workers[:MAX_WORKER_ROWS],
        workers_text=workers_text(seen.workers),
        examples=examples,
        samples=samples,
        max_settings=MAX_SETTINGS,
        settings=codec.encode_pretty(snapshot.run).decode() if snapshot.run else "",
    )


def _tiles(seen: Overview) -> list[tuple[str, str, str]]:
    """The figures at the top of the page, each as (name, figure, text in small print)."""
    is_over = seen.state in ("done", "stopped")
    rate = seen.overall if is_over else seen.recent
    rows, total = seen.rows_finished, seen.rows.total
    when = "first start to end" if is_over else f"last {units.duration(rate.seconds)}, live workers"
    rates = f"{units.short(rate.input_tokens)} input, {units.short(rate.rows)} rows/s"
    failed = units.percent(seen.totals.rows_error, rows)
    tiles = [
        ("rows", units.percent(rows, total), f"{units.count(rows)} of {units.count(total)}"),
        ("output tokens/s", units.short(rate.output_tokens), f"{rates}; {when}"),
        ("rows failed", units.count(seen.totals.rows_error), failed),
    ]
    if is_over:
        took = units.duration(seen.overall.seconds)
        tiles.append(("took", took, f"from {units.moment(seen.started)}"))
    elif seen.eta_seconds is not None:
        until = units.moment(seen.time + seen.eta_seconds)
        tiles.append(("time left", units.duration(seen.eta_seconds), until))
    if seen.cost.so_far is not None:
        per_million = units.money(seen.cost.per_million_output_tokens)
        small = f"{per_million} per million output tokens"
        tiles.append(("cost" if is_over else "cost so far", units.money(seen.cost.so_far), small))
    return tiles


def put_page(url: str, page: str, open_store: OpenStore) -> int:
    """Write a page to a path or URL, and return its size in bytes. An older page there is replaced.

    Raises:
        ConfigError: the URL names no file, or names a folder.
    """
    folder, name = split_name(url)
    if not name or name.startswith("."):
        raise ConfigError(f"--output {url!r}: names no file", hint="add a name: -o report.html")
    store = open_store(folder)
    data = page.encode(errors="replace")
    try:
        store.create(name, data)
    except AlreadyExists:
        try:
            store.replace(name, data, store.stat(name).etag)
        except ObjectNotFound:
            raise ConfigError(
                f"--output {url}: is a folder, expected a file",
                hint=f"name a file in it: -o {url.rstrip('/')}/report.html",
            ) from None
    return len(data)


# --------------------------------------------------------------------------- the command


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
    """Write the run at RUN as one HTML page: progress, speed, errors, cost, workers, answers, settings.

    The page needs no network and runs no script; it can be mailed or put into a bucket.
    """
    from batchinfer.storage.opening import open_store

    return run_report(ReportConfig(**options), open_store=open_store, clock=SystemClock())
