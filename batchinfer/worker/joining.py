"""How a worker joins its run, and the result that it prints at its end.

All workers of a run must have the same configuration (promise P6), which is checked here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from batchinfer import __version__
from batchinfer.cli.options import recorded_values
from batchinfer.cli.server_args import without_secrets_in
from batchinfer.core import layout
from batchinfer.core.counts import most_common
from batchinfer.core.errors import BatchinferError, ConfigError, ErrorRateExceeded, RunMismatch
from batchinfer.core.records import EngineInfo, Run
from batchinfer.core.redaction import redact, without_secrets
from batchinfer.engines import Engine
from batchinfer.engines.replies import failure_of
from batchinfer.ledger.jobs import (
    Assignment,
    ChunkRef,
    check_columns,
    job_chunks,
    manifest_chunks,
    read_assignment,
    split_name,
)
from batchinfer.ledger.runs import UNKNOWN, check_same, join_run, read_run
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.types import RowError
from batchinfer.storage import Store
from batchinfer.worker.limits import limits_result
from batchinfer.worker.media_fetching import check_media
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Environment, WorkerConfig, rules_of

_ROWS_TO_JUDGE = 100
"""Least number of finished rows by which a start of the worker is judged. It ends if nearly all of them failed."""
_NEARLY_ALL = 0.95


class Membership:
    """A worker's membership of a run. Call `check` before the engine loads, and `join` after it has loaded.

    Args:
        config: The worker's configuration.
        environment: The outside world.
        store: The run's store.
        assignment: The chunks of the worker's manifests.
    """

    def __init__(
        self, config: WorkerConfig, environment: Environment, store: Store, assignment: Assignment
    ) -> None:
        self._environment = environment
        self._store = store
        self.assignment = assignment
        self._model_identity = ""
        self._adapters: list[dict[str, str]] = []
        self.config = config
        """The worker's configuration. If it names no revision of the model, `check` adds the one in run.json."""
        self.run: Run | None = None
        """The content of run.json; None until this worker has found or created the file."""

    def check(self) -> None:
        """Refuse a configuration that cannot work, before an engine is loaded and run.json is written. Writes nothing.

        Raises:
            RunMismatch: the run has another configuration. Values that only a loaded engine knows are not compared.
            ConfigError: an option cannot work with this engine or with the chunks' columns, or an adapter is not there.
            BatchinferError: the Hub or a bucket, where an adapter lies, refuses access or cannot be reached.
        """
        self.run = read_run(self._store)
        engine = self.config.engine
        if engine.revision is None and self.run is not None:
            engine = msgspec.structs.replace(
                engine, revision=self.run.recorded.get("revision") or None
            )
            self.config = msgspec.structs.replace(self.config, engine=engine)
        self._model_identity = self._environment.identify_model(engine)
        if engine.loras:
            from batchinfer.engines.adapters import describe_adapters

            adapters = describe_adapters(engine)
            self._adapters = [{"name": each.name, "identity": each.identity} for each in adapters]
        if self.run is not None:
            check_same(self.run, self._run_config(None), url=self._store.url)
        check_media(self.config.limits)
        builder = self.make_builder()
        job = self.assignment.job
        check_columns(job, builder.needed_columns, optional=self.config.prompt.optional_columns)

    @property
    def is_store_tried(self) -> bool:
        """Whether the worker that made the run at this place has found that the store honours preconditions."""
        return self.run is not None and self.run.recorded.get("store") == redact(self._store.url)

    def confirm(self) -> None:
        """Check at the end that the run still has this worker's configuration.

        Raises:
            RunMismatch: run.json was replaced.
        """
        assert self.run is not None, "a worker without run.json joins the run before its end"
        run = self.run
        try:
            join_run(self._store, run.config, run.recorded, nonce=run.nonce)
        except RunMismatch as error:
            hint = "put back the run.json that was replaced; `batchinfer verify` tells which chunks are of which"
            raise RunMismatch(error.message, hint=hint) from error

    def join(self, info: EngineInfo, *, nonce: str, marked: dict[str, str]) -> Run:
        """Create run.json, or check that the existing run.json has the same configuration. See ledger.runs.join_run."""
        config, recorded = self._run_config(info), self._recorded(info)
        self.run = join_run(self._store, config, recorded, nonce=nonce, marked=marked)
        return self.run

    def make_builder(
        self, engine: Engine | None = None, info: EngineInfo | None = None
    ) -> PromptBuilder:
        """Make the object that builds calls from rows. An open engine is also asked whether it takes the run's fields.

        Args:
            engine: The engine; None before it is open.
            info: Facts about the open engine; None before.

        Raises:
            ConfigError: no row's call could be built, or the engine refuses the run's own fields.
        """
        config = self.config
        rules = rules_of(config.engine, opened=engine, info=info)
        builder = PromptBuilder(config.prompt, config.run_seed, rules=rules)
        try:
            call = builder.probe()
        except RowError as error:
            raise ConfigError(error.message, hint="correct the option") from error
        if engine is not None and call is not None:
            reply = engine.ask(call, self._environment.stopper)
            failure = failure_of(reply)
            if failure is not None and failure.param == "max_tokens":  # rows may have none
                failure = failure if "max_tokens" in config.prompt.body else None
            if failure is not None and 400 <= reply.status < 500 and reply.status != 429:
                raise ConfigError(
                    f"the server refuses the run's options: {failure.message}",
                    hint="correct the option; no row was asked yet",
                )
        return builder

    @property
    def may_steal(self) -> bool:
        """Whether this worker may take other workers' chunks after it has none of its own left.

        A manifest that `split` has not written says what is to be done, and no more.
        """
        if self.config.retry_errors:
            return False
        own = manifest_chunks(self.assignment.job)
        names = [split_name(manifest)[1] for manifest in self.config.manifests]
        return all(f"{layout.MANIFESTS}{name}" in own for name in names)

    def all_chunks(self) -> dict[str, ChunkRef]:
        """Return all chunks of the job by name, in order."""
        return job_chunks(self.assignment.job, self.assignment.job_url, self.config.limit)

    def _run_config(self, info: EngineInfo | None) -> dict[str, Any]:
        """Return the values from which the run's fingerprint is made.

        Without `info`, UNKNOWN stands for the values that only a loaded engine knows.
        """
        config, assignment = self.config, self.assignment
        engine = config.engine
        return {
            "job_sha256": assignment.job_sha256,
            "task": engine.task,
            "model": engine.model or engine.engine,
            "model_identity": self._model_identity,
            "adapters": self._adapters,
            "server_command": engine.server_command,
            "server_options": without_secrets(engine.answer_options),
            "max_model_len": info.max_model_len if info else UNKNOWN,
            "prompt": msgspec.to_builtins(config.prompt),
            "seed": config.run_seed,
            "limit": config.limit,
        }

    def _recorded(self, info: EngineInfo) -> dict[str, Any]:
        """Return the values that run.json records but the fingerprint does not cover. Contains no secrets."""
        engine = self.config.engine
        return {
            "batchinfer_version": __version__,
            "engine": info.name,
            "engine_version": info.version,
            "revision": info.revision,
            "device": info.device,
            "tensor_parallel_size": engine.tensor_parallel_size,
            "pipeline_parallel_size": engine.pipeline_parallel_size,
            "options": without_secrets(recorded_values(self.config)),
            "replicas": info.num_replicas,
            "max_num_seqs": info.max_num_seqs,
            "server_args": without_secrets_in(engine.server_args),
            "job": redact(self.assignment.job_url),
            "store": redact(self._store.url),
            "created": int(self._environment.clock.now()),
        }


