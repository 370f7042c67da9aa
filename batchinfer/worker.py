"""`batchinfer worker`: options to one frozen config, then `session.run_worker`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from batchinfer import layout
from batchinfer.console import common_options
from batchinfer.engines.config import EngineConfig
from batchinfer.errors import ConfigError, InputError
from batchinfer.manifests import load_job, rank_manifests
from batchinfer.notices import find_service, watch
from batchinfer.progress import progress_for
from batchinfer.prompts import REQUEST_FORMATS, TRUNCATIONS, PromptConfig
from batchinfer.records import Sampling
from batchinfer.session import WorkerConfig, real_world, run_worker
from batchinfer.shelf import Limits
from batchinfer.stopping import install_signal_handlers

F = TypeVar("F", bound=Callable[..., Any])


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


input_options = _options(
    click.option(
        "--manifest",
        "manifests",
        multiple=True,
        envvar=["BATCHINFER_WORKER_MANIFEST", "DATA_METADATA"],
        help="Manifest to work through: path or URL; may be repeated. Default: by rank, see --job.",
    ),
    click.option(
        "--job",
        metavar="URL",
        help="The job that manifest lines are relative to. Needed without --manifest.",
    ),
    click.option(
        "--output",
        metavar="RUN",
        help="Where the run lies: path or URL. Default: JOB/runs/default.",
    ),
    click.option(
        "--allow-absolute",
        is_flag=True,
        help="Take absolute paths and URLs from a remote manifest.",
    ),
    click.option("--limit", type=click.IntRange(1), help="Only the first N rows of the job."),
)

engine_options = _options(
    click.option(
        "--engine",
        default="vllm",
        show_default=True,
        help="vllm, or echo to rehearse without a model.",
    ),
    click.option("--model", default="", help="Model: a name on the Hub or a local folder."),
    click.option(
        "--revision",
        help="Commit, tag or branch of the model. Default: the run's, else the latest.",
    ),
    click.option("--tokenizer", help="Tokenizer, where it is not the model's own."),
    click.option("--hf-config-path", help="Where config.json lies, if not with the model."),
    click.option(
        "--tensor-parallel-size",
        type=click.IntRange(1),
        help="GPUs a replica. Default: the fewest that fit.",
    ),
    click.option("--pipeline-parallel-size", type=click.IntRange(1), default=1, show_default=True),
    click.option(
        "--replicas",
        default="auto",
        show_default=True,
        help="Engine processes, or auto: as many as fit.",
    ),
    click.option("--gpus", help="GPUs to use, e.g. 2,5. Default: all that are visible."),
    click.option("--dtype", default="auto", show_default=True),
    click.option("--quantization"),
    click.option(
        "--max-model-len", type=click.IntRange(1), help="Longest prompt plus answer, in tokens."
    ),
    click.option(
        "--max-num-seqs", type=click.IntRange(1), help="Rows that the engine runs at once."
    ),
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(1),
        help="Tokens that the engine takes in a step.",
    ),
    click.option(
        "--gpu-memory-utilization", type=float, help="Share of GPU memory that the engine may use."
    ),
    click.option("--cpu-offload-gb", type=float, default=0.0, show_default=True),
    click.option(
        "--enforce-eager/--no-enforce-eager",
        default=None,
        help="Run without CUDA graphs and compilation.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run code that comes with the model. Recorded in run.json.",
    ),
    click.option(
        "--engine-arg",
        "engine_args",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other vLLM engine argument.",
    ),
    click.option(
        "--stall-seconds",
        type=float,
        default=300.0,
        show_default=True,
        help="Without progress for so long, the engine counts as hung.",
    ),
    click.option("--load-timeout-seconds", type=float, default=1800.0, show_default=True),
    click.option(
        "--echo-latency-seconds", type=float, default=0.0, help="echo: mean latency of a row."
    ),
    click.option(
        "--echo-tokens", metavar="LEAST,MOST", help="echo: random number of answer tokens."
    ),
    click.option("--echo-seed", type=int, default=0),
    click.option("--echo-load-seconds", type=float, default=0.0),
)

prompt_options = _options(
    click.option(
        "--request-format", type=click.Choice(REQUEST_FORMATS), default="rows", show_default=True
    ),
    click.option(
        "--messages-column",
        default="",
        help="Column with a conversation; goes through the chat template.",
    ),
    click.option(
        "--turns", default="first", show_default=True, help="first, all, or how many user turns."
    ),
    click.option("--prompt-column", default="", help="Column with the prompt: text or token ids."),
    click.option(
        "--prompt-template",
        type=click.Path(path_type=Path),
        help="Jinja file over the row's columns.",
    ),
    click.option(
        "--template", "template_name", default="", help="A named template; `list` shows them."
    ),
    click.option(
        "--as-chat",
        is_flag=True,
        help="Send the prompt as one user message through the chat template.",
    ),
    click.option("--system-prompt", default="", help="Text, or @FILE."),
    click.option(
        "--chat-template", default="", help="Jinja text or @FILE in place of the model's own."
    ),
    click.option(
        "--chat-template-kwargs",
        default="{}",
        metavar="JSON",
        help='E.g. {"enable_thinking": false}.',
    ),
    click.option(
        "--continue-final",
        default=None,
        help="Text that every answer starts with; `row` continues the row's own last answer.",
    ),
    click.option(
        "--blank-columns",
        default="",
        metavar="A,B",
        help="Columns to empty before the template sees them.",
    ),
    click.option(
        "--few-shot", type=click.Path(path_type=Path), help="JSON Lines file with example rows."
    ),
    click.option(
        "--truncate-prompt",
        type=click.Choice(TRUNCATIONS),
        default="error",
        show_default=True,
        help="What to do with prompts longer than the model takes.",
    ),
)

sampling_options = _options(
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Longest answer. Default: what the model has room for.",
    ),
    click.option("--temperature", type=float),
    click.option("--top-p", type=float),
    click.option("--top-k", type=int),
    click.option("--min-p", type=float),
    click.option("--repetition-penalty", type=float),
    click.option("--presence-penalty", type=float),
    click.option("--frequency-penalty", type=float),
    click.option("--stop", multiple=True, help="Text that ends an answer; may be repeated."),
    click.option(
        "--n", type=click.IntRange(1), default=1, show_default=True, help="Answers a row."
    ),
    click.option("--logprobs", type=click.IntRange(0)),
    click.option(
        "--seed",
        default="0",
        show_default=True,
        help="Seed of the run, or `none`: faster on a GPU, not repeatable.",
    ),
    click.option(
        "--sampling",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other sampling parameter of vLLM; may be repeated.",
    ),
)

output_options = _options(
    click.option(
        "--output-format",
        type=click.Choice(["native", "openai-batch", "completions"]),
        default="native",
        show_default=True,
    ),
    click.option(
        "--keep", default="", metavar="A,B", help="Columns to repeat in the output; * for all."
    ),
    click.option("--keep-prompt", is_flag=True, help="Repeat the prompt in the output."),
    click.option("--strip", is_flag=True, help="Remove white space around every answer."),
)

behaviour_options = _options(
    click.option(
        "--worker-id",
        envvar=["BATCHINFER_WORKER_WORKER_ID"],
        help="Stable name of this worker. Default: SkyPilot's task id and node rank, else random.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=click.FloatRange(0, min_open=True),
        default=30.0,
        show_default=True,
    ),
    click.option(
        "--checkpoint-rows",
        type=click.IntRange(1),
        help="Checkpoint also after so many finished rows.",
    ),
    click.option(
        "--lease-seconds",
        type=click.FloatRange(0, min_open=True),
        default=120.0,
        show_default=True,
        help="Without a heartbeat for so long, others take a worker's chunks.",
    ),
    click.option(
        "--claims/--no-claims",
        default=True,
        show_default=True,
        help="Whether to agree with other workers on who does what.",
    ),
    click.option(
        "--steal/--no-steal",
        default=True,
        show_default=True,
        help="Help others once the own chunks are done.",
    ),
    click.option(
        "--grace-seconds",
        type=click.FloatRange(0),
        default=20.0,
        show_default=True,
        help="Time to finish rows after SIGTERM or SIGINT.",
    ),
    click.option(
        "--notices/--no-notices",
        default=True,
        show_default=True,
        help="Ask AWS or Google for preemption notices, on their machines only.",
    ),
    click.option(
        "--max-error-rate",
        type=click.FloatRange(0, 1),
        help="Stop (exit 3) when a larger share of rows fails.",
    ),
    click.option(
        "--min-errors",
        type=click.IntRange(1),
        default=20,
        show_default=True,
        help="Errors before --max-error-rate counts.",
    ),
    click.option(
        "--max-attempts",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="Starts without a new finished row before the worker gives up (exit 3).",
    ),
    click.option("--retry-errors", is_flag=True, help="Do the error rows of a finished run again."),
    click.option(
        "--scratch-dir",
        type=click.Path(path_type=Path),
        help="Local folder for chunks and outputs under way.",
    ),
    click.option("--max-open-chunks", type=click.IntRange(1), default=64, show_default=True),
)


@click.command("worker")
@input_options
@engine_options
@prompt_options
@sampling_options
@output_options
@behaviour_options
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Run a model over the chunks of a manifest.

    Finished rows are checkpointed to the run, and each chunk's output is published with a .succeed marker, so this
    command can be killed at any moment and started again, here or elsewhere.
    """
    environment = dict(os.environ)
    config = make_config(options, environment)
    world = real_world(grace_seconds=config.grace_seconds, progress=progress_for(sys.stderr))
    install_signal_handlers(world.stopper)
    service = find_service(config.host, environment) if options["notices"] else None
    with contextlib.ExitStack() as stack:
        if service is not None:
            watcher = watch(service, world.background, world.stopper.request)
            stack.callback(watcher.cancel)
        return run_worker(config, world)


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
    job = job or _job_of_run(output, manifests)
    seed = options["seed"]
    return WorkerConfig(
        manifests=manifests,
        job=job,
        output=output.rstrip("/"),
        engine=_engine_config(options),
        prompt=_prompt_config(options),
        sampling=_sampling(options),
        run_seed=None if str(seed).lower() == "none" else _integer("--seed", seed),
        worker_id=options["worker_id"] or _default_worker_id(environment),
        scratch_dir=str(options["scratch_dir"]) if options["scratch_dir"] else None,
        limits=Limits(max_open_chunks=options["max_open_chunks"]),
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
    job, slash, _ = output.rstrip("/").rpartition("/runs/")
    if not slash or not job or any("/manifests/" in f"/{manifest}" for manifest in manifests):
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
    """Cloud, region and GPUs as SkyPilot tells them. Never the host's name."""
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
    return host


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    replicas = options["replicas"]
    tokens = options["echo_tokens"]
    # The run's seed is each request's; the engine's own stays at its default.
    names = {field.name for field in msgspec.structs.fields(EngineConfig)} - {"seed"}
    return EngineConfig(
        **{
            **{name: value for name, value in options.items() if name in names},
            "replicas": replicas if replicas == "auto" else _integer("--replicas", replicas),
            "gpus": _comma_list(options["gpus"]) or None,
            "engine_args": _key_values("--engine-arg", options["engine_args"]),
            "echo_tokens": _pair("--echo-tokens", tokens) if tokens else None,
        }
    )


def _prompt_config(options: dict[str, Any]) -> PromptConfig:
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
        chat_template=_text_or_file(options["chat_template"], "--chat-template"),
        chat_template_kwargs=template_kwargs,
        continue_final=True if continued == "row" else continued or False,
        blank_columns=_comma_list(options["blank_columns"]),
        few_shot=_read_rows(options["few_shot"]) if options["few_shot"] else [],
        truncate_prompt=options["truncate_prompt"],
        keep=_comma_list(options["keep"]),
        keep_prompt=options["keep_prompt"],
        strip=options["strip"],
        output_format=options["output_format"],
    )


