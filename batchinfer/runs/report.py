"""`batchinfer report`: a run as one HTML page that needs nothing else, finished or not.

Whatever comes from the bucket is hostile: jinja escapes it, charts escape it, and the page forbids every script and
every request by its content security policy, so that nothing could run even if something got through.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from batchinfer import __version__
from batchinfer.cli.settings import common_options
from batchinfer.core import units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import AlreadyExists, ConfigError, ObjectNotFound
from batchinfer.core.records import Record, Worker
from batchinfer.ledger.jobs import split_name
from batchinfer.ledger.snapshot import RunReader, SeenWorker, Snapshot
from batchinfer.runs import charts
from batchinfer.runs.charts import (
    Band,
    Bins,
    Count,
    Extent,
    bins_by_worker,
    bins_of,
    cumulative,
    lanes_of,
    life_of,
)
from batchinfer.runs.overview import RECENT_MINUTES, Overview, overview
from batchinfer.runs.prices import price_options, price_source
from batchinfer.runs.samples import SampleRow, cut, read_samples
from batchinfer.storage import Store

MAX_BANDS = 7
"""So many workers have a colour of their own in a stacked chart; more are shown row by row."""
MAX_LANES = 100
MAX_WORKER_ROWS = 300
MAX_SETTING = 4000


class Chart(NamedTuple):
    """Markup of a chart, and what its colours mean as (style, name)."""

    svg: Any
    legend: list[tuple[str, str]]


def render_page(
    snapshot: Snapshot, seen: Overview, samples: Sequence[SampleRow], *, version: str
) -> str:
    """Make the whole page."""
    import jinja2

    files = importlib.resources.files("batchinfer.runs") / "templates"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(lambda name: (files / name).read_text(encoding="utf-8")),
    )
    environment.globals["f"] = units
    style = (files / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.jinja").render(
        style=_markup(style),
        policy=_policy(style),
        seen=seen,
        tiles=_tiles(seen),
        progress_bar=_markup(
            charts.share_bar(seen.rows.done, seen.rows.in_progress, seen.rows.total or 0)
        ),
        samples=samples,
        settings=_settings(snapshot),
        workers=_worker_rows(seen),
        num_hidden_workers=max(0, len(seen.workers) - MAX_WORKER_ROWS),
        version=version,
        **_charts(snapshot, seen),
        **_sums([worker.record for worker in snapshot.workers], seen),
    )


def _markup(text: str) -> Any:
    """Mark text as safe: only for what this package made or escaped itself."""
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704 - see the docstring; callers pass charts and the style sheet


def _policy(style: str) -> str:
    """No script, no request, no other style than the page's own."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


# --------------------------------------------------------------------------- figures


def _tiles(seen: Overview) -> list[tuple[str, str, str]]:
    """(name, figure, small print) of what people look for first."""
    is_over = seen.state in ("done", "stopped")
    rate = seen.overall if is_over else seen.recent
    rows = seen.rows.done + seen.rows.in_progress
    done = units.percent(rows, seen.rows.total) if seen.rows.total else units.count(rows)
    when = "" if seen.eta_seconds is None else units.moment(seen.time + seen.eta_seconds)
    cost = seen.cost
    return [
        ("rows done", done, f"{units.count(rows)} of {units.count(seen.rows.total)}"),
        (
            "chunks done",
            units.count(seen.chunks.done),
            f"of {units.count(seen.chunks.total)}, {units.count(seen.chunks.in_progress)} in progress",
        ),
        (
            "output tokens/s",
            units.short(rate.output_tokens),
            f"{units.short(rate.input_tokens)} input, {units.short(rate.rows)} rows/s "
            + ("over all" if is_over else f"(last {RECENT_MINUTES} min)"),
        ),
        ("took", units.duration(seen.overall.seconds), f"from {units.moment(seen.started)}")
        if is_over
        else ("time left", units.duration(seen.eta_seconds), when),
        (
            "cost" if is_over else "cost so far",
            units.money(cost.so_far),
            "price not known"
            if cost.so_far is None
            else f"{units.money(cost.per_million_output_tokens)} per million output tokens",
        ),
        (
            "rows failed",
            units.count(seen.rows_error),
            units.percent(seen.rows_error, sum(worker.rows_done for worker in seen.workers)),
        ),
    ]


