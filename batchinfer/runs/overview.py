"""Summary of a run at one moment: workers, progress, rates, time left and cost. `status` and `report` show it.

This module only computes; it makes no requests. A worker's clock may be hours off. So a worker's times are only
compared with each other, or converted to storage's clock by adding the offset of the worker's clock. The offset is the
time at which storage received the worker's record, minus the time of the heartbeat in that record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from batchinfer.core import units
from batchinfer.core.prices import Prices
from batchinfer.core.printable import error_code
from batchinfer.core.records import Job, Money, Record, Run, Worker
from batchinfer.ledger.claims import ENDED_STATES, has_lapsed, seems_stalled
from batchinfer.ledger.inventory import SeenWorker, Snapshot
from batchinfer.ledger.spending import (
    cost_of,
    joined_seconds,
    machine_of,
    offset_of,
    price_of,
    starts_of,
    up_seconds_of,
    whole,
)

RECENT_MINUTES = 5
"""Whole minutes over which recent rates are taken. The current minute is added to them."""
STALL_SECONDS = 600.0
"""Seconds without a finished row after which a worker with open chunks counts as stalled."""
_NEW_SECONDS = 5.0
"""Seconds after loading in which a worker without an open chunk counts as running: it is about to open its first."""
NOTED_CLOCK_SECONDS = 60.0
"""Seconds of offset of a worker's clock above which the overview has a note about it."""
ALIVE_STATES = ("loading", "running", "waiting", "stalled")


class Rate(Record, frozen=True, kw_only=True):
    """Rows and tokens per second. `seconds` is the length of the time over which they were counted."""

    seconds: float
    rows: float
    input_tokens: float
    output_tokens: float


class WorkerView(Record, frozen=True, kw_only=True):
    """Figures of one worker. Counts are summed over all starts of its process."""

    id: str
    state: str
    """loading, running, waiting (nothing to do now), stalled, gone, done, stopped or failed."""
    reason: str
    cloud: str
    region: str
    accelerator: str
    gpus: int
    is_spot: bool | None
    replicas: int
    """Number of engine replicas that the worker's last start loaded; 0 while it has not loaded any."""
    replicas_lost: int
    """Number of the loaded replicas that have died or stalled since."""
    epoch: int
    open_chunks: list[str]
    chunks_done: int
    rows_done: int
    rows_error: int
    rows_resumed: int
    prompt_tokens: int
    completion_tokens: int
    recent: Rate
    overall: Rate
    heartbeat_age_seconds: float
    clock_offset_seconds: float
    """Seconds that storage's clock is ahead of the worker's; 0 if they hardly differ."""
    up_seconds: float
    price_per_hour: float | None
    price_source: str
    cost: float | None

    @property
    def place(self) -> str:
        """Cloud and region as one text for people."""
        return "/".join(filter(None, (self.cloud, self.region))) or units.NONE

    @property
    def machine(self) -> str:
        """Number and name of the GPUs as one text for people."""
        if not self.accelerator:
            return units.NONE
        spot = " spot" if self.is_spot else ""
        return f"{self.gpus}\N{MULTIPLICATION SIGN}{self.accelerator}{spot}"


def clock_offset(seen: SeenWorker) -> float:
    """Seconds to add to a time by the worker's clock to get the time by storage's clock; 0 for a small difference."""
    return offset_of(seen.record, seen.modified)


def _age(seen: SeenWorker, now: float) -> float:
    """Seconds since a worker's last heartbeat.

    If this process itself has seen the worker's record change, the seconds are counted from that moment. This is most
    reliable, because it compares no two machines' clocks.
    """
    if seen.age_seconds is not None:
        return seen.age_seconds
    return max(0.0, now - (seen.modified or seen.record.heartbeat))


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
    return record.last_start + record.engine_load_seconds


