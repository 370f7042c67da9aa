"""How a start of a worker goes: the object of its last line, and the failures that end it. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from batchinfer.core.errors import BatchinferError, ConfigError, ErrorRateExceeded
from batchinfer.core.records import Completion, EngineInfo, Run
from batchinfer.prompts import Code
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.world import WorkerConfig


def make_result(
    config: WorkerConfig,
    telemetry: Telemetry,
    *,
    run: Run | None,
    info: EngineInfo | None,
    error: BatchinferError | None,
) -> dict[str, Any]:
    """The JSON object of the last line. Names follow older batch tools' statistics where they have one."""
    seconds = max(telemetry.busy_seconds, 1e-9)
    result: dict[str, Any] = {
        "status": "SUCCESS" if error is None else "FAILED",
        "run_id": run_id(run),
        "fingerprint": run.fingerprint if run else "",
        "output": config.output,
        "worker": telemetry.latest.id,
        "model": config.engine.model or config.engine.engine,
        "seed": config.run_seed,
        "request_count": telemetry.rows_done,
        "response_count": telemetry.rows_done - telemetry.rows_error,
        "error_count": telemetry.rows_error,
        "errors": telemetry.errors,
        "rows_resumed": telemetry.rows_resumed,
        "chunks_total": telemetry.num_chunks,
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
        "total_prompt_tokens": telemetry.prompt_tokens,
        "total_cached_tokens": telemetry.cached_tokens,
        "total_tokens_generated": telemetry.completion_tokens,
        "tokens_per_sec": {
            "input": round(telemetry.prompt_tokens / seconds, 3),
            "output": round(telemetry.completion_tokens / seconds, 3),
        },
    }
    if error is not None:
        result["exit_status"] = error.exit_status
        result["reason"] = error.message
    return result


def run_id(run: Run | None) -> str:
    """When the run was created, as 20230801T130712Z: the same for each of its workers and starts."""
    created = run.recorded.get("created") if run else None
    if not isinstance(created, int | float):
        return ""
    return datetime.fromtimestamp(created, UTC).strftime("%Y%m%dT%H%M%SZ")


def check_error_rate(config: WorkerConfig, telemetry: Telemetry) -> None:
    """Raise ErrorRateExceeded, with the commonest errors, once more rows failed than --max-error-rate allows."""
    if config.max_error_rate is None or telemetry.rows_error < config.min_errors:
        return
    rate = telemetry.rows_error / telemetry.rows_done
    if rate <= config.max_error_rate:
        return
    commonest = sorted(telemetry.errors.items(), key=lambda item: -item[1])[:3]
    lines = []
    for code, count in commonest:
        example = telemetry.examples.get(code)
        where = f", e.g. {example.chunk} line {example.line}: {example.message}" if example else ""
        lines.append(f"  {count} x {code}{where}")
    raise ErrorRateExceeded(
        f"{rate:.1%} of {telemetry.rows_done} rows failed, --max-error-rate allows {config.max_error_rate:.1%}:\n"
        + "\n".join(lines),
        hint="mend the prompts or the data, or raise --max-error-rate; rows done so far are kept",
    )


def check_parameters(config: WorkerConfig, completions: list[Completion]) -> None:
    """Raise ConfigError if the engine refuses the parameters of a plain row.

    Plain rows all have the run's own: what the engine says of one's is true of every one's.
    """
    if config.prompt.request_format != "rows":
        return
    for completion in completions:
        failure = completion.failure
        if failure is not None and failure.code == Code.INVALID_PARAMETER:
            raise ConfigError(
                f"sampling options: {config.engine.engine} refuses them: {failure.message}",
                hint="see the sampling options in docs/cli.md; no row was lost",
            )
