"""Summary of a run at one moment: workers, progress, rates, time left and cost. `status` and `report` show it.

This module only computes; it makes no requests. A worker's clock may be hours off. So a worker's times are only
compared with each other, or converted to storage's clock by adding the offset of the worker's clock.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from batchinfer.clusters import LaunchRecord
from batchinfer.core.counts import Counts
from batchinfer.core.prices import Machine
from batchinfer.core.records import Money, Record, Run, Worker
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.jobs import rows_by_chunk
from batchinfer.ledger.looks import SeenWorker, Snapshot
from batchinfer.ledger.spending import machine_of, money_of, offset_of

RECENT_MINUTES = 5
"""Whole minutes over which recent rates are taken. The current minute is added to them."""
STALL_SECONDS = 600.0
"""Seconds without a finished row after which a worker with open chunks counts as stalled."""
SLOW_SHARE = 0.5
"""Share of the median rate of its like below which a worker counts as slow."""
_NEW_SECONDS = 5.0
"""Seconds after loading in which a worker without an open chunk counts as running: it is about to open its first."""
_FEWEST_SECONDS = 10.0
"""Fewest seconds of a rate of a later start, whose minute may have begun before its heartbeat."""
_JUDGED_SECONDS, _FEWEST_LIKE = 60.0, 3
"""Fewest seconds of a rate by which a worker is called slow, and fewest workers that it is compared with."""
ALIVE_STATES = ("running", "slow", "loading", "stalled", "waiting")


class Rate(Record, frozen=True):
    """Rows and tokens per second. `seconds` is the length of the time over which they were counted."""

    seconds: float = 0.0
    rows: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


class WorkerView(Worker, frozen=True, kw_only=True):
    """A worker's record, without its minutes, and what follows from it.

    `state` is that of the record, or slow, stalled or gone. `money` has the price and the cost wherever these are
    known. `clock_offset_seconds`: seconds that storage's clock is ahead of the worker's; 0 if they hardly differ.
    """

    money: Money
    machine: Machine
    recent: Rate
    heartbeat_age_seconds: float
    clock_offset_seconds: float

    @property
    def is_alive(self) -> bool:
        """Whether it is or should be at work."""
        return self.state in ALIVE_STATES


class Progress(Record, frozen=True):
    """How many chunks, or rows, are done.

    Chunks in progress are those that live workers have open. Rows in progress are the finished rows of chunks that are
    not done: those in checkpoints, or those that a live worker reports if they are more.
    """

    total: int
    done: int
    in_progress: int
    waiting: int


class Cost(Record, frozen=True, kw_only=True):
    """Cost in dollars. A cost is None if it cannot be computed, for example because no worker's price is known.

    `unpriced_workers` is the number of workers whose price is not known. No figure here includes them.
    """

    so_far: float | None = None
    at_end: float | None = None
    per_hour_now: float | None = None
    per_million_tokens: float | None = None
    per_million_output_tokens: float | None = None
    unpriced_workers: int
    source: str = ""


class LaunchView(LaunchRecord, frozen=True, kw_only=True):
    """The record of one launch, and what follows from it."""

    away: dict[str, list[int]] = {}
    """Ranks of the workers that never came or did not come back, by what is known of them."""
    lost: list[str] = []
    """Ids of those that do not come by themselves, and were not launched again."""
    coming: int = 0
    """Number of those that the cluster is still to start, or of which nobody here can say."""
    left: float | None = None
    """Dollars that the lost ones have left of their shares; None: they have no limit."""
    held: float | None = None
    """Dollars that those at work or to come may still spend; None: they have no limit, or nothing to do."""


class Overview(Record, frozen=True, kw_only=True):
    """A run at one moment. `status --json` prints these fields."""

    run: str
    job: str
    model: str
    fingerprint: str
    state: str
    """empty, loading, running, waiting, stalled, idle (no worker is alive), stopping, stopped or done."""
    time: float
    """Moment of the overview, in Unix seconds by this machine's clock, or by storage's clock if that is ahead."""
    started: float | None
    chunks: Progress
    rows: Progress
    recent: Rate
    overall: Rate
    eta_seconds: float | None
    totals: Counts
    """Sums over the workers' records; `report` has those over the markers, once they count more."""
    cost: Cost
    workers: list[WorkerView]
    launches: list[LaunchView] = []
    notes: list[str]

    @property
    def rows_finished(self) -> int:
        """Number of finished rows, those of chunks in progress included."""
        return self.rows.done + self.rows.in_progress


