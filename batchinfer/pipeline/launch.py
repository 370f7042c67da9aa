"""The command `batchinfer launch`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import click
from msgspec import Meta

from batchinfer.cli.options import options as options_from
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say
from batchinfer.clusters import Plan
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError
from batchinfer.core.option_help import FIRST
from batchinfer.core.records import Record
from batchinfer.worker.worker_config import WorkerConfig

_NOT_TAKEN = ("manifests", "job", "output", "worker_id", "price_per_hour")
"""Parameters of the worker that are no options of `launch`, or that it declares itself."""


class LaunchConfig(Record, frozen=True, kw_only=True):
    """Options of `launch` that are not the worker's."""

    SECTION: ClassVar[str] = "options"

    run: Annotated[str, FIRST] = ""
    """Place of the run, as in JOB/runs/llama."""
    on: Annotated[str, FIRST] = ""
    """One of skypilot, slurm, kubernetes."""
    workers: Annotated[int, Meta(ge=0, le=100_000), FIRST] = 0
    """Number of new workers."""
    gpu: Annotated[str, FIRST] = ""
    """GPUs of a worker, as in L4:2; none for a CPU."""
    template: str = ""
    """File in place of the package's task, script or Job."""
    sky_arg: list[str] = []
    """Option of sky jobs launch, as in --infra=aws."""
    sbatch_arg: list[str] = []
    """Option of sbatch, as in --mem=64G."""
    image: str = ""
    """Image of the workers (kubernetes)."""
    namespace: str = ""
    """Default: that of kubectl's context (kubernetes)."""
    env: list[str] = []
    """NAME=VALUE in the environment of the workers."""
    secret: list[str] = []
    """Variable here, or Secret of Kubernetes, by its name."""
    check: bool = True
    """Whether to run batchinfer check first."""
    dry_run: bool = False
    """Print what would be submitted, and stop."""
    watch: bool = False
    """Stay, and start again what is lost until the run has ended."""


@click.command("launch", cls=ServerCommand)
@click.argument("job")
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
    template = str(Path(options["template"]).absolute()) if options["template"] else ""
    fields = {name: value for name, value in options.items() if name in Plan.__struct_fields__}
    for name in ("job", "run"):
        url = fields[name]
        is_here = split_url(url)[0] == "file"
        fields[name] = str(local_path(url).resolve()) if is_here else layout.without_slash(url)
    return Plan(**fields | {"gpu": gpu, "template": template})
