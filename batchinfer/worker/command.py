"""`batchinfer worker`: options to one frozen config, then `session.run_worker`."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from batchinfer.cli.options import (
    behaviour_options,
    engine_options,
    input_options,
    output_options,
    prompt_options,
    read_pairs,
    sampling_options,
)
from batchinfer.cli.settings import common_options
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.ledger.jobs import load_job, rank_manifests
from batchinfer.prompts import PromptConfig, make_sampling
from batchinfer.worker import preview
from batchinfer.worker.background import install_signal_handlers, unless_stopped
from batchinfer.worker.config import Limits, WorkerConfig, real_environment
from batchinfer.worker.notices import find_service, watch
from batchinfer.worker.progress import progress_for
from batchinfer.worker.start import run_worker

_FILES = 65_536

YES, NO = ("1", "true", "yes"), ("0", "false", "no")


@click.command("worker")
@input_options
@engine_options
@prompt_options
@sampling_options
@output_options
@behaviour_options
@preview.inspect_options
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Run a model over the chunks of a manifest.

    Finished rows are checkpointed to the run, and each chunk's output is published with a .succeed marker, so this
    command can be killed at any moment and started again, here or elsewhere.
    """
    if options["template_name"] == "list":
        return preview.show_templates()
    if options["show_config"]:
        return preview.show_config(click.get_current_context(), _parts(options))
    environment = dict(os.environ)
    configure = partial(make_config, options, environment)
    if options["preview"]:
        from batchinfer.engines.tokenizers import tokenizer_for
        from batchinfer.storage.opening import open_store

        return preview.run_preview(
            configure(), options["preview"], open_store=open_store, load_tokenizer=tokenizer_for
        )
    outside = real_environment(
        grace_seconds=options["grace_seconds"], show_progress=progress_for(sys.stderr)
    )
    _raise_file_limit()
    install_signal_handlers(outside.stopper)
    with contextlib.ExitStack() as stack:
        stack.callback(outside.background.close)
        config = unless_stopped(outside.background, outside.stopper, configure)
        service = find_service(config.host, environment) if options["notices"] else None
        if service is not None:
            watcher = watch(service, outside.background, outside.stopper.request)
            stack.callback(watcher.cancel)
        return run_worker(config, outside)


def _parts(options: dict[str, Any]) -> dict[str, Any]:
    """The parts of the configuration that options alone decide."""
    return {
        "engine": engine_config(options),
        "prompt": prompt_config(options),
        "sampling": sampling_config(options),
    }


def _raise_file_limit() -> None:
    """Small chunks are open by the hundreds, each with two files; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_config(options: dict[str, Any], environment: dict[str, str]) -> WorkerConfig:
    """Turn parsed options into the one config. Reads the small files that options name, and job.json for ranks.

    Raises:
        ConfigError: options that cannot work, together or alone.
    """
    manifests = list(options["manifests"])
    job = options["job"]
    if not manifests:
        manifests = _manifests_by_rank(job, environment)
    output = options["output"] or _default_output(job, manifests)
    from batchinfer.storage.opening import check_writable

    check_writable(output, option="--output")
    job = job or _job_of_run(output, manifests)
    seed = options["seed"]
    return WorkerConfig(
        manifests=manifests,
        job=job,
        output=layout.without_slash(output),
        engine=engine_config(options),
        prompt=prompt_config(options),
        sampling=sampling_config(options),
        run_seed=None if str(seed).lower() == "none" else _integer("--seed", seed),
        worker_id=options["worker_id"] or _default_worker_id(environment),
        scratch_dir=str(options["scratch_dir"]) if options["scratch_dir"] else None,
        limits=Limits(
            max_open_chunks=options["max_open_chunks"], prefix_window=options["prefix_window"]
        ),
        host=describe_host(environment),
        **{
            name: options[name]
            for name in (
                "limit",
                "allow_absolute",
                "retry_errors",
                "claims",
                "steal",
                "lease_seconds",
                "checkpoint_seconds",
                "checkpoint_rows",
                "grace_seconds",
                "max_error_rate",
                "min_errors",
                "max_attempts",
            )
        },
    )


def _manifests_by_rank(job: str | None, environment: dict[str, str]) -> list[str]:
    """Every manifest of this rank among SKYPILOT_NUM_JOBS."""
    if not job:
        raise ConfigError(
            "no --manifest and no --job",
            hint="pass --manifest JOB/manifests/worker-00000.txt, or --job JOB to go by rank",
        )
    from batchinfer.storage.opening import open_store

    found = load_job(job, open_store)
    if found is None:
        raise InputError(
            f"{job}: no job.json there",
            hint=f"make the job first: batchinfer split SOURCE --output {job}",
        )
    rank = _integer("SKYPILOT_JOB_RANK", environment.get("SKYPILOT_JOB_RANK") or "0")
    num_ranks = _integer("SKYPILOT_NUM_JOBS", environment.get("SKYPILOT_NUM_JOBS") or "1")
    return [f"{job.rstrip('/')}/{key}" for key in rank_manifests(found[0], rank, num_ranks)]


def _default_output(job: str | None, manifests: list[str]) -> str:
    base = job
    if base is None and "/manifests/" in f"/{manifests[0]}":
        base = manifests[0].rsplit("manifests/", 1)[0].rstrip("/") or "."
    if base is None:
        raise ConfigError(
            "--output: is missing, expected where the run should lie",
            hint="add --output s3://bucket/run",
        )
    return layout.run_url(base, "default")


def _job_of_run(output: str, manifests: list[str]) -> str | None:
    """The job above a run at JOB/runs/<name>, for a manifest that was copied to the worker's machine."""
    job = layout.job_above(output)
    if not job or any("/manifests/" in f"/{manifest}" for manifest in manifests):
        return None
    from batchinfer.storage.opening import open_store

    return job if load_job(job, open_store) is not None else None


