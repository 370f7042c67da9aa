"""The command `batchinfer launch`."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from batchinfer.cli.options import FIRST, SectionCommand, SectionOption
from batchinfer.cli.run_options import run_options
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say
from batchinfer.cli.values import NumberRange
from batchinfer.clusters import CLUSTERS, WORKER, Cluster, Plan, jobs_command
from batchinfer.core import units
from batchinfer.core.errors import ConfigError
from batchinfer.pipeline.launching import OWN

_NOT_TAKEN = ("price_per_hour", *(name for name in OWN if name != "model"))
"""Parameters of the worker that are no options of `launch`, or that it declares itself."""


_OF_RANKS = {
    "sources", "cluster", "workers", "what", "gpu", "pool", "address", "cluster_options", "environment", "secrets",
    "name", "dry_run", "is_spot",
}  # fmt: skip
"""Parameters that may be given with another --what than worker."""


def _gpu(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str:
    """Check the value of --gpu. Without the option it is an empty text."""
    name, colon, count = (value or "").partition(":")
    is_count = bool(name and count.isdecimal() and int(count))
    if (colon and not is_count) or not name.isprintable():
        raise ConfigError(f"--gpu {value!r}: expected NAME or NAME:NUMBER", hint="e.g. --gpu L4:2")
    return value or ""


def _name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Check the value of --name, which becomes a part of scripts and manifests."""
    if not value.strip() or not value.isprintable():
        raise ConfigError(f"--name {value!r}: expected letters that can be printed")
    return value