def _sums(records: Sequence[Worker], seen: Overview) -> dict[str, Any]:
    """Finish reasons, errors with examples, and what the workers' machines cost."""
    examples: dict[str, Any] = {}
    for record in records:
        for code, example in record.examples.items():
            examples.setdefault(code, example)
    most = max(seen.errors.values(), default=0)
    total = sum(seen.finish_reasons.values())
    return {
        "errors": [
            (
                code,
                units.count(number),
                _markup(charts.rule(number, most, "bad")),
                examples.get(code),
            )
            for code, number in seen.errors.items()
        ],
        "finish_reasons": [
            (
                reason or "(none)",
                units.count(number),
                units.percent(number, total),
                _markup(charts.rule(number, total, "s1")),
            )
            for reason, number in seen.finish_reasons.items()
        ],
        "rows_resumed": sum(record.rows_resumed for record in records),
        "cached_tokens": sum(record.cached_tokens for record in records),
        "num_starts": sum(record.epoch for record in records),
        "up_seconds": sum(worker.up_seconds for worker in seen.workers),
    }


def _worker_rows(seen: Overview) -> list[dict[str, Any]]:
    top = max((worker.overall.output_tokens for worker in seen.workers), default=0.0)
    return [
        {
            "view": worker,
            "where": "/".join(filter(None, (worker.cloud, worker.region))) or units.NONE,
            "gpus": f"{worker.gpus} {worker.accelerator}{' spot' if worker.is_spot else ''}"
            if worker.accelerator
            else units.NONE,
            "rate": _markup(charts.rule(worker.overall.output_tokens, top, "s1")),
        }
        for worker in seen.workers[:MAX_WORKER_ROWS]
    ]


def _settings(snapshot: Snapshot) -> list[tuple[str, list[tuple[str, str]]]]:
    """run.json as (section, [(dotted key, value)]); what is empty is left out."""
    if snapshot.run is None:
        return []
    run = snapshot.run
    return [
        ("Part of the fingerprint", flatten(run.config)),
        ("For the record", flatten(run.recorded)),
    ]


