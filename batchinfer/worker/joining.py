"""How a worker joins its run, and the result that it prints at its end.

All workers of a run must have the same configuration (promise P6), which is checked here.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from batchinfer import __version__
from batchinfer.core import units
from batchinfer.core.errors import BatchinferError, ConfigError, ErrorRateExceeded
from batchinfer.core.records import Completion, EngineInfo, Run
from batchinfer.core.redaction import redact
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.parser_process import check_parsers
from batchinfer.formats import find_format
from batchinfer.ledger.jobs import Assignment, ChunkRef, check_columns, job_chunks, read_assignment
from batchinfer.ledger.runs import (
    UNKNOWN,
    check_same,
    confirm_run,
    join_run,
    read_run,
    refuse_foreign,
)
from batchinfer.prompts import Code, PromptBuilder, Tokenizer, find_request_format
from batchinfer.storage import Store
from batchinfer.worker.adapters import assumed_name, identify_adapters
from batchinfer.worker.config import Environment, WorkerConfig, has_budget, rules_of
from batchinfer.worker.media import check_media
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

_ANY_NUMBER = 2**31
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
        self._assumed_name = ""
        """Name that all requests give to the model, if no option says its name; else empty."""
        self.config = config
        """The worker's configuration. If it names no revision of the model, `check` adds the one in run.json."""
        self.run: Run | None = None
        """The content of run.json; None until this worker has found or created the file."""
        self._marked: dict[str, str] = {}
        """Fingerprints in those markers of other workers and earlier starts that were compared, by chunk."""

    def check(self) -> None:
        """Refuse a configuration that cannot work, before an engine is loaded and run.json is written. Writes nothing.

        Raises:
            RunMismatch: the run has another configuration. Values that only a loaded engine knows are not compared.
            ConfigError: an option cannot work with this engine or with the chunks' columns.
        """
        self.run = read_run(self._store)
        self._take_revision()
        self._model_identity = self._environment.identify_model(self.config.engine)
        self._adapters = identify_adapters(self.config.engine)
        if self.run is not None:
            check_same(self.run, self._run_config(None), url=self._store.url)
        self._environment.check_sampling(self.config)
        check_media(self.config.prompt, self.config.limits)
        check_parsers(self.config.engine, has_budget=has_budget(self.config.sampling))
        self._assumed_name = assumed_name(
            self.config, self.assignment, self._environment.open_store
        )
        builder = self.make_builder(None, None)
        job = self.assignment.job
        if job is not None:
            check_columns(job, builder.needed_columns, optional=self.config.prompt.optional_columns)
            if job.duplicate_ids:
                logger.warning(
                    "%s of the job with an _id (of OpenAI requests the custom_id) that an earlier row has",
                    units.many(job.duplicate_ids, "row"),
                )

    def compare(self, marked: dict[str, str]) -> None:
        """Refuse markers of another configuration than run.json. Without run.json they are compared by `join`.

        Args:
            marked: The fingerprints in markers, by chunk.

        Raises:
            RunMismatch: a chunk was done with another configuration.
        """
        self._marked |= marked
        if self.run is not None:
            refuse_foreign(self._marked, self.run.fingerprint, url=self._store.url)

    def confirm(self) -> None:
        """Check at the end that the run still has this worker's configuration.

        Raises:
            RunMismatch: run.json was replaced.
        """
        assert self.run is not None, "a worker without run.json joins the run before its end"
        confirm_run(self._store, self.run)

    def join(self, info: EngineInfo, *, nonce: str, is_safe: bool) -> Run:
        """Create run.json, or check that the existing run.json has the same configuration. See ledger.runs.join_run."""
        self.run = join_run(
            self._store,
            self._run_config(info),
            self._recorded(info),
            nonce=nonce,
            is_safe=is_safe,
            marked=self._marked,
        )
        self.compare({})
        return self.run

    def make_builder(self, tokenizer: Tokenizer | None, info: EngineInfo | None) -> PromptBuilder:
        """Make the object that builds requests from rows. Raises ConfigError if no row's request could be built.

        Args:
            tokenizer: The model's tokenizer; None before it is known.
            info: Properties of the loaded engine; None before it has loaded.
        """
        config = self.config
        # `most` is the highest number of log-probabilities that a request may ask for. A loaded engine tells it. Before
        # that it is taken from the engine arguments. If neither names a number, the default of PromptConfig holds.
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
            needs_prompt=find_format(prompt.output_format).repeats_request,
            rules=rules_of(config.engine, self._assumed_name),
        )

    def chunks_left(self, done: dict[str, int], goal: int) -> list[ChunkRef]:
        """Return the chunks of this worker's manifests that are left to do, in order. Sends no request.

        Args:
            done: The highest generation of each chunk that has a marker, by the chunk's name.
            goal: The generation that makes a chunk done: 0, or higher in a run that repairs error rows.
        """
        # In a repair the list also contains chunks without error rows. They are skipped when they are opened.
        return [
            ref._replace(generation=done.get(ref.name, -1) + 1, repair_goal=goal)
            for ref in self.assignment.chunks
            if done.get(ref.name, -1) < goal
        ]

    @property
    def may_help(self) -> bool:
        """Whether this worker may do chunks of other workers after it has none of its own left."""
        config = self.config
        return config.steal and self.assignment.job is not None and not config.retry_errors

    def all_chunks(self) -> dict[str, ChunkRef]:
        """Return all chunks of the job by name, in order. Return an empty dict if the worker has no job."""
        job, url = self.assignment.job, self.assignment.job_url
        return job_chunks(job, url, self.config.limit) if job is not None else {}

    def _take_revision(self) -> None:
        """Use the model revision that run.json records, unless --revision is given."""
        engine = self.config.engine
        if engine.revision is None and self.run is not None:
            revision = self.run.recorded.get("revision") or None
            if revision:
                engine = msgspec.structs.replace(engine, revision=revision)
                self.config = msgspec.structs.replace(self.config, engine=engine)

    def _run_config(self, info: EngineInfo | None) -> dict[str, Any]:
        """Return the values from which the run's fingerprint is made.

        Without `info`, UNKNOWN stands for the values that only a loaded engine knows.
        """
        config, assignment = self.config, self.assignment
        trusts = config.engine.trust_remote_code
        # Earlier versions had trust_remote_code only among the recorded values, not in the fingerprint.
        is_old = self.run is not None and "trust_remote_code" not in self.run.config
        trusted = is_old and bool(self.run and self.run.recorded.get("trust_remote_code"))
        return {
            # Most runs trust no remote code. They lack this key, so their fingerprints are those of earlier versions.
            **({"trust_remote_code": trusts} if trusts != trusted else {}),
            **config.engine.pooling_options,
            **parsers_in(config.engine),
            "job_sha256": assignment.job_sha256,
            "model": config.engine.model or config.engine.engine,
            "model_identity": self._model_identity,
            "tokenizer": config.engine.tokenizer or "",
            "hf_config_path": config.engine.hf_config_path or "",
            "engine_args": config.engine.answer_arguments,
            # Without a job.json there is no checksum of the data, so the chunks' folders tell two data sets apart.
            "folders": []
            if assignment.job
            else sorted({redact(ref.root) for ref in assignment.chunks}),
            "dtype": info.dtype if info else UNKNOWN,
            "quantization": info.quantization if info else UNKNOWN,
            "max_model_len": info.max_model_len if info else UNKNOWN,
            "adapters": self._adapters,
            # In runs of earlier versions the model itself answered such rows.
            **({"adapter_of_all": only} if (only := config.prompt.adapter_of_all) else {}),
            **(
                {"limit_mm_per_prompt": limits}
                if (limits := config.engine.limit_mm_per_prompt)
                else {}
            ),
            "prompt": msgspec.to_builtins(config.prompt),
            "sampling": msgspec.to_builtins(config.sampling),
            "seed": config.run_seed,
            "limit": config.limit,
        }

    def _recorded(self, info: EngineInfo) -> dict[str, Any]:
        """Return the values that run.json records but the fingerprint does not cover. Contains no secrets."""
        engine, limits = self.config.engine, self.config.limits
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
            **({"lora": {k: redact(v) for k, v in engine.loras.items()}} if engine.loras else {}),
            **({"dedupe": True} if limits.dedupe else {}),
            **({"media_root": redact(limits.media_root)} if limits.media_root else {}),
            **({"allow_private_urls": True} if limits.allow_private_urls else {}),
            "job": redact(self.assignment.job_url),
            "created": int(self._environment.clock.now()),
            **({"base_url": redact(engine.base_url)} if engine.base_url else {}),
        }


