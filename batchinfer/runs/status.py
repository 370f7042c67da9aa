"""`batchinfer status`: show the progress of a run. Only storage is read; no worker is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import click
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.values import NumberRange
from batchinfer.core import units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import ConfigError
from batchinfer.core.prices import Prices
from batchinfer.core.printable import printable_record
from batchinfer.core.records import Record
from batchinfer.ledger.inventory import RunReader, Snapshot
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.metrics import WorkerSample, families_of, run_families
from batchinfer.runs.launched import launch_text, with_launches
from batchinfer.runs.overview import ALIVE_STATES, Overview, Rate, WorkerView, overview

MAX_SHOWN_WORKERS = 60
MAX_SHOWN_WARNINGS = 10
WIDE = 120
"""Width in characters of a wide terminal. Only a terminal at least this wide shows all columns of workers."""
STATE_STYLES = {
    "done": "green",
    "running": "bold green",
    "loading": "cyan",
    "waiting": "cyan",
    "stalled": "bold yellow",
    "idle": "bold yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "gone": "red",
    "failed": "bold red",
}
"""Colours of states. The name of the state is always shown, too."""


class StatusConfig(Record, frozen=True, kw_only=True):
    """What to show. `price_per_hour` is the price of one worker's machine in dollars."""

    run: str
    job: str = ""
    price_per_hour: float | None = None
    is_spot: bool | None = None
    namespace: str = ""
    """Namespace of Kubernetes in which launched workers are looked for; empty: that of kubectl's context."""


class Status:
    """Reads one run, any number of times, and changes nothing.

    After the first, a `look` costs about one request for each page of a listing, and one for each worker's record that
    has changed.
    """

    def __init__(self, config: StatusConfig, *, open_store: OpenStore, clock: Clock) -> None:
        self._config = config
        self._store = open_store(config.run)
        self._reader = RunReader(self._store, open_store, clock, config.job)
        self._prices = Prices(config.price_per_hour)

    def look(self) -> Overview:
        """Read the run as it is now.

        Raises:
            InputError: there is no such run, or the run cannot be read.
        """
        seen = overview(self._reader.read(), self._prices, is_spot=self._config.is_spot)
        return with_launches(seen, self._store, self._config.namespace)

    def metrics(self) -> bytes:
        """Read the run as it is now. Return its figures in the text format of Prometheus.

        Raises:
            InputError: there is no such run, or the run cannot be read.
        """
        snapshot = self._reader.read()
        seen = overview(snapshot, self._prices, is_spot=self._config.is_spot)
        return metrics_text(snapshot, seen)