def read_work(config: WorkerConfig, environment: Environment, store: Store) -> Assignment:
    """Read which chunks the manifests assign to this worker. Writes nothing.

    Raises:
        ConfigError: --output is the job's own folder, or the job's folder of chunks or manifests.
    """
    assignment = read_assignment(
        config.manifests,
        job_url=config.job,
        limit=config.limit,
        open_store=environment.open_store,
    )
    own_places = [f"{assignment.job_url}{part}" for part in ("", "/chunks", "/manifests")]
    if store.url.rstrip("/") in own_places:
        raise ConfigError(
            f"--output {store.url}: is the job's own place",
            hint=f"write the run beside it, as in --output {assignment.job_url}/runs/first",
        )
    return assignment


def make_result(
    config: WorkerConfig,
    telemetry: Telemetry,
    *,
    run: Run | None,
    info: EngineInfo | None,
    error: BatchinferError | None,
) -> dict[str, Any]:
    """Make the JSON object that the worker prints as its last line."""
    counts, work, stats = telemetry.counts, telemetry.workload, telemetry.stats
    seconds = max(telemetry.busy_seconds, 1e-9)
    result: dict[str, Any] = {
        "status": "SUCCESS" if error is None else "FAILED",
        "run_id": run_id(run),
        "fingerprint": run.fingerprint if run else "",
        "output": config.output,
        "worker": telemetry.latest.id,
        "model": config.engine.model or config.engine.engine,
        "seed": config.run_seed,
        "request_count": counts.rows_done,
        "response_count": counts.rows_ok,
        "error_count": counts.rows_error,
        "errors": counts.errors,
        "rows_resumed": counts.rows_resumed,
        "chunks_total": work.chunks,
        "chunks_done": len(work.published),
        "chunks_skipped": work.chunks_skipped,
        "run_time_sec": round(telemetry.run_seconds, 3),
        "engine_load_sec": round(info.load_seconds, 3) if info else None,
        "generate_time_sec": round(telemetry.busy_seconds, 3),
        "engine_steps": stats.steps,
        "preemptions": stats.preemptions,
        "replicas": info.num_replicas if info else None,
        "replicas_lost": stats.replicas_lost,
        "total_prompt_tokens": counts.prompt_tokens,
        "total_cached_tokens": counts.cached_tokens,
        "total_tokens_generated": counts.completion_tokens,
        "tokens_per_sec": {
            "input": round(counts.prompt_tokens / seconds, 3),
            "output": round(counts.completion_tokens / seconds, 3),
        },
    }
    if error is not None:
        result |= {"exit_status": error.exit_status, "reason": error.message}
    return result | limits_result(telemetry.latest)


