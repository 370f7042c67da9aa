"""One start of a worker, from its set-up through its main loop to its end: it runs a model over chunks of rows.

A worker is done when every chunk of its manifests has a marker and it finds no other chunk to take. With
--retry-errors, the error rows of these chunks must also have been tried again. A worker may end at any instant, also by
SIGKILL, and may be started again on any machine: the next start needs only what is on storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from batchinfer.core import units
from batchinfer.core.errors import (
    BatchinferError,
    EngineError,
    StorageError,
)
from batchinfer.core.events import event
from batchinfer.core.records import EngineInfo
from batchinfer.engines import Engine
from batchinfer.ledger.claims import LEASES_WITHOUT_STORAGE, Claims, Lease
from batchinfer.ledger.jobs import ChunkRef, rows_by_chunk
from batchinfer.ledger.publishing import Publisher
from batchinfer.ledger.runs import refuse_foreign
from batchinfer.ledger.survey import chunks_with_checkpoints, newest_markers
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.background import Pending, WhileLoading, unless_stopped
from batchinfer.worker.heartbeat import Heartbeat, check_stop_request
from batchinfer.worker.joining import (
    Membership,
    check_error_rate,
    make_result,
    read_work,
    refuse_only_errors,
)
from batchinfer.worker.limits import limits_result, watch_limits
from batchinfer.worker.metrics_server import serve_metrics
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.own_markers import OwnMarkers
from batchinfer.worker.repairs import to_repair
from batchinfer.worker.ring import Ring
from batchinfer.worker.stream import RowStream
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Environment, RunAccess, WorkerConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_SNAPSHOT_SECONDS = 2.0
_END_LOADING_SECONDS = 15.0
_SAVE_SECONDS = 5.0
"""Seconds that a worker has to save its rows when it ends, even if no grace period is left."""


def run_worker(config: WorkerConfig, environment: Environment) -> dict[str, Any]:
    """Process every chunk of the manifests. It can be killed at any point and run again: what is on storage is kept.

    Returns:
        The result object: counts, tokens and rates of this start.

    Raises:
        BatchinferError: the worker ends early. The error's `result` is the result object with the counts until then.
    """
    start = _Start(config, environment)
    try:
        start.run()
    except BatchinferError as error:
        error.attach_result(start.result(error))
        raise
    return start.result(None)


class _Start:
    """One start of a worker. `run` goes through the start from beginning to end; most other methods are its steps."""

    def __init__(self, config: WorkerConfig, environment: Environment) -> None:
        self.config = config
        self.environment = environment
        self.clock = environment.clock
        self.nonce = environment.new_nonce()
        self.worker_id = config.worker_id or f"w-{environment.new_nonce()}"
        self.telemetry = Telemetry(
            self.worker_id, environment.clock, host=config.host, money=config.money
        )
        self.store = environment.open_store(config.output)
        self.markers = OwnMarkers(self.store, environment.background, self._await)
        self.info: EngineInfo | None = None
        self.membership: Membership | None = None
        self._rows_saved = 0
        self._snapshot_at = float("-inf")
        self._turn: Callable[[], None] = lambda: None
        """Tells the heartbeat that the main loop has turned."""

    def run(self) -> None:
        """Set up, generate answers, publish outputs, and clean up, also after an error."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.environment.background.close)
            serve_metrics(self.config, self.store.url, self.telemetry, stack)
            membership = self._look()
            scratch = Scratch(self.config.scratch_dir)
            stack.callback(scratch.close)
            lease = Lease(
                self.store,
                self.worker_id,
                self.clock,
                lease_seconds=self.config.lease_seconds,
                nonce=self.nonce,
            )
            stopper = self.environment.stopper
            heartbeat = Heartbeat(self.store, lease, self.telemetry, stopper, self.clock)
            self._turn = heartbeat.turned
            heartbeat.start(
                self.environment.background, stack, max_attempts=self.config.max_attempts
            )
            watch_limits(
                self.config,
                self.telemetry,
                self.environment.stopper,
                self.environment.background,
                stack,
            )
            try:
                engine = self.environment.create_engine(self.config.engine)
                stack.callback(engine.close)
                self._work(membership, engine, heartbeat, scratch, stack)
                self.telemetry.set_state("done")
            except BatchinferError as error:
                self.telemetry.end_with(error)
                raise
            except Exception as error:
                self.telemetry.set_state("failed", f"{type(error).__name__}: {error}"[:500])
                raise

    def _look(self) -> Membership:
        """Read the manifests, and check that this worker may run and that the store honours preconditions.

        Afterwards storage is as it was before.
        """
        assignment = self._unless_stopped(
            partial(read_work, self.config, self.environment, self.store)
        )
        self.telemetry.workload.set_own({ref.name: _num_rows(ref) for ref in assignment.chunks})
        self._unless_stopped(partial(check_stop_request, self.store))
        self.membership = membership = Membership(
            self.config, self.environment, self.store, assignment
        )
        self._unless_stopped(membership.check)
        self.config = membership.config
        if not membership.is_store_tried:
            self._unless_stopped(partial(self.environment.probe, self.store), may_finish=True)
        return membership

    def _unless_stopped(self, work: Callable[[], T], *, may_finish: bool = False) -> T:
        return unless_stopped(
            self.environment.background,
            self.environment.stopper,
            work,
            may_finish=may_finish,
            on_turn=self._turn,
        )

    # -- the work

    def _work(
        self,
        membership: Membership,
        engine: Engine,
        heartbeat: Heartbeat,
        scratch: Scratch,
        stack: contextlib.ExitStack,
    ) -> None:
        environment, config = self.environment, self.config
        listed = environment.background.submit(partial(newest_markers, self.store))
        with_checkpoints = environment.background.submit(
            partial(chunks_with_checkpoints, self.store)
        )
        loading = self._begin_loading(engine, stack)
        markers = self._await(listed)
        done = {name: marker.generation for name, marker in markers.items()}
        own = {ref.name for ref in membership.assignment.chunks}
        if membership.run is not None:
            marked = self.markers.fingerprints(done, own)
            refuse_foreign(marked, membership.run.fingerprint, url=self.store.url)
        checkpointed = self._await(with_checkpoints)
        access = self._access_run(membership, heartbeat.lease, scratch, checkpointed)
        ring = self._make_ring(membership, access, done)
        self._log_work(membership.assignment.chunks, checkpointed)
        info = self._await(loading, ring)
        if info is None:
            logger.info("nothing is left to do; the engine is not needed")
            self._confirm(membership, done, own)
            return
        self.info = info
        # Before run.json is written: if the server refuses the options, none may be there that forbids better ones.
        builder = self._unless_stopped(partial(membership.make_builder, engine, info))
        access = dataclasses.replace(access, fingerprint=self._join(membership, info, done))
        open_chunks = OpenChunks(environment, access, ring, self.telemetry, config)
        environment.background.submit(heartbeat.beat)  # so that `status` says running
        stream = RowStream(
            environment, open_chunks, builder, self.telemetry, config.limits, info=info
        )
        self._answer(engine, stream, open_chunks)
        self._raise_failures(open_chunks)
        self._confirm(membership, done, own - open_chunks.published)

    def _confirm(self, membership: Membership, before: dict[str, int], others: set[str]) -> None:
        """Check that the run is a success: of one configuration, and with an answer.

        Args:
            membership: The worker's membership of the run.
            before: The generation of each marker that this start found at its beginning.
            others: The own chunks that this start has not published.
        """
        assert membership.run is not None
        if self.config.retry_errors or not others <= before.keys():
            self.markers.refuse_mixed(membership.run.fingerprint, before, others)
        self._unless_stopped(membership.confirm, may_finish=True)
        counts, markers = self.telemetry.counts, self.markers
        if markers.num_read and not markers.has_answers and counts.rows_done == counts.rows_error:
            refuse_only_errors(self.config)

    def _begin_loading(self, engine: Engine, stack: contextlib.ExitStack) -> Pending[EngineInfo]:
        """Open the engine in the background.

        The loading is told to stop when the worker is asked to stop, and when `stack` is left.
        """
        stop_loading = WhileLoading(self.environment.stopper)
        loading = self.environment.background.submit(partial(engine.open, stop_loading))
        stack.callback(self._end_loading, loading, stop_loading)
        kind = self.config.engine.engine
        name = self.config.engine.model or kind
        logger.info("loading %s", name, extra=event("engine_loading", engine=kind, model=name))
        return loading

    def _join(self, membership: Membership, info: EngineInfo, done: dict[str, int]) -> str:
        """Agree with the other workers on the run's configuration, and return its fingerprint.

        Where run.json is missing, some of the run's markers are read: they may be of another configuration.
        """
        marked = {} if membership.run is not None else self.markers.fingerprints(done, done)
        join = partial(membership.join, info, nonce=self.nonce, marked=marked)
        run = self._unless_stopped(join, may_finish=True)
        self.telemetry.engine_ready(info)
        self.telemetry.snapshot()
        logger.info(
            "engine ready: %s %s, %.1f s to load",
            info.name,
            info.model,
            info.load_seconds,
            extra=event("engine_ready", **msgspec.to_builtins(info)),
        )
        if self.config.engine.engine == "echo":
            logger.info("a rehearsal: neither the model nor the lengths of prompts are checked")
        return run.fingerprint

    def _answer(self, engine: Engine, stream: RowStream, open_chunks: OpenChunks) -> None:
        """Run the rows through the engine until every chunk is published. After an error, save finished rows."""
        try:
            self._generate(engine, stream, open_chunks)
            self._drain(open_chunks, stream)
        except EngineError as error:
            stream.note_death(error.in_flight)
            self._save(open_chunks, is_patient=True)  # nobody waits for a worker whose engine died
            raise
        except Exception:
            # Save the finished rows after any other error too, even a bug of batchinfer.
            self._save(open_chunks)
            raise

    def _access_run(
        self,
        membership: Membership,
        lease: Lease,
        scratch: Scratch,
        checkpointed: dict[str, int],
    ) -> RunAccess:
        assignment = membership.assignment
        # Also the job's own store: this worker may take chunks that are not in its manifests.
        roots = {assignment.job_url, *(ref.root for ref in assignment.chunks)}
        return RunAccess(
            store=self.store,
            lease=lease,
            claims=Claims(self.store, lease, self.clock),
            publisher=Publisher(self.store, nonce=self.nonce, require_lease=lease.require),
            scratch=scratch,
            sources={root: self.environment.open_store(root) for root in roots},
            checkpointed=checkpointed,
        )

    def _make_ring(self, membership: Membership, access: RunAccess, done: dict[str, int]) -> Ring:
        """Find out which chunks of the manifests are left to do, and make the ring from them."""
        own = membership.assignment.chunks
        left = [ref for ref in own if ref.name not in done]
        if self.config.retry_errors:
            names = {ref.name: done[ref.name] for ref in own if ref.name in done}
            left = to_repair(own, done, self.markers.read(names))
        names_left = {ref.name for ref in left}
        may_steal = membership.may_steal
        work, job = self.telemetry.workload, membership.assignment.job
        if may_steal:
            work.set_job(rows_by_chunk(job, self.config.limit))
            work.done(*done)
        work.done(*(ref.name for ref in own if ref.name not in names_left))
        return Ring(
            left,
            environment=self.environment,
            run=access,
            everything=membership.all_chunks if may_steal else None,
            num_workers=job.num_workers,
            done=done if not self.config.retry_errors else (),
        )

    def _log_work(self, own: list[ChunkRef], checkpointed: dict[str, int]) -> None:
        """Log how much of this worker's manifests is done already, by what storage holds."""
        work = self.telemetry.workload
        found = [ref for ref in own if ref.name in checkpointed and not work.is_done(ref.name)]
        rows = sum(min(checkpointed[ref.name], _num_rows(ref)) for ref in found)
        logger.info(
            "%s in the manifests, %d done before; checkpoints of the others hold %s",
            units.many(work.chunks, "chunk"),
            work.chunks_done,
            units.many(rows, "row"),
            extra=event(
                "manifests_read",
                chunks=work.chunks,
                done_before=work.chunks_done,
                rows_checkpointed=rows,
            ),
        )

    def _await(self, pending: Pending[Any], ring: Ring | None = None) -> Any:
        """Wait for a background job and return its result.

        If `ring` is given, the worker looks meanwhile whether there is anything to do. Returns None early if there is
        not, unless run.json is missing: whether the run has this worker's configuration, only a loaded engine tells.

        Raises:
            BatchinferError: a stop was requested, or the background job failed.
        """
        while not pending.is_done():
            self._turn()
            self.environment.stopper.raise_if_requested()
            if ring is not None:
                has_run = self.membership is not None and self.membership.run is not None
                if ring.is_finished and has_run:
                    return None
                ring.tick(is_hungry=True)
                self.telemetry.workload.done(*ring.take_found_done())
            self.environment.show_progress(self.telemetry)
            self.environment.background.wait(_POLL_SECONDS)
        # A stop request is raised before the job's own error. An engine that is stopped while it loads raises an error
        # too, but that error does not say why the engine was stopped.
        self.environment.stopper.raise_if_requested()
        return pending.result()

    def _end_loading(self, loading: Pending[Any], stop_loading: WhileLoading) -> None:
        """Stop the loading of the engine and wait for its end, for at most _END_LOADING_SECONDS.

        The engine is closed next, which should not happen while another thread is still opening it.
        """
        stop_loading.cancel()
        deadline = self.clock.monotonic() + _END_LOADING_SECONDS
        while not loading.is_done() and self.clock.monotonic() < deadline:
            self.environment.background.wait(_POLL_SECONDS)

    def _generate(self, engine: Engine, stream: RowStream, open_chunks: OpenChunks) -> None:
        """Run the main loop: the engine takes rows from `stream` when it has free slots, and yields finished rows."""
        stopper = self.environment.stopper
        batches = engine.generate(stream, stopper)
        self._keep_books(stream, open_chunks)
        try:
            for replies in batches:
                self.telemetry.rows_in_engine(stream.num_in_flight)
                stream.handle(replies)
                self._keep_books(stream, open_chunks)
                self._round(engine, stream, open_chunks)
                if stopper.is_requested:
                    if not open_chunks.is_closing:
                        logger.info(
                            "%s; ending",
                            stopper.error,
                            extra=event("stop_requested", reason=str(stopper.error)),
                        )
                        open_chunks.close()
                        # Checkpoint now, because the machine may be gone before the engine finishes its last rows.
                        open_chunks.checkpoint()
                    if not stream.num_in_flight or stopper.is_set():
                        break
                elif stream.is_complete:
                    break
        finally:
            _close(batches)
        self.telemetry.note_engine_stats(engine.stats())
        self.environment.stopper.raise_if_requested()

    def _keep_books(self, stream: RowStream, open_chunks: OpenChunks) -> None:
        """Take in finished background work, and begin what is due next.

        Background work builds calls, opens chunks, and writes checkpoints and outputs.
        """
        self._turn()
        stream.collect()
        open_chunks.tick(stream.demand)
        stream.prepare()

    def _round(self, engine: Engine, stream: RowStream, open_chunks: OpenChunks) -> None:
        """Do what is due: write checkpoints, update the worker's record, check the error rate, show progress."""
        now = self.clock.monotonic()
        self._checkpoint_if_due(open_chunks)
        if now - self._snapshot_at >= _SNAPSHOT_SECONDS:
            self._snapshot_at = now
            self.telemetry.note_engine_stats(engine.stats())
            self.telemetry.snapshot()
            check_error_rate(self.config, self.telemetry, num_pending=stream.num_pending)
        self.environment.show_progress(self.telemetry)

    def _checkpoint_if_due(self, open_chunks: OpenChunks) -> None:
        """Ask for checkpoints after so many rows. After so many seconds each chunk writes one by itself."""
        every_rows, rows_done = self.config.checkpoint_rows, self.telemetry.counts.rows_done
        if every_rows is not None and rows_done - self._rows_saved >= every_rows:
            open_chunks.checkpoint()
            self._rows_saved = rows_done
        self.telemetry.note_checkpoints(open_chunks.unsaved_seconds)

    def _drain(self, open_chunks: OpenChunks, stream: RowStream) -> None:
        """Wait until every complete chunk is published."""
        while not open_chunks.is_drained:
            self.environment.stopper.raise_if_requested()
            self._keep_books(stream, open_chunks)
            self._checkpoint_if_due(open_chunks)
            self.environment.show_progress(self.telemetry)
            if not open_chunks.is_drained:
                self.environment.background.wait(_POLL_SECONDS)
        check_error_rate(self.config, self.telemetry, is_end=True)

    def _save(self, open_chunks: OpenChunks, *, is_patient: bool = False) -> None:
        """Prepare an early end: checkpoint the finished rows, then release the claims.

        Waits for storage until the grace period ends, or for 5 seconds if fewer are left of it. With `is_patient` it
        waits much longer, as long as nobody asks the worker to stop and storage does not refuse permission.
        """
        stopper, clock = self.environment.stopper, self.clock
        began = clock.monotonic()
        soon = began + max(_SAVE_SECONDS, stopper.seconds_left)
        late = began + LEASES_WITHOUT_STORAGE * self.config.lease_seconds if is_patient else soon

        def deadline() -> float:
            if stopper.is_requested:
                return max(began + _SAVE_SECONDS, clock.monotonic() + stopper.seconds_left)
            return late

        open_chunks.end(deadline, self._turn)

    def result(self, error: BatchinferError | None) -> dict[str, Any]:
        """Make the result object that the command prints; `error` is the error that ended this start, if any."""
        result = make_result(
            self.config,
            self.telemetry,
            run=None if self.membership is None else self.membership.run,
            info=self.info,
            error=error,
        )
        return result | limits_result(self.config, self.telemetry.latest)

    def _raise_failures(self, open_chunks: OpenChunks) -> None:
        if not open_chunks.failures:
            return
        lines = [
            f"  {name}: {error.message}" for name, error in list(open_chunks.failures.items())[:5]
        ]
        raise StorageError(
            f"{len(open_chunks.failures)} chunks could not be done; all others are:\n"
            + "\n".join(lines),
            hint="fix them, then start the same command again",
        )


def _num_rows(ref: ChunkRef) -> int:
    """Number of rows to do of a chunk."""
    return (ref.rows or 0) if ref.row_limit is None else ref.row_limit


def _close(batches: Iterator[object]) -> None:
    """Close the engine's generator of replies, so that its clean-up code runs now."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()