def metrics_text(snapshot: Snapshot, seen: Overview) -> bytes:
    """Return the figures of a run and its workers in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    views = {view.id: view for view in seen.workers}
    samples = [
        WorkerSample(
            record=worker.record,
            state=view.state,
            cost=view.cost,
            price_per_hour=view.price_per_hour,
            age_seconds=view.heartbeat_age_seconds,
        )
        for worker in snapshot.workers
        if (view := views.get(worker.record.id)) is not None
    ]
    figures: dict[str, float | None] = {
        "batchinfer_run_rows": seen.rows.total,
        "batchinfer_run_rows_done": seen.rows.done + seen.rows.in_progress,
        "batchinfer_run_chunks": seen.chunks.total,
        "batchinfer_run_chunks_done": seen.chunks.done,
    }

    class Figures:
        def collect(self) -> Iterable[Any]:
            yield from families_of(seen.run, samples)
            yield from run_families(seen.run, figures)

    registry = CollectorRegistry()
    registry.register(Figures())
    return generate_latest(registry)


def run_status(config: StatusConfig, *, open_store: OpenStore, clock: Clock) -> Overview:
    """Read a run once and return its overview."""
    return Status(config, open_store=open_store, clock=clock).look()


def watch(status: Status, console: Console, clock: Clock, every_seconds: float) -> Overview:
    """Show the run again every `every_seconds` seconds, until the run is done or stopped or the user interrupts.

    Returns:
        The overview that was shown last.
    """
    seen = status.look()
    with Live(
        render(seen, console.width), console=console, auto_refresh=False, screen=False
    ) as live:
        try:
            while seen.state not in ("done", "stopped"):
                clock.sleep(every_seconds)
                seen = status.look()
                live.update(render(seen, console.width), refresh=True)
        except KeyboardInterrupt:
            pass
    return seen


def summary(seen: Overview) -> dict[str, Any]:
    """The most important figures of a run. `status` prints them as its result; with --json it prints all figures."""
    return {
        "run": seen.run,
        "state": seen.state,
        "chunks_done": seen.chunks.done,
        "chunks_total": seen.chunks.total,
        "rows_done": seen.rows.done,
        "rows_total": seen.rows.total,
        "rows_error": seen.rows_error,
        "rows_per_sec": round(seen.recent.rows, 3),
        "tokens_per_sec": {
            "input": round(seen.recent.input_tokens, 3),
            "output": round(seen.recent.output_tokens, 3),
        },
        "eta_sec": None if seen.eta_seconds is None else round(seen.eta_seconds),
        "cost": None if seen.cost.so_far is None else round(seen.cost.so_far, 4),
        "max_cost": seen.cost.limit,
        "hours": round(seen.hours, 4),
        "max_hours": seen.max_hours,
        "workers": len(seen.workers),
        "workers_expected": sum(launch.expected for launch in seen.launches) or None,
    }


# --------------------------------------------------------------------------- the screen


def render(seen: Overview, width: int = WIDE) -> Group:
    """Lay out the overview for a terminal of `width` characters. A narrow terminal gets fewer columns of workers."""
    seen = printable_record(seen)
    parts: list[Any] = [_head(seen)]
    if seen.workers:
        parts.append(_worker_table(seen, is_wide=width >= WIDE))
    if seen.errors:
        counts = ", ".join(f"{units.count(number)} {code}" for code, number in seen.errors.items())
        parts.append(Text(f"failed rows: {counts}", style="yellow"))
    warnings = seen.warnings[:MAX_SHOWN_WARNINGS]
    if len(seen.warnings) > len(warnings):
        warnings.append(f"… and {len(seen.warnings) - len(warnings)} more (--json has all)")
    parts += [Text(f"warning: {warning}", style="bold yellow") for warning in warnings]
    parts += [Text(f"note: {note}", style="dim") for note in seen.notes]
    return Group(*parts)


def _head(seen: Overview) -> Group:
    state = (seen.state, STATE_STYLES.get(seen.state, ""))
    title = Text.assemble((seen.model or "run", "bold"), "  ", (seen.run, "dim"), "  ", state)
    rows, chunks = seen.rows, seen.chunks
    finished = rows.done + rows.in_progress
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()

    def add(name: str, text: str) -> None:
        grid.add_row(
            name, Text(text)
        )  # plain text: names from the bucket must not be read as rich's markup

    add(
        "rows",
        f"{units.count(finished)} of {units.count(rows.total)} ({units.percent(finished, rows.total)}), "
        f"{units.count(rows.in_progress)} of them in checkpoints, {units.count(rows.waiting)} left",
    )
    add(
        "chunks",
        f"{units.count(chunks.done)} of {units.count(chunks.total)} done, "
        f"{units.count(chunks.in_progress)} in progress, {units.count(chunks.waiting)} waiting",
    )
    if seen.reasoning_tokens:
        share = seen.reasoning_tokens / max(seen.completion_tokens, 1)
        add("reasoning", f"{units.count(seen.reasoning_tokens)} tokens, {share:.0%} of the output")
    if seen.state not in ("done", "stopped"):
        minutes = round(seen.recent.seconds / 60)
        rates = f"{_rates(seen.recent)} over the last {minutes} minutes"
        add("now", _why_no_rows(seen) or rates)
    add("over all", f"{_rates(seen.overall)} over {units.duration(seen.overall.seconds)}")
    add("time left", _time_left(seen))
    add("cost", _cost(seen))
    if seen.max_hours is not None:
        add("hours", f"{seen.hours:.2f} of {seen.max_hours:g} (--max-hours)")
    for launch in seen.launches:
        add("launched", launch_text(launch))
    bar = Table.grid()
    if rows.total:
        bar.add_row(
            ProgressBar(
                total=rows.total,
                completed=min(finished, rows.total),
                width=72,
                complete_style="cyan",  # rich's default is a red, which means failure here
                finished_style="green",
            )
        )
    return Group(title, bar, grid)


def _rates(rate: Rate) -> str:
    return (
        f"{units.short(rate.rows)} rows/s, {units.short(rate.input_tokens)} tok/s in, "
        f"{units.short(rate.output_tokens)} out"
    )


def _why_no_rows(seen: Overview) -> str:
    """Say why no row is finished now, however many were before; "" if workers are at work."""
    states = {view.state for view in seen.workers}.intersection(ALIVE_STATES)
    if not states:
        return "no worker is at work"
    return "the engine is loading" if states == {"loading"} else ""


def _time_left(seen: Overview) -> str:
    if seen.state == "done":
        return "nothing left to do"
    if seen.eta_seconds is None:
        why = _why_no_rows(seen) or "no row was finished lately"
        return f"not known: {why}" if seen.rows.total else "not known"
    return f"{units.duration(seen.eta_seconds)}, until {units.moment(seen.time + seen.eta_seconds)}"


def _cost(seen: Overview) -> str:
    cost = seen.cost
    if cost.so_far is None:
        return "not known: give --price-per-hour"
    allowed = f" of {units.money(cost.limit)} (--max-cost)" if cost.limit is not None else ""
    parts = [f"{units.money(cost.so_far)} so far{allowed}"]
    if cost.at_end is not None and seen.state != "done":
        parts.append(f"{units.money(cost.at_end)} at the end")
    if cost.per_million_output_tokens is not None:
        parts.append(
            f"{units.money(cost.per_million_output_tokens)} per million output tokens "
            f"({units.money(cost.per_million_tokens)} with input)"
        )
    text = ", ".join(parts) + f" [{cost.source}]"
    if cost.unpriced_workers:
        text += f", without {cost.unpriced_workers} workers of unknown price"
    return text


def _worker_table(seen: Overview, *, is_wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [column for column in _WORKER_COLUMNS if is_wide or column.is_vital]
    for column in columns:
        table.add_column(column.name, justify=column.justify, no_wrap=True)
    order = sorted(seen.workers, key=lambda view: (view.state in ("done", "gone"), view.id))
    for view in order[:MAX_SHOWN_WORKERS]:
        cells = (column.cell(view) for column in columns)
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in cells))
    if len(order) > MAX_SHOWN_WORKERS:
        table.add_row(f"… and {len(order) - MAX_SHOWN_WORKERS} more (--json has all)")
    return table


def _short_id(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:12]}…{name[-19:]}"


def _chunks(view: WorkerView) -> str:
    if not view.open_chunks:
        return units.NONE
    more = len(view.open_chunks) - 1
    return view.open_chunks[0] + (f" +{more}" if more else "")


class _WorkerColumn(NamedTuple):
    """One column of the table of workers. A narrow terminal shows only the columns with `is_vital`."""

    name: str
    cell: Callable[[WorkerView], str]
    justify: Literal["left", "right"] = "right"
    is_vital: bool = True


_WORKER_COLUMNS = (
    _WorkerColumn("worker", lambda view: _short_id(view.id), "left"),
    _WorkerColumn("where", lambda view: view.place, "left", is_vital=False),
    _WorkerColumn("GPUs", lambda view: view.machine, "left", is_vital=False),
    _WorkerColumn("state", lambda view: view.state, "left"),
    _WorkerColumn("chunks", _chunks, "left", is_vital=False),
    _WorkerColumn("rows", lambda view: units.count(view.rows_done)),
    _WorkerColumn("rows/s", lambda view: units.short(view.recent.rows)),
    _WorkerColumn("tok/s out", lambda view: units.short(view.recent.output_tokens)),
    _WorkerColumn("errors", lambda view: units.count(view.rows_error), is_vital=False),
    _WorkerColumn("starts", lambda view: str(view.epoch), is_vital=False),
    _WorkerColumn("heartbeat", lambda view: f"{units.duration(view.heartbeat_age_seconds)} ago"),
)


# --------------------------------------------------------------------------- the command


@click.command("status")
@click.argument("run")
@click.option("--job", default="", help="URL of the job, where run.json does not lead to it.")
@click.option(
    "--watch", "is_watch", is_flag=True, help="Keep showing it until it is done or Ctrl-C."
)
@click.option(
    "--refresh-seconds",
    type=NumberRange(0.5),
    default=10.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@click.option("--json", "is_json", is_flag=True, help="Everything as JSON on stdout, no table.")
@click.option(
    "--prometheus",
    "is_prometheus",
    is_flag=True,
    help="Metrics for Prometheus as text on stdout, for a push; no table.",
)
@click.option("--namespace", default="", help="Namespace of launched workers (kubernetes).")
@price_options
@common_options
def command(
    *,
    is_watch: bool,
    refresh_seconds: float,
    is_json: bool,
    is_prometheus: bool,
    **options: Any,
) -> Any:
    """Show how the run at RUN goes: progress, rates, time left, errors, workers, cost.

    Reads the workers' heartbeats and the list of markers, never an output; changes nothing.
    """
    from batchinfer.storage.opening import open_store

    if is_prometheus and (is_watch or is_json):
        raise ConfigError(
            "--prometheus: prints metrics once, without --watch or --json",
            hint="leave the other option out",
        )
    clock = SystemClock()
    status = Status(StatusConfig(**options), open_store=open_store, clock=clock)
    if is_prometheus:
        sys.stdout.buffer.write(status.metrics())
        return None
    if is_json and not is_watch:
        return status.look()
    # If stderr is a file, it has no width. A width of 160 characters gives it the whole table.
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    if is_watch:
        seen = watch(status, console, clock, refresh_seconds)
    else:
        seen = status.look()
        console.print(render(seen, console.width))
    return seen if is_json else summary(seen)
