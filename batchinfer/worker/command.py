"""The command `batchinfer worker`: it turns options into one frozen configuration and starts the worker with it.

The worker's other modules are imported only inside the functions that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import resource
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

import click

from batchinfer.cli.help import COMMON
from batchinfer.cli.options import F, value_of, values_of
from batchinfer.cli.options import options as options_from
from batchinfer.cli.server_args import ServerCommand, check_server_args, without_secrets_in
from batchinfer.cli.settings import common_options, show_config
from batchinfer.cli.terminal import say
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.engines.engine_config import EngineConfig, parallel_options
from batchinfer.prompts.prompt_config import make_body
from batchinfer.prompts.types import PromptConfig, Sampling
from batchinfer.worker.worker_config import Limits, WorkerConfig

if TYPE_CHECKING:
    from batchinfer.core.prices import Price

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
_MAX_OPEN_FILES, _FEWER_OPEN_FILES = 65_536, 10_240
_MOST_SEEDS = 2**32
"""Number of seeds that the libraries take with which a server seeds itself."""
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class Look(Record, frozen=True, kw_only=True):
    """Options that show something in place of working."""

    SECTION: ClassVar[str] = COMMON

    show_config: bool = False
    """Show every option, where its value comes from, and stop; reads no storage."""


def look_options(function: F) -> F:
    """Add --show-config to a command that has the worker's options, or those of an engine and its prompts."""

    @options_from(Look)
    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if not options.pop("show_config"):
            return function(*arguments, **options)
        parts = {"engine": engine_config(options), "prompt": prompt_config(options)}
        return show_config(click.get_current_context(), parts)

    return cast("F", called)


@click.command("worker", cls=ServerCommand)
@options_from(WorkerConfig)
@look_options
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Run a model over the chunks of a job.

    \b
      batchinfer worker --job s3://my-bucket/job --output s3://my-bucket/run \\
          --model Qwen/Qwen3-8B --messages-column conversation --max-tokens 512

    Finished rows are checkpointed to the run, and each chunk's output is published with a .succeed marker, so this
    command can be killed at any moment and started again, here or elsewhere. Other options are those of `vllm serve`
    and go to the server, as in --max-model-len 8192. A settings file (--config) may group options by section.
    """  # noqa: D301 - \b keeps click from wrapping the example
    return work(options, dict(os.environ))


def work(options: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Run a worker with these options until its work is done, with progress and signal handlers of its own.

    Args:
        options: Values that click has parsed, by the names of its parameters.
        variables: Environment variables.

    Returns:
        The result object; see `run_worker`, also for the errors.
    """
    from batchinfer.worker.background import install_signal_handlers, unless_stopped
    from batchinfer.worker.progress import Progress
    from batchinfer.worker.start import run_worker
    from batchinfer.worker.worker_config import real_environment

    engine = engine_config(options)
    if "headless" in engine.server_options:
        return _follow(engine, options["grace_seconds"])
    if engine.node_rank:
        raise ConfigError(
            f"--node-rank {engine.node_rank} without --headless: only node 0 is a worker",
            hint="add --headless on the other nodes",
        )
    if engine.engine == "echo" and engine.server_args:
        say(f"--engine echo does not check {' '.join(without_secrets_in(engine.server_args))}")
    show_progress = Progress(sys.stderr)
    outside = real_environment(grace_seconds=options["grace_seconds"], show_progress=show_progress)
    _raise_file_limit()
    _give_large_blocks_back()
    install_signal_handlers(outside.stopper)
    with contextlib.closing(show_progress):
        configuring = outside.background.submit(functools.partial(make_config, options, variables))
        config = unless_stopped(outside.background, outside.stopper, configuring)
        return run_worker(config, outside)


