"""The main loop of a worker: rows go through the engine until every chunk is published."""

from __future__ import annotations

import logging
from collections.abc import Callable

from batchinfer.core.errors import EngineError
from batchinfer.core.events import tell
from batchinfer.engines import Engine
from batchinfer.ledger.claims import LEASES_WITHOUT_STORAGE
from batchinfer.worker.joining import check_error_rate
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.stream import RowStream
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Environment, WorkerConfig

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_SNAPSHOT_SECONDS = 2.0


class MainLoop:
    """The main loop of one start. `on_turn` tells the heartbeat that it has turned."""

    def __init__(
        self,
        engine: Engine,
        stream: RowStream,
        open_chunks: OpenChunks,
        config: WorkerConfig,
        environment: Environment,
        telemetry: Telemetry,
        on_turn: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._open_chunks = open_chunks
        self._config = config
        self._environment = environment
        self._telemetry = telemetry
        self._turn = on_turn
        self._rows_saved = 0
        self._snapshot_at = float("-inf")

    def run(self) -> None:
        """Run the rows through the engine until every chunk is published. After an error, save finished rows."""
        stopper = self._environment.stopper
        try:
            self._generate()
            while not self._open_chunks.is_drained:
                stopper.raise_if_requested()
                self._keep_books()
                if not self._open_chunks.is_drained:
                    self._environment.background.wait(_POLL_SECONDS)
            check_error_rate(self._config, self._telemetry, is_end=True)
        except EngineError as error:
            self._open_chunks.note_death(error.in_flight)
            # Nobody waits for a worker whose engine died.
            self._open_chunks.end(LEASES_WITHOUT_STORAGE * self._config.lease_seconds, self._turn)
            raise
        except Exception:
            # Finished rows are saved after any other error too, even a bug of batchinfer.
            self._open_chunks.end(stopper.seconds_left, self._turn)
            raise

    def _generate(self) -> None:
        """Run the main loop: the engine takes rows from `stream` when it has free slots, and yields finished rows."""
        stopper = self._environment.stopper
        batches = self._engine.generate(self._stream, stopper)
        self._keep_books()
        try:
            for replies in batches:
                self._telemetry.rows_in_engine(self._stream.num_in_flight)
                self._stream.handle(replies)
                self._keep_books()
                if stopper.is_requested:
                    if not self._open_chunks.is_closing:
                        text = "{reason}; ending"
                        tell(logger, "stop_requested", text, reason=str(stopper.error))
                        self._open_chunks.close()
                        # Checkpoint now, because the machine may be gone before the engine finishes its last rows.
                        self._open_chunks.checkpoint()
                    if not self._stream.num_in_flight or stopper.is_set():
                        break
                elif self._stream.is_complete:
                    break
        finally:
            getattr(batches, "close", list)()  # runs a generator's clean-up code now
        self._telemetry.note_engine_stats(self._engine.stats())
        stopper.raise_if_requested()

    def _keep_books(self) -> None:
        """Take in finished background work, and begin what is due next.

        Background work builds calls, opens chunks, and writes checkpoints and outputs. From time to time the worker's
        record is updated, the error rate is checked, and progress is shown.
        """
        config, telemetry = self._config, self._telemetry
        self._turn()
        self._stream.collect()
        self._open_chunks.tick(self._stream.num_built, self._stream.max_in_flight)
        self._stream.prepare()
        # After so many seconds each chunk writes a checkpoint by itself.
        rows_done = telemetry.counts.rows_done
        if config.checkpoint_rows and rows_done - self._rows_saved >= config.checkpoint_rows:
            self._open_chunks.checkpoint()
            self._rows_saved = rows_done
        telemetry.note_checkpoints(self._open_chunks.unsaved_seconds)
        now = self._environment.clock.monotonic()
        if now - self._snapshot_at >= _SNAPSHOT_SECONDS:
            self._snapshot_at = now
            telemetry.note_engine_stats(self._engine.stats())
            telemetry.snapshot()
            check_error_rate(config, telemetry, num_pending=self._stream.num_pending)
        self._environment.show_progress(telemetry)
