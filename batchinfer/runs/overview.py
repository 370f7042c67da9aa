"""Summary of a run at one moment: workers, progress, rates, time left and cost. `status` and `report` show it.

This module only computes; it makes no requests. A worker's clock may be hours off. So a worker's times are only
compared with each other, or converted to storage's clock by adding the offset of the worker's clock.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from batchinfer.core import units
from batchinfer.core.counts import Counts, most_common
from batchinfer.core.prices import Machine, Prices
from batchinfer.core.printable import error_code
from batchinfer.core.records import Record, Run, Worker
from batchinfer.ledger.claims import ENDED_STATES, has_lapsed, seems_stalled
from batchinfer.ledger.jobs import rows_by_chunk
from batchinfer.ledger.looks import SeenWorker, Snapshot
from batchinfer.ledger.spending import cost_of, machine_of, offset_of, price_of

RECENT_MINUTES = 5
"""Whole minutes over which recent rates are taken. The current minute is added to them."""
STALL_SECONDS = 600.0
"""Seconds without a finished row after which a worker with open chunks counts as stalled."""
SLOW_SHARE = 0.5
"""Share of the median rate of its like below which a worker counts as slow."""
_NEW_SECONDS = 5.0
"""Seconds after loading in which a worker without an open chunk counts as running: it is about to open its first."""
_JUDGED_SECONDS, _FEWEST_LIKE = 60.0, 3
"""Fewest seconds of a rate by which a worker is called slow, and fewest workers that it is compared with."""
_NOTED_CLOCK_SECONDS = 60.0
ALIVE_STATES = ("running", "slow", "loading", "stalled", "waiting")


class Rate(Record, frozen=True, kw_only=True):
    """Rows and tokens per second. `seconds` is the length of the time over which they were counted."""

    seconds: float = 0.0
    rows: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


class WorkerView(Record, frozen=True, kw_only=True):
    """A worker's record, without its minutes, and what follows from it.

    `state` is that of the record, or slow, stalled or gone. `clock_offset_seconds` are the seconds that storage's clock
    is ahead of the worker's; 0 if they hardly differ.
    """

    id: str
    state: str
    reason: str
    record: Worker
    machine: Machine
    recent: Rate
    heartbeat_age_seconds: float
    clock_offset_seconds: float
    up_seconds: float
    price_per_hour: float | None
    price_source: str
    cost: float | None


class Progress(Record, frozen=True, kw_only=True):
    """How many chunks, or rows, are done. `total` and `waiting` are None without a job.json.

    Chunks in progress are those that live workers have open. Rows in progress are the finished rows of chunks that are
    not done: those in checkpoints, or those that a live worker reports if they are more.
    """

    total: int | None
    done: int
    in_progress: int
    waiting: int | None


class Cost(Record, frozen=True, kw_only=True):
    """Cost in dollars. A cost is None if it cannot be computed, for example because no worker's price is known.

    `unpriced_workers` is the number of workers whose price is not known. No figure here includes them.
    """

    so_far: float | None
    at_end: float | None
    per_hour_now: float | None
    per_million_tokens: float | None
    per_million_output_tokens: float | None
    unpriced_workers: int
    source: str


class LaunchView(Record, frozen=True, kw_only=True):
    """Figures of one launch. A worker is seen if it has a record, which it writes when it begins to load its engine."""

    id: str
    cluster: str
    expected: int
    seen: int
    away: dict[str, list[int]] = {}
    """Ranks of the workers that never came or did not come back, by what is known of them."""
    lost: list[str] = []
    """Ids of those that do not come by themselves, and were not launched again."""
    coming: int = 0
    """Number of those that the cluster is still to start, or of which nobody here can say."""
    relaunched: int = 0
    """Number of lost workers in whose place others were launched."""


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
    warnings: list[str]
    """Texts about problems that cost speed or money until somebody acts."""

    @property
    def rows_finished(self) -> int:
        """Number of finished rows, those of chunks in progress included."""
        return self.rows.done + self.rows.in_progress


def overview(
    snapshot: Snapshot,
    prices: Prices,
    *,
    is_spot: bool | None = None,
    of_markers: Counts | None = None,
) -> Overview:
    """Summarize a run.

    Args:
        snapshot: What was read of the run.
        prices: Prices of machines.
        is_spot: Whether machines are spot machines, for workers whose records do not say.
        of_markers: The sums over the run's markers, if they were read.
    """
    now = max(
        snapshot.taken,
        *(seen.modified for seen in snapshot.workers),
        *(marker.modified for marker in snapshot.markers.values()),
        0.0,
    )  # an object that looks newer than now shows that this machine's clock is behind storage's
    seen_workers = sorted(snapshot.workers, key=lambda seen: seen.record.id)
    views = [_view_of(seen, now, snapshot.run, prices, is_spot=is_spot) for seen in seen_workers]
    views = _with_slow(views)
    alive = [view for view in views if view.state in ALIVE_STATES]
    totals = add_up([view.record for view in views])
    chunks, rows, notes = _progress(snapshot, alive, totals.rows_done)
    recent = Rate(
        seconds=max((view.recent.seconds for view in views), default=0.0),
        rows=sum(view.recent.rows for view in views),
        input_tokens=sum(view.recent.input_tokens for view in views),
        output_tokens=sum(view.recent.output_tokens for view in views),
    )
    state = _run_state(snapshot, chunks, [view.state for view in views])
    eta = 0.0 if state == "done" else None
    if eta is None and rows.waiting is not None and recent.rows > 0:
        eta = rows.waiting / recent.rows
    started, seconds = _lifetime(views, now if alive else None)
    if of_markers is not None and (state == "done" or of_markers.rows_done > totals.rows_done):
        totals = of_markers
    return Overview(
        run=snapshot.url,
        job=snapshot.job_url,
        model=_model_name(snapshot),
        fingerprint=snapshot.run.fingerprint if snapshot.run else "",
        state=state,
        time=now,
        started=started,
        chunks=chunks,
        rows=rows,
        recent=recent,
        overall=_rate(
            seconds, rows.done + rows.in_progress, totals.prompt_tokens, totals.completion_tokens
        ),
        eta_seconds=eta,
        totals=totals,
        cost=_cost(views, eta, totals),
        workers=views,
        notes=[*snapshot.notes, *notes, *_clock_notes(views)],
        warnings=[
            f"worker {view.id}: {view.record.replicas_lost} of {view.record.engine.get('num_replicas')} replicas lost"
            for view in views
            if view.record.replicas_lost
        ],
    )


def add_up(parts: Iterable[Counts]) -> Counts:
    """Add up what markers, or workers' records, count. The most frequent error codes and finish reasons come first."""
    total = Counts()
    for part in parts:
        total = total.plus(part.with_codes(error_code))
    return msgspec.structs.replace(
        total,
        errors=dict(most_common(total.errors)),
        finish_reasons=dict(most_common(total.finish_reasons)),
    )