def parsers_in(engine: EngineConfig) -> dict[str, str]:
    """Return the names of the parsers, as far as there are any, for the run's configuration."""
    names = {
        "tool_call_parser": engine.tool_call_parser,
        "reasoning_parser": engine.reasoning_parser,
    }
    return {key: name for key, name in names.items() if name}


def read_work(config: WorkerConfig, environment: Environment, store: Store) -> Assignment:
    """Read which chunks the manifests assign to this worker. Writes nothing.

    Raises:
        ConfigError: --output is the job's own folder, or the job's folder of chunks or manifests.
    """
    assignment = read_assignment(
        config.manifests,
        job_url=config.job,
        allow_absolute=config.allow_absolute,
        limit=config.limit,
        open_store=environment.open_store,
    )
    own_places = [f"{assignment.job_url}{part}" for part in ("", "/chunks", "/manifests")]
    if assignment.job is not None and store.url.rstrip("/") in own_places:
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
    has_answers: bool,
) -> dict[str, Any]:
    """Make the JSON object that the worker prints as its last line.

    Without `has_answers`, every row of the run failed. The status is then not SUCCESS, even if --max-error-rate 1
    allows that.
    """
    seconds = max(telemetry.busy_seconds, 1e-9)
    result: dict[str, Any] = {
        "status": "FAILED" if error is not None else "SUCCESS" if has_answers else "ERRORS",
        "run_id": run_id(run),
        "fingerprint": run.fingerprint if run else "",
        "output": config.output,
        "worker": telemetry.latest.id,
        "model": config.engine.model or config.engine.engine,
        "seed": config.run_seed,
        "request_count": telemetry.tally.rows,
        "response_count": telemetry.tally.rows - telemetry.tally.num_errors,
        "error_count": telemetry.tally.num_errors,
        "errors": dict(telemetry.tally.errors),
        "rows_resumed": telemetry.rows_resumed,
        "chunks_total": telemetry.workload.chunks,
        "chunks_done": telemetry.chunks_done,
        "chunks_resumed": telemetry.chunks_resumed,
        "chunks_skipped": telemetry.chunks_skipped,
        "run_time_sec": round(telemetry.run_seconds, 3),
        "engine_load_sec": round(info.load_seconds, 3) if info else None,
        "generate_time_sec": round(telemetry.busy_seconds, 3),
        "engine_steps": telemetry.stats.steps,
        "preemptions": telemetry.stats.preemptions,
        "replicas": info.num_replicas if info else None,
        "replicas_lost": telemetry.stats.replicas_lost,
        "total_prompt_tokens": telemetry.tally.prompt_tokens,
        "total_cached_tokens": telemetry.tally.cached_tokens,
        "total_tokens_generated": telemetry.tally.completion_tokens,
        "tokens_per_sec": {
            "input": round(telemetry.tally.prompt_tokens / seconds, 3),
            "output": round(telemetry.tally.completion_tokens / seconds, 3),
        },
    }
    if config.limits.dedupe:
        tally = telemetry.tally
        result["rows_copied"] = tally.rows_copied
        result["tokens_copied"] = {
            "input": tally.prompt_tokens_copied,
            "output": tally.completion_tokens_copied,
        }
    if error is not None:
        result["exit_status"] = error.exit_status
        result["reason"] = error.message
    return result


