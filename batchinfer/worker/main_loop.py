"""The main loop of a worker: rows go through the engine until every chunk is published."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from batchinfer.core.errors import EngineError
from batchinfer.core.events import tell
from batchinfer.engines import Engine
from batchinfer.ledger.claims import LEASES_WITHOUT_STORAGE
from batchinfer.worker.joining import check_error_rate
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.stream import RowStream
from batchinfer.worker.worker_config import Environment, WorkerConfig

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_SNAPSHOT_SECONDS = 2.0


@dataclass(slots=True)
class MainLoop:
    """The main loop of one start. `on_turn` tells the heartbeat that it has turned."""

    engine: Engine
    stream: RowStream
    open_chunks: OpenChunks
    config: WorkerConfig
    environment: Environment
    on_turn: Callable[[], None]
    _snapshot_at: float = float("-inf")

    def run(self) -> None:
        """Run the rows through the engine until every chunk is published. After an error, save finished rows."""
        stopper = self.environment.stopper
        try:
            self._generate()
            while not self.open_chunks.is_drained:
                stopper.raise_if_requested()
                self._keep_books()
                if not self.open_chunks.is_drained:
                    self.environment.background.wait(_POLL_SECONDS)
        except EngineError:
            # Nobody waits for a worker whose engine died.
            self.open_chunks.end(LEASES_WITHOUT_STORAGE * self.config.lease_seconds, self.on_turn)
            raise
        except Exception:
            # Finished rows are saved after any other error too, even a bug of batchinfer.
            self.open_chunks.end(stopper.seconds_left, self.on_turn)
            raise

    def _generate(self) -> None:
        """Run the main loop: the engine takes rows from `stream` when it has free slots, and yields finished rows."""
        stopper = self.environment.stopper
        batches = self.engine.generate(self.stream, stopper)
        self._keep_books()
        try:
            for replies in batches:
                self.open_chunks.telemetry.rows_in_engine(self.stream.num_in_flight)
                self.stream.handle(replies)
                self._keep_books()
                if stopper.is_requested:
                    if not self.open_chunks.is_closing:
                        text = "{reason}; ending"
                        tell(logger, "stop_requested", text, reason=str(stopper.error))
                        self.open_chunks.close()
                        # Checkpoint now, because the machine may be gone before the engine finishes its last rows.
                        self.open_chunks.checkpoint()
                    if not self.stream.num_in_flight or stopper.is_set():
                        break
                elif self.stream.is_complete:
                    break
        finally:
            getattr(batches, "close", list)()  # runs a generator's clean-up code now
        self.open_chunks.telemetry.note_engine_stats(self.engine.stats())
        stopper.raise_if_requested()

    def _keep_books(self) -> None:
        """Take in finished background work, and begin what is due next.

        Background work builds calls, opens chunks, and writes checkpoints and outputs. From time to time the worker's
        record is updated, the error rate is checked, and progress is shown.
        """
        config, telemetry = self.config, self.open_chunks.telemetry
        self.on_turn()
        self.stream.collect()
        self.open_chunks.tick(self.stream.num_built, self.stream.max_in_flight)
        self.stream.prepare()
        now = self.environment.clock.monotonic()
        if now - self._snapshot_at >= _SNAPSHOT_SECONDS:
            self._snapshot_at = now
            telemetry.note_engine_stats(self.engine.stats())
            telemetry.snapshot()
            ok, failed = telemetry.counts.rows_ok, telemetry.counts.rows_error
            check_error_rate(config, telemetry, ok, failed, num_pending=self.stream.num_pending)
        self.environment.show_progress(telemetry)
