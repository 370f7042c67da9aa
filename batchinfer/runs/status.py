"""`batchinfer status`: show the progress of a run. Only storage is read; no worker is asked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchinfer.cli.config_commands import config_command
from batchinfer.cli.terminal import write
from batchinfer.core import units
from batchinfer.core.clock import Clock
from batchinfer.core.counts import most_common
from batchinfer.core.option_help import NO_OPTION, Opt
from batchinfer.core.printable import printable_record
from batchinfer.core.records import Record
from batchinfer.ledger.inventory import read_markers
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.looks import Snapshot, look_at
from batchinfer.ledger.metrics import families_of, run_families
from batchinfer.runs.launched import launch_text, with_launches
from batchinfer.runs.overview import Overview, Rate, WorkerView, add_up, overview, rows_of

MAX_SHOWN_WORKERS = 60
_ALARMING = ("idle", "slow", "stalled", "gone", "failed")
"""States at which somebody should look: they are red, and workers in them are named. All others are green."""
_TOO_EARLY_SECONDS = 60.0
_MOST_MARKERS = 2000
"""Most markers that `status` reads, where it has to."""


class RunConfig(Record, frozen=True, kw_only=True):
    """Which run to look at. `price_per_hour` is the price of one worker's machine in dollars."""

    run: Annotated[str, NO_OPTION]
    job: Annotated[str, Opt(metavar="URL")] = ""
    """The job, where run.json and the run's place do not tell."""
    namespace: str = ""
    """Namespace of launched workers (kubernetes)."""
    price_per_hour: Annotated[float | None, NO_OPTION] = None
    is_spot: Annotated[bool | None, NO_OPTION] = None


class StatusConfig(Record, frozen=True, kw_only=True):
    """Which run to show, and how."""

    look: RunConfig
    watch: bool = False
    """Keep showing it until it is done or stopped, or Ctrl-C."""
    refresh_seconds: Annotated[float, msgspec.Meta(ge=0.5)] = 10.0
    """Seconds between two looks of --watch."""
    as_json: Annotated[bool, Opt(flag="--json")] = False
    """Everything as JSON on stdout, no table."""
    prometheus: bool = False
    """Metrics for Prometheus as text on stdout, for a push; no table."""


def run_status(config: RunConfig, *, open_store: OpenStore, clock: Clock) -> Overview:
    """Read a run as it is now. Changes nothing.

    This costs about one request for each page of a listing, and two for each worker.

    Raises:
        InputError: there is no such run, or the run cannot be read.
    """
    return look_closely(config, open_store=open_store, clock=clock, reads_markers=False)[1]


def look_closely(
    config: RunConfig, *, open_store: OpenStore, clock: Clock, reads_markers: bool = True
) -> tuple[Snapshot, Overview]:
    """Read a run and, if `reads_markers`, its markers: one request each. Their sums are exactly those of the outputs.

    Markers of a finished run are read in any case if some rows were asked again, which workers count twice, or are
    being asked again, and if there are not very many.

    Raises:
        InputError: there is no such run, or the run cannot be read.
    """
    store = open_store(config.run)
    snapshot = look_at(store, open_store, clock, config.job)
    generations = snapshot.markers
    rows = rows_of(snapshot)
    counted_rows = add_up(worker.record for worker in snapshot.workers).rows_done
    is_again = any(generations.values()) or counted_rows > sum(rows.values())
    is_done = rows.keys() <= generations.keys()
    reads_markers |= is_done and is_again and len(generations) <= _MOST_MARKERS
    counted = add_up(read_markers(store, generations).values()) if reads_markers else None
    seen = overview(snapshot, config.price_per_hour, is_spot=config.is_spot, of_markers=counted)
    return snapshot, with_launches(seen, store, config.namespace)


def metrics_text(seen: Overview) -> bytes:
    """Return the figures of a run and its workers in the text format of Prometheus."""
    from prometheus_client import generate_latest

    figures = {
        "batchinfer_run_rows": seen.rows.total,
        "batchinfer_run_rows_done": seen.rows_finished,
        "batchinfer_run_chunks": seen.chunks.total,
        "batchinfer_run_chunks_done": seen.chunks.done,
    }
    families = chain(families_of(seen.run, seen.workers), run_families(seen.run, figures))
    registry: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(registry)