@click.command("launch", cls=SectionCommand)
@click.argument("sources", metavar="[JOB|SOURCE...]", nargs=-1)
@click.option(
    "--run",
    cls=SectionOption,
    section=FIRST,
    metavar="URL",
    help="Place of the run, as in JOB/runs/llama.  [required for workers]",
)
@click.option(
    "--job",
    cls=SectionOption,
    section=FIRST,
    metavar="URL",
    help="The job; with SOURCE, the place for its job.  [default: JOB, if the run is at JOB/runs/NAME]",
)
@click.option(
    "--on",
    "cluster",
    cls=SectionOption,
    section=FIRST,
    required=True,
    metavar="CLUSTER",
    help=f"What starts the workers: {', '.join(CLUSTERS)}.",
)
@click.option(
    "--workers",
    cls=SectionOption,
    section=FIRST,
    type=click.IntRange(1),
    help="Number of new workers; or see --hours. Workers of earlier launches that failed are started again, too.",
)
@click.option(
    "--what",
    type=click.Choice(["worker", "split"]),
    default="worker",
    show_default=True,
    help="Command to run; split shares its work as ranks, and takes its own arguments after --.",
)
@click.option(
    "--gpu",
    metavar="NAME[:N]",
    callback=_gpu,
    help="GPUs of one worker: L4, H100:8; none for CPU machines.",
)
@click.option(
    "--hours",
    type=NumberRange(0, min_open=True),
    help="Start as many workers as finish in so many hours, by --rate or --rate-from.",
)
@click.option("--rate", type=NumberRange(0, min_open=True), help="Rows per second of one worker.")
@click.option("--rate-from", metavar="RUN", help="Take the rate of an earlier run's workers.")
@click.option("--pool", metavar="NAME", help="Machines of this pool (skypilot).")
@click.option("--address", metavar="URL", help="Address of the cluster's dashboard (ray).")
@click.option(
    "--cluster-option",
    "cluster_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the cluster, as in partition=gpu; may be repeated.",
)
@click.option(
    "--env", "environment", multiple=True, metavar="NAME=VALUE", help="Environment of the workers."
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME",
    help="Variable whose value the workers get as a secret (skypilot), or name of a Secret (kubernetes).",
)
@click.option(
    "--name",
    default="batchinfer",
    show_default=True,
    callback=_name,
    help="Name of the jobs in the cluster.",
)
@click.option(
    "--check/--no-check",
    "is_checked",
    default=True,
    help="Run `batchinfer check` first.  [default: check]",
)
@click.option(
    "--dry-run/--submit",
    help="Print what would be submitted, and stop; or submit it.  [default: submit]",
)
@price_options
@run_options(with_look=False, without=_NOT_TAKEN)
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Start workers for JOB on a cluster. Everything is checked first, and the run keeps a record of the launch.

    In place of a job it takes a data set (files, folders or URLs of parquet, JSON Lines or CSV), and splits it first.

    \b
      batchinfer launch s3://my-bucket/job --run s3://my-bucket/job/runs/llama --on skypilot --workers 16 --gpu L4 \\
          --model meta-llama/Llama-3.1-8B-Instruct --messages-column conversation --max-tokens 512

    \b
      batchinfer launch --what split --on slurm --workers 8 -- 's3://raw/*.parquet' --output s3://my-bucket/job

    Options of `batchinfer worker` are options of this command. `batchinfer status RUN` shows how many of the workers
    were seen; `batchinfer stop RUN --cancel` stops the run and cancels what was launched.
    """  # noqa: D301 - \b keeps click from wrapping the example
    if options["what"] != WORKER:
        return _launch_ranks(options)
    if not options["run"]:
        raise ConfigError("--run: is missing", hint="say where the run goes, as in JOB/runs/llama")
    if not options["sources"] and not options["job"]:
        raise ConfigError("no job and no data set is named", hint="batchinfer launch JOB --run …")
    from batchinfer.check.steps import CheckWorld
    from batchinfer.core.clock import SystemClock
    from batchinfer.core.prices import Prices, listed_accelerators
    from batchinfer.engines.models import describe_model
    from batchinfer.engines.tokenizers import tokenizer_for
    from batchinfer.pipeline.launching import Launch, LaunchConfig
    from batchinfer.storage.opening import check_writable, open_store, probe

    check_writable(options["run"], option="--run")
    if options["job"]:
        check_writable(options["job"], option="--job")
    clock = SystemClock()
    world = CheckWorld(
        open_store=open_store,
        probe=probe,
        describe_model=describe_model,
        load_tokenizer=tokenizer_for,
        prices=Prices(options["price_per_hour"]),
        accelerators=listed_accelerators(),
        clock=clock,
    )
    config = LaunchConfig(
        sources=list(options["sources"]) or [options["job"]],
        job=options.pop("job") or "",
        run=options["run"],
        cluster=options["cluster"],
        workers=options["workers"],
        hours=options["hours"],
        gpu=options["gpu"],
        is_spot=options["is_spot"],
        name=options["name"],
        environment=_environment(options["environment"]),
        secrets=list(options["secrets"]),
        options=_cluster_options(options),
        is_checked=options["is_checked"],
    )
    launch = Launch(config, options, open_store=open_store, world=world, clock=clock)
    plan = launch.plan()
    known = {"run": plan.run, "launch": plan.id, "cluster": config.cluster, "workers": plan.workers}
    known |= {"replaces": plan.replaces} if plan.replaces else {}
    if options["dry_run"]:
        for line in filter(None, [launch.splits()]):
            say(line)
        return {"status": "DRY_RUN", **known, "submission": _shown(launch.cluster, plan)}
    handle = launch.submit(plan)
    say(
        f"{units.many(plan.workers, 'worker')} submitted on {config.cluster}; "
        f"watch them with: batchinfer status {plan.run}"
    )
    return {"status": "SUCCESS", **known, "handle": handle}


def _launch_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Launch the ranks of another command than the worker."""
    from batchinfer.core.clock import SystemClock
    from batchinfer.pipeline.rank_launch import RankLaunch
    from batchinfer.storage.opening import open_store

    context = click.get_current_context()
    for name in options:
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _OF_RANKS:
            option = next(one.opts[0] for one in context.command.params if one.name == name)
            raise ConfigError(
                f"{option}: is an option of workers, not of --what {options['what']}",
                hint=f"options of {options['what']} stand after --",
            )
    if options["workers"] is None:
        raise ConfigError("--workers: is missing, expected the number of ranks")
    asked = Plan(
        id="",
        name=options["name"],
        workers=options["workers"],
        job="",
        run="",
        model="",
        words="",
        environment=_environment(options["environment"]),
        secrets=list(options["secrets"]),
        gpu=options["gpu"],
        is_spot=options["is_spot"],
        options=_cluster_options(options),
    )
    launch = RankLaunch(
        options["what"],
        options["sources"],
        options["cluster"],
        asked,
        open_store=open_store,
        clock=SystemClock(),
    )
    plan = launch.plan()
    known = {"launch": plan.id, "cluster": options["cluster"], "workers": plan.workers}
    if options["dry_run"]:
        return {"status": "DRY_RUN", **known, "submission": _shown(launch.cluster, plan)}
    handle = launch.submit(plan)
    cancel = launch.cluster.cancel_command(handle)
    say(
        f"{units.many(plan.workers, 'rank')} of {plan.what} submitted on {options['cluster']}; "
        f"see them with: {jobs_command(launch.cluster, plan)}"
    )
    say(f"no record is kept of them; cancel them with: {cancel}")
    return {"status": "SUCCESS", **known, "handle": handle, "cancel": cancel}


def _shown(cluster: Cluster, plan: Plan) -> str:
    """Print what would be submitted, and return it."""
    text = cluster.describe(plan)
    for line in text.splitlines():
        say(line)
    return text


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env {pair!r}: expected NAME=VALUE")
        found[name] = value
    return found


def _cluster_options(options: dict[str, Any]) -> dict[str, str]:
    found = {}
    for pair in options["cluster_options"]:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--cluster-option {pair!r}: expected NAME=VALUE")
        found[name.replace("_", "-")] = value
    return found | {name: options[name] for name in ("pool", "address") if options[name]}
