"""`batchinfer status`: show the progress of a run. Only storage is read; no worker is asked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import click
import msgspec
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
from batchinfer.core.prices import Machine, Prices
from batchinfer.core.printable import printable_record
from batchinfer.core.records import Record
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.looks import RunReader
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
    "slow": "bold yellow",
    "stalled": "bold yellow",
    "idle": "bold yellow",
    "gone": "red",
    "failed": "bold red",
}
"""Colours of states. The name of the state is always shown, too."""
_NAMED_STATES = ("slow", "stalled", "gone", "failed")
"""States of workers that somebody should look at, so the workers are named."""


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
        return with_launches(self._overview(), self._store, self._config.namespace)

    def metrics(self) -> bytes:
        """Read the run as it is now. Return its figures in the text format of Prometheus.

        Raises:
            InputError: there is no such run, or the run cannot be read.
        """
        return metrics_text(self._overview())

    def _overview(self) -> Overview:
        return overview(self._reader.read(), self._prices, is_spot=self._config.is_spot)


def metrics_text(seen: Overview) -> bytes:
    """Return the figures of a run and its workers in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    samples = [
        WorkerSample(
            record=view.record,
            state=view.state,
            cost=view.cost,
            price_per_hour=view.price_per_hour,
            age_seconds=view.heartbeat_age_seconds,
        )
        for view in seen.workers
    ]
    figures: dict[str, float | None] = {
        "batchinfer_run_rows": seen.rows.total,
        "batchinfer_run_rows_done": seen.rows_finished,
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
    with Live(render(seen, console.width), console=console, auto_refresh=False) as live:
        try:
            while seen.state not in ("done", "stopped"):
                clock.sleep(every_seconds)
                seen = status.look()
                live.update(render(seen, console.width), refresh=True)
        except KeyboardInterrupt:
            pass
    return seen


# --------------------------------------------------------------------------- the screen


def render(seen: Overview, width: int = WIDE) -> Group:
    """Lay out the overview for a terminal of `width` characters. A narrow terminal gets fewer columns of workers."""
    seen = printable_record(seen)
    title = Text.assemble(
        (seen.model or "run", "bold"), "  ", (seen.run, "dim"), "  ", _styled(seen.state)
    )
    parts: list[Any] = [title]
    if seen.rows.total:
        bar = ProgressBar(total=seen.rows.total, completed=seen.rows_finished, width=72)
        bar.complete_style = "cyan"  # rich's default is a red, which means failure here
        parts += [bar, Text()]
    grid = Table.grid(padding=(0, 2))
    for name, text in _lines(seen):
        # Plain text: names from the bucket must not be read as rich's markup.
        grid.add_row(Text(name, style="dim"), Text(text))
    parts.append(grid)
    if seen.workers:
        parts.append(_worker_table(seen, is_wide=width >= WIDE))
    warnings = seen.warnings[:MAX_SHOWN_WARNINGS]
    if len(seen.warnings) > len(warnings):
        warnings.append(f"… and {len(seen.warnings) - len(warnings)} more (--json has all)")
    parts += [Text(f"warning: {warning}", style="bold yellow") for warning in warnings]
    parts += [Text(f"note: {note}", style="dim") for note in seen.notes]
    return Group(*parts)


def _lines(seen: Overview) -> Iterable[tuple[str, str]]:
    """Yield the lines above the table of workers, each with its name."""
    rows, chunks, totals = seen.rows, seen.chunks, seen.totals
    share = units.percent(seen.rows_finished, rows.total)
    of_all = f"{units.count(seen.rows_finished)} of {units.count(rows.total)} ({share})"
    in_open = f"{units.count(rows.in_progress)} of them in open chunks"
    yield "rows", f"{of_all}, {in_open}, {units.count(rows.waiting)} left"
    of_all = f"{units.count(chunks.done)} of {units.count(chunks.total)} done"
    in_open = f"{units.count(chunks.in_progress)} in progress"
    yield "chunks", f"{of_all}, {in_open}, {units.count(chunks.waiting)} waiting"
    if seen.workers:
        yield "workers", workers_text(seen.workers)
    for launch in seen.launches:
        yield "launched", launch_text(launch)
    if totals.reasoning_tokens:
        share = units.percent(totals.reasoning_tokens, totals.completion_tokens)
        yield "reasoning", f"{units.count(totals.reasoning_tokens)} tokens, {share} of the output"
    why = why_no_rows(seen)
    if seen.state not in ("done", "stopped"):
        yield "now", why or _rates(seen.recent)
    yield "over all", _rates(seen.overall)
    yield "time left", _time_left(seen, why)
    yield "cost", _cost(seen)
    if totals.errors:
        counts = (f"{units.count(number)} {code}" for code, number in totals.errors.items())
        yield "failed rows", ", ".join(counts)


def workers_text(workers: list[WorkerView]) -> str:
    """Say in words how many workers are in which state, and which of them somebody should look at."""
    parts = []
    for state, number in Counter(view.state for view in workers).most_common():
        names = [view.id for view in workers if view.state == state]
        more = ", …" if number > 3 else ""
        named = f" ({', '.join(names[:3])}{more})" if state in _NAMED_STATES else ""
        parts.append(f"{number} {state}{named}")
    return ", ".join(parts)


def _rates(rate: Rate) -> str:
    return (
        f"{units.short(rate.rows)} rows/s, {units.short(rate.input_tokens)} tok/s in, "
        f"{units.short(rate.output_tokens)} out, over {units.duration(rate.seconds)}"
    )


def why_no_rows(seen: Overview) -> str:
    """Say why no row is finished now, however many were before; "" if workers are at work."""
    states = {view.state for view in seen.workers}.intersection(ALIVE_STATES)
    if not states:
        return "no worker is at work"
    return "the engine is loading" if states == {"loading"} else ""


def _time_left(seen: Overview, why: str) -> str:
    if seen.state == "done":
        return "nothing left to do"
    if seen.eta_seconds is None:
        return f"not known: {why or 'no row was finished lately'}"
    return f"{units.duration(seen.eta_seconds)}, until {units.moment(seen.time + seen.eta_seconds)}"


def _cost(seen: Overview) -> str:
    cost = seen.cost
    if cost.so_far is None:
        return "not known: give --price-per-hour"
    parts = [f"{units.money(cost.so_far)} so far"]
    if cost.at_end is not None and seen.state != "done":
        parts.append(f"{units.money(cost.at_end)} at the end")
    if cost.per_million_output_tokens is not None:
        output, both = cost.per_million_output_tokens, cost.per_million_tokens
        parts.append(
            f"{units.money(output)} per million output tokens ({units.money(both)} with input)"
        )
    text = f"{', '.join(parts)} [{cost.source}]"
    if cost.unpriced_workers:
        text += f", without {cost.unpriced_workers} workers of unknown price"
    return text


def _styled(state: str) -> tuple[str, str]:
    return state, STATE_STYLES.get(state, "")


def place_of(machine: Machine) -> str:
    """Cloud and region as one text for people."""
    return "/".join(filter(None, (machine.cloud, machine.region))) or units.NONE


def gpus_of(machine: Machine) -> str:
    """Number and name of the GPUs as one text for people."""
    if not machine.accelerator:
        return units.NONE
    spot = " spot" if machine.is_spot else ""
    return f"{machine.gpus}\N{MULTIPLICATION SIGN}{machine.accelerator}{spot}"


class _Column(NamedTuple):
    """One column of the table of workers. A narrow terminal shows only the columns with `is_vital`."""

    name: str
    cell: Callable[[WorkerView], str]
    is_text: bool = False
    is_vital: bool = True


def _chunks(view: WorkerView) -> str:
    names = list(view.record.open_chunks)
    return names[0] + (f" +{len(names) - 1}" if names[1:] else "") if names else units.NONE


_COLUMNS = (
    _Column("worker", lambda view: view.id, is_text=True),
    _Column("where", lambda view: place_of(view.machine), is_text=True, is_vital=False),
    _Column("GPUs", lambda view: gpus_of(view.machine), is_text=True, is_vital=False),
    _Column("state", lambda view: view.state, is_text=True),
    _Column("chunks", _chunks, is_text=True, is_vital=False),
    _Column("rows", lambda view: units.count(view.record.rows_done)),
    _Column("rows/s", lambda view: units.short(view.recent.rows)),
    _Column("tok/s out", lambda view: units.short(view.recent.output_tokens)),
    _Column("errors", lambda view: units.count(view.record.rows_error), is_vital=False),
    _Column("starts", lambda view: str(len(view.record.starts)), is_vital=False),
    _Column("heartbeat", lambda view: f"{units.duration(view.heartbeat_age_seconds)} ago"),
)


def _worker_table(seen: Overview, *, is_wide: bool) -> Table:
    """Lay out the table of workers: those first that are or should be at work."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [column for column in _COLUMNS if is_wide or column.is_vital]
    for column in columns:
        table.add_column(
            column.name, justify="left" if column.is_text else "right", no_wrap=True, max_width=32
        )
    order = sorted(seen.workers, key=lambda view: (view.state in ("done", "gone"), view.id))
    for view in order[:MAX_SHOWN_WORKERS]:
        table.add_row(*(Text(*_styled(column.cell(view))) for column in columns))
    if len(order) > MAX_SHOWN_WORKERS:
        table.add_row(f"… and {len(order) - MAX_SHOWN_WORKERS} more (--json has all)")
    return table


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
    *, is_watch: bool, refresh_seconds: float, is_json: bool, is_prometheus: bool, **options: Any
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
    return seen if is_json else _without_lists(seen)


def _without_lists(seen: Overview) -> dict[str, Any]:
    """The figures of a run as one short JSON object, without those of each worker."""
    figures: dict[str, Any] = msgspec.to_builtins(seen)
    return {name: value for name, value in figures.items() if not isinstance(value, list)}
