"""`batchinfer report`: write one HTML page about a run, finished or not. The page needs no other files."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import click

from batchinfer.cli.settings import common_options, price_options
from batchinfer.core import units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.prices import Prices
from batchinfer.core.printable import error_code
from batchinfer.core.records import ErrorExample, Record, Worker
from batchinfer.ledger.inventory import RunReader, Snapshot
from batchinfer.ledger.jobs import OpenStore
from batchinfer.runs import charts
from batchinfer.runs.answers import (
    Answers,
    DoneChunk,
    Piece,
    WorkerShare,
    most,
    pieces_of,
    read_answers,
    shares_of,
    with_answers,
)
from batchinfer.runs.launched import with_launches
from batchinfer.runs.overview import RECENT_MINUTES, Overview, add_up, overview
from batchinfer.runs.pages import put_page, render_template
from batchinfer.runs.samples import SampleRow, cut, read_samples

MAX_LANES = 100
"""Largest number of workers that are drawn in the time line."""
MAX_WORKER_ROWS = 300
"""Largest number of workers that are listed in the table."""
MAX_SETTING = 4000
"""Largest number of characters that are shown of one setting."""


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
    """
    store = open_store(config.run)
    prices = Prices(config.price_per_hour)
    snapshot = RunReader(store, open_store, clock, config.job).read()
    answers = read_answers(store, snapshot)
    seen = with_answers(overview(snapshot, prices, is_spot=config.is_spot), answers)
    seen = with_launches(seen, store)
    samples = (
        read_samples(store, snapshot, open_store, num_rows=config.num_samples)
        if config.num_samples
        else []
    )
    num_bytes = put_page(config.output, render_page(snapshot, seen, answers, samples), open_store)
    return {
        "report": config.output,
        "bytes": num_bytes,
        "run": seen.run,
        "state": seen.state,
        "chunks_done": seen.chunks.done,
        "chunks_total": seen.chunks.total,
        "rows_done": seen.rows.done,
        "rows_total": seen.rows.total,
    }


# --------------------------------------------------------------------------- the page


def render_page(
    snapshot: Snapshot,
    seen: Overview,
    answers: Answers,
    samples: Sequence[SampleRow],
) -> str:
    """Return the whole page as HTML."""
    gone = {view.id for view in seen.workers if view.state == "gone"}
    pieces = pieces_of(answers, snapshot, gone)
    shares = shares_of(answers, pieces)
    return render_template(
        "report.html.jinja",
        seen=seen,
        tiles=_tiles(seen),
        workers=seen.workers[:MAX_WORKER_ROWS],
        shares=shares,
        most_tokens=max((share.tokens for share in shares.values()), default=0.0),
        no_share=WorkerShare(),
        num_hidden_workers=max(0, len(seen.workers) - MAX_WORKER_ROWS),
        samples=samples,
        settings=_settings(snapshot),
        **_charts(snapshot, seen, answers, pieces, gone),
        **_sums([worker.record for worker in snapshot.workers], seen),
    )


def _charts(
    snapshot: Snapshot,
    seen: Overview,
    answers: Answers,
    pieces: Sequence[Piece],
    gone: Collection[str],
) -> dict[str, Any]:
    workers = sorted(snapshot.workers, key=lambda worker: worker.record.id)
    life = charts.life_of(workers)
    done: dict[str, list[DoneChunk]] = {}
    for chunk in answers.chunks:
        done.setdefault(chunk.worker, []).append(chunk)
    lanes = [
        charts.lane_of(
            worker, life, done.get(worker.record.id, ()), is_gone=worker.record.id in gone
        )
        for worker in workers[:MAX_LANES]
    ]
    found: dict[str, Any] = {
        "throughput": None,
        "progress": None,
        "lanes": lanes,
        "ticks": charts.time_ticks(life),
        "num_hidden_lanes": len(workers) - len(lanes),
        "num_kills": sum(lane.num_kills for lane in lanes),
        **_lengths([worker.record for worker in workers], seen, answers),
    }
    if pieces and workers:
        bins = charts.Bins.covering(life)
        series = charts.series_of(pieces, workers, bins)
        found["throughput"] = charts.throughput(series, bins, life)
        found["progress"] = charts.progress(series, bins, life, seen.rows.total or 0)
    return found


