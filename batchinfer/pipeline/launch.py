"""The command `batchinfer launch`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from batchinfer.cli.options import F, Option, group
from batchinfer.cli.run_options import run_options
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say
from batchinfer.cli.values import FLAG, REPEATED, TEXT, at_least, number_from
from batchinfer.clusters import CLUSTERS, Plan
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError

_POSITIVE = number_from(0, is_open=True)
_OWN = group(
    "options",
    "",
    Option("--run", TEXT, "Place of the run, as in JOB/runs/llama.", default="", is_first=True),
    Option("--on", TEXT, f"One of {', '.join(CLUSTERS)}.", default="", is_first=True),
    Option("--workers", at_least(0, 100_000), "Number of new workers.", default=0, is_first=True),
    Option("--gpu", TEXT, "GPUs of a worker: L4:2, or none. Default: the template's.", default=""),
    Option("--template", REPEATED, "File in place of the package's task, script or Job."),
    Option("--sky-arg", REPEATED, "Option of `sky jobs launch`, as in --infra=aws."),
    Option("--sbatch-arg", REPEATED, "Option of sbatch, as in --mem=64G."),
    Option("--image", TEXT, "Image of the workers (kubernetes).", default=""),
    Option("--namespace", TEXT, "Default: that of kubectl's context (kubernetes).", default=""),
    Option("--env", REPEATED, "NAME=VALUE in the environment of the workers."),
    Option("--secret", REPEATED, "Variable here, or Secret of Kubernetes, by its name."),
    Option("--hours", _POSITIVE, "In place of --workers: as many as finish in so many hours."),
    Option("--rate", _POSITIVE, "Rows per second of one worker, for --hours."),
    Option("--rate-from", TEXT, "Take the rate of this run's workers."),
    Option("--check/--no-check", FLAG, "Whether to run `batchinfer check` first.", default=True),
    Option("--dry-run", FLAG, "Print what would be submitted, and stop."),
    Option("--watch", FLAG, "Stay, and start again what is lost until the run has ended."),
)
_NOT_TAKEN = (
    "manifests", "job", "output", "worker_id", "template_name", "price_per_hour",
    "nnodes", "node_rank", "master_addr", "master_port", "headless",
)  # fmt: skip
"""Parameters of the worker that are no options of `launch`, or that it declares itself."""


def _own_options(function: F) -> F:
    for option in reversed(_OWN):
        function = option.decorate(function)
    return function


@click.command("launch", cls=ServerCommand)
@click.argument("job")
@_own_options
@price_options
@run_options(with_look=False, without=_NOT_TAKEN)
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Start workers for JOB on a cluster. Everything is checked first, and the run keeps a record of the launch.

    \b
      batchinfer launch s3://my-bucket/job --run s3://my-bucket/job/runs/llama --on skypilot --workers 16 --gpu L4 \\
          --model meta-llama/Llama-3.1-8B-Instruct --messages-column conversation --max-tokens 512

    Workers of earlier launches that were lost are started again, too. Options of `batchinfer worker` are options of
    this command; --max-cost is the whole run's, and divided among them. `batchinfer status RUN` shows which of them
    came, and `batchinfer stop RUN --cancel` ends them all.
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
    """Return the plan as far as the command's own options say it. The option --template is divided in two.

    Raises:
        ConfigError: An option is missing, or wrong.
    """
    from batchinfer.prompts import NAMED_TEMPLATES
    from batchinfer.storage.opening import local_path, split_url

    on, gpu = options["on"], "none" if options["gpu"].lower() == "cpu" else options["gpu"]
    wrong = [f"--env {pair!r}" for pair in options["env"] if not re.match(r"[A-Za-z_]\w*=", pair)]
    wrong += [] if re.fullmatch(r"([\w.-]+(:[1-9]\d*)?)?", gpu) else [f"--gpu {gpu!r}"]
    if wrong or not options["run"]:
        known = "--env NAME=VALUE, --gpu L4:2, --run s3://bucket/job/runs/first"
        raise ConfigError(f"{(wrong or ['--run'])[0]}: expected a value, as in {known}")
    if (options["sky_arg"] and on != "skypilot") or (options["sbatch_arg"] and on != "slurm"):
        raise ConfigError("--sky-arg is for --on skypilot, and --sbatch-arg for --on slurm")
    if options["is_spot"] is not None:  # workers tell it for their price
        market = "--use-spot" if options["is_spot"] else "--no-use-spot"
        options["sky_arg"] = (market, *options["sky_arg"])
        options["env"] = (f"BATCHINFER_SPOT={int(options['is_spot'])}", *options["env"])
    # The worker's option of this name takes the name of a prompt template, and a launch may have both.
    named = [one for one in options["template"] if one in NAMED_TEMPLATES]
    options["template_name"] = (named or [""])[0]
    files = [str(Path(one).absolute()) for one in options["template"] if one not in named]
    fields = {name: value for name, value in options.items() if name in Plan.__struct_fields__}
    for name in ("job", "run"):
        url = fields[name]
        is_here = split_url(url)[0] == "file"
        fields[name] = str(local_path(url).resolve()) if is_here else layout.without_slash(url)
    return Plan(**fields | {"gpu": gpu, "template": files[-1] if files else ""})