def _default_worker_id(environment: dict[str, str]) -> str:
    """SkyPilot's task id survives a recovery, so a recovered worker knows its own claims."""
    task = environment.get("SKYPILOT_TASK_ID")
    if not task:
        return ""
    rank = environment.get("SKYPILOT_NODE_RANK") or "0"
    return "".join(
        letter if letter.isalnum() or letter in "._-" else "-" for letter in f"{task}-{rank}"
    )[-128:].lstrip("._-")


def describe_host(environment: dict[str, str]) -> dict[str, Any]:
    """Cloud, region and GPUs as SkyPilot tells them. Never the host's name.

    Nothing on the machine tells for every cloud whether it is a spot machine; BATCHINFER_SPOT=1 or 0 does. Without
    BATCHINFER_ACCELERATOR the GPU's name is what the engine's driver says.
    """
    host: dict[str, Any] = {}
    try:
        info = json.loads(environment.get("SKYPILOT_CLUSTER_INFO") or "{}")
    except ValueError:
        info = {}
    if isinstance(info, dict):
        host |= {
            key: info[key] for key in ("cloud", "region", "zone") if isinstance(info.get(key), str)
        }
    for key, name in (
        ("accelerator", "BATCHINFER_ACCELERATOR"),
        ("gpus", "SKYPILOT_NUM_GPUS_PER_NODE"),
    ):
        if environment.get(name):
            host[key] = environment[name]
    spot = environment.get("BATCHINFER_SPOT", "").lower()
    if spot in (*YES, *NO):
        host["spot"] = spot in YES
    return host


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's part of the options."""
    replicas = options["replicas"]
    tokens = options["echo_tokens"]
    # The run's seed is each request's; the engine's own stays at its default.
    names = {field.name for field in msgspec.structs.fields(EngineConfig)} - {"seed"}
    return EngineConfig(
        **{
            **{name: value for name, value in options.items() if name in names},
            "replicas": replicas if replicas == "auto" else _integer("--replicas", replicas),
            "gpus": _comma_list(options["gpus"]) or None,
            "engine_args": read_pairs("--engine-arg", options["engine_args"]),
            "echo_tokens": _pair("--echo-tokens", tokens) if tokens else None,
        }
    )


def prompt_config(options: dict[str, Any]) -> PromptConfig:
    """The part that makes prompts of rows. Reads the files that options name."""
    continued = options["continue_final"]
    try:
        template_kwargs = json.loads(options["chat_template_kwargs"])
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs: not JSON ({error})") from error
    if not isinstance(template_kwargs, dict):
        raise ConfigError("--chat-template-kwargs: expected a JSON object")
    return PromptConfig(
        request_format=options["request_format"],
        messages_column=options["messages_column"],
        turns=str(options["turns"]),
        prompt_column=options["prompt_column"],
        prompt_template=_read(options["prompt_template"], "--prompt-template")
        if options["prompt_template"]
        else "",
        template_name=options["template_name"],
        as_chat=options["as_chat"],
        system_prompt=_text_or_file(options["system_prompt"], "--system-prompt"),
        chat_template=_chat_template(options["chat_template"]),
        chat_template_kwargs=template_kwargs,
        continue_final=True if continued == "row" else continued or False,
        blank_columns=_comma_list(options["blank_columns"]),
        few_shot=_read_rows(options["few_shot"]) if options["few_shot"] else [],
        truncate_prompt=options["truncate_prompt"],
        keep=_comma_list(options["keep"]),
        keep_prompt=options["keep_prompt"],
        id_column=options["id_column"],
        has_timing=options["has_timing"],
        strip=options["strip"],
        output_format=options["output_format"],
    )


def sampling_config(options: dict[str, Any]) -> Sampling:
    """The sampling parameters of the run."""
    given = {name: value for name, value in options.items() if name != "sampling"}
    given["stop"] = list(options["stop"]) or None
    given["stop_token_ids"] = [
        _integer("--stop-token-ids", part) for part in _comma_list(options["stop_token_ids"])
    ] or None
    return make_sampling(given, read_pairs("--sampling", options["sampling"]))


def _comma_list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _pair(option: str, text: str) -> tuple[int, int]:
    parts = _comma_list(text)
    if len(parts) != 2:
        raise ConfigError(f"{option} {text!r}: expected two numbers, e.g. 5,50")
    return _integer(option, parts[0]), _integer(option, parts[1])


def _integer(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: is {value!r}, expected a whole number") from None


def _text_or_file(text: str, option: str) -> str:
    """A text as it is, or the one that lies in the file after @.

    Raises:
        ConfigError: the file cannot be read, or the text is the name of one.
    """
    if text.startswith("@"):
        return _read(Path(text[1:]), option)
    with contextlib.suppress(OSError):  # too long for a name
        if text and Path(text).is_file():
            raise ConfigError(
                f"{option} {text}: is the name of a file, expected a text, or @ before the name",
                hint=f"write {option} @{text}",
            )
    return text


def _chat_template(text: str) -> str:
    template = _text_or_file(text, "--chat-template")
    if template and "{{" not in template and "{%" not in template:
        shown = text if len(text) <= 60 else f"{text[:59]}…"
        raise ConfigError(
            f"--chat-template {shown}: holds neither {{{{ nor {{%, so every prompt would be the same; "
            "expected a Jinja template",
            hint="write --chat-template @FILE to take it from a file",
        )
    return template


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error})") from error


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in _read(path, "--few-shot").split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(f"--few-shot {path}: not JSON Lines ({error})") from error
