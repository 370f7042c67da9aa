"""Counters of a worker, for its record on storage, its log and its result. Their lists have a largest length."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from batchinfer.core.events import event
from batchinfer.core.records import (
    EngineInfo,
    EngineStats,
    ErrorExample,
    Failure,
    Money,
    Worker,
    WorkerLease,
)
from batchinfer.core.redaction import redact
from batchinfer.ledger.checkpoints import FinishedRow, count_rows
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.minutes import Minutes
from batchinfer.worker.workload import Workload

logger = logging.getLogger(__name__)

MAX_STARTS = 200
_MAX_MESSAGE = 500

WAITING_SECONDS = 30.0
"""Seconds after which a start whose engine is ready, but which has had no chunk, counts as waiting for other workers.
A waiting start does not count as an attempt."""


class Telemetry:
    """Counters of one start of a worker, used on the main thread. `latest` is an immutable copy for all threads."""

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        *,
        host: dict[str, Any],
        money: Money | None = None,
    ) -> None:
        self._clock = clock
        self._money = money
        self._host = host
        self._began = clock.monotonic()
        self.counts = Counts()
        """Sums over the rows that this start finished. Rows taken over from storage are not counted."""
        self.examples: dict[str, ErrorExample] = {}
        """First failed row of each error code."""
        self._minutes = Minutes()
        self.workload = Workload()
        """The chunks of this worker's manifests, and those of other workers that it does, too."""
        self._resumed_in_closed = 0
        self.chunks_resumed = 0
        """Number of chunks with rows that this start took over from storage."""
        self.chunks_done = 0
        """Number of chunks that this start published."""
        self.attempts = 1
        """Number of starts in a row, this one included, that finished no new row; 0 once this start finishes one.

        Starts that were asked to end, or that only waited for other workers, are not counted.
        """
        self.stats = EngineStats()
        """Counters of the engine, as they were last read."""
        self._base = Worker(
            id=worker_id,
            nonce="",
            state="loading",
            started=clock.now(),
            heartbeat=clock.now(),
            host=host,
        )
        self._state = "loading"
        self._reason = ""
        self._has_had_a_chunk = False
        self._write_now: Callable[[], object] = lambda: None
        self._engine: dict[str, Any] = {}
        self._running_since: float | None = None
        self._running_until: float | None = None
        self._num_in_engine = 0
        self._has_sent_rows = False
        self._checkpointed = 0.0
        self.latest = self._base

    # -- life

    def begin(self, before: WorkerLease | None, earlier: Worker | None) -> Worker:
        """Begin this start's record.

        Args:
            before: The lease that this worker's last start left; None without one.
            earlier: The statistics that it left; None without any.
        """
        base = self._base if earlier is None else msgspec.structs.replace(earlier, host=self._host)
        self.attempts = 1 if before is None else before.attempts + 1
        starts = [*base.starts, self._clock.now()][-MAX_STARTS:]
        self._base = msgspec.structs.replace(base, starts=starts, open_chunks={})
        self._minutes = Minutes(base.minutes)
        return self.snapshot()

    def log_start(self, before: WorkerLease | None) -> None:
        """Log that this start holds its lease, and how the last start ended. `before` is the last start's lease."""
        worker, start = self._base.id, len(self._base.starts)
        fields = {"worker": worker, "start": start, "attempt": self.attempts}
        logger.info("worker %s: start %d", worker, start, extra=event("worker_started", **fields))
        if before is None:
            return
        is_kill = before.state not in ENDED_STATES
        how = f"ended as {before.state}"
        if is_kill:
            how = "was killed, or still runs and will end now (workers that run at once need an id each)"
        fields = {"before": before.state, "is_kill": is_kill, "rows": self._base.rows_done}
        logger.info(
            "worker %s: the last start %s", worker, how, extra=event("worker_resumed", **fields)
        )

    def log_end(self) -> None:
        """Log how this start ended, and its failed rows by error code."""
        errors = most_common(self.counts.errors)
        failed = f" ({', '.join(f'{count} x {code}' for code, count in errors)})" if errors else ""
        logger.info(
            "worker %s: %s after %.0f s, %s, %d failed%s%s",
            self._base.id,
            self._state,
            self.run_seconds,
            units.many(self.counts.rows_done, "row"),
            self.counts.rows_error,
            failed,
            f" ({self._reason})" if self._reason else "",
            extra=event(
                "worker_ended",
                worker=self._base.id,
                state=self._state,
                reason=self._reason,
                seconds=round(self.run_seconds, 3),
                rows=self.counts.rows_done,
                rows_error=self.counts.rows_error,
                errors=self.counts.errors,
                rows_resumed=self.rows_resumed,
                chunks_done=self.chunks_done,
                prompt_tokens=self.counts.prompt_tokens,
                completion_tokens=self.counts.completion_tokens,
            ),
        )

    @property
    def is_loading(self) -> bool:
        """Whether the engine has not loaded yet."""
        return self._running_since is None

    def engine_ready(self, info: EngineInfo) -> None:
        """Note that the engine has loaded."""
        self._engine = msgspec.to_builtins(info)
        self._running_since = self._clock.monotonic()
        self.set_state("running")

    def note_checkpoints(self, seconds_ago: float) -> None:
        """Note that all rows that were finished so many seconds ago are on storage."""
        self._checkpointed = self._clock.now() - seconds_ago

    def rows_in_engine(self, count: int) -> None:
        """Note how many rows are in the engine, and log when the first ones are."""
        self._num_in_engine = count
        if count and not self._has_sent_rows:
            self._has_sent_rows = True
            seconds = round(self.run_seconds, 3)
            logger.info(
                "first rows in the engine %.1f s after the start",
                seconds,
                extra=event("first_rows", seconds=seconds),
            )

    def set_state(self, state: str, reason: str = "") -> None:
        """Set the state that the worker's record shows; records.Worker lists the states."""
        self._state = state
        self._reason = redact(reason)
        if state in ENDED_STATES:
            self._num_in_engine = 0
            self._running_until = self._clock.monotonic()
        if state == "done":
            self.attempts = 0

    def end_with(self, error: BatchinferError) -> None:
        """Set the state for a start that ends with an error: `stopped` or `failed`.

        A start that ends because of a signal, `batchinfer stop` or a limit does not count as an attempt.
        Nor does a start that is refused because the run has another configuration: each further start says so, too.
        """
        is_asked = isinstance(error, PolicyStop | Interrupted)
        if isinstance(error, StopRequested | LimitReached | Interrupted | RunMismatch):
            self.attempts = max(0, self.attempts - 1)
        self.set_state(
            "stopped" if is_asked else "failed", f"{type(error).__name__}: {error.message}"[:500]
        )

    def note_engine_stats(self, stats: EngineStats) -> None:
        """Keep the engine's counters. Logs a warning when they first show that the engine computed rows twice."""
        if stats.preemptions and not self.stats.preemptions:
            logger.warning(
                "the engine ran out of KV cache and computes rows again (preemption); lower --max-num-seqs, or give it "
                "more memory: --gpu-memory-utilization, --tensor-parallel-size, "
                "on a CPU --engine-arg kv_cache_memory_bytes",
                extra=event("engine_preempted", preemptions=stats.preemptions),
            )
        self.stats = stats

    # -- events, told on the main thread

    def chunk_opened(self, chunk: OpenChunk) -> None:
        """Count a chunk that has just been opened, and its rows that were taken over from storage."""
        self.workload.opened(chunk)
        self._has_had_a_chunk = True
        if self.latest.attempts < self.attempts:
            # Write the record now. If this chunk kills the worker, storage must already show this start as an attempt.
            self.snapshot()
            self._write_now()
        self.chunks_resumed += chunk.counts.rows_resumed > 0
        logger.info(
            "chunk %s: open, %s, %d resumed",
            chunk.name,
            units.many(chunk.num_rows, "row"),
            chunk.counts.rows_resumed,
            extra=event(
                "chunk_open",
                chunk=chunk.name,
                rows=chunk.num_rows,
                resumed=chunk.counts.rows_resumed,
            ),
        )

    def chunk_closed(self, chunk: OpenChunk, outcome: str) -> None:
        """Count a chunk that this worker has closed.

        `outcome` is `done`, `lost` (another worker published it) or `released`.
        """
        self._resumed_in_closed += chunk.counts.rows_resumed
        if outcome == "released":
            self.workload.released(chunk.name)
        else:
            self.workload.done(chunk.name)
        if outcome == "done":
            self.chunks_done += 1
        logger.info(
            "chunk %s: %s, %s ok, %s, %d resumed",
            chunk.name,
            outcome,
            units.many(chunk.counts.rows_ok, "row"),
            units.many(chunk.counts.rows_error, "error"),
            chunk.counts.rows_resumed,
            extra=event(
                f"chunk_{outcome}",
                chunk=chunk.name,
                rows_ok=chunk.counts.rows_ok,
                errors=chunk.counts.errors,
                resumed=chunk.counts.rows_resumed,
                seconds=round(self._clock.now() - chunk.started, 3),
            ),
        )

    def chunk_skipped(self, name: str) -> None:
        """Count a chunk that another worker or an earlier start has done."""
        self.workload.done(name)
        logger.info("chunk %s: already done", name, extra=event("chunk_skipped", chunk=name))

    def rows_finished(self, rows: list[FinishedRow]) -> None:
        """Count rows that this start finished. Rows taken over from storage must not be among them."""
        self.attempts = 0
        counts = count_rows(rows)
        self.counts = self.counts.plus(counts)
        self._minutes.add(counts, int(self._clock.now() // 60))

    def row_failed(self, chunk: str, line: int, failure: Failure) -> None:
        """Keep the failure of an error row as an example, and log it, if it is the first with its error code."""
        if failure.code not in self.examples and len(self.examples) < MAX_CODES:
            example = ErrorExample(chunk=chunk, line=line, message=failure.message[:_MAX_MESSAGE])
            self.examples[failure.code] = example
            logger.warning(
                "%s line %d: %s: %s",
                chunk,
                line,
                failure.code,
                example.message,
                extra=event(
                    "row_error", code=failure.code, chunk=chunk, line=line, example=example.message
                ),
            )

    # -- the work of this start

    @property
    def chunks_skipped(self) -> int:
        """Number of chunks of the workload that another worker or an earlier start has done."""
        return self.workload.chunks_done - self.chunks_done

    def when_urgent(self, write_now: Callable[[], object]) -> None:
        """Set the function to call when `latest` must be written to storage without waiting for the next heartbeat."""
        self._write_now = write_now

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
    def rows_resumed(self) -> int:
        """Number of finished rows that this start took over from storage: checkpoints, or the output of a repair."""
        return self._resumed_in_closed + sum(
            chunk.counts.rows_resumed for chunk in self.workload.open.values()
        )

    @property
    def run_seconds(self) -> float:
        """Seconds since this start began."""
        return self._clock.monotonic() - self._began

    # -- the record

    def snapshot(self) -> Worker:
        """Make the worker's present record, and keep it as `latest`.

        Most of its counters are sums over this start and all earlier ones.
        """
        base = self._base.plus(self.counts)
        self.latest = msgspec.structs.replace(
            base,
            state=self._state,
            reason=self._reason,
            attempts=max(0, self.attempts - self._is_waiting),
            engine=self._engine or base.engine,
            open_chunks={
                name: chunk.num_rows - chunk.num_left for name, chunk in self.workload.open.items()
            },
            examples=dict(list((self.examples | base.examples).items())[:MAX_CODES]),
            minutes=self._minutes.series(),
            chunks_done=base.chunks_done + self.chunks_done,
            rows_resumed=base.rows_resumed + self.rows_resumed,
            replicas_lost=self.stats.replicas_lost,
            engine_restarts=base.engine_restarts + self.stats.restarts,
            rows_in_engine=self._num_in_engine,
            checkpointed=self._checkpointed,
            busy_seconds=base.busy_seconds + self.busy_seconds,
        )
        self.latest = self.up_to_date()
        return self.latest

    def up_to_date(self) -> Worker:
        """Return `latest` with the time, the seconds and the cost of now. Any thread may call it.

        While an engine loads, no snapshot is made, but the machine costs money.
        """
        base, seconds = self._base, self.run_seconds
        money = self._money
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

    @property
    def _is_waiting(self) -> bool:
        """Whether this start has had no chunk for WAITING_SECONDS since its engine became ready.

        A start that ends while it waits like this does not count as an attempt.
        """
        is_idle = self._state == "running" and not self._has_had_a_chunk
        return is_idle and self.busy_seconds >= WAITING_SECONDS