def _follow(engine: EngineConfig, grace_seconds: float) -> dict[str, Any]:
    """Run a share of another machine's model; see `batchinfer.engines.headless.follow`."""
    from batchinfer.core.clock import Clock
    from batchinfer.engines.headless import follow
    from batchinfer.worker.background import Stopper, WhileLoading, install_signal_handlers

    stopper = Stopper(Clock(), grace_seconds=grace_seconds)
    install_signal_handlers(stopper)
    return follow(engine, loading=WhileLoading(stopper), stop=stopper)


def _raise_file_limit() -> None:
    """Raise this process's limit of open files, which usually is 1024.

    Hundreds of small chunks may be open at a time, and each open chunk has two open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        for most in (wanted, _FEWER_OPEN_FILES):  # macOS has a lower limit than it says
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return


def _give_large_blocks_back() -> None:
    """Let the C library return blocks of 128 KB and more to the system as soon as they are free.

    By itself glibc keeps more and more of them (mallopt(3), M_MMAP_THRESHOLD): a worker whose rows have a megabyte took
    up to 60 MB more than --max-row-memory and what is written at a moment.
    """
    with contextlib.suppress(AttributeError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 128 << 10)


def make_config(options: dict[str, Any], environment: dict[str, str]) -> WorkerConfig:
    """Turn parsed options into the worker's configuration.

    Reads the small files that options name. May read job.json, to choose the manifests or to find the run's job.

    Raises:
        ConfigError: an option has a value that cannot work, or two options contradict each other.
    """
    fields = values_of(WorkerConfig, options)
    manifests = fields["manifests"] or _manifests_by_rank(fields["job"], environment)
    output = fields["output"] or _default_output(fields["job"], manifests)
    host, engine = describe_host(environment), engine_config(options)
    price = price_of_machine(fields, host, engine)
    return WorkerConfig(
        **{
            **fields,
            "price_per_hour": price.per_hour if price else None,
            "price_source": price.source if price else "",
            "manifests": manifests,
            "output": layout.without_slash(output),
            "worker_id": fields["worker_id"] or _default_worker_id(environment),
        },
        engine=engine,
        prompt=prompt_config(options),
        limits=Limits(**values_of(Limits, options)),
        host=host,
    )


def price_of_machine(
    given: dict[str, Any], host: dict[str, Any], engine: EngineConfig
) -> Price | None:
    """Return what this worker's machine costs; None if neither --price-per-hour nor --max-cost is given.

    Args:
        given: Values of options, by the names of their parameters.
        host: Facts about the machine, by `describe_host`.
        engine: The engine's configuration.

    Raises:
        ConfigError: --max-cost is given, and the price is not known.
    """
    if given["price_per_hour"] is None and given["max_cost"] is None:
        return None
    from batchinfer.core.prices import price_of
    from batchinfer.engines.gpus import visible_gpus
    from batchinfer.ledger.spending import describe_machine

    gpus = [] if given["price_per_hour"] is not None else visible_gpus(engine.gpus)
    device = gpus[0].name if gpus else ""
    machine = describe_machine(host, device=device, num_gpus=len(gpus), is_spot=None)
    price = price_of(machine, given["price_per_hour"])
    if price is None:
        what = f"a machine with {machine.accelerator}" if machine.accelerator else "this machine"
        raise ConfigError(
            f"--max-cost: no price of {what} is known",
            hint="say what it costs: --price-per-hour DOLLARS (0.35, for example)",
        )
    return price


def _manifests_by_rank(job: str | None, environment: dict[str, str]) -> list[str]:
    """Return the manifests of this worker when no --manifest is given.

    Variables say which worker this is and how many there are: BATCHINFER_RANK and BATCHINFER_NUM_WORKERS, which
    `batchinfer launch` sets, or SkyPilot's SKYPILOT_JOB_RANK and SKYPILOT_NUM_JOBS.
    """
    if not job:
        raise ConfigError(
            "no --manifest and no --job",
            hint="pass --manifest JOB/manifests/worker-00000.txt, or --job JOB to go by rank",
        )
    rank, num_ranks = _rank_and_count(environment)
    if (rank, num_ranks) == (0, 1):  # who reads the chunks reads job.json anyway
        return [f"{job.rstrip('/')}/{layout.ALL_MANIFEST}"]
    from batchinfer.ledger.jobs import load_job, no_job, rank_manifests
    from batchinfer.storage.opening import open_store

    found = load_job(job, open_store)
    if found is None:
        raise no_job(job)
    return [f"{job.rstrip('/')}/{key}" for key in rank_manifests(found[0], rank, num_ranks)]


def _rank_and_count(environment: dict[str, str]) -> tuple[int, int]:
    """Return this worker's rank, counted from 0, and the number of workers."""
    names = "SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS"
    if environment.get("BATCHINFER_RANK"):
        names = "BATCHINFER_RANK", "BATCHINFER_NUM_WORKERS"
    rank, number = (environment.get(name) or str(index) for index, name in enumerate(names))
    try:
        return int(rank), int(number)
    except ValueError:
        said = f"{names[0]}, {names[1]}: are {rank!r}, {number!r}, expected whole numbers"
        raise ConfigError(said) from None


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