def watch(
    look: Callable[[], Overview], console: Console, clock: Clock, every_seconds: float
) -> Overview:
    """Show the run again every `every_seconds` seconds, until the run is done or stopped or the user interrupts.

    Args:
        look: Reads the run.
        console: Where to show it.
        clock: Sleeps.
        every_seconds: Seconds between two looks; 0 to look once.

    Returns:
        The overview that was shown last.
    """
    seen = look()
    live = Live(render(seen, console.width), console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), live:
        while every_seconds and seen.state not in ("done", "stopped"):
            # A log has one look after the other. `live` prints the last one.
            if not console.is_terminal:
                console.print(render(seen, console.width))
            clock.sleep(every_seconds)
            seen = look()
            live.update(render(seen, console.width), refresh=True)
    return seen


# --------------------------------------------------------------------------- the words, for the screen and the report


Figure = tuple[str, str, str]
"""One figure of a run: its name, the figure itself, and what is to be said of it."""


def figures_of(seen: Overview) -> Iterator[Figure]:
    """Yield the figures of a run in words, the most important ones first."""
    rows, chunks, totals, count = seen.rows, seen.chunks, seen.totals, units.count
    left = f"{count(rows.in_progress)} of them in open chunks, {count(rows.waiting)} left"
    more = f"{count(seen.rows_finished)} of {count(rows.total)}, {left}"
    yield "rows", units.percent(seen.rows_finished, rows.total), more
    more = f"{count(chunks.in_progress)} in progress, {count(chunks.waiting)} waiting"
    yield "chunks", f"{count(chunks.done)} of {count(chunks.total)} done", more
    if seen.state not in ("done", "stopped"):
        why = _why_no_rows(seen)
        yield ("now", why, "") if why else _rate("now", seen.recent)
        if seen.eta_seconds is None:
            is_early = seen.recent.seconds < _TOO_EARLY_SECONDS
            lately = "too early to say" if is_early else "no row was finished lately"
            yield "time left", "not known", why or lately
        else:
            until = f"until {units.moment(seen.time + seen.eta_seconds)}"
            yield "time left", units.duration(seen.eta_seconds), until
    yield _rate("over all", seen.overall)
    yield _cost(seen)
    codes = (f"{count(number)} {code}" for code, number in most_common(totals.errors))
    yield "failed rows", count(totals.rows_error), ", ".join(codes)
    if totals.reasoning_tokens:
        share = units.percent(totals.reasoning_tokens, totals.completion_tokens)
        yield "reasoning", f"{count(totals.reasoning_tokens)} tokens", f"{share} of the output"
    if seen.workers:
        yield "workers", count(len(seen.workers)), workers_text(seen.workers)
    for launch in seen.launches:
        yield "launched", count(launch.workers), launch_text(launch)


def workers_text(workers: list[WorkerView]) -> str:
    """Say in words how many workers are in which state, and which of them somebody should look at."""
    parts = []
    for state, number in Counter(view.state for view in workers).most_common():
        names = [view.id for view in workers if view.state == state]
        named = f" ({', '.join(names[:3])}{', …' if number > 3 else ''})"
        parts.append(f"{number} {state}{named if state in _ALARMING else ''}")
    return ", ".join(parts)


def _rate(name: str, rate: Rate) -> Figure:
    rest = f"{units.short(rate.rows)} rows/s, over {units.duration(rate.seconds)}"
    more = f"{units.short(rate.input_tokens)} of input, {rest}"
    return name, f"{units.short(rate.output_tokens)} tokens/s", more


def _why_no_rows(seen: Overview) -> str:
    """Say why no row is finished now, however many were before; "" if workers are at work."""
    states = {view.state for view in seen.workers if view.is_alive}
    if not states:
        return "no worker is at work"
    return "the engine is loading" if states == {"loading"} else ""


def _cost(seen: Overview) -> Figure:
    cost, money = seen.cost, units.money
    if cost.so_far is None:
        return "cost", "not known", "give --price-per-hour"
    parts = []
    if seen.state != "done":
        parts += [f"{money(cost.at_end)} at the end", f"{money(cost.per_hour_now)} an hour"]
    if cost.per_million_output_tokens is not None:
        output, both = money(cost.per_million_output_tokens), money(cost.per_million_tokens)
        parts.append(f"{output} per million output tokens ({both} with input)")
    parts.append(cost.source)
    if cost.unpriced_workers:
        parts.append(f"without {cost.unpriced_workers} workers of unknown price")
    return "cost", money(cost.so_far), ", ".join(parts)


class Column(NamedTuple):
    """One column of the table of workers. A terminal shows it from a width of `least_width` on, the report always."""

    name: str
    cell: Callable[[WorkerView], str]
    is_text: bool = False
    least_width: int = 0


