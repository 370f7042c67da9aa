"""What one worker's record says by now: alive or gone, how fast, on which machine, at what cost. Pure.

A worker's own times are compared with each other only, or shifted by how far its clock is from storage's (the time of
its record's last write there, less the heartbeat in it). A worker whose clock is hours off counts as any other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from batchinfer.core.records import Record, Run, Worker
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.snapshot import SeenWorker
from batchinfer.runs.prices import Machine, PriceSource, accelerator_count, accelerator_name

RECENT_MINUTES = 5
"""Whole minutes before the current one that count as recent."""
STALL_SECONDS = 600.0
"""A worker with open chunks that finishes no row for so long is stalled."""
CLOCK_TOLERANCE_SECONDS = 5.0
ALIVE_STATES = ("loading", "running", "waiting", "stalled")


class Rate(Record, frozen=True, kw_only=True):
    """Per second, over `seconds`."""

    seconds: float
    rows: float
    input_tokens: float
    output_tokens: float


class WorkerView(Record, frozen=True, kw_only=True):
    """One worker, every start of it together."""

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
    """That its last start loaded; 0 where it has loaded none."""
    replicas_lost: int
    """Of these, the ones that died or stalled since."""
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
    """How far storage's clock is ahead of the worker's; 0 within a few seconds."""
    up_seconds: float
    price_per_hour: float | None
    price_source: str
    cost: float | None


class Timed(NamedTuple):
    """A worker with what its times mean here."""

    seen: SeenWorker
    offset: float
    """Seconds to add to the worker's own times."""
    age: float
    """Seconds since its last heartbeat."""

    @classmethod
    def of(cls, seen: SeenWorker, now: float) -> Timed:
        """A worker as seen at `now`, Unix seconds."""
        return cls(seen, clock_offset(seen), _age(seen, now))


def clock_offset(seen: SeenWorker) -> float:
    """Seconds to add to a worker's own times to have storage's; 0 where they agree or storage tells no time."""
    if not seen.modified:
        return 0.0
    offset = seen.modified - seen.record.heartbeat
    return offset if abs(offset) > CLOCK_TOLERANCE_SECONDS else 0.0


def _age(seen: SeenWorker, now: float) -> float:
    """Seconds since a worker's last heartbeat."""
    if seen.age_seconds is not None:
        return seen.age_seconds
    return max(0.0, now - (seen.modified or seen.record.heartbeat))


def _state(record: Worker, age: float) -> str:
    """What a worker is, from what it says and how long ago it said it."""
    if record.state in ENDED_STATES:
        return record.state
    if age >= record.lease_seconds:
        return "gone"
    if age >= 0.6 * record.lease_seconds:
        return "stalled"  # two heartbeats are missing
    if record.state != "running":
        return record.state
    if not record.open_chunks:
        return "waiting"
    last = max((minute.minute + minute.length for minute in record.minutes), default=0) * 60.0
    since = max(last, _ready(record))
    return "stalled" if record.heartbeat - since >= STALL_SECONDS else "running"


def _ready(record: Worker) -> float:
    """When its engine was ready in this start, by the worker's clock."""
    begun = record.starts[-1] if record.starts else record.started
    return begun + float(record.engine.get("load_seconds") or 0.0)


def _recent(record: Worker, state: str) -> Rate:
    """Its rate over the last minutes, by its own clock."""
    first = int(record.heartbeat // 60) - RECENT_MINUTES
    begin = max(first * 60.0, min(_ready(record), record.heartbeat))
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
    """So much in so many seconds; all 0 where no time has passed."""
    if seconds <= 0:
        return Rate(seconds=0.0, rows=0.0, input_tokens=0.0, output_tokens=0.0)
    return Rate(
        seconds=seconds,
        rows=rows / seconds,
        input_tokens=prompt_tokens / seconds,
        output_tokens=completion_tokens / seconds,
    )


def _machine(record: Worker, run: Run | None, is_spot: bool | None) -> Machine:
    host, engine = record.host, record.engine
    name = str(host.get("accelerator") or "")
    recorded: dict[str, Any] = run.recorded if run is not None else {}
    parallel = [recorded.get("tensor_parallel_size"), recorded.get("pipeline_parallel_size")]
    gpus = _whole(host.get("gpus")) or accelerator_count(name)
    if not gpus:
        gpus = _whole(engine.get("num_replicas")) or 1
        for factor in parallel:
            gpus *= _whole(factor) or 1
    accelerator = accelerator_name(name or str(engine.get("device") or ""))
    spot = host.get("spot") if isinstance(host.get("spot"), bool) else is_spot
    return Machine(
        cloud=str(host.get("cloud") or ""),
        region=str(host.get("region") or ""),
        accelerator=accelerator,
        gpus=gpus if accelerator else 0,
        is_spot=bool(spot),
    )


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0


def view_of(
    one: Timed, run: Run | None, prices: PriceSource, *, is_spot: bool | None
) -> WorkerView:
    """One worker for people. `is_spot` says what its machine is, where its record does not."""
    record = one.seen.record
    state = _state(record, one.age)
    machine = _machine(record, run, is_spot)
    price = prices.price(machine)
    up_seconds = record.up_seconds or record.busy_seconds + record.load_seconds
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
        replicas=_whole(record.engine.get("num_replicas")),
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
        heartbeat_age_seconds=one.age,
        clock_offset_seconds=one.offset,
        up_seconds=up_seconds,
        price_per_hour=price.per_hour if price else None,
        price_source=price.source if price else "",
        cost=price.per_hour * up_seconds / 3600 if price else None,
    )
