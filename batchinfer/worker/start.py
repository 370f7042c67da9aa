"""One start of a worker, from its set-up through its main loop (main_loop.py) to its end.

A worker is done when every chunk of its manifests has a marker and it finds no other chunk to take. With
--retry-errors, the error rows of these chunks must also have been tried again. A worker may end at any instant, also by
SIGKILL, and may be started again on any machine: the next start needs only what is on storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from batchinfer.core import units
from batchinfer.core.errors import BatchinferError, StorageError
from batchinfer.core.events import tell
from batchinfer.core.records import EngineInfo
from batchinfer.engines import Engine
from batchinfer.ledger.claims import Claims, Lease
from batchinfer.ledger.jobs import rows_by_chunk
from batchinfer.ledger.runs import refuse_foreign
from batchinfer.ledger.survey import newest_markers
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.background import WhileLoading, unless_stopped
from batchinfer.worker.heartbeat import Heartbeat, check_stop_request
from batchinfer.worker.joining import Membership, check_error_rate, make_result, read_work
from batchinfer.worker.limits import watch_limits
from batchinfer.worker.main_loop import MainLoop
from batchinfer.worker.metrics_server import serve_metrics
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.own_markers import OwnMarkers, to_repair
from batchinfer.worker.ring import Ring
from batchinfer.worker.stream import RowStream
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Environment, RunAccess, WorkerConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_END_LOADING_SECONDS = 15.0


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
        self.telemetry = Telemetry(
            config.worker_id or f"w-{environment.new_nonce()}",
            environment.clock,
            host=config.host,
            money=config.money,
        )
        self.store = environment.open_store(config.output)
        self.markers = OwnMarkers(self.store, self._do)
        self.info: EngineInfo | None = None
        self.membership: Membership | None = None
        self._turn: Callable[[], None] = lambda: None
        """Tells the heartbeat that the main loop has turned."""

    def run(self) -> None:
        """Set up, generate answers, publish outputs, and clean up, also after an error."""
        environment, telemetry = self.environment, self.telemetry
        with contextlib.ExitStack() as stack:
            serve_metrics(self.config, self.store.url, telemetry, stack)
            membership = self._look()
            scratch = stack.enter_context(contextlib.closing(Scratch(self.config.scratch_dir)))
            lease = Lease(
                self.store,
                telemetry.latest.id,
                self.clock,
                lease_seconds=self.config.lease_seconds,
                nonce=self.nonce,
            )
            heartbeat = Heartbeat(self.store, lease, telemetry, environment.stopper, self.clock)
            self._turn = heartbeat.turned
            heartbeat.start(environment.background, stack, max_attempts=self.config.max_attempts)
            try:
                stack.callback(watch_limits(telemetry, environment.stopper, environment.background))
                engine = environment.create_engine(self.config.engine)
                stack.callback(engine.close)
                self._work(membership, engine, heartbeat, scratch, stack)
                telemetry.set_state("done")
            except Exception as error:
                telemetry.end_with(error)
                raise

    def result(self, error: BatchinferError | None) -> dict[str, Any]:
        """Make the result object that the command prints; `error` is the error that ended this start, if any."""
        run = None if self.membership is None else self.membership.run
        return make_result(self.config, self.telemetry, run=run, info=self.info, error=error)

    def _look(self) -> Membership:
        """Read the manifests, and check that this worker may run and that the store honours preconditions.

        Afterwards storage is as it was before.
        """
        assignment = self._do(partial(read_work, self.config, self.environment, self.store))
        self.telemetry.workload.set_own({ref.name: ref.rows_to_do for ref in assignment.chunks})
        self._do(partial(check_stop_request, self.store))
        self.membership = membership = Membership(
            self.config, self.environment, self.store, assignment
        )
        self._do(membership.check)
        self.config = membership.config
        if not membership.is_store_tried:
            self._do(partial(self.environment.probe, self.store), may_finish=True)
        return membership

    def _do(self, work: Callable[[], T], *, may_finish: bool = False) -> T:
        """Do work in the background, unless the worker is asked to stop; see `unless_stopped`."""
        self.environment.stopper.raise_if_requested()
        return self._await(self.environment.background.submit(work), may_finish=may_finish)

    def _await(self, pending: Future[T], *, may_finish: bool = False) -> T:
        environment = self.environment
        return unless_stopped(
            environment.background,
            environment.stopper,
            pending,
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
        submit = environment.background.submit
        listed = submit(partial(newest_markers, self.store))
        loading = self._begin_loading(engine, stack)
        done = self._await(listed)
        own = {ref.name for ref in membership.assignment.chunks}
        if membership.run is not None:
            marked = self.markers.fingerprints(done, own)
            refuse_foreign(marked, membership.run.fingerprint, url=self.store.url)
        access = self._access_run(membership, heartbeat.lease, scratch)
        ring = self._make_ring(membership, access, done)
        # Where a worker is gone, the time in which its chunks are still its own passes while the engine loads.
        submit(access.claims.watch)
        self._log_work()
        self.info = info = self._await_engine(loading, ring, has_run=membership.run is not None)
        if info is None:
            logger.info("nothing is left to do; the engine is not needed")
            self._confirm(membership, done, own)
            return
        # Before run.json is written: if the server refuses the options, none may be there that forbids better ones.
        builder = self._do(partial(membership.make_builder, engine, info))
        access = dataclasses.replace(access, fingerprint=self._join(membership, info, done))
        open_chunks = OpenChunks(environment, access, ring, self.telemetry, config)
        submit(heartbeat.beat)  # so that `status` says running
        stream = RowStream(environment, open_chunks, builder, config.limits, info=info)
        MainLoop(engine, stream, open_chunks, config, environment, self._turn).run()
        if open_chunks.failures:
            raise _undone(open_chunks.failures)
        self._confirm(membership, done, own - self.telemetry.workload.published)

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
        self._do(membership.confirm, may_finish=True)
        markers, counts = self.markers, self.telemetry.workload.counts
        ok, failed = markers.rows_ok + counts.rows_ok, markers.rows_error + counts.rows_error
        check_error_rate(self.config, self.telemetry, ok, failed, is_end=True)

    def _begin_loading(self, engine: Engine, stack: contextlib.ExitStack) -> Future[EngineInfo]:
        """Open the engine in the background.

        The loading is told to stop when the worker is asked to stop, and when `stack` is left.
        """
        stop_loading = WhileLoading(self.environment.stopper)
        loading = self.environment.background.submit(partial(engine.open, stop_loading))
        stack.callback(self._end_loading, loading, stop_loading)
        kind = self.config.engine.engine
        name = self.config.engine.model or kind
        tell(logger, "engine_loading", "loading {model}", engine=kind, model=name)
        return loading

    def _end_loading(self, loading: Future[Any], stop_loading: WhileLoading) -> None:
        """Stop the loading of the engine and wait for its end, for at most _END_LOADING_SECONDS.

        The engine is closed next, which should not happen while another thread is still opening it.
        """
        stop_loading.cancel()
        deadline = self.clock.monotonic() + _END_LOADING_SECONDS
        while not loading.done() and self.clock.monotonic() < deadline:
            self.environment.background.wait(_POLL_SECONDS)

    def _await_engine(
        self, loading: Future[EngineInfo], ring: Ring, *, has_run: bool
    ) -> EngineInfo | None:
        """Wait for the engine, and look meanwhile whether there is anything to do.

        Returns None early if there is not, unless run.json is missing: whether the run has this worker's
        configuration, only a loaded engine tells.
        """
        environment = self.environment
        while not loading.done():
            self._turn()
            environment.stopper.raise_if_requested()
            if ring.is_finished and has_run:
                return None
            self.telemetry.workload.done(*ring.tick(is_hungry=True))
            environment.show_progress(self.telemetry)
            environment.background.wait(_POLL_SECONDS)
        return self._await(loading)

    def _join(self, membership: Membership, info: EngineInfo, done: dict[str, int]) -> str:
        """Agree with the other workers on the run's configuration, and return its fingerprint.

        Where run.json is missing, some of the run's markers are read: they may be of another configuration.
        """
        marked = {} if membership.run is not None else self.markers.fingerprints(done, done)
        join = partial(membership.join, info, nonce=self.nonce, marked=marked)
        run = self._do(join, may_finish=True)
        self.telemetry.engine_ready(info)
        self.telemetry.snapshot()
        text = "engine ready: {name} {model}, {load_seconds:.1f} s to load"
        tell(logger, "engine_ready", text, **msgspec.to_builtins(info))
        if self.config.engine.engine == "echo":
            logger.info("a rehearsal: neither the model nor the lengths of prompts are checked")
        return run.fingerprint

    def _access_run(
        self,
        membership: Membership,
        lease: Lease,
        scratch: Scratch,
    ) -> RunAccess:
        source_at = cache(self.environment.open_store)
        # Now, so that a source which cannot be opened is refused before anything is claimed. Also the job's own store:
        # this worker may take chunks that are not in its manifests.
        assignment = membership.assignment
        for root in {assignment.job_url, *(ref.root for ref in assignment.chunks)}:
            source_at(root)
        return RunAccess(
            store=self.store,
            lease=lease,
            claims=Claims(self.store, lease, self.clock),
            scratch=scratch,
            source_at=source_at,
            retry_errors=self.config.retry_errors,
        )

    def _make_ring(self, membership: Membership, access: RunAccess, done: dict[str, int]) -> Ring:
        """Find out which chunks of the manifests are left to do, and make the ring from them."""
        own, unreadable = membership.assignment.chunks, self.markers.unreadable
        left = [
            ref._replace(generation=done.get(ref.name, ref.generation))
            for ref in own
            if ref.name not in done or ref.name in unreadable
        ]
        if self.config.retry_errors:
            names = {ref.name: done[ref.name] for ref in own if ref.name in done}
            # 0: their rows are counted already, with the fingerprints.
            left = to_repair(own, done, self.markers.read(names, 0))
        names_left = {ref.name for ref in left}
        may_steal = membership.may_steal
        work, job = self.telemetry.workload, membership.assignment.job
        if may_steal:
            work.set_job(rows_by_chunk(job, self.config.limit))
            work.done(*(done.keys() - unreadable))
        work.done(*(ref.name for ref in own if ref.name not in names_left))
        return Ring(
            left,
            environment=self.environment,
            run=access,
            everything=membership.all_chunks if may_steal else None,
            num_workers=job.num_workers,
            done=done.keys() - unreadable if not self.config.retry_errors else (),
        )

    def _log_work(self) -> None:
        """Log how much of this worker's manifests is done already."""
        work = self.telemetry.workload
        tell(
            logger,
            "manifests_read",
            "{} in the manifests, {done_before} done before",
            units.many(work.chunks, "chunk"),
            chunks=work.chunks,
            done_before=work.chunks_done,
        )


def _undone(failures: dict[str, BatchinferError]) -> StorageError:
    lines = [
        f"  {name}: {error.message}" + f" ({error.hint})" * bool(error.hint)
        for name, error in list(failures.items())[:5]
    ]
    return StorageError(
        f"{units.many(len(failures), 'chunk')} could not be done:\n" + "\n".join(lines),
        hint="fix them, then start the same command again",
    )