def flatten(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted keys in order, without the empty ones.

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


# --------------------------------------------------------------------------- charts


def _charts(snapshot: Snapshot, seen: Overview) -> dict[str, Any]:
    workers = sorted(snapshot.workers, key=lambda worker: worker.record.id)
    records = [worker.record for worker in workers]
    return {
        **_over_time(workers, seen),
        **_timeline(workers),
        "prompt_lengths": _histogram([r.prompt_lengths for r in records], "Prompt lengths", "s1"),
        "answer_lengths": _histogram(
            [r.completion_lengths for r in records], "Answer lengths", "s2"
        ),
    }


def _over_time(workers: Sequence[SeenWorker], seen: Overview) -> dict[str, Any]:
    if not any(worker.record.minutes for worker in workers):
        return {"throughput": None, "progress": None, "heat": []}
    life = life_of(workers)
    extent = bins_of(life)
    bins = bins_by_worker(workers, extent)
    groups = _grouped(bins)
    legend = [(style, name) for name, style, _ in groups]
    rate = [
        Band(name, per_second(sums.output_tokens, extent, life), style)
        for name, style, sums in groups
    ]
    rows = [Band(name, cumulative(sums.rows), style) for name, style, sums in groups]
    return {
        "heat": _heat(bins, extent, life) if len(bins) > MAX_BANDS else [],
        "throughput": Chart(
            _markup(
                charts.stacked_areas(
                    rate,
                    extent,
                    life,
                    title="Output tokens per second by worker",
                    shown=units.short,
                )
            ),
            legend,
        ),
        "progress": Chart(
            _markup(
                charts.stacked_areas(
                    rows,
                    extent,
                    life,
                    title="Rows finished by worker",
                    shown=units.short,
                    is_sum=True,
                    maximum=float(seen.rows.total or 0),
                )
            ),
            legend,
        ),
    }


def per_second(values: Sequence[float], bins: Extent, life: Extent) -> list[float]:
    """Sums of bins as rates. The first and the last bin count for the part of them that anybody lived in.

    >>> per_second([30.0, 60.0], Extent(0.0, 120.0, 2), Extent(30.0, 120.0, 1))
    [1.0, 1.0]
    """
    rates: list[float] = []
    for index, value in enumerate(values):
        begin = bins.begin + index * bins.bin_seconds
        seconds = min(begin + bins.bin_seconds, life.end) - max(begin, life.begin)
        is_sliver = seconds < min(0.3 * bins.bin_seconds, 5.0) and len(values) > 1
        # Of a sliver the rate would be noise: it takes its neighbour's.
        rates.append((rates[-1] if rates else 0.0) if is_sliver else value / max(seconds, 1.0))
    return rates


def _grouped(bins: Sequence[Bins]) -> list[tuple[str, str, Bins]]:
    """(name, style, sums): every worker where they are few enough to tell apart, else all together."""
    if len(bins) <= MAX_BANDS:
        return [(one.worker, f"s{index + 1}", one) for index, one in enumerate(bins)]
    name = f"all {len(bins)} workers"
    sums = Bins(
        name,
        [sum(column) for column in zip(*(one.rows for one in bins), strict=True)],
        [sum(column) for column in zip(*(one.input_tokens for one in bins), strict=True)],
        [sum(column) for column in zip(*(one.output_tokens for one in bins), strict=True)],
    )
    return [(name, "s1", sums)]


def _heat(bins: Sequence[Bins], extent: Extent, life: Extent) -> list[tuple[str, Any, str]]:
    """(worker, its rate over time as shades, its highest rate): where a stacked chart has too many bands."""
    rates = {one.worker: per_second(one.output_tokens, extent, life) for one in bins[:MAX_LANES]}
    top = max((max(values, default=0.0) for values in rates.values()), default=0.0)
    return [
        (
            name,
            _markup(
                charts.heat_row(values, top, title=f"{name}: output tokens per second over time")
            ),
            units.short(max(values, default=0.0)),
        )
        for name, values in rates.items()
    ]


def _timeline(workers: Sequence[SeenWorker]) -> dict[str, Any]:
    extent = life_of(workers)
    lanes = lanes_of(workers[:MAX_LANES], extent, max_tracks=12 if len(workers) <= 10 else 6)
    return {
        "time_axis": _markup(charts.time_axis(extent)) if lanes else "",
        "lanes": [(line.worker, _markup(charts.lane(line, extent))) for line in lanes],
        "num_hidden_lanes": max(0, len(workers) - MAX_LANES),
        "num_kills": sum(mark.kind == "kill" for line in lanes for mark in line.marks),
    }


def _histogram(counts: Sequence[dict[str, int]], title: str, style: str) -> Any:
    """Rows by length; buckets are named by their upper bound, empty ones inside are kept."""
    sums: dict[int, int] = {}
    for one in counts:
        for bucket, number in one.items():
            if bucket.isdecimal():
                sums[int(bucket)] = sums.get(int(bucket), 0) + number
    if not sums:
        return None
    low, high = min(sums), max(sums)
    buckets = [low]
    while buckets[-1] < high and len(buckets) < 64:
        buckets.append(max(1, buckets[-1] * 2))
    bars = [
        Count(_tokens(bucket), float(sums.get(bucket, 0)), units.short(sums.get(bucket, 0)))
        for bucket in buckets
    ]
    return _markup(charts.columns(bars, title=title, style=style))


def _tokens(bucket: int) -> str:
    """The upper bound of a bucket, short.

    >>> _tokens(512), _tokens(2048)
    ('512', '2k')
    """
    return f"{bucket // 1024}k" if bucket >= 1024 and bucket % 1024 == 0 else str(bucket)


class ReportConfig(Record, frozen=True, kw_only=True):
    """What `report` is asked. `output` is a path or URL; `num_samples` rows of each of two chunks are shown."""

    run: str
    output: str
    job: str = ""
    price_per_hour: float | None = None
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
    prices = price_source(config.price_per_hour)
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

    return run_report(ReportConfig(**options), open_store=open_store, clock=SystemClock())