def _default_worker_id(environment: dict[str, str]) -> str:
    """Return a name that stays the same when a lost machine is replaced, so the worker there knows its own claims.

    It is the launch and the rank if `batchinfer launch` started the worker, else SkyPilot's task id and node rank, and
    "" elsewhere.
    """
    if environment.get("BATCHINFER_LAUNCH"):
        return layout.launched_worker(
            environment["BATCHINFER_LAUNCH"], _rank_and_count(environment)[0]
        )
    task = environment.get("SKYPILOT_TASK_ID")
    if not task:
        return ""
    rank = environment.get("SKYPILOT_NODE_RANK") or "0"
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{task}-{rank}")[-128:].lstrip("._-")


def describe_host(environment: dict[str, str]) -> dict[str, Any]:
    """Describe the machine for the worker's record: cloud, region, zone, GPUs, and whether it is a spot machine.

    All values come from environment variables, most of them set by SkyPilot. The host's name is never used. Not every
    cloud lets a machine find out whether it is a spot machine, so the variable BATCHINFER_SPOT says it with 1 or 0.
    Without BATCHINFER_ACCELERATOR the worker's record shows the GPU's name as the driver gives it.
    """
    try:
        info = json.loads(environment.get("SKYPILOT_CLUSTER_INFO") or "{}")
    except ValueError:
        info = {}
    found = {
        **{key: info.get(key) for key in ("cloud", "region", "zone") if isinstance(info, dict)},
        "accelerator": environment.get("BATCHINFER_ACCELERATOR"),
        "gpus": environment.get("SKYPILOT_NUM_GPUS_PER_NODE"),
    }
    host: dict[str, Any] = {
        key: text for key, text in found.items() if text and isinstance(text, str)
    }
    spot = environment.get("BATCHINFER_SPOT", "").lower()
    if spot in (*_YES, *_NO):
        host["spot"] = spot in _YES
    return host


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """Make the configuration of the engine from the options.

    Raises:
        ConfigError: a value cannot be read, or an option of the server is one that the worker sets itself.
    """
    fields = values_of(EngineConfig, options)
    server_args = list(options.get("server_args") or ())
    check_server_args(server_args, fields["engine"])
    return EngineConfig(
        **fields | parallel_options(server_args),
        server_args=server_args,
        seed=(value_of(WorkerConfig, "run_seed", options) or 0) % _MOST_SEEDS,
        scratch_dir=value_of(WorkerConfig, "scratch_dir", options),
    )


def prompt_config(options: dict[str, Any]) -> PromptConfig:
    """Make the configuration that decides how rows become requests. Reads the files that options name.

    Raises:
        ConfigError: a value cannot work.
    """
    return PromptConfig(
        **values_of(PromptConfig, options),
        adapters=sorted(value_of(EngineConfig, "loras", options)),
        task=value_of(EngineConfig, "task", options),
        body=make_body(Sampling(**values_of(Sampling, options))),
    )