# --------------------------------------------------------------------------- a worker


def _view_of(
    seen: SeenWorker, now: float, run: Run | None, prices: Prices, *, is_spot: bool | None
) -> WorkerView:
    record, age = seen.record, seen.age_seconds
    if age is None:  # this process has not seen the record change, so two clocks are compared
        age = max(0.0, now - (seen.modified or record.heartbeat))
    state = _state(record, age)
    machine = machine_of(record, run, is_spot=is_spot)
    price = price_of(record, prices, machine)
    return WorkerView(
        id=record.id,
        state=state,
        reason=record.reason,
        record=msgspec.structs.replace(record, minutes=[]),
        machine=machine,
        recent=_recent(record) if state in ALIVE_STATES else Rate(),
        heartbeat_age_seconds=age,
        clock_offset_seconds=offset_of(record, seen.modified),
        up_seconds=record.up_seconds,
        price_per_hour=price.per_hour if price else None,
        price_source=price.source if price else "",
        cost=cost_of(record, prices, price),
    )


def _state(record: Worker, age: float) -> str:
    """A worker's state, from its record and the seconds since its last heartbeat."""
    if record.state in ENDED_STATES:
        return record.state
    if has_lapsed(age, record.lease_seconds):
        return "gone"
    if seems_stalled(age, record.lease_seconds):
        return "stalled"
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
    return min(record.last_start + record.engine_load_seconds, record.heartbeat)