def _recent(record: Worker, state: str) -> Rate:
    """A worker's rate over the last minutes before its heartbeat, by its own clock.

    Time before the engine was loaded is left out, unless an earlier start was up in that minute: the record counts the
    rows of a minute together. The rate is 0 if the worker is no longer alive.
    """
    first = int(record.heartbeat // 60) - RECENT_MINUTES
    begin = max(first * 60.0, min(_ready(record), record.heartbeat))
    last_end, _ = record.ends[-1] if record.ends else (0.0, "")
    if last_end >= begin // 60 * 60:
        begin = begin // 60 * 60
    seconds = max(record.heartbeat - begin, 1.0)
    minutes = [minute for minute in record.minutes if minute.minute >= int(begin // 60)]
    if state not in ALIVE_STATES:
        minutes = []
    return rate_of(
        seconds,
        sum(minute.rows for minute in minutes),
        sum(minute.prompt_tokens for minute in minutes),
        sum(minute.completion_tokens for minute in minutes),
    )


def rate_of(seconds: float, rows: int, prompt_tokens: int, completion_tokens: int) -> Rate:
    """A rate, from the numbers of rows and tokens in some seconds; 0 if `seconds` is not positive."""
    if seconds <= 0:
        return Rate(seconds=0.0, rows=0.0, input_tokens=0.0, output_tokens=0.0)
    return Rate(
        seconds=seconds,
        rows=rows / seconds,
        input_tokens=prompt_tokens / seconds,
        output_tokens=completion_tokens / seconds,
    )


def view_of(
    seen: SeenWorker, now: float, run: Run | None, prices: Prices, *, is_spot: bool | None
) -> WorkerView:
    """Return the figures of one worker at the moment `now` (Unix seconds).

    `is_spot` says whether the worker's machine is a spot machine. It is used only if the worker's record does not say.
    """
    record = seen.record
    age = _age(seen, now)
    state = _state(record, age)
    machine = machine_of(record, run, is_spot=is_spot)
    price = price_of(record, prices, machine)
    host_spot = record.host.get("spot")
    return WorkerView(
        id=record.id,
        state=state,
        reason=record.reason,
        cloud=machine.cloud,
        region=machine.region,
        accelerator=machine.accelerator,
        gpus=machine.gpus,
        is_spot=host_spot if isinstance(host_spot, bool) else is_spot,
        replicas=whole(record.engine.get("num_replicas")),
        replicas_lost=record.replicas_lost,
        epoch=record.epoch,
        open_chunks=record.open_chunks,
        chunks_done=record.chunks_done,
        rows_done=record.rows_done,
        rows_error=record.rows_error,
        rows_resumed=record.rows_resumed,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        recent=_recent(record, state),
        overall=rate_of(
            record.busy_seconds, record.rows_done, record.prompt_tokens, record.completion_tokens
        ),
        heartbeat_age_seconds=age,
        clock_offset_seconds=clock_offset(seen),
        up_seconds=up_seconds_of(record),
        price_per_hour=price.per_hour if price else None,
        price_source=price.source if price else "",
        cost=cost_of(record, prices, price),
    )


class Progress(Record, frozen=True, kw_only=True):
    """How many chunks, or rows, are done. `total` and `waiting` are None without a job.json.

    Chunks in progress are those that live workers have open. Rows in progress are the rows in checkpoints of chunks
    that are not done: they are safe, whatever happens to the workers. All other rows of these chunks are waiting, also
    those that a worker has finished since its last checkpoint.
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
    limit: float | None = None
    """--max-cost of the worker that started last."""


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
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """Number of those tokens of `completion_tokens` that are reasoning."""
    rows_error: int
    errors: dict[str, int]
    finish_reasons: dict[str, int]
    workers: list[WorkerView]
    launches: list[LaunchView] = []
    cost: Cost
    hours: float
    """Hours in which at least one worker was up."""
    max_hours: float | None
    """--max-hours of the worker that started last."""
    notes: list[str]
    warnings: list[str]
    """Texts about problems that cost speed or money until somebody acts."""


def time_now(snapshot: Snapshot) -> float:
    """The present time in Unix seconds: by this machine's clock, or the time of the newest marker or worker's record.

    The later one is taken. If an object looks newer than now, this machine's clock is behind storage's.
    """
    times = [snapshot.taken, *(seen.modified for seen in snapshot.workers)]
    times += (marker.modified for marker in snapshot.markers.values())
    return max(times)


def overview(snapshot: Snapshot, prices: Prices, *, is_spot: bool | None = None) -> Overview:
    """Summarize a run.

    `is_spot` says whether machines are spot machines. It is used only for workers whose records do not say.
    """
    now = time_now(snapshot)
    workers = sorted(snapshot.workers, key=lambda seen: seen.record.id)
    records = [seen.record for seen in workers]
    views = [view_of(seen, now, snapshot.run, prices, is_spot=is_spot) for seen in workers]
    pairs = list(zip(records, views, strict=True))
    alive = [record for record, view in pairs if view.state in ALIVE_STATES]
    chunks, rows, notes = _progress(snapshot, alive)
    recent = _sum_rates([view.recent for view in views], RECENT_MINUTES * 60.0)
    state = _run_state(snapshot, chunks, [view.state for view in views])
    rows_left = None if rows.total is None else rows.total - rows.done - rows.in_progress
    eta = None
    if state == "done":
        eta = 0.0
    elif rows_left is not None and recent.rows > 0:
        eta = rows_left / recent.rows
    started, seconds = _lifetime(pairs, now, is_alive=bool(alive))
    spans = [span for seen in workers for span in starts_of(seen.record, clock_offset(seen))]
    limits = _limits(pairs)
    prompt_tokens = sum(record.prompt_tokens for record in records)
    completion_tokens = sum(record.completion_tokens for record in records)
    return Overview(
        run=snapshot.url,
        job=snapshot.job_url,
        model=model_name(snapshot),
        fingerprint=snapshot.run.fingerprint if snapshot.run else "",
        state=state,
        time=now,
        started=started,
        chunks=chunks,
        rows=rows,
        recent=recent,
        overall=rate_of(seconds, rows.done + rows.in_progress, prompt_tokens, completion_tokens),
        eta_seconds=eta,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        reasoning_tokens=sum(record.reasoning_tokens or 0 for record in records),
        rows_error=sum(record.rows_error for record in records),
        errors=add_up(_by_code(record.errors) for record in records),
        finish_reasons=add_up(record.finish_reasons for record in records),
        workers=views,
        cost=_cost(views, eta, limits),
        hours=joined_seconds(spans) / 3600,
        max_hours=limits.max_hours,
        notes=[*snapshot.notes, *notes, *_clock_notes(views)],
        warnings=[
            f"worker {view.id}: {view.replicas_lost} of {view.replicas} replicas lost"
            for view in views
            if view.replicas_lost
        ],
    )


def add_up(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up dictionaries of counts. The result has the largest sum first.

    >>> add_up([{"a": 1, "b": 2}, {"b": 3}])
    {'b': 5, 'a': 1}
    """
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _by_code(errors: dict[str, int]) -> dict[str, int]:
    """Counts by error code. Counts of keys that are no codes are added up under one name."""
    found: dict[str, int] = {}
    for written, number in errors.items():
        code = error_code(written)
        found[code] = found.get(code, 0) + number
    return found


def model_name(snapshot: Snapshot) -> str:
    """The name of the run's model: from run.json, else from a worker's record; empty if neither names a model."""
    if snapshot.run is not None:
        return str(snapshot.run.config.get("model") or "")
    return next(
        (str(seen.record.engine["model"]) for seen in snapshot.workers if seen.record.engine), ""
    )


# --------------------------------------------------------------------------- the run


def _progress(snapshot: Snapshot, alive: list[Worker]) -> tuple[Progress, Progress, list[str]]:
    """Return the progress in chunks, the progress in rows, and notes about markers of chunks that the job lacks."""
    done = set(snapshot.markers)
    busy = {name for record in alive for name in record.open_chunks} - done
    saved = rows_saved(snapshot)
    if snapshot.job is None:
        spans = [span for seen in snapshot.workers for span in seen.record.spans]
        rows_done = sum(span.rows for span in spans if span.outcome == "done")
        return (
            _progress_of(None, len(done), len(busy)),
            _progress_of(None, rows_done, sum(saved.values())),
            [],
        )
    rows = rows_by_chunk(snapshot.job, snapshot.run)
    notes = []
    strange = done - rows.keys()
    if strange:
        notes.append(
            f"{len(strange)} markers are of no chunk of the job, left out ({min(strange)})"
        )
        done &= rows.keys()
    busy &= rows.keys()
    rows_done = sum(rows[name] for name in done)
    in_checkpoints = sum(min(number, rows[name]) for name, number in saved.items() if name in rows)
    return (
        _progress_of(len(rows), len(done), len(busy)),
        _progress_of(sum(rows.values()), rows_done, in_checkpoints),
        notes,
    )


def rows_saved(snapshot: Snapshot) -> dict[str, int]:
    """Number of rows in checkpoints, for each chunk that is not done and has checkpoints.

    Segments of earlier versions do not tell their number of rows. The workers' records then give it, as of their last
    heartbeats.
    """
    if None not in snapshot.checkpointed.values():
        return {name: number or 0 for name, number in snapshot.checkpointed.items()}
    reported: dict[str, int] = {}
    for seen in snapshot.workers:
        for span in (*seen.record.spans, *seen.record.open_spans):
            reported[span.chunk] = max(span.rows, reported.get(span.chunk, 0))
    return {
        name: reported.get(name, 0) if number is None else number
        for name, number in snapshot.checkpointed.items()
    }


def _progress_of(total: int | None, done: int, in_progress: int) -> Progress:
    waiting = None if total is None else total - done - in_progress
    return Progress(total=total, done=done, in_progress=in_progress, waiting=waiting)


def rows_by_chunk(job: Job, run: Run | None) -> dict[str, int]:
    """Number of rows to do in each chunk of a job, by the chunk's name.

    A run with a limit does only the job's first rows. Then chunks that hold none of these rows are left out.
    """
    limit = run.config.get("limit") if run is not None else None
    return {
        chunk.name: chunk.rows if limit is None else min(chunk.rows, limit - chunk.first_row)
        for chunk in job.chunks
        if limit is None or chunk.first_row < limit
    }


def _run_state(snapshot: Snapshot, chunks: Progress, states: list[str]) -> str:
    if chunks.total is not None and chunks.done >= chunks.total:
        return "done"
    if snapshot.is_stop_asked:
        return "stopping" if any(state in ALIVE_STATES for state in states) else "stopped"
    for state in ("running", "loading", "stalled", "waiting"):
        if state in states:
            return state
    if not states and not snapshot.markers:
        return "empty"
    if chunks.total is None and states and all(state == "done" for state in states):
        return "done"
    return "idle"


def _sum_rates(rates: list[Rate], seconds: float) -> Rate:
    return Rate(
        seconds=seconds,
        rows=sum(rate.rows for rate in rates),
        input_tokens=sum(rate.input_tokens for rate in rates),
        output_tokens=sum(rate.output_tokens for rate in rates),
    )


def _lifetime(
    pairs: list[tuple[Worker, WorkerView]], now: float, *, is_alive: bool
) -> tuple[float | None, float]:
    """Return the time at which the first worker started, and the run's length in seconds.

    The length counts until `now` if a worker is alive, else until the last heartbeat of any worker.
    """
    if not pairs:
        return None, 0.0
    started = min(record.started + view.clock_offset_seconds for record, view in pairs)
    last = max(record.heartbeat + view.clock_offset_seconds for record, view in pairs)
    return started, max((now if is_alive else last) - started, 1e-3)


def _limits(pairs: list[tuple[Worker, WorkerView]]) -> Money:
    """Return the limits of the worker that started last. They are what the run keeps to, if all workers have them."""
    last = max(
        pairs, key=lambda pair: pair[0].last_start + pair[1].clock_offset_seconds, default=None
    )
    return (last[0].money if last is not None else None) or Money()


def _cost(views: list[WorkerView], eta: float | None, limits: Money) -> Cost:
    priced = [view for view in views if view.cost is not None]
    so_far = sum(view.cost or 0.0 for view in priced)
    per_hour = sum(view.price_per_hour or 0.0 for view in priced if view.state in ALIVE_STATES)
    output = sum(view.completion_tokens for view in priced)
    tokens = output + sum(view.prompt_tokens for view in priced)
    return Cost(
        so_far=so_far if priced else None,
        at_end=so_far + per_hour * eta / 3600 if priced and eta is not None else None,
        per_hour_now=per_hour if priced else None,
        per_million_tokens=1e6 * so_far / tokens if priced and tokens else None,
        per_million_output_tokens=1e6 * so_far / output if priced and output else None,
        unpriced_workers=len(views) - len(priced),
        source="; ".join(sorted({view.price_source for view in priced})),
        limit=limits.max_cost,
    )


def _clock_notes(views: list[WorkerView]) -> list[str]:
    off = [view for view in views if abs(view.clock_offset_seconds) > NOTED_CLOCK_SECONDS]
    if not off:
        return []
    shown = ", ".join(
        f"{view.id} {units.duration(abs(view.clock_offset_seconds))} "
        + ("behind" if view.clock_offset_seconds > 0 else "ahead")
        for view in off[:3]
    )
    return [
        f"the clocks of {units.many(len(off), 'worker')} are off, their times are corrected here ({shown}"
        + (", …)" if len(off) > 3 else ")")
    ]