def overview(
    snapshot: Snapshot,
    per_hour: float | None,
    *,
    is_spot: bool | None = None,
    of_markers: Counts | None = None,
) -> Overview:
    """Summarize a run.

    Args:
        snapshot: What was read of the run.
        per_hour: The user's price of a machine in dollars an hour.
        is_spot: Whether machines are spot machines, for workers whose records do not say.
        of_markers: The sums over the run's markers, if they were read.
    """
    run = snapshot.run
    # An object that looks newer than now shows that this machine's clock is behind storage's.
    now = max(0.0, snapshot.taken, *(seen.modified for seen in snapshot.workers))
    views = [_view_of(seen, now, run, per_hour, is_spot=is_spot) for seen in snapshot.workers]
    views = _with_slow(views)
    totals = add_up(views)
    chunks, rows = _progress(snapshot, views)
    recent = Rate(
        max((view.recent.seconds for view in views), default=0.0),
        sum(view.recent.rows for view in views),
        sum(view.recent.input_tokens for view in views),
        sum(view.recent.output_tokens for view in views),
    )
    state, is_alive = _run_state(snapshot, chunks, views), any(view.is_alive for view in views)
    eta = 0.0 if state == "done" else rows.waiting / recent.rows if recent.rows > 0 else None
    if of_markers is not None and (state == "done" or of_markers.rows_done > totals.rows_done):
        totals = of_markers
    started = min((one.started + one.clock_offset_seconds for one in views), default=now)
    beats = (one.heartbeat + one.clock_offset_seconds for one in views)
    end = now if is_alive else max(beats, default=now)
    notes = [
        f"worker {one.id}: {one.replicas_lost} of {one.engine.get('num_replicas')} replicas are lost"
        for one in views
        if one.replicas_lost
    ]
    if any(view.state == "gone" for view in views) and not is_alive:
        notes.append(
            "workers count as gone by this machine's clock; one that is ahead is wrong about it"
        )
    models = [run and run.config.get("model"), *(view.engine.get("model") for view in views)]
    finished = rows.done + rows.in_progress
    tokens = (totals.prompt_tokens, totals.completion_tokens)
    return Overview(
        run=snapshot.url,
        job=snapshot.job_url,
        model=str(next(filter(None, models), "")),
        fingerprint=run.fingerprint if run else "",
        state=state,
        time=now,
        started=started if views else None,
        chunks=chunks,
        rows=rows,
        recent=recent,
        overall=_rate(end - started, finished, *tokens),
        eta_seconds=eta,
        totals=totals,
        cost=_cost(views, eta, totals),
        workers=views,
        notes=snapshot.notes + notes,
    )


def rows_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the number of rows of each chunk that the run is to do, by --limit those of the first chunks."""
    return rows_by_chunk(snapshot.job, snapshot.run.config.get("limit") if snapshot.run else None)


def add_up(parts: Iterable[Counts]) -> Counts:
    """Add up what markers, or workers' records, count."""
    return functools.reduce(Counts.plus, parts, Counts())


# --------------------------------------------------------------------------- a worker


def _view_of(
    seen: SeenWorker, now: float, run: Run | None, per_hour: float | None, *, is_spot: bool | None
) -> WorkerView:
    record, modified = seen
    age = max(0.0, now - (modified or record.heartbeat))
    state, machine = _state(record, age), machine_of(record, run, is_spot=is_spot)
    changed = {"state": state, "money": money_of(record, per_hour, machine), "minutes": []}
    return WorkerView(
        **msgspec.structs.asdict(record) | changed,
        machine=machine,
        recent=_recent(record) if state in ALIVE_STATES else Rate(),
        heartbeat_age_seconds=age,
        clock_offset_seconds=offset_of(record, modified),
    )


def _state(record: Worker, age: float) -> str:
    """A worker's state, from its record and the seconds since its last heartbeat."""
    if record.state in ENDED_STATES:
        return record.state
    if age >= record.lease_seconds:
        return "gone"
    if record.state != "running":
        return record.state
    if not record.open_chunks:
        # The next record follows only after a quarter of the lease.
        is_new = record.heartbeat - _ready(record) < _NEW_SECONDS
        return "running" if is_new else "waiting"
    last = max((minute.minute + minute.length for minute in record.minutes), default=0) * 60.0
    since = max(last, _ready(record))
    return "stalled" if record.heartbeat - since >= STALL_SECONDS else "running"


