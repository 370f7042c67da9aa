"""The command `batchinfer launch`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import click

from batchinfer.cli.options import options as options_from
from batchinfer.cli.options import values_of
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say
from batchinfer.clusters import Plan
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.worker.worker_config import WorkerConfig

_NOT_TAKEN = ("manifests", "job", "output", "worker_id", "price_per_hour")
"""Parameters of the worker that are no options of `launch`, or that it declares itself."""


class LaunchConfig(Record, frozen=True, kw_only=True):
    """Options of `launch` that say what to do with the plan."""

    SECTION: ClassVar[str] = "options"

    check: bool = True
    """Whether to run batchinfer check first."""
    dry_run: bool = False
    """Print what would be submitted, and stop."""
    watch: bool = False
    """Stay, and start again what is lost until the run has ended."""


@click.command("launch", cls=ServerCommand)
@click.argument("job")
@options_from(Plan)
@options_from(LaunchConfig)
@price_options
@options_from(WorkerConfig, without=_NOT_TAKEN)
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Start workers for JOB on a cluster. Everything is checked first, and the run keeps a record of the launch.

    \b
      batchinfer launch s3://my-bucket/job --run s3://my-bucket/job/runs/llama \\
          --on skypilot --workers 16 --gpu L4 --model Qwen/Qwen3-8B \\
          --messages-column conversation --max-tokens 512

    Lost workers of earlier launches are started again, too. --max-cost is the whole run's, and divided among
    them. `batchinfer status RUN` shows who came, and `batchinfer stop RUN --cancel` ends them all.
    """  # noqa: D301 - \b keeps click from wrapping the example
    from batchinfer.pipeline.launching import Launch

    launch = Launch(_plan(options), options)
    if not options["dry_run"]:
        return launch.start() | (launch.watch() if options["watch"] else {})
    page = launch.page()
    for line in page.splitlines():
        say(line)
    return {"status": "DRY_RUN", "submission": page}


def _plan(options: dict[str, Any]) -> Plan:
    """Return the plan as far as the command's own options say it.

    Raises:
        ConfigError: An option is missing, or wrong.
    """
    from batchinfer.storage.opening import local_path, split_url

    given = values_of(Plan, options) | {name: options[name] for name in ("job", "model")}
    wrong = [f"--{name}" for name in ("run", "on") if not given[name]]
    wrong += [f"--env {pair!r}" for pair in given["env"] if not re.match(r"[A-Za-z_]\w*=", pair)]
    if not re.fullmatch(r"([\w.-]+(:[1-9]\d*)?)?", given["gpu"]):
        wrong.append(f"--gpu {given['gpu']!r}")
    if wrong:
        known = "--env NAME=VALUE, --gpu L4:2, --on slurm, --run s3://bucket/job/runs/first"
        raise ConfigError(f"{wrong[0]}: expected a value, as in {known}")
    owners = {"sky_arg": "skypilot", "sbatch_arg": "slurm"}
    if any(given[name] and given["on"] != owner for name, owner in owners.items()):
        raise ConfigError("--sky-arg is for --on skypilot, and --sbatch-arg for --on slurm")
    if options["is_spot"] is not None:  # workers tell it for their price
        market = "--use-spot" if options["is_spot"] else "--no-use-spot"
        given["sky_arg"] = [market, *given["sky_arg"]]
        given["env"] = [f"BATCHINFER_SPOT={int(options['is_spot'])}", *given["env"]]
    if given["template"]:
        given["template"] = str(Path(given["template"]).absolute())
    for name in ("job", "run"):
        is_here = split_url(url := given[name])[0] == "file"
        given[name] = str(local_path(url).resolve()) if is_here else layout.without_slash(url)
    return Plan(**given)