def run_id(run: Run | None) -> str:
    """Return the time at which the run was created, as in 20230801T130712Z; "" if it is unknown.

    The id is the same for all workers of the run and all their starts.
    """
    created = run.recorded.get("created") if run else None
    if not isinstance(created, int | float):
        return ""
    return datetime.fromtimestamp(created, UTC).strftime("%Y%m%dT%H%M%SZ")


def check_error_rate(config: WorkerConfig, telemetry: Telemetry, *, num_pending: int = 0) -> None:
    """Raise ErrorRateExceeded if a larger share of this worker's rows failed than --max-error-rate allows.

    The error's text names the three commonest errors. With fewer than `min_errors` failed rows nothing is raised.
    Without --max-error-rate, `_check_first_rows` decides.

    Args:
        config: The worker's configuration.
        telemetry: The worker's counters.
        num_pending: Number of rows that have a prompt and have not finished.
    """
    if config.max_error_rate is None:
        _check_first_rows(config, telemetry, num_pending)
        return
    if telemetry.tally.num_errors < config.min_errors:
        return
    rate = telemetry.tally.num_errors / telemetry.tally.rows
    if rate <= config.max_error_rate:
        return
    commonest = sorted(telemetry.tally.errors.items(), key=lambda item: -item[1])[:3]
    lines = [f"  {count} x {code}{_example(telemetry, code)}" for code, count in commonest]
    raise ErrorRateExceeded(
        f"{rate:.1%} of {telemetry.tally.rows} rows failed, --max-error-rate allows {config.max_error_rate:.1%}:\n"
        + "\n".join(lines),
        hint="fix the prompts or the data, or raise --max-error-rate; rows done so far are kept",
    )