def run_id(run: Run | None) -> str:
    """Return the time at which the run was created, as in 20230801T130712Z; "" if it is unknown.

    The id is the same for all workers of the run and all their starts.
    """
    created = run.recorded.get("created") if run else None
    if not isinstance(created, int | float):
        return ""
    return datetime.fromtimestamp(created, UTC).strftime("%Y%m%dT%H%M%SZ")


def check_error_rate(
    config: WorkerConfig,
    telemetry: Telemetry,
    rows_ok: int,
    rows_error: int,
    *,
    num_pending: int = 0,
    is_end: bool = False,
) -> None:
    """Raise ErrorRateExceeded if a larger share of rows failed than --max-error-rate allows, by default nearly all.

    At the end, the rows are those of all starts; a repair is judged only by whether the run has an answer at all.

    Args:
        config: The worker's configuration.
        telemetry: The worker's counters, for the reasons.
        rows_ok: Number of rows with an answer.
        rows_error: Number of rows without one.
        num_pending: Number of rows that have a call and have not finished. They count as good ones: rows without a call
            fail at once, so they are the first to finish even if they are few.
        is_end: Whether all work is done.
    """
    most, least = config.max_error_rate, config.min_errors
    if most is None:
        most, least = _NEARLY_ALL, 1 if is_end else _ROWS_TO_JUDGE
    is_over = rows_error >= least and rows_error > most * (rows_ok + rows_error + num_pending)
    if not is_over or (config.retry_errors and (rows_ok or not is_end)):
        return
    lines = [f"{rows_error} of {rows_ok + rows_error} rows failed, {most:.1%} may"]
    for code, count in most_common(telemetry.counts.errors)[:3]:
        example = telemetry.examples.get(code)
        where = f", e.g. {example.chunk} line {example.line}: {example.message}" if example else ""
        lines.append(f"{count} x {code}{where}")
    raise ErrorRateExceeded(
        "\n  ".join(lines),
        hint="fix the prompt options or the data; rows done so far are kept, --retry-errors asks failed ones "
        "again, `batchinfer status` counts them, and --max-error-rate 1 goes on in spite of them",
    )
