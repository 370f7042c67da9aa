"""`batchinfer report`: write one HTML page about a run, finished or not. The page needs no other files.

Texts from the bucket may be hostile. Jinja escapes them. The page's content security policy also forbids scripts
and requests, so no script could run even if a text were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from typing import Annotated, Any

from msgspec import Meta

from batchinfer import __version__
from batchinfer.cli.run_commands import run_command
from batchinfer.core import codec, units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import AlreadyExists, ConfigError, ObjectNotFound
from batchinfer.core.option_help import Opt
from batchinfer.core.printable import error_code
from batchinfer.core.records import ErrorExample, Record
from batchinfer.ledger.jobs import OpenStore, split_name
from batchinfer.ledger.looks import Snapshot
from batchinfer.runs.drawing import draw, ticks_of
from batchinfer.runs.overview import Overview
from batchinfer.runs.pairs import Sample, read_samples
from batchinfer.runs.status import COLUMNS, RunConfig, figures_of, look_closely

MAX_WORKER_ROWS = 300
"""Largest number of workers that are listed in the table."""
MAX_TEXT, MAX_SETTINGS = 2000, 40_000
"""Largest numbers of characters that are shown of an answer or a column's value, and of run.json."""


class ReportConfig(Record, frozen=True, kw_only=True):
    """What to report."""

    look: RunConfig
    output: Annotated[str, Opt(short="-o")] = "report.html"
    """Where to write the page: a path or URL. A page that is there is replaced."""
    num_samples: Annotated[int, Meta(ge=0, le=50)] = 4
    """Rows to show of each of two chunks; 0 for none, where answers should not be seen."""


def run_report(config: ReportConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Read a run and write the page about it. An older page at the same place is replaced.

    Raises:
        InputError: there is no such run, or the run cannot be read.
        ConfigError: the output's URL names no file, or names a folder.
    """
    snapshot, seen = look_closely(config.look, open_store=open_store, clock=clock)
    samples = read_samples(open_store(seen.run), snapshot, open_store, num_rows=config.num_samples)
    page = render_page(snapshot, seen, samples).encode(errors="replace")
    put_page(config.output, page, open_store)
    return {
        "report": config.output,
        "bytes": len(page),
        "run": seen.run,
        "state": seen.state,
        "rows_done": seen.rows.done,
        "rows_total": seen.rows.total,
    }


def render_page(snapshot: Snapshot, seen: Overview, samples: list[Sample]) -> str:
    """Return the whole page as HTML."""
    import jinja2

    files = importlib.resources.files("batchinfer.runs") / "templates"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cut"] = cut
    style = (files / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    examples: dict[str, ErrorExample] = {}
    for view in seen.workers:
        examples |= {error_code(code): one for code, one in view.examples.items()}
    template = environment.from_string((files / "report.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        f=units,
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        version=__version__,
        seen=seen,
        figures=list(figures_of(seen)),
        drawings=(drawings := draw(snapshot.workers, seen)),
        ticks=ticks_of(seen) if drawings else [],
        columns=COLUMNS,
        workers=seen.workers[:MAX_WORKER_ROWS],
        examples=examples,
        samples=samples,
        max_settings=MAX_SETTINGS,
        settings=codec.encode_pretty(snapshot.run).decode() if snapshot.run else "",
    )


def cut(text: str, most: int = MAX_TEXT) -> str:
    """A text, cut after `most` characters. A text that was cut ends with the number of characters left out.

    >>> cut("abcdef", 3)
    'abc… (3 more characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def put_page(url: str, page: bytes, open_store: OpenStore) -> None:
    """Write a page to a path or URL. An older page there is replaced.

    Raises:
        ConfigError: the URL names no file, or names a folder.
    """
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


@run_command("report", ReportConfig, has_prices=True)
def command(config: ReportConfig) -> dict[str, Any]:
    """Write the run at RUN as one HTML page: progress, speed, errors, cost, workers, answers, settings.

    The page needs no network and runs no script; it can be mailed or put into a bucket.
    """
    from batchinfer.storage.opening import open_store

    return run_report(config, open_store=open_store, clock=SystemClock())
