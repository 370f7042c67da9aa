"""What a worker counts, for its record in the bucket, its log and its last line. Bounded, whatever the run's length."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from batchinfer.checkpoints import FinishedRow
from batchinfer.chunks import OpenChunk
from batchinfer.clock import Clock
from batchinfer.records import EngineInfo, EngineStats, ErrorExample, Failure, Minute, Span, Worker

logger = logging.getLogger(__name__)

MAX_MINUTES = 1440
MAX_SPANS = 2000
MAX_STARTS = 200
MAX_CODES = 50
MAX_MESSAGE = 500


def length_bucket(tokens: int) -> str:
    """Upper bound of the histogram bucket of a length: the next power of two, inclusive.

    >>> [length_bucket(n) for n in (0, 1, 2, 3, 1000)]
    ['0', '1', '2', '4', '1024']
    """
    return str(1 << (tokens - 1).bit_length()) if tokens > 0 else "0"


class Telemetry:
    """Counts on the main thread; `latest` is an immutable record for any thread. Implements shelf.Observer."""

    def __init__(
        self, worker_id: str, clock: Clock, *, host: dict[str, Any], num_chunks: int
    ) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self.num_chunks = num_chunks
        self.num_rows = 0
        """Rows of the own manifests, where known."""
        self.rows_skipped = 0
        """Of these, in chunks that were done before."""
        self._base = Worker(
            id=worker_id,
            epoch=0,
            nonce="",
            state="loading",
            started=clock.now(),
            heartbeat=clock.now(),
            host=host,
        )
        self._state = "loading"
        self._reason = ""
        self._attempts = 1
        self._engine: dict[str, Any] = {}
        self._open: dict[str, OpenChunk] = {}
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, ErrorExample] = {}
        self._finish_reasons: Counter[str] = Counter()
        self._prompt_lengths: Counter[str] = Counter()
        self._completion_lengths: Counter[str] = Counter()
        self._minutes: dict[int, list[int]] = {}
        self._spans: list[Span] = []
        self._running_since: float | None = None
        self._load_seconds = 0.0
        self._stats = EngineStats()
        self._epoch = 0
        self.latest = self._base

    # -- life

    def begin(self, before: Worker | None) -> Worker:
        """Go on from the record of this worker's last epoch."""
        if before is not None:
            self._base = msgspec.structs.replace(
                before, host=self._base.host, started=before.started
            )
            self._attempts = before.attempts + 1
            self._epoch = before.epoch + 1
        else:
            self._epoch = 1
        starts = [*self._base.starts, self._clock.now()][-MAX_STARTS:]
        self._base = msgspec.structs.replace(self._base, starts=starts)
        return self.snapshot()

    @property
    def attempts(self) -> int:
        """Starts, this one included, since one finished a new row."""
        return self._attempts

    def engine_ready(self, info: EngineInfo) -> None:
        """The engine has loaded."""
        self._engine = msgspec.to_builtins(info)
        self._load_seconds = info.load_seconds
        self._running_since = self._clock.monotonic()
        self.set_state("running")

    def set_state(self, state: str, reason: str = "") -> None:
        """Enter a state; see records.Worker."""
        self._state = state
        self._reason = reason
        if state == "done":
            self._attempts = 0

    def engine_stats(self, stats: EngineStats) -> None:
        """Take the engine's counters."""
        self._stats = stats

    # -- Observer

    def chunk_opened(self, chunk: OpenChunk) -> None:
        """See shelf.Observer."""
        self._open[chunk.name] = chunk
        self._counts["rows_resumed"] += chunk.counts.resumed
        logger.info(
            "chunk %s: open, %d rows, %d resumed",
            chunk.name,
            chunk.num_rows,
            chunk.counts.resumed,
            extra=_event("open"),
        )

    def chunk_closed(self, chunk: OpenChunk, outcome: str) -> None:
        """See shelf.Observer."""
        self._open.pop(chunk.name, None)
        if outcome == "done":
            self._counts["chunks_done"] += 1
        finished = chunk.num_rows - chunk.num_left
        self._spans.append(
            Span(
                chunk=chunk.name,
                start=chunk.started,
                end=self._clock.now(),
                rows=finished,
                resumed=chunk.counts.resumed,
                epoch=self._epoch,
                outcome=outcome,
            )
        )
        logger.info(
            "chunk %s: %s, %d rows ok, %d errors, %d resumed",
            chunk.name,
            outcome,
            chunk.counts.ok,
            sum(chunk.counts.errors.values()),
            chunk.counts.resumed,
            extra=_event(outcome),
        )

    def chunk_skipped(self, name: str) -> None:
        """See shelf.Observer."""
        self._counts["chunks_skipped"] += 1
        logger.info("chunk %s: already done", name, extra=_event("skipped"))

    def rows_finished(self, rows: list[FinishedRow]) -> None:
        """See shelf.Observer."""
        self._attempts = 0
        minute = self._minutes.setdefault(int(self._clock.now() // 60), [0, 0, 0, 0])
        for row in rows:
            minute[0] += 1
            minute[1] += row.prompt_tokens
            minute[2] += row.completion_tokens
            if row.ok:
                self._finish_reasons[row.finish_reason] += 1
                self._prompt_lengths[length_bucket(row.prompt_tokens)] += 1
                self._completion_lengths[length_bucket(row.completion_tokens)] += 1
            else:
                minute[3] += 1
                self._errors[row.code] += 1
            self._counts["cached_tokens"] += row.cached_tokens

    def row_failed(self, chunk: str, line: int, failure: Failure) -> None:
        """See shelf.Observer."""
        if failure.code not in self._examples and len(self._examples) < MAX_CODES:
            message = failure.message[:MAX_MESSAGE]
            self._examples[failure.code] = ErrorExample(chunk=chunk, line=line, message=message)

    # -- numbers of this epoch

    @property
    def rows_done(self) -> int:
        """Rows finished in this epoch, resumed ones left out."""
        return sum(minute[0] for minute in self._minutes.values())

    @property
    def rows_error(self) -> int:
        """Error rows of this epoch."""
        return sum(self._errors.values())

    @property
    def rows_resumed(self) -> int:
        """Rows that this epoch took up from checkpoints."""
        return self._counts["rows_resumed"]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of this epoch's rows."""
        return sum(minute[1] for minute in self._minutes.values())

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of this epoch's rows."""
        return sum(minute[2] for minute in self._minutes.values())

    @property
    def chunks_done(self) -> int:
        """Chunks published in this epoch."""
        return self._counts["chunks_done"]

    @property
    def chunks_skipped(self) -> int:
        """Chunks that were done before."""
        return self._counts["chunks_skipped"]

    @property
    def stats(self) -> EngineStats:
        """The engine's counters when last asked."""
        return self._stats

    @property
    def errors(self) -> dict[str, int]:
        """Error rows of this epoch by code."""
        return dict(self._errors)

    @property
    def examples(self) -> dict[str, ErrorExample]:
        """First error row of each code."""
        return dict(self._examples)

    def count_skipped(self, number: int) -> None:
        """Chunks found done at the start."""
        self._counts["chunks_skipped"] += number

    @property
    def busy_seconds(self) -> float:
        """Since the engine was ready."""
        return 0.0 if self._running_since is None else self._clock.monotonic() - self._running_since

    @property
    def run_seconds(self) -> float:
        """Since this epoch began."""
        return self._clock.monotonic() - self._began

    # -- the record

    def snapshot(self) -> Worker:
        """Make and remember the record as of now: this epoch's numbers on top of the earlier ones'."""
        base = self._base
        self.latest = msgspec.structs.replace(
            base,
            state=self._state,
            reason=self._reason,
            attempts=self._attempts,
            engine=self._engine or base.engine,
            open_chunks=list(self._open),
            chunks_done=base.chunks_done + self.chunks_done,
            chunks_skipped=self.chunks_skipped,
            rows_done=base.rows_done + self.rows_done,
            rows_ok=base.rows_ok + self.rows_done - self.rows_error,
            rows_error=base.rows_error + self.rows_error,
            rows_resumed=base.rows_resumed + self.rows_resumed,
            prompt_tokens=base.prompt_tokens + self.prompt_tokens,
            cached_tokens=base.cached_tokens + self._counts["cached_tokens"],
            completion_tokens=base.completion_tokens + self.completion_tokens,
            engine_steps=base.engine_steps + self._stats.steps,
            busy_seconds=base.busy_seconds + self.busy_seconds,
            load_seconds=base.load_seconds + self._load_seconds,
            errors=_sum(base.errors, self._errors),
            examples={**self._examples, **base.examples},
            finish_reasons=_sum(base.finish_reasons, self._finish_reasons),
            prompt_lengths=_sum(base.prompt_lengths, self._prompt_lengths),
            completion_lengths=_sum(base.completion_lengths, self._completion_lengths),
            minutes=merge_minutes(base.minutes, self._minutes),
            spans=[*base.spans, *self._spans][-MAX_SPANS:],
        )
        return self.latest


def merge_minutes(before: Iterable[Minute], now: dict[int, list[int]]) -> list[Minute]:
    """Join two series; where there are too many points, the older half is thinned by joining neighbours. Pure."""
    points = {minute.minute: minute for minute in before}
    for number, (rows, prompt, completion, errors) in now.items():
        old = points.get(
            number, Minute(minute=number, rows=0, prompt_tokens=0, completion_tokens=0, errors=0)
        )
        points[number] = Minute(
            minute=number,
            rows=old.rows + rows,
            prompt_tokens=old.prompt_tokens + prompt,
            completion_tokens=old.completion_tokens + completion,
            errors=old.errors + errors,
        )
    series = [points[number] for number in sorted(points)]
    while len(series) > MAX_MINUTES:
        half = len(series) // 2
        series = [_join(*series[i : i + 2]) for i in range(0, half - 1, 2)] + series[
            half - half % 2 :
        ]
    return series


def _join(first: Minute, second: Minute) -> Minute:
    return Minute(
        minute=first.minute,
        rows=first.rows + second.rows,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        errors=first.errors + second.errors,
    )


def _sum(before: dict[str, int], now: Counter[str]) -> dict[str, int]:
    return dict(Counter(before) + now)


def _event(name: str) -> dict[str, str]:
    """Machine-readable name of a log line (``--log-format json``)."""
    return {"event": f"chunk_{name}"}