def _ready(record: Worker) -> float:
    """The time at which the engine was loaded after the worker's last start, in Unix seconds by the worker's clock."""
    return min((record.last_start or record.started) + record.engine_load_seconds, record.heartbeat)


def _recent(record: Worker) -> Rate:
    """A worker's rate over the last minutes before its heartbeat, by its own clock.

    Time before the engine was loaded is left out. The record counts the rows of a minute together, so the minute in
    which a later start of the worker loaded its engine is left out, too: the start before may have finished its rows.
    """
    first = int(record.heartbeat // 60) - RECENT_MINUTES
    ready = _ready(record)
    is_later = record.num_starts > 1
    begin = max(first * 60.0, math.ceil(ready / 60) * 60.0 if is_later else ready)
    minutes = [minute for minute in record.minutes if minute.minute >= begin // 60]
    if is_later and record.heartbeat - begin < _FEWEST_SECONDS:
        return Rate()
    return _rate(
        max(record.heartbeat - begin, 1.0),
        sum(minute.rows for minute in minutes),
        sum(minute.prompt_tokens for minute in minutes),
        sum(minute.completion_tokens for minute in minutes),
    )


def _rate(seconds: float, rows: int, prompt_tokens: int, completion_tokens: int) -> Rate:
    if seconds <= 0:
        return Rate()
    return Rate(seconds, rows / seconds, prompt_tokens / seconds, completion_tokens / seconds)


def _with_slow(views: list[WorkerView]) -> list[WorkerView]:
    """Call a running worker slow if it makes less than half of the tokens of the median of the same machines."""
    rates: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for view in views:
        if view.state == "running" and view.recent.seconds >= _JUDGED_SECONDS:
            like = rates[view.machine.accelerator, view.machine.gpus]
            like[view.id] = view.recent.input_tokens + view.recent.output_tokens
    slow = {
        name
        for like in rates.values()
        for name, rate in like.items()
        if len(like) >= _FEWEST_LIKE and rate < SLOW_SHARE * statistics.median(like.values())
    }
    return [msgspec.structs.replace(v, state="slow") if v.id in slow else v for v in views]


# --------------------------------------------------------------------------- the run


def _progress(snapshot: Snapshot, views: list[WorkerView]) -> tuple[Progress, Progress]:
    """Return the progress in chunks and the progress in rows."""
    rows = rows_of(snapshot)
    left = rows.keys() - snapshot.markers.keys()
    finished, busy = dict(snapshot.checkpointed), set[str]()
    for view in views:
        for name, number in view.open_chunks.items() if view.is_alive else ():
            busy.add(name)
            finished[name] = max(number, finished.get(name, 0))
    in_progress = sum(min(finished[name], rows[name]) for name in left & finished.keys())
    total, rows_left = sum(rows.values()), sum(rows[name] for name in left)
    return (
        Progress(len(rows), len(rows) - len(left), len(left & busy), len(left - busy)),
        Progress(total, total - rows_left, in_progress, rows_left - in_progress),
    )


def _run_state(snapshot: Snapshot, chunks: Progress, views: list[WorkerView]) -> str:
    if chunks.done >= chunks.total:
        return "done"
    states = {view.state for view in views}
    alive = next((state for state in ALIVE_STATES if state in states), "")
    if snapshot.is_stop_asked:
        return "stopping" if alive else "stopped"
    return alive or ("idle" if states or snapshot.markers else "empty")


def _cost(views: list[WorkerView], eta: float | None, totals: Counts) -> Cost:
    priced = [view for view in views if view.money.cost is not None]
    if not priced:
        return Cost(unpriced_workers=len(views))
    so_far = sum(view.money.cost or 0.0 for view in priced)
    per_hour = sum(view.money.price_per_hour or 0.0 for view in priced if view.is_alive)
    if len(priced) < len(views):
        totals = add_up(priced)
    output = totals.completion_tokens
    tokens = output + totals.prompt_tokens
    return Cost(
        so_far=so_far,
        at_end=None if eta is None else so_far + per_hour * eta / 3600,
        per_hour_now=per_hour,
        per_million_tokens=1e6 * so_far / tokens if tokens else None,
        per_million_output_tokens=1e6 * so_far / output if output else None,
        unpriced_workers=len(views) - len(priced),
        source="; ".join(sorted({view.money.price_source for view in priced})),
    )