def _lengths(
    records: Sequence[Worker], seen: Overview, answers: Answers
) -> dict[str, list[charts.Column]]:
    """Histograms of the lengths of prompts and answers.

    They are by the markers, and until the run is done also by the workers' records. If the markers have no lengths,
    they are by the records alone.
    """
    prompts = [add_up(record.prompt_lengths for record in records)]
    completions = [add_up(record.completion_lengths for record in records)]
    if answers.has_shapes:
        if seen.state == "done":
            prompts, completions = [], []
        prompts.append(answers.prompt_lengths)
        completions.append(answers.completion_lengths)
    return {
        "prompt_lengths": charts.histogram([most(*prompts)]),
        "answer_lengths": charts.histogram([most(*completions)]),
    }


def _sums(records: Sequence[Worker], seen: Overview) -> dict[str, Any]:
    """One example of each error code, and those sums over all workers that the overview lacks."""
    examples: dict[str, ErrorExample] = {}
    for record in records:
        coded = {error_code(code): example for code, example in record.examples.items()}
        examples = coded | examples
    return {
        "examples": examples,
        "rows_resumed": sum(record.rows_resumed for record in records),
        "num_starts": sum(record.epoch for record in records),
        "up_seconds": sum(worker.up_seconds for worker in seen.workers),
    }


def _tiles(seen: Overview) -> list[tuple[str, str, str]]:
    """The figures at the top of the page, each as (name, figure, text in small print)."""
    is_over = seen.state in ("done", "stopped")
    rate = seen.overall if is_over else seen.recent
    rows = seen.rows.done + seen.rows.in_progress
    done = units.percent(rows, seen.rows.total) if seen.rows.total else units.count(rows)
    when = "" if seen.eta_seconds is None else units.moment(seen.time + seen.eta_seconds)
    cost = seen.cost
    tiles = [
        ("rows done", done, f"{units.count(rows)} of {units.count(seen.rows.total)}"),
        (
            "chunks done",
            units.count(seen.chunks.done),
            f"of {units.count(seen.chunks.total)}, {units.count(seen.chunks.in_progress)} in progress",
        ),
        (
            "output tokens/s",
            units.short(rate.output_tokens),
            f"{units.short(rate.input_tokens)} input, {units.short(rate.rows)} rows/s; "
            + ("first start to end" if is_over else f"last {RECENT_MINUTES} min, live workers"),
        ),
        ("rows failed", units.count(seen.rows_error), units.percent(seen.rows_error, rows)),
    ]
    if is_over:
        from_when = f"from {units.moment(seen.started)}"
        tiles.insert(3, ("took", units.duration(seen.overall.seconds), from_when))
    elif seen.eta_seconds is not None:
        tiles.insert(3, ("time left", units.duration(seen.eta_seconds), when))
    if cost.so_far is not None:
        small = f"{units.money(cost.per_million_output_tokens)} per million output tokens"
        if cost.limit is not None:
            small = f"of {units.money(cost.limit)} (--max-cost); {small}"
        tiles.append(("cost" if is_over else "cost so far", units.money(cost.so_far), small))
    if seen.max_hours is not None:
        tiles.append(("hours", f"{seen.hours:.2f}", f"of {seen.max_hours:g} (--max-hours)"))
    return tiles


def _settings(snapshot: Snapshot) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings in run.json, in two sections, each as (section's title, [(dotted key, value)])."""
    if snapshot.run is None:
        return []
    run = snapshot.run
    return [
        ("Part of the fingerprint", flatten(run.config)),
        ("For the record", flatten(run.recorded)),
    ]


def flatten(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as a flat list of (dotted key, value), sorted by key. Empty settings are left out.

    >>> flatten({"b": 1, "a": {"x": "y", "z": None}})
    [('a.x', 'y'), ('b', '1')]
    """
    found: list[tuple[str, str]] = []
    for key, value in sorted(settings.items()):
        if value is None or value == "" or value in ([], {}):
            continue
        if isinstance(value, dict):
            found += flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found.append((prefix + key, cut(text, MAX_SETTING)))
    return found


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
    """Write the run at RUN as one HTML page: progress, time line, lengths, errors, cost, settings, answers.

    The page needs no network and runs no script; it can be mailed or put into a bucket.
    """
    from batchinfer.storage.opening import open_store

    return run_report(ReportConfig(**options), open_store=open_store, clock=SystemClock())
