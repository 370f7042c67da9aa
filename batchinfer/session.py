"""One start of a worker: run a model over the chunks of its manifests until every one of them has a marker.

A worker may end at any instant, SIGKILL included, and be started again anywhere: what is on storage then is all that
the next one needs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from batchinfer import __version__, layout
from batchinfer.background import Pending
from batchinfer.checkpoints import chunks_with_segments
from batchinfer.chunks import Opener
from batchinfer.claims import Claims, Lease
from batchinfer.engines import Engine
from batchinfer.errors import (
    BatchinferError,
    ConfigError,
    EngineError,
    NoProgress,
    ObjectNotFound,
    PolicyStop,
    StopRequested,
    StorageError,
)
from batchinfer.events import event
from batchinfer.formats import encoder_for
from batchinfer.manifests import (
    Assignment,
    ChunkRef,
    check_columns,
    job_chunks,
    read_assignment,
)
from batchinfer.outcome import check_error_rate, make_result
from batchinfer.plan import Plan, Scout, finished_chunks
from batchinfer.prompts import Code, PromptBuilder, Tokenizer
from batchinfer.publishing import Publisher
from batchinfer.records import Completion, EngineInfo, RowKey, Run
from batchinfer.runconfig import UNKNOWN, check_same, join_run, read_run
from batchinfer.scratch import Scratch
from batchinfer.services import Services
from batchinfer.shelf import Shelf
from batchinfer.stopping import WhileLoading
from batchinfer.stream import RowStream
from batchinfer.telemetry import Telemetry
from batchinfer.world import WorkerConfig, World

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_SNAPSHOT_SECONDS = 2.0
_LEASES_WITHOUT_STORAGE = 10.0
"""After so long without a heartbeat that could be written, nothing that is done here can be kept: give up."""
_END_LOADING_SECONDS = 15.0
_ROWS_WHILE_LOADING = 256
_ANY_NUMBER = 2**31
_ANSWER_ARGS = frozenset(
    {
        "generation_config",
        "hf_overrides",
        "kv_cache_dtype",
        "load_format",
        "logits_processors",
        "model_impl",
        "override_generation_config",
        "rope_scaling",
        "rope_theta",
        "speculative_config",
        "tokenizer_mode",
    }
)
"""Engine arguments of vLLM that change answers; the others (memory, batching, kernels) may differ between workers."""


def run_worker(config: WorkerConfig, world: World) -> dict[str, Any]:
    """Do every chunk of the manifests. Idempotent, restartable at any point; see the module.

    Returns:
        The result object: counts, tokens and rates of this start.

    Raises:
        BatchinferError: with the exit status that design and docs/cli.md give; `result` holds the counts so far.
    """
    worker = _Worker(config, world)
    try:
        worker.run()
    except BatchinferError as error:
        error.result = worker.result(error)  # type: ignore[attr-defined]
        raise
    return worker.result(None)


class _Worker:
    """One start of a worker. `run` is the whole story; the rest are its paragraphs."""

    def __init__(self, config: WorkerConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.clock = world.clock
        self.nonce = world.new_nonce()
        self.worker_id = config.worker_id or f"w-{world.new_nonce()}"
        self.telemetry = Telemetry(self.worker_id, world.clock, host=config.host, num_chunks=0)
        self.store = world.open_store(config.output)
        self.stream: RowStream | None = None
        self.info: EngineInfo | None = None
        self.standing: Run | None = None
        self._checkpointed = (world.clock.monotonic(), 0)
        self._snapshot_at = float("-inf")

    def run(self) -> None:
        """Set up, generate, publish, tidy up."""
        assignment = self._read_assignment()
        self._check_stop_request()
        self.standing = read_run(self.store)
        self._settle_model()
        if self.standing is not None:
            check_same(self.standing, self._run_config(assignment, None), url=self.store.url)
        # Options that cannot work are found before a GPU waits for them, and before the run has them for good.
        self.world.check_sampling(self.config)
        if assignment.job is not None:
            prompt = self.config.prompt
            wanted = {
                "--prompt-column": [prompt.prompt_column],
                "--messages-column": [prompt.messages_column],
                "--keep": prompt.keep,
            }
            check_columns(assignment.job, wanted)
        self._make_builder(None, None)
        preconditions = self.world.probe(self.store)
        self.is_safe = preconditions.is_safe
        if not self.is_safe:
            logger.warning(
                "%s ignores preconditions: no claims; this worker keeps to its own manifest, and create-only outputs "
                "and one configuration per run are best effort",
                self.store.url,
            )
        with contextlib.ExitStack() as stack:
            stack.callback(self.world.background.close)
            scratch = Scratch(Path(self.config.scratch_dir) if self.config.scratch_dir else None)
            stack.callback(scratch.close)
            lease = self._take_lease(stack)
            try:
                engine = self.world.create_engine(self.config.engine)
                stack.callback(engine.close)
                self._work(assignment, engine, lease, scratch, stack)
                self.telemetry.set_state("done")
                if (
                    self.telemetry.rows_done
                    and self.telemetry.rows_error == self.telemetry.rows_done
                ):
                    logger.warning(
                        "every row failed; see `errors` in the result, and --max-error-rate"
                    )
            except BatchinferError as error:
                is_asked = isinstance(error, PolicyStop) or error.exit_status == 75
                reason = f"{type(error).__name__}: {error.message}"[:500]
                self.telemetry.set_state("stopped" if is_asked else "failed", reason)
                raise
            except Exception as error:
                self.telemetry.set_state("failed", f"{type(error).__name__}: {error}"[:500])
                raise

    # -- set-up

    def _read_assignment(self) -> Assignment:
        config = self.config
        assignment = read_assignment(
            config.manifests,
            job_url=config.job,
            allow_absolute=config.allow_absolute,
            limit=config.limit,
            open_store=self.world.open_store,
        )
        own_places = [f"{assignment.job_url}{part}" for part in ("", "/chunks", "/manifests")]
        if assignment.job is not None and self.store.url.rstrip("/") in own_places:
            raise ConfigError(
                f"--output {self.store.url}: is the job's own place",
                hint=f"write the run beside it, as in --output {assignment.job_url}/runs/first",
            )
        self.telemetry.num_chunks = len(assignment.chunks)
        self.telemetry.num_rows = sum(_num_rows(ref) for ref in assignment.chunks)
        return assignment

    def _settle_model(self) -> None:
        """Without --revision, a worker takes the run's."""
        engine = self.config.engine
        if engine.revision is None and self.standing is not None:
            revision = self.standing.recorded.get("revision") or None
            if revision:
                engine = msgspec.structs.replace(engine, revision=revision)
                self.config = msgspec.structs.replace(self.config, engine=engine)
        self.model_identity = self.world.identify_model(engine)

    def _run_config(self, assignment: Assignment, info: EngineInfo | None) -> dict[str, Any]:
        """What the fingerprint covers. UNKNOWN stands for what only a loaded engine can tell."""
        config = self.config
        return {
            "job_sha256": assignment.job_sha256,
            "model": config.engine.model or config.engine.engine,
            "model_identity": self.model_identity,
            "tokenizer": config.engine.tokenizer or "",
            "hf_config_path": config.engine.hf_config_path or "",
            "engine_args": {
                key: value
                for key, value in config.engine.engine_args.items()
                if key in _ANSWER_ARGS
            },
            # Without a job there is nothing else to tell one data set's run from another's.
            "folders": [] if assignment.job else sorted({ref.root for ref in assignment.chunks}),
            "dtype": info.dtype if info else UNKNOWN,
            "quantization": info.quantization if info else UNKNOWN,
            "max_model_len": info.max_model_len if info else UNKNOWN,
            "adapters": [],
            "prompt": msgspec.to_builtins(config.prompt),
            "sampling": msgspec.to_builtins(config.sampling),
            "seed": config.run_seed,
            "limit": config.limit,
        }

    def _recorded(self, info: EngineInfo, job_url: str) -> dict[str, Any]:
        """What run.json keeps for the record; no secret is among it."""
        engine = self.config.engine
        return {
            "batchinfer_version": __version__,
            "engine": info.name,
            "engine_version": info.version,
            "revision": info.revision,
            "device": info.device,
            "tensor_parallel_size": engine.tensor_parallel_size,
            "pipeline_parallel_size": engine.pipeline_parallel_size,
            "replicas": info.num_replicas,
            "max_num_seqs": info.max_num_seqs,
            "trust_remote_code": engine.trust_remote_code,
            "job": job_url,
            "created": int(self.clock.now()),
        }

    def _make_builder(self, tokenizer: Tokenizer | None, info: EngineInfo | None) -> PromptBuilder:
        config = self.config
        # Until the engine is there to say it, what it was asked for, or vLLM's default.
        most = config.engine.engine_args.get("max_logprobs") if info is None else info.max_logprobs
        prompt = config.prompt
        if isinstance(most, int):
            prompt = msgspec.structs.replace(
                prompt, max_logprobs=most if most >= 0 else _ANY_NUMBER
            )
        return PromptBuilder(
            prompt,
            config.sampling,
            config.run_seed,
            tokenizer,
            None if info is None else info.max_model_len,
        )

    def _take_lease(self, stack: contextlib.ExitStack) -> Lease:
        """Take this worker's record, and keep it fresh until `stack` unwinds."""
        lease = Lease(
            self.store,
            self.worker_id,
            self.clock,
            lease_seconds=self.config.lease_seconds,
            nonce=self.nonce,
            is_safe=self.is_safe,
        )
        before = lease.take(self.telemetry.begin)
        self.telemetry.log_start(before)
        stack.callback(self._last_beat, lease)
        if (
            before is not None
            and before.state != "done"
            and before.attempts >= self.config.max_attempts
        ):
            reason = f" (the last one: {before.reason})" if before.reason else ""
            self.telemetry.set_state("stopped", f"NoProgress{reason}"[:500])
            raise NoProgress(
                f"worker {self.worker_id}: {before.attempts} starts in a row finished no new row{reason}",
                hint="mend the cause, then start it with another --worker-id or a higher --max-attempts",
            )
        heartbeat = self.world.background.every(lease.lease_seconds / 4, partial(self._beat, lease))
        stack.callback(heartbeat.cancel)
        return lease

    def _check_stop_request(self) -> None:
        try:
            self.store.stat(layout.STOP_KEY)
        except ObjectNotFound:
            return
        raise StopRequested(
            f"{self.store.url}: the run was stopped",
            hint=f"to go on: batchinfer stop --resume {self.store.url}",
        )

    # -- heartbeat (on its own thread)

    def _beat(self, lease: Lease) -> None:
        try:
            lease.renew(self.telemetry.latest)
            self._check_stop_request()
        except StorageError as error:
            logger.warning("heartbeat: %s", error, extra=event("heartbeat_failed"))
        except BatchinferError as error:
            self.world.stopper.request(error)
        if lease.silent_seconds >= _LEASES_WITHOUT_STORAGE * lease.lease_seconds:
            reason = (
                f"{self.store.url}: no heartbeat could be written for {lease.silent_seconds:.0f} s"
            )
            hint = "start the same command again once the bucket can be written"
            self.world.stopper.request(StorageError(reason, hint=hint))

    def _last_beat(self, lease: Lease) -> None:
        with contextlib.suppress(BatchinferError):
            lease.close(self.telemetry.snapshot())
        self.telemetry.log_end()

    # -- the work

    def _work(
        self,
        assignment: Assignment,
        engine: Engine,
        lease: Lease,
        scratch: Scratch,
        stack: contextlib.ExitStack,
    ) -> None:
        world, config = self.world, self.config
        finished = world.background.submit(partial(finished_chunks, self.store))
        begun = world.background.submit(partial(chunks_with_segments, self.store))
        stop_loading = WhileLoading(world.stopper)
        loading = world.background.submit(partial(engine.open, stop_loading))
        stack.callback(self._end_loading, loading, stop_loading)
        name = config.engine.model or config.engine.engine
        logger.info(
            "loading %s",
            name,
            extra=event("engine_loading", engine=config.engine.engine, model=name),
        )
        tokenizer = world.background.submit(partial(world.load_tokenizer, config.engine))
        done = self._await(finished)
        services, claims = self._services(assignment, lease, scratch)
        services.opener.begun = self._await(begun)
        own = self._own_chunks(assignment, done)
        plan = Plan(
            own,
            everything=self._everything(assignment, claims),
            scout=Scout(self.store, claims),
            background=world.background,
            clock=self.clock,
            look_seconds=min(config.lease_seconds / 4, 10.0),
            worker_id=self.worker_id,
            done=done if not config.retry_errors else (),
        )
        shelf = Shelf(services, plan, config.limits)
        info = self._await(loading, shelf)
        if info is None:
            logger.info("nothing is left to do; the engine is not needed")
            self._raise_failures(shelf)
            return
        self.info = info
        self.standing = join_run(
            self.store,
            self._run_config(assignment, info),
            self._recorded(info, assignment.job_url),
            nonce=self.nonce,
            is_safe=self.is_safe,
        )
        shelf.allow_publishing(self.standing.fingerprint)
        self.telemetry.engine_ready(info)
        self.telemetry.snapshot()
        world.background.submit(partial(self._beat, lease))  # whoever looks sees that it runs
        logger.info(
            "engine ready: %s %s, %.1f s to load",
            info.name,
            info.model,
            info.load_seconds,
            extra=event("engine_ready", **msgspec.to_builtins(info)),
        )
        builder = self._make_builder(self._await(tokenizer, shelf), info)
        encoder = encoder_for(
            config.prompt,
            model=config.engine.model or info.model,
            created=int(self.standing.recorded.get("created", 0)),
        )
        stream = RowStream(
            services, shelf, builder, encoder, config.limits, max_in_flight=info.max_in_flight
        )
        self.stream = stream
        try:
            self._generate(engine, stream, shelf)
            self._drain(shelf, stream)
        except EngineError as error:
            known = getattr(error, "in_flight", None)
            self._save(shelf, deaths=stream.rows_in_flight() if known is None else _by_chunk(known))
            raise
        except Exception:
            # A mistake of ours, too: what is finished is worth keeping.
            self._save(shelf, deaths={})
            raise
        self._raise_failures(shelf)

    def _services(
        self, assignment: Assignment, lease: Lease, scratch: Scratch
    ) -> tuple[Services, Claims | None]:
        world, config = self.world, self.config
        claims = None
        if self.is_safe and config.claims:
            claims = Claims(self.store, lease, self.clock, new_nonce=world.new_nonce)
        publisher = Publisher(
            self.store, is_safe=self.is_safe, nonce=self.nonce, require_lease=lease.require
        )
        # The job's own place too: a worker without chunks of its own still helps with others.
        roots = {ref.root for ref in assignment.chunks}
        if assignment.job is not None:
            roots.add(assignment.job_url)
        opener = Opener(
            run=self.store,
            sources={root: world.open_store(root) for root in roots},
            claims=claims,
            publisher=publisher,
            scratch=scratch,
        )
        services = Services(
            run=self.store,
            background=world.background,
            clock=self.clock,
            lease=lease,
            claims=claims,
            opener=opener,
            publisher=publisher,
            scratch=scratch,
            observer=self.telemetry,
        )
        return services, claims

    def _own_chunks(self, assignment: Assignment, done: dict[str, int]) -> list[ChunkRef]:
        """What is left to do of the manifests."""
        if not self.config.retry_errors:
            left = [ref for ref in assignment.chunks if ref.name not in done]
        else:
            # Whether a chunk has error rows at all is seen when it is opened, in the background.
            left = [
                ref._replace(generation=done.get(ref.name, -1) + 1) for ref in assignment.chunks
            ]
        self.telemetry.count_skipped(len(assignment.chunks) - len(left))
        self.telemetry.rows_skipped = sum(_num_rows(ref) for ref in assignment.chunks) - sum(
            map(_num_rows, left)
        )
        logger.info(
            "%d chunks in the manifests, %d done before",
            len(assignment.chunks),
            len(assignment.chunks) - len(left),
            extra=event(
                "manifests_read",
                chunks=len(assignment.chunks),
                done_before=len(assignment.chunks) - len(left),
            ),
        )
        return left

    def _everything(
        self, assignment: Assignment, claims: Claims | None
    ) -> Callable[[], dict[str, ChunkRef]] | None:
        """All chunks of the job, for helping others; None where that is off or cannot be safe."""
        if (
            not self.config.steal
            or claims is None
            or assignment.job is None
            or self.config.retry_errors
        ):
            return None
        return partial(job_chunks, assignment.job, assignment.job_url, self.config.limit)

    def _await(self, pending: Pending[Any], shelf: Shelf | None = None) -> Any:
        """Wait for background work, opening chunks meanwhile. None as soon as it turns out that there are none.

        Raises what stops the worker.
        """
        while not pending.is_done():
            self._raise_if_stopped()
            if shelf is not None:
                if shelf.is_drained:
                    return None
                shelf.tick(
                    rows_ahead=shelf.num_unread,
                    rows_wanted=self.config.engine.max_num_seqs or _ROWS_WHILE_LOADING,
                    rows_per_second=0.0,
                    own_rate=0.0,
                    is_building=False,
                )
            self.world.progress(self.telemetry, None)
            self.world.background.wait(_POLL_SECONDS)
        # An engine that was stopped while it loaded says so too, but not why.
        self._raise_if_stopped()
        return pending.result()

    def _end_loading(self, loading: Pending[Any], stop_loading: WhileLoading) -> None:
        """Let an engine that is still loading end before it is closed: two threads must not take it apart."""
        stop_loading.cancel()
        deadline = self.clock.monotonic() + _END_LOADING_SECONDS
        while not loading.is_done() and self.clock.monotonic() < deadline:
            self.world.background.wait(_POLL_SECONDS)

    def _raise_if_stopped(self) -> None:
        if self.world.stopper.error is not None:
            raise self.world.stopper.error

    def _generate(self, engine: Engine, stream: RowStream, shelf: Shelf) -> None:
        """The loop: the engine takes rows as it has room, and gives back what finished."""
        stopper = self.world.stopper
        batches = engine.generate(stream, stopper)
        try:
            for completions in batches:
                self._check_parameters(completions)
                stream.handle(completions)
                stream.tick()
                self._round(engine, stream, shelf)
                if stopper.is_requested:
                    if not shelf.is_closing:
                        logger.info(
                            "%s; ending",
                            stopper.error,
                            extra=event("stop_requested", reason=str(stopper.error)),
                        )
                        shelf.is_closing = True
                        # At once: whoever asked may not wait for the rows in flight.
                        shelf.checkpoint()
                    if not stream.num_in_flight or stopper.is_set():
                        break
                elif stream.is_complete:
                    break
        finally:
            _close(batches)
        self.telemetry.engine_stats(engine.stats())
        self._raise_if_stopped()

    def _round(self, engine: Engine, stream: RowStream, shelf: Shelf) -> None:
        """What is due now and then: checkpoints, the record, the policy."""
        now = self.clock.monotonic()
        since, rows = self._checkpointed
        every_rows = self.config.checkpoint_rows
        rows_done = self.telemetry.rows_done
        is_due = now - since >= self.config.checkpoint_seconds
        if is_due or (every_rows is not None and rows_done - rows >= every_rows):
            shelf.checkpoint()
            self._checkpointed = (now, rows_done)
        if now - self._snapshot_at >= _SNAPSHOT_SECONDS:
            self._snapshot_at = now
            self.telemetry.engine_stats(engine.stats())
            self.telemetry.snapshot()
            check_error_rate(self.config, self.telemetry)
        self.world.progress(self.telemetry, stream)

    def _check_parameters(self, completions: list[Completion]) -> None:
        """Plain rows all have the run's own parameters: what the engine says of one's is true of every one's."""
        if self.config.prompt.request_format != "rows":
            return
        for completion in completions:
            failure = completion.failure
            if failure is not None and failure.code == Code.INVALID_PARAMETER:
                raise ConfigError(
                    f"sampling options: {self.config.engine.engine} refuses them: {failure.message}",
                    hint="see the sampling options in docs/cli.md; no row was lost",
                )

    def _drain(self, shelf: Shelf, stream: RowStream) -> None:
        """Publish what is still on its way."""
        while not shelf.is_drained:
            self._raise_if_stopped()
            stream.tick()
            self.world.progress(self.telemetry, stream)
            if not shelf.is_drained:
                self.world.background.wait(_POLL_SECONDS)
        check_error_rate(self.config, self.telemetry)

    def _save(self, shelf: Shelf, *, deaths: dict[str, list[int]]) -> None:
        """Before ending early: write down the finished rows and give the claims back, within the grace."""
        shelf.is_closing = True
        deadline = self.clock.monotonic() + max(5.0, self.world.stopper.seconds_left)
        try:
            shelf.note_deaths(deaths)
            shelf.checkpoint()
            while shelf.is_writing and self.clock.monotonic() < deadline:
                self.world.background.wait(_POLL_SECONDS)
                shelf.tick(
                    rows_ahead=0, rows_wanted=0, rows_per_second=0.0, own_rate=0.0, is_building=True
                )
                # Again: a chunk whose segment was on its way has rows that came after it.
                shelf.checkpoint()
            shelf.release_all(deadline)
        except BatchinferError as error:
            logger.warning("not everything could be saved (%s)", error)

    def result(self, error: BatchinferError | None) -> dict[str, Any]:
        """See outcome.make_result."""
        return make_result(
            self.config, self.telemetry, run=self.standing, info=self.info, error=error
        )

    def _raise_failures(self, shelf: Shelf) -> None:
        if not shelf.failures:
            return
        lines = [f"  {name}: {error.message}" for name, error in list(shelf.failures.items())[:5]]
        raise StorageError(
            f"{len(shelf.failures)} chunks could not be done; all others are:\n" + "\n".join(lines),
            hint="mend them, then start the same command again",
        )


def _by_chunk(keys: list[RowKey]) -> dict[str, list[int]]:
    lines: dict[str, list[int]] = {}
    for name, line in keys:
        lines.setdefault(name, []).append(line)
    return lines


def _num_rows(ref: ChunkRef) -> int:
    return (ref.rows if ref.row_limit is None else ref.row_limit) or 0


def _close(batches: Iterator[object]) -> None:
    """Let a generator's own clean-up run now."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()