def _sampling(options: dict[str, Any]) -> Sampling:
    """Sampling options, and ``--sampling`` pairs: to fields of that name where there is one, else to the engine."""
    fields = {field.name for field in msgspec.structs.fields(Sampling)} - {"extra", "seed"}
    values = {name: options[name] for name in fields if options.get(name) is not None}
    values["stop"] = list(options["stop"]) or None
    extra = _key_values("--sampling", options["sampling"])
    values |= {name: extra.pop(name) for name in list(extra) if name in fields}
    if "seed" in extra:
        raise ConfigError("--sampling seed: is the run's", hint="use --seed")
    try:
        return msgspec.convert({**values, "extra": extra or None}, Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"sampling options: {error}", hint="check the values given to --sampling"
        ) from error


def _key_values(option: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Read KEY=VALUE pairs, several to an argument with commas; a value is JSON if it can be, else text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {pair!r}: expected KEY=VALUE")
        try:
            found[key.strip().replace("-", "_")] = json.loads(value)
        except ValueError:
            lowered = {"true": True, "false": False, "none": None}
            found[key.strip().replace("-", "_")] = lowered.get(value.lower(), value)
    return found


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
    return _read(Path(text[1:]), option) if text.startswith("@") else text


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


if __name__ == "__main__":
    importlib.import_module("batchinfer.cli").run(["worker", *sys.argv[1:]])