def _recent(record: Worker) -> Rate:
    """A worker's rate over the last minutes before its heartbeat, by its own clock.

    Time before the engine was loaded is left out. The record counts the rows of a minute together, so the minute in
    which a later start of the worker loaded its engine counts as a whole: the start before may have finished its rows.
    """
    first = int(record.heartbeat // 60) - RECENT_MINUTES
    ready = _ready(record)
    begin = max(first * 60.0, ready if len(record.starts) <= 1 else ready // 60 * 60)
    minutes = [minute for minute in record.minutes if minute.minute >= begin // 60]
    return _rate(
        max(record.heartbeat - begin, 1.0),
        sum(minute.rows for minute in minutes),
        sum(minute.prompt_tokens for minute in minutes),
        sum(minute.completion_tokens for minute in minutes),
    )


def _rate(seconds: float, rows: int, prompt_tokens: int, completion_tokens: int) -> Rate:
    if seconds <= 0:
        return Rate()
    return Rate(
        seconds=seconds,
        rows=rows / seconds,
        input_tokens=prompt_tokens / seconds,
        output_tokens=completion_tokens / seconds,
    )


def _with_slow(views: list[WorkerView]) -> list[WorkerView]:
    """Call a running worker slow if it makes less than half of the tokens of the median of the same machines."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for view in views:
        if _is_judged(view):
            rates[_like(view)].append(_tokens(view))
    found = []
    for view in views:
        others = rates[_like(view)]
        is_slow = (
            _is_judged(view)
            and len(others) >= _FEWEST_LIKE
            and _tokens(view) < SLOW_SHARE * statistics.median(others)
        )
        found.append(msgspec.structs.replace(view, state="slow") if is_slow else view)
    return found


def _is_judged(view: WorkerView) -> bool:
    return view.state == "running" and view.recent.seconds >= _JUDGED_SECONDS


def _like(view: WorkerView) -> tuple[str, int]:
    return view.machine.accelerator, view.machine.gpus


def _tokens(view: WorkerView) -> float:
    return view.recent.input_tokens + view.recent.output_tokens


# --------------------------------------------------------------------------- the run


def _model_name(snapshot: Snapshot) -> str:
    if snapshot.run is not None:
        return str(snapshot.run.config.get("model") or "")
    models = [seen.record.engine.get("model") for seen in snapshot.workers]
    return str(next(filter(None, models), ""))


def _progress(
    snapshot: Snapshot, alive: list[WorkerView], num_reported: int
) -> tuple[Progress, Progress, list[str]]:
    """Return the progress in chunks, the progress in rows, and notes about markers of chunks that the job lacks.

    `num_reported` is the number of rows in the workers' records. It counts where no job.json says how many rows the
    done chunks have.
    """
    finished = {name: rows or 0 for name, rows in snapshot.checkpointed.items()}
    busy: set[str] = set()
    for view in alive:
        busy.update(view.record.open_chunks)
        for name, number in view.record.open_chunks.items():
            finished[name] = max(number, finished.get(name, 0))
    done = set(snapshot.markers)
    if snapshot.job is None:
        in_progress = sum(number for name, number in finished.items() if name not in done)
        return (
            _progress_of(None, len(done), len(busy - done)),
            _progress_of(None, max(0, num_reported - in_progress), in_progress),
            [],
        )
    limit = snapshot.run.config.get("limit") if snapshot.run else None
    rows = rows_by_chunk(snapshot.job, limit)
    strange, left = done - rows.keys(), rows.keys() - done
    notes = []
    if strange:
        notes = [f"{len(strange)} markers are of no chunk of the job, left out ({min(strange)})"]
    in_progress = sum(min(finished[name], rows[name]) for name in left & finished.keys())
    rows_left = sum(rows[name] for name in left)
    total = sum(rows.values())
    return (
        _progress_of(len(rows), len(rows) - len(left), len(busy & left)),
        _progress_of(total, total - rows_left, in_progress),
        notes,
    )


def _progress_of(total: int | None, done: int, in_progress: int) -> Progress:
    waiting = None if total is None else total - done - in_progress
    return Progress(total=total, done=done, in_progress=in_progress, waiting=waiting)


def _run_state(snapshot: Snapshot, chunks: Progress, states: list[str]) -> str:
    if chunks.total is not None and chunks.done >= chunks.total:
        return "done"
    alive = next((state for state in ALIVE_STATES if state in states), "")
    if snapshot.is_stop_asked:
        return "stopping" if alive else "stopped"
    if alive or not (states or snapshot.markers):
        return alive or "empty"
    if chunks.total is None and states and all(state == "done" for state in states):
        return "done"
    return "idle"


def _lifetime(views: list[WorkerView], now: float | None) -> tuple[float | None, float]:
    """Return the time at which the first worker started, and the run's length in seconds.

    The length counts until `now`, or until the last heartbeat of any worker if no worker is alive.
    """
    if not views:
        return None, 0.0
    started = min(view.record.started + view.clock_offset_seconds for view in views)
    last = max(view.record.heartbeat + view.clock_offset_seconds for view in views)
    return started, max((now or last) - started, 1e-3)


def _cost(views: list[WorkerView], eta: float | None, totals: Counts) -> Cost:
    priced = [view for view in views if view.cost is not None]
    so_far = sum(view.cost or 0.0 for view in priced)
    per_hour = sum(view.price_per_hour or 0.0 for view in priced if view.state in ALIVE_STATES)
    if len(priced) < len(views):
        totals = add_up([view.record for view in priced])
    output = totals.completion_tokens
    tokens = output + totals.prompt_tokens
    return Cost(
        so_far=so_far if priced else None,
        at_end=so_far + per_hour * eta / 3600 if priced and eta is not None else None,
        per_hour_now=per_hour if priced else None,
        per_million_tokens=1e6 * so_far / tokens if priced and tokens else None,
        per_million_output_tokens=1e6 * so_far / output if priced and output else None,
        unpriced_workers=len(views) - len(priced),
        source="; ".join(sorted({view.price_source for view in priced})),
    )


def _clock_notes(views: list[WorkerView]) -> list[str]:
    off = [view for view in views if abs(view.clock_offset_seconds) > _NOTED_CLOCK_SECONDS]
    if not off:
        return []
    shown = ", ".join(
        f"{view.id} {units.duration(abs(view.clock_offset_seconds))} "
        + ("behind" if view.clock_offset_seconds > 0 else "ahead")
        for view in off[:3]
    )
    workers = units.many(len(off), "worker")
    more = ", …" if len(off) > 3 else ""
    return [f"the clocks of {workers} are off, their times are corrected here ({shown}{more})"]