def _check_first_rows(config: WorkerConfig, telemetry: Telemetry, num_pending: int) -> None:
    """Raise ErrorRateExceeded if nearly all rows of this start failed with one code, as with a wrong prompt option.

    Rows that have a prompt and have not finished count as good ones. Rows without a prompt fail at once, so they are
    the first to finish even if they are few.
    """
    tally = telemetry.tally
    most = _NEARLY_ALL * (tally.rows + num_pending)
    if config.retry_errors or tally.rows < _ROWS_TO_JUDGE or tally.num_errors < most:
        return
    [(code, count)] = tally.errors.most_common(1)
    if count >= most:
        raise ErrorRateExceeded(
            f"{count} of the first {tally.rows} rows failed with {code}{_example(telemetry, code)}",
            hint="fix the prompt options or the data; --max-error-rate 1 goes on in spite of it; "
            "rows done so far are kept",
        )


def refuse_only_errors(config: WorkerConfig, telemetry: Telemetry) -> None:
    """Raise ErrorRateExceeded for a run in which every row failed, unless --max-error-rate is 1."""
    if config.max_error_rate == 1:
        logger.warning("every row of the run failed; see `errors` in the result")
        return
    commonest = telemetry.tally.errors.most_common(1)
    code = commonest[0][0] if commonest else ""
    raise ErrorRateExceeded(
        "every row of the run failed"
        + (f", most with {code}{_example(telemetry, code)}" if code else ""),
        hint="fix the prompt options or the data; `batchinfer status` counts the errors, and "
        "--max-error-rate 1 accepts such a run",
    )


def _example(telemetry: Telemetry, code: str) -> str:
    example = telemetry.tally.examples.get(code)
    return f", e.g. {example.chunk} line {example.line}: {example.message}" if example else ""


def check_parameters(config: WorkerConfig, completions: list[Completion]) -> None:
    """Raise ConfigError if the engine refused the sampling parameters of the run.

    All rows share the run's parameters, so one refused row means that every row would be refused. Does nothing if the
    request format lets each row have its own parameters.
    """
    prompt = config.prompt
    if find_request_format(prompt.request_format).has_own_parameters or prompt.constraint_column:
        return
    for completion in completions:
        failure = completion.failure
        if failure is not None and failure.code == Code.INVALID_PARAMETER:
            raise ConfigError(
                f"sampling options: {config.engine.engine} refuses them: {failure.message}",
                hint="see the sampling options in docs/cli.md; no row was lost",
            )
