"""The chunks that a worker has at work. `OpenChunks` begins their lives, and hands rows between them and the engine.

    ring -> opening -> open -> (all rows done) -> publishing -> closed

Each chunk lives on a thread of its own (chunk_life.py). All methods here run on the main thread. The worker's loop
calls `tick`, which takes in what the threads have come to and begins the next chunks; only `end` waits for threads.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from batchinfer.core.errors import BatchinferError
from batchinfer.core.events import tell
from batchinfer.core.records import FinishedRow, Marker, RowKey
from batchinfer.ledger.claims import Held
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Published
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.chunk_life import MAX_WRITING, Ending, Hall, Life
from batchinfer.worker.ring import Ring
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Environment, RunAccess, WorkerConfig

logger = logging.getLogger(__name__)

_FIRST_OPENING_SECONDS = 2.0
"""Seconds that opening a chunk is assumed to take, before the worker has opened its first chunk."""
_POLL_SECONDS = 0.2
_SAVE_SECONDS = 5.0
"""Seconds that a worker has to save its rows when it ends, even if no grace period is left."""


class OpenChunks:
    """The chunks of one worker that are at work; see the module's docstring."""

    def __init__(
        self,
        environment: Environment,
        run: RunAccess,
        ring: Ring,
        telemetry: Telemetry,
        config: WorkerConfig,
    ) -> None:
        self._environment = environment
        self._run = run
        self._ring = ring
        self.telemetry = telemetry
        self._limits = config.limits
        self._hall = Hall(
            environment.clock,
            run,
            config,
            lambda: any(chunk.num_left for chunk in list(self.open.values())),
            wake_loop=environment.background.wake,
            publishing=environment.background.gate(config.limits.max_publishing),
            writing=environment.background.gate(MAX_WRITING),
        )
        self._lives: dict[str, tuple[Life, Future[Ending]]] = {}
        self._opening_seconds = _FIRST_OPENING_SECONDS
        self.open: dict[str, OpenChunk] = telemetry.workload.open
        """Chunks whose rows the engine may have, by name."""
        self.failures: dict[str, BatchinferError] = {}

    # -- state

    @property
    def is_closing(self) -> bool:
        """Whether the worker has stopped opening chunks and handing out rows, for good."""
        return self._hall.is_closing

    @property
    def num_unread(self) -> int:
        """Unfinished rows of open chunks that have not been read yet to build their prompts."""
        return sum(chunk.num_unread for chunk in self.open.values())

    @property
    def may_grow(self) -> bool:
        """Whether another chunk may still be opened."""
        if self.is_closing:
            return False
        return bool(self._opening()) or not self._ring.is_finished

    @property
    def is_drained(self) -> bool:
        """Whether no chunk is at work, and no further chunk will be opened."""
        return not self._lives and not self.may_grow

    # -- what the worker calls while it runs and when it ends

    def tick(self, rows_built: int, rows_wanted: int) -> None:
        """Take in what the chunks' threads have come to, and open the chunks that the engine needs.

        Args:
            rows_built: Rows on their way to the engine that were read from their chunks already.
            rows_wanted: Rows that suffice to keep the engine busy. While there are fewer, more chunks are opened.

        Raises:
            BatchinferError: the worker must end: full scratch disk, refused permissions, a newer start of itself.
        """
        self._collect()
        found_done: set[str] = set()
        if not self.is_closing:
            counts, seconds = self.telemetry.counts, self.telemetry.busy_seconds
            rate = counts.rows_done / max(seconds, 1.0)
            if not counts.rows_done:
                # Nobody knows the rate yet, so each row is assumed to take five seconds.
                rate = rows_wanted / max(seconds, 5.0)
            # Twice the number of rows that the engine finishes while one chunk is opened keep the engine busy if the
            # bucket becomes slower.
            missing = rows_wanted + int(2 * rate * self._opening_seconds)
            missing -= rows_built + self.num_unread
            missing -= sum(_expected_rows(life.ref) for life in self._opening())
            found_done = self._ring.tick(is_hungry=missing > 0)
            self._begin_lives(missing)
        self.telemetry.workload.done(*found_done - self.open.keys())

    def finish(self, name: str, rows: list[FinishedRow]) -> None:
        """Keep finished rows of a chunk, and wake its thread after its last row."""
        chunk = self.open.get(name)
        if chunk is None:
            return
        fresh = chunk.finish(rows)
        if fresh:
            self.telemetry.rows_finished(fresh)
            if not chunk.num_left:
                self._lives[name][0].wake()

    def checkpoint(self) -> None:
        """Have those finished rows saved that no segment holds yet."""
        for life, _ in self._lives.values():
            if life.has_unsaved_rows:
                life.wake(has_to_save=True)

    def close(self) -> None:
        """Open no more chunks and hand out no more rows, for good. Idempotent."""
        self._hall.close()

    def note_death(self, keys: Sequence[RowKey]) -> None:
        """Note which rows were in the engine when it died, also in segments for later starts and other workers."""
        lines: defaultdict[str, list[int]] = defaultdict(list)
        for name, line in keys:
            lines[name].append(line)
        for name, each in lines.items():
            chunk = self.open.get(name)
            if chunk is not None:
                chunk.note_deaths(each, len(keys))
                self._lives[name][0].note_death(each, len(keys))

    def end(self, patience_seconds: float, on_turn: Callable[[], None]) -> None:
        """Let all chunks save their rows and give their claims back. Blocks until they have, or until time is up.

        Args:
            patience_seconds: How long this waits for storage, unless somebody asks the worker to stop: then until the
                grace period ends, or for _SAVE_SECONDS if fewer are left of it.
            on_turn: Called again and again while this waits.
        """
        clock, stopper = self._environment.clock, self._environment.stopper
        began = clock.monotonic()

        def deadline() -> float:
            until = began + patience_seconds
            if stopper.is_requested:
                left = stopper.seconds_left
                # With none left, a moment that moves on with the clock would never be reached.
                until = clock.monotonic() + left if left else began
            return max(began + _SAVE_SECONDS, until)

        self._hall.end(deadline)
        for life, _ in self._lives.values():
            life.wake()
        while self._lives and clock.monotonic() < deadline():
            on_turn()
            try:
                self._collect()
            except BatchinferError as error:
                logger.warning("not everything could be saved (%s)", error)
            if self._lives:
                self._environment.background.wait(_POLL_SECONDS)

    # -- inside

    def _opening(self) -> list[Life]:
        # A chunk that its thread has just opened counts here until its rows count in `open`.
        return [life for life, _ in self._lives.values() if life.name not in self.open]

    def _begin_lives(self, missing: int) -> None:
        limits, environment = self._limits, self._environment
        while (
            missing > 0
            and len(self._opening()) < limits.max_openings
            # A chunk stays open until its slowest row is done. If chunks are small, many must be open.
            and len(self._lives) < limits.max_open_chunks
            and self._has_disk_left()
        ):
            ref = self._ring.next()
            if ref is None:
                return
            self._ring.started(ref.name)
            life = Life(ref, self._hall, environment.background.event())
            self._lives[ref.name] = life, environment.background.submit(life.live)
            missing -= _expected_rows(ref)

    def _has_disk_left(self) -> bool:
        chunks = self.open.values()
        held = sum(chunk.local.size_bytes + chunk.spool.size_bytes for chunk in chunks)
        return not self.open or held < self._limits.max_open_bytes

    def _collect(self) -> None:
        """Take in chunks that were opened, and those whose life has ended."""
        for name, (life, pending) in list(self._lives.items()):
            is_over = pending.done()  # before its chunk is looked for
            if life.chunk is not None and name not in self.open:
                took = self._environment.clock.monotonic() - life.started
                # The estimate rises at once after a slow opening. It falls slowly after fast openings, since the next
                # one may be slow again.
                self._opening_seconds = max(took, 0.7 * self._opening_seconds + 0.3 * took)
                self.telemetry.chunk_opened(life.chunk)
            if is_over:
                del self._lives[name]
                self.open.pop(name, None)
                try:
                    self._ended(life, pending.result())
                finally:
                    if life.chunk is not None:
                        life.chunk.close()

    def _ended(self, life: Life, ending: Ending) -> None:
        name, ring, telemetry = life.name, self._ring, self.telemetry
        outcome = "released"
        if isinstance(ending, Marker):
            ring.ended(name, is_done=True)
            telemetry.chunk_skipped(name)
        elif isinstance(ending, Held):
            text = "{chunk}: worker {worker} has it"
            tell(logger, "chunk_held", text, chunk=name, worker=ending.claim.worker)
            ring.ended(name)
        elif isinstance(ending, Published):
            outcome = "done" if ending.is_ours else "lost"
            ring.ended(name, is_done=True)
        elif isinstance(ending, BatchinferError):
            self.failures[name] = ending
            ring.ended(name, is_given_up=True)
        if life.chunk is not None:
            telemetry.chunk_closed(life.chunk, outcome)


def _expected_rows(ref: ChunkRef) -> int:
    """Number of rows to count on of a chunk that is being opened: of a repair, most are done already."""
    return 1 if ref.generation else ref.rows_to_do