def _machine(view: WorkerView) -> str:
    machine = view.machine
    gpus = f"{machine.gpus}\N{MULTIPLICATION SIGN}{machine.accelerator}" if machine.gpus else ""
    place = "/".join(filter(None, (machine.cloud, machine.region)))
    return " ".join(filter(None, (gpus, "spot" * machine.is_spot, place)))


def _chunks(view: WorkerView) -> str:
    first, *others = view.open_chunks or [""]
    return first + (f" +{len(others)}" if others else "")


COLUMNS = (
    Column("worker", lambda view: view.id, is_text=True),
    Column("state", lambda view: view.state, is_text=True),
    Column("machine", _machine, is_text=True, least_width=160),
    Column("chunks", _chunks, is_text=True, least_width=120),
    Column("rows", lambda view: units.count(view.rows_done)),
    Column("rows/s", lambda view: units.short(view.recent.rows)),
    Column("tokens/s", lambda view: units.short(view.recent.output_tokens)),
    Column("failed", lambda view: units.count(view.rows_error), least_width=120),
    Column("resumed", lambda view: units.count(view.rows_resumed), least_width=160),
    Column("starts", lambda view: str(view.num_starts), least_width=120),
    Column("up", lambda view: units.duration(view.up_seconds), least_width=160),
    Column("cost", lambda view: units.money(view.money.cost), least_width=160),
    Column("heartbeat", lambda view: f"{units.duration(view.heartbeat_age_seconds)} ago"),
)


# --------------------------------------------------------------------------- the screen


def render(seen: Overview, width: int) -> Group:
    """Lay out the overview for a terminal of `width` characters. A narrow terminal gets fewer columns of workers."""
    seen = printable_record(seen)
    state = Text(seen.state, _style(seen.state))
    title = Text.assemble((seen.model or "run", "bold"), "  ", (seen.run, "dim"), "  ", state)
    # rich's default is a red, which means failure here
    bar = ProgressBar(seen.rows.total, seen.rows_finished, width=72, complete_style="cyan")
    grid = Table.grid(padding=(0, 2))
    for name, figure, more in figures_of(seen):
        # Plain text: names from the bucket must not be read as rich's markup.
        grid.add_row(Text(name, style="dim"), Text(", ".join(filter(None, (figure, more)))))
    parts: list[Any] = [title, bar, Text(), grid]
    if seen.workers:
        parts.append(_worker_table(seen.workers, width))
    return Group(*parts, *(Text(f"note: {note}", style="dim") for note in seen.notes))


def _style(state: str) -> str:
    return "bold red" if state in _ALARMING else "green"


def _worker_table(workers: list[WorkerView], width: int) -> Table:
    """Lay out the table of workers: those first that are or should be at work."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [column for column in COLUMNS if width >= column.least_width]
    for column in columns:
        justify: Any = "left" if column.is_text else "right"
        # A long name takes several lines, for its end tells workers apart. A number is never cut.
        how: Any = {"no_wrap": not column.is_text, "overflow": "fold", "max_width": 32}
        how |= {"min_width": 8} if column.is_text else {}
        table.add_column(column.name, justify=justify, **how)
    order = sorted(workers, key=lambda view: (not view.is_alive, view.state == "done", view.id))
    for view in order[:MAX_SHOWN_WORKERS]:
        styles = {"state": _style(view.state)}
        table.add_row(*(Text(one.cell(view), styles.get(one.name, "")) for one in columns))
    if len(order) > MAX_SHOWN_WORKERS:
        table.add_row(f"… and {len(order) - MAX_SHOWN_WORKERS} more (--json has all)")
    return table


# --------------------------------------------------------------------------- the command


@config_command("status", StatusConfig, has_prices=True)
def command(show: StatusConfig) -> Any:
    """Show how the run at RUN goes: progress, rates, time left, errors, workers, cost.

    Reads the workers' heartbeats and the list of markers, never an output; changes nothing.
    """
    from batchinfer.storage.opening import open_store

    clock = Clock()
    # If stderr is a file, it has no width. A width of 160 characters gives it the whole table.
    width, is_quiet = None if sys.stderr.isatty() else 160, show.as_json or show.prometheus
    console = Console(stderr=True, highlight=False, width=width, quiet=is_quiet and not show.watch)
    look = partial(run_status, show.look, open_store=open_store, clock=clock)
    seen = watch(look, console, clock, show.refresh_seconds if show.watch else 0.0)
    if show.prometheus:
        write(metrics_text(seen).decode())
        return None
    if show.as_json:
        return seen
    figures: dict[str, Any] = msgspec.to_builtins(seen)
    return {name: value for name, value in figures.items() if not isinstance(value, list)}
