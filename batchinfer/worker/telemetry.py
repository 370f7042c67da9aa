"""Counters of a worker, for its record on storage, its log and its result. Their lists have a largest length."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec

from batchinfer.core import units
from batchinfer.core.clock import Clock
from batchinfer.core.counts import MAX_CODES, Counts, most_common
from batchinfer.core.errors import (
    BatchinferError,
    Interrupted,
    LimitReached,
    PolicyStop,
    RunMismatch,
    StopRequested,
)
from batchinfer.core.events import tell
from batchinfer.core.records import (
    EngineInfo,
    EngineStats,
    ErrorExample,
    Failure,
    FinishedRow,
    Money,
    Worker,
    WorkerLease,
)
from batchinfer.core.redaction import redact
from batchinfer.ledger.checkpoints import count_rows
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.minutes import Minutes
from batchinfer.worker.workload import Workload

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 500

_STARVED_LOOKS = 30
"""Looks in a row at an engine without work, one every two seconds, after which it is said what to do."""
_STARVED_SHARE = 0.7
_FEW_CORES = 4
"""Cores with which further processes would only take time from the engine."""

WAITING_SECONDS = 30.0
"""Seconds after which a start whose engine is ready, but which has had no chunk, counts as waiting for other workers.
A waiting start does not count as an attempt."""


class Telemetry:
    """Counters of one start of a worker, used on the main thread. `latest` is an immutable copy for all threads."""

    def __init__(
        self, worker_id: str, clock: Clock, *, host: dict[str, Any], money: Money | None = None
    ) -> None:
        now = clock.now()
        self._clock = clock
        self._began = clock.monotonic()
        self._base = Worker(
            id=worker_id, nonce="", state="loading", started=now, heartbeat=now, host=host
        )
        """What earlier starts have left. This start's sums are added to it."""
        self._present: dict[str, Any] = {
            "state": "loading",
            "reason": "",
            "rows_in_engine": 0,
            "host": host,
            "money": money,
        }
        """Fields of the record of which this start's values stand alone."""
        self.counts = Counts()
        """Sums over the rows that this start finished, and the number of those that it took over from storage."""
        self.examples: dict[str, ErrorExample] = {}
        """First failed row of each error code."""
        self._minutes = Minutes()
        self.workload = Workload()
        """The chunks of this worker's manifests, and those of other workers that it does, too."""
        self.attempts = 1
        """Number of starts in a row, this one included, that finished no new row; 0 once this start finishes one.

        Starts that were asked to end, or that only waited for other workers, are not counted.
        """
        self.stats = EngineStats()
        """Counters of the engine, as they were last read."""
        self._num_starved = 0
        """Looks in a row at an engine with free slots whose rows were in the server's front end, until it is told."""
        self._running_since: float | None = None
        self._running_until: float | None = None
        self.latest = self._base

    # -- life

    def begin(self, before: WorkerLease | None, earlier: Worker | None) -> Worker:
        """Begin this start's record.

        Args:
            before: The lease that this worker's last start left; None without one.
            earlier: The statistics that it left; None without any.
        """
        base = earlier or self._base
        self.attempts = 1 if before is None else before.attempts + 1
        starts = {"num_starts": base.num_starts + 1, "last_start": self._clock.now()}
        self._base = msgspec.structs.replace(base, **starts)
        money, known = self._present["money"] or Money(), base.money
        if known and money.price_per_hour is None:  # the same machine costs what it did
            price = known.price_per_hour if base.host == self._present["host"] else None
            more = {"price_source": known.price_source, "cost": known.cost}
            self._present["money"] = msgspec.structs.replace(money, price_per_hour=price, **more)
        self._minutes = Minutes(base.minutes)
        return self.snapshot()

    def log_start(self, before: WorkerLease | None) -> None:
        """Log that this start holds its lease, and how the last start ended. `before` is the last start's lease."""
        worker, start = self._base.id, self._base.num_starts
        text = "worker {worker}: start {start}"
        tell(logger, "worker_started", text, worker=worker, start=start, attempt=self.attempts)
        if before is None:
            return
        is_kill = before.state not in ENDED_STATES
        how = f"ended as {before.state}"
        if is_kill:
            how = "was killed, or still runs and will end now (workers that run at once need an id each)"
        tell(
            logger,
            "worker_resumed",
            "worker {}: the last start {}",
            worker,
            how,
            before=before.state,
            is_kill=is_kill,
            rows=self._base.rows_done,
        )

    def log_end(self) -> None:
        """Log how this start ended, and its failed rows by error code."""
        counts, reason = self.counts, self._present["reason"]
        errors = ", ".join(f"{count} x {code}" for code, count in most_common(counts.errors))
        tell(
            logger,
            "worker_ended",
            "worker {worker}: {state} after {seconds:.0f} s, {}, {rows_error} failed{}{}",
            units.many(counts.rows_done, "row"),
            f" ({errors})" if errors else "",
            f" ({reason})" if reason else "",
            worker=self._base.id,
            state=self._present["state"],
            reason=reason,
            seconds=round(self.run_seconds, 3),
            errors=counts.errors,
            chunks_done=len(self.workload.published),
            **self.sums,
        )

    @property
    def is_loading(self) -> bool:
        """Whether the engine has not loaded yet."""
        return self._running_since is None

    def engine_ready(self, info: EngineInfo) -> None:
        """Note that the engine has loaded."""
        self._present["engine"] = msgspec.to_builtins(info)
        self._running_since = self._clock.monotonic()
        self.set_state("running")

    def rows_in_engine(self, count: int) -> None:
        """Note how many rows are in the engine."""
        self._present["rows_in_engine"] = count

    def set_state(self, state: str, reason: str = "") -> None:
        """Set the state that the worker's record shows; records.Worker lists the states."""
        self._present |= {"state": state, "reason": redact(reason[:_MAX_MESSAGE])}
        if state in ENDED_STATES:
            self._present["rows_in_engine"] = 0
            self._running_until = self._clock.monotonic()
        if state == "done":
            self.attempts = 0

    def end_with(self, error: Exception) -> None:
        """Set the state for a start that ends with an error: `stopped` or `failed`.

        A start that ends because of a signal, `batchinfer stop` or a limit does not count as an attempt.
        Nor does a start that is refused because the run has another configuration: each further start says so, too.
        """
        is_asked = isinstance(error, StopRequested | LimitReached | Interrupted | RunMismatch)
        if is_asked or self._only_waits:
            self.attempts = max(0, self.attempts - 1)
        message = error.message if isinstance(error, BatchinferError) else error
        self.set_state(
            "stopped" if isinstance(error, PolicyStop | Interrupted) else "failed",
            f"{type(error).__name__}: {message}",
        )

    def end_untried(self, before: WorkerLease, reason: str) -> None:
        """Set the state for a start that tries nothing, and so does not count as an attempt."""
        self.attempts = before.attempts
        self.set_state("stopped", reason)

    def note_engine_stats(self, stats: EngineStats) -> None:
        """Keep the engine's counters. Logs a warning when they first show that the engine computed rows twice."""
        if stats.preemptions and not self.stats.preemptions:
            tell(
                logger,
                "engine_preempted",
                "the engine ran out of KV cache and computes rows again (preemption); lower --max-num-seqs, or give it "
                "more memory: --gpu-memory-utilization, --tensor-parallel-size, "
                "on a CPU --kv-cache-memory-bytes",
                level=logging.WARNING,
                preemptions=stats.preemptions,
            )
        self.stats = stats
        self._look_for_starvation()

    def _look_for_starvation(self) -> None:
        if self._num_starved == _STARVED_LOOKS:
            return  # it was told
        stats, slots = self.stats, self._present.get("engine", {}).get("max_num_seqs") or 0
        # Servers without counters have no steps either.
        has_room = stats.steps and stats.rows < _STARVED_SHARE * slots
        is_starved = has_room and self._present["rows_in_engine"] >= slots
        self._num_starved = self._num_starved + 1 if is_starved else 0
        if self._num_starved == _STARVED_LOOKS and (os.cpu_count() or 1) > _FEW_CORES:
            tell(
                logger,
                "engine_starved",
                "the engine has {rows} of the {slots} rows that it could have, since the server's front end is busy; "
                "a larger --api-server-count gives it more processes",
                level=logging.WARNING,
                rows=stats.rows,
                slots=slots,
            )

    # -- events, told on the main thread

    def chunk_opened(self, chunk: OpenChunk) -> None:
        """Count a chunk that has just been opened, and its rows that were taken over from storage."""
        resumed = chunk.counts.rows_resumed
        self.workload.opened(chunk)
        self.counts = self.counts.plus(Counts(rows_resumed=resumed))
        tell(
            logger,
            "chunk_open",
            "chunk {chunk}: open, {}, {resumed} resumed",
            units.many(chunk.num_rows, "row"),
            chunk=chunk.name,
            rows=chunk.num_rows,
            resumed=resumed,
        )

    def chunk_closed(self, chunk: OpenChunk, outcome: str) -> None:
        """Count a chunk that this worker has closed.

        `outcome` is `done`, `lost` (another worker published it) or `released`.
        """
        self.workload.closed(chunk, outcome)
        counts = chunk.counts
        tell(
            logger,
            f"chunk_{outcome}",
            "chunk {chunk}: {}, {} ok, {}, {resumed} resumed",
            outcome,
            units.many(counts.rows_ok, "row"),
            units.many(counts.rows_error, "error"),
            chunk=chunk.name,
            rows_ok=counts.rows_ok,
            errors=counts.errors,
            resumed=counts.rows_resumed,
            seconds=round(self._clock.now() - chunk.started, 3),
        )

    def chunk_skipped(self, name: str) -> None:
        """Count a chunk that another worker or an earlier start has done."""
        self.workload.done(name)
        tell(logger, "chunk_skipped", "chunk {chunk}: already done", chunk=name)

    def rows_finished(self, rows: list[FinishedRow]) -> None:
        """Count rows that this start finished. Rows taken over from storage must not be among them."""
        self.attempts = 0
        counts = count_rows(rows)
        self.counts = self.counts.plus(counts)
        self._minutes.add(counts, int(self._clock.now() // 60))

    def row_failed(self, chunk: str, line: int, failure: Failure) -> None:
        """Keep the failure of an error row as an example, and log it, if it is the first with its error code."""
        if failure.code not in self.examples and len(self.examples) < MAX_CODES:
            message = failure.message[:_MAX_MESSAGE]
            self.examples[failure.code] = ErrorExample(chunk=chunk, line=line, message=message)
            tell(
                logger,
                "row_error",
                "{chunk} line {line}: {code}: {example}",
                level=logging.WARNING,
                code=failure.code,
                chunk=chunk,
                line=line,
                example=message,
            )

    # -- the work of this start

    @property
    def sums(self) -> dict[str, int]:
        """Sums over this start's rows, as events have them."""
        names = ("rows_error", "rows_resumed", "prompt_tokens", "completion_tokens")
        return {"rows": self.counts.rows_done} | {n: getattr(self.counts, n) for n in names}

    @property
    def busy_seconds(self) -> float:
        """Seconds from the moment the engine became ready until the work ended, or until now if it has not.

        0 until the engine is ready. The time to close the engine is not counted.
        """
        if self._running_since is None:
            return 0.0
        until = self._running_until
        return (self._clock.monotonic() if until is None else until) - self._running_since

    @property
    def run_seconds(self) -> float:
        """Seconds since this start began."""
        return self._clock.monotonic() - self._began

    @property
    def _only_waits(self) -> bool:
        """Whether this start waits for other workers alone. If it ends, it does not count as an attempt."""
        is_running = self._present["state"] == "running" and not self.workload.num_opened
        return is_running and self.busy_seconds >= WAITING_SECONDS

    # -- the record

    def snapshot(self) -> Worker:
        """Make the worker's present record, and keep it as `latest`.

        Most of its counters are sums over this start and all earlier ones.
        """
        base, work = self._base.plus(self.counts), self.workload
        self.latest = msgspec.structs.replace(
            base,
            **self._present,
            attempts=max(0, self.attempts - self._only_waits),
            open_chunks={
                name: chunk.num_rows - chunk.num_left for name, chunk in work.open.items()
            },
            examples=dict(list((self.examples | base.examples).items())[:MAX_CODES]),
            minutes=self._minutes.series(),
            chunks_done=base.chunks_done + len(work.published),
            replicas_lost=self.stats.replicas_lost,
            engine_restarts=base.engine_restarts + self.stats.restarts,
            busy_seconds=base.busy_seconds + self.busy_seconds,
        )
        self.latest = self.up_to_date()
        return self.latest

    def up_to_date(self) -> Worker:
        """Return `latest` with the time, the seconds and the cost of now. Any thread may call it.

        While an engine loads, no snapshot is made, but the machine costs money.
        """
        base, money = self._base, self._present["money"]
        seconds = self.run_seconds
        if money is not None and money.price_per_hour is not None:
            rate = money.price_per_hour / 3600
            before = base.money.cost if base.money is not None else None
            earlier = rate * base.up_seconds if before is None else before
            money = msgspec.structs.replace(money, cost=earlier + rate * seconds)
        return msgspec.structs.replace(
            self.latest,
            heartbeat=self._clock.now(),
            up_seconds=base.up_seconds + seconds,
            money=money,
        )
