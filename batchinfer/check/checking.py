"""`batchinfer check`: find out without a GPU, before paying for one, whether a run will work."""

from __future__ import annotations

from typing import Any

import click

from batchinfer.check.examination import CheckConfig, Examination
from batchinfer.cli.options import options as options_from
from batchinfer.cli.options import values_of
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say
from batchinfer.core import units
from batchinfer.core.errors import ConfigError
from batchinfer.worker.command import look_options
from batchinfer.worker.worker_config import WorkerConfig


def examine(config: CheckConfig) -> dict[str, Any]:
    """Run a check, print what it finds, and return it.

    Raises:
        ConfigError: It finds errors.
    """
    result = Examination(config).run()
    result["requests"] = result.get("requests", [])[: config.show]
    tell(result)
    if result["errors"]:
        error = ConfigError(
            f"would not work: {units.many(result['errors'], 'error')}, listed above",
            hint="fix them and check again; nothing was started",
        )
        error.attach_result(result)
        raise error
    return result


def tell(result: dict[str, Any]) -> None:
    """Print a result to stderr as text."""
    for request in result["requests"]:
        say(f"request: {request}")
    if machine := result.get("machine"):
        gpus = [f"{gpu['name']} {units.size(gpu['total_bytes'])}" for gpu in machine["gpus"]]
        sizes = {"memory": machine["memory"], "shared memory": machine["shared_memory"]}
        free = {f"free disk at {name}": size for name, size in machine["free"].items()}
        versions = ", ".join(
            f"{name} {machine[name] or 'none'}" for name in ("vllm", "cuda", "driver")
        )
        say(f"machine: {versions}; GPUs: {', '.join(gpus) or 'none'}")
        say("; ".join(f"{name} {units.size(size)}" for name, size in (sizes | free).items()))
    if lengths := result.get("lengths"):
        how = " (estimated from bytes: no tokenizer here)" if lengths["is_estimate"] else ""
        say(
            f"prompt tokens: {lengths['mean']:.0f} on average, 95 % up to {lengths['p95']}, "
            f"longest {lengths['longest']}{how}"
        )
    if memory := result.get("memory"):
        rows = units.count(memory["rows_at_once"])
        say(
            f"memory: {memory['explanation']}; KV cache of {memory['cache_tokens']:,} tokens, {rows} rows at once"
        )
    if found := result.get("estimate"):
        say(
            f"estimate: {units.count(found['rows'])} rows, {units.many(found['workers'], 'worker')}, "
            f"{units.duration(found['hours'] * 3600)}, {units.money(found['cost'])}"
        )
    for text in result.get("not_checked", ()):
        say(f"not checked: {text}")
    for problem in result["problems"]:
        hint = f" ({problem['hint']})" if problem["hint"] else ""
        say(f"{problem['level']}: {problem['message']}{hint}")


@click.command("check", cls=ServerCommand)
@click.argument("sources", nargs=-1)
@options_from(CheckConfig)
@price_options
@options_from(WorkerConfig, without=["price_per_hour"])
@look_options
@common_options
def command(sources: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Find out before paying: SOURCE (or --job) and the worker's own options, without a GPU.

    \b
      batchinfer check reviews.parquet --model Qwen/Qwen3-8B --gpu L4 \\
          --messages-column conversation --max-tokens 512

    Looks at the options, access (a probe object is written to --output and removed), the model's files, the prompts of
    some rows and their lengths, memory, time and cost. Exit 2 with all problems at once.
    """  # noqa: D301 - \b keeps click from wrapping the example
    own = values_of(CheckConfig, options)
    return examine(CheckConfig(**own | {"options": options, "sources": list(sources)}))
