"""The command `batchinfer launch`: check everything, record the launch in the run, submit the workers, watch them."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

import click
import msgspec

from batchinfer.check.checking import examine
from batchinfer.check.examination import CheckConfig
from batchinfer.check.model import GPU_GIB
from batchinfer.cli.options import options as options_from
from batchinfer.cli.options import values_of, words_of
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say, write
from batchinfer.clusters import (
    Plan,
    find_cluster,
    find_launches,
    name_of,
    new_id,
    record_cancelled,
    record_launch,
)
from batchinfer.clusters.skypilot import accelerators
from batchinfer.core import layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, ConfigError, NoProgress, PolicyStop
from batchinfer.core.redaction import redact
from batchinfer.core.shell import quote
from batchinfer.engines.engine_config import NODE_OPTIONS
from batchinfer.ledger.jobs import load_job
from batchinfer.runs.launched import cancel_launches, launch_text
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import RunConfig, run_status
from batchinfer.runs.stop import has_begun
from batchinfer.storage.opening import local_path, open_store, split_url
from batchinfer.worker.command import look_options
from batchinfer.worker.worker_config import WorkerConfig

WATCH_SECONDS = 30.0
LONGEST_PAUSE = 32
"""Longest pause before lost workers are started again, in WATCH_SECONDS. It doubles until a row is finished."""
MOST_LOOKS = 60
"""Attempts at a look of `watch`."""
_NOT_TAKEN = ("manifests", "job", "output", "worker_id", "price_per_hour")
"""Parameters of the worker that are no options of `launch`, or that it declares itself."""


@click.command("launch", cls=ServerCommand)
@click.argument("job")
@options_from(Plan)
@price_options
@options_from(WorkerConfig, without=(*_NOT_TAKEN, *NODE_OPTIONS))
@look_options
@common_options
def command(**options: Any) -> dict[str, Any] | None:
    """Start workers for JOB on a cluster. Everything is checked first, and the run keeps a record of the launch.

    \b
      batchinfer launch s3://my-bucket/job --run s3://my-bucket/job/runs/llama \\
          --on skypilot --workers 16 --gpu L4 --model Qwen/Qwen3-8B \\
          --messages-column conversation --max-tokens 512

    Lost workers of earlier launches are started again, too. --max-cost is the whole run's, and divided among
    them. `batchinfer status RUN` shows who came, and `batchinfer stop RUN --cancel` ends them all.
    """  # noqa: D301 - \b keeps click from wrapping the example
    launch = Launch(_plan(options), options)
    if not options["dry_run"]:
        return launch.start() | (launch.watch() if options["watch"] else {})
    page = launch.page()
    # Queries may be a prompt's, or say which API an endpoint is to use.
    shown = redact(page, whole_queries=False)
    if shown != page:
        say("secrets of URLs are shown as …, so what is printed does not run as it is")
    write(shown)
    return None


def _plan(options: dict[str, Any]) -> Plan:
    """Return the plan as far as the command's own options say it.

    Raises:
        ConfigError: An option is missing, or wrong.
    """
    given = values_of(Plan, options) | {name: options[name] for name in ("job", "model")}
    wrong = [f"--{name}" for name in ("run", "on") if not given[name]]
    wrong += [f"--env {pair!r}" for pair in given["env"] if not re.match(r"[A-Za-z_]\w*=", pair)]
    wrong += ["--secret" for name in given["secret"] if "=" in name]
    if not re.fullmatch(r"([A-Za-z][\w-]*(:[1-9]\d*)?)?", given["gpu"]):
        wrong += [f"--gpu {given['gpu']!r}"]
    if wrong:
        known = "--env NAME=VALUE, --gpu L4:2, --on slurm, --run s3://bucket/job/runs/first, --secret NAME"
        raise ConfigError(f"{wrong[0]}: expected a value, as in {known}")
    for name, owner in (("sky_arg", "skypilot"), ("sbatch_arg", "slurm"), ("image", "kubernetes")):
        if given[name] and given["on"] != owner:
            raise ConfigError(f"--{name.replace('_', '-')}: is for --on {owner}")
    if given["watch"] and options["retry_errors"]:
        # The run is done before its failed rows are asked again.
        hint = "start it without; `batchinfer status` shows how it goes"
        raise ConfigError("--watch: not together with --retry-errors", hint=hint)
    for name in given["secret"]:
        if given["on"] != "kubernetes" and not options["dry_run"] and name not in os.environ:
            raise ConfigError(f"--secret {name}: has no value here", hint=f"export {name}=…")
    if options["is_spot"] is not None:  # workers tell it for their price
        market = "--use-spot" if options["is_spot"] else "--no-use-spot"
        given["sky_arg"] = [market, *given["sky_arg"]]
        given["env"] = [f"BATCHINFER_SPOT={int(options['is_spot'])}", *given["env"]]
    for name in ("job", "run"):
        scheme, rest = split_url(given[name])  # in small letters, as in the store's own URL
        here = os.path.realpath(local_path(given[name])) if scheme == "file" else ""
        given[name] = here or layout.without_slash(f"{scheme}://{rest}")
    return Plan(**given)


class Launch:
    """One `batchinfer launch`: `start` checks everything and submits, `watch` starts lost workers again.

    Args:
        asked: The launch, as far as its options say it.
        options: All options of the command.
    """

    def __init__(self, asked: Plan, options: dict[str, Any]) -> None:
        self._asked, self._options = asked, options
        self._cluster = find_cluster(asked.on)
        self._clock = Clock()
        self._began = self._clock.now()
        self._run = RunConfig(run=asked.run, job=asked.job, namespace=asked.namespace)

    def page(self) -> str:
        """Return what would be submitted, ready to be run by hand. Reads no storage, and asks no cluster."""
        if not self._asked.workers:
            raise ConfigError("--workers: is missing", hint="--dry-run looks at no job")
        return self._cluster.page(self._plan_of(self._asked.workers, self._options["max_cost"], []))

    def start(self) -> dict[str, Any]:
        """Check everything, and submit new workers and those that were lost. Return the command's result.

        Raises:
            ConfigError: It would not work, or the run needs no worker. What `batchinfer check` finds is printed before.
        """
        asked = self._asked
        self._cluster.page(asked)  # refuses a template that is wrong
        self._store = open_store(asked.run)
        is_there = has_begun(self._store)
        seen = run_status(self._run, open_store=open_store, clock=self._clock) if is_there else None
        if seen and seen.state == "done" and not self._options["retry_errors"]:
            hint = "--retry-errors asks its failed rows again; another --run answers all rows anew"
            raise ConfigError(f"{asked.run}: is done, so workers have nothing to do", hint=hint)
        if seen and seen.state in ("stopping", "stopped"):
            hint = "`batchinfer stop RUN --resume` lets it go on"
            raise ConfigError(f"{asked.run}: is stopped, so workers would end at once", hint=hint)
        job = load_job(asked.job, open_store)
        self._num_manifests = job[0].num_workers if job else 0
        lost = self._restartable(seen) if seen else []
        workers = asked.workers + len(lost)
        if asked.check:
            gpus = accelerators(asked.template, [*GPU_GIB]) if asked.on == "skypilot" else ""
            given = self._options | {"output": asked.run, "manifests": (), "workers": workers}
            given |= {"gpu": asked.gpu or gpus}
            elsewhere = "" if asked.on == "slurm" else asked.on
            examine(CheckConfig(options=given, elsewhere=elsewhere, sample_rows=50, show=0))
        if not (workers or (seen and asked.watch)):
            hint = "say how many to start: --workers 8"
            raise ConfigError("--workers: is missing, and no worker was lost", hint=hint)
        result = {"status": "SUCCESS", "run": asked.run, "workers": workers, "replaces": lost}
        return result | (self._submit(workers, lost, seen) if workers else {})

    def watch(self) -> dict[str, Any]:
        """Say how the run goes, and start lost workers again, until the run is done, stopped or has no worker left.

        Raises:
            PolicyStop: The run was stopped; no worker is left and none may be started again; or workers were lost
                again and again.
        """
        pause, due, best, said, refused = WATCH_SECONDS, 0.0, -1, "", ""
        num_looks_at_nobody = 0
        while True:
            seen = self._look()
            lost = self._restartable(seen)
            alive = sum(view.is_alive for view in seen.workers)
            coming = sum(launch.coming for launch in seen.launches)
            text = (
                f"{seen.state}: {units.count(seen.rows_finished)} of {units.count(seen.rows.total)} rows, "
                f"{units.many(alive, 'worker')} at work, {coming} to come, {len(lost)} lost, "
                f"{units.money(seen.cost.so_far)}"
            )
            text = "\n".join([text, *(launch_text(each) for each in seen.launches if each.lost)])
            if text != said:
                said = text
                say(text)
            if seen.state == "done":
                # Machines that would only come to find nothing to do.
                namespace = self._asked.namespace
                for line in cancel_launches(self._store, self._clock, namespace) if coming else ():
                    say(line)
                return {"rows_done": seen.rows.done, "cost": seen.cost.so_far}
            # Workers may have come and ended after their records were read, and before the cluster was asked.
            num_looks_at_nobody = 0 if alive or coming or lost else num_looks_at_nobody + 1
            if seen.state == "stopped" or num_looks_at_nobody == 2:
                why = "; ".join(sorted({view.reason for view in seen.workers} - {""}))
                more = f" ({why})" if why else ""
                raise PolicyStop(f"{seen.run}: is {seen.state}, and no worker is left{more}")
            if seen.rows_finished > best:
                pause, best = WATCH_SECONDS, seen.rows_finished
            if lost and self._clock.monotonic() >= due:
                if pause >= LONGEST_PAUSE * WATCH_SECONDS:
                    why = refused or "workers were started again and again"
                    raise NoProgress(
                        f"{seen.run}: {why}, and no row was finished since",
                        hint=f"see why: batchinfer status {quote(seen.run)}",
                    )
                pause *= 2
                due = self._clock.monotonic() + pause
                try:
                    self._submit(len(lost), lost, seen)
                    refused = ""
                except BatchinferError as error:
                    say(refused := error.message)

    # -- what is started

    def _plan_of(self, workers: int, budget: float | None, lost: list[str]) -> Plan:
        """Return the plan of so many workers, which divide the budget in dollars among them; None: without a limit."""
        share = None if budget is None else max(0.0001, round(budget / workers, 4))
        asked, identity = self._asked, new_id(self._clock.now())
        given = self._options | {"max_cost": share, "job": asked.job, "output": asked.run}
        words = [text for _, text in words_of(WorkerConfig, given, is_parsed=True)]
        shared = [f"BATCHINFER_LAUNCH={identity}", f"BATCHINFER_NUM_WORKERS={workers}"]
        own = {"id": identity, "name": name_of(identity, asked.run), "workers": workers}
        own |= {"words": " ".join([*words, *map(quote, given["server_args"])])}
        own |= {"env": [*asked.env, *shared], "share": share, "replaces": lost}
        return msgspec.structs.replace(asked, **own)

    def _budget(self, seen: Overview | None, *, is_for_lost: bool) -> float | None:
        """Return the dollars that new workers may spend: what the run has neither spent nor given to others.

        Raises:
            ConfigError: Less than a cent is left.
        """
        most: float | None = self._options["max_cost"]
        if most is None or seen is None:
            return most
        held = sum(launch.held or 0.0 for launch in seen.launches)
        budget = most - (seen.cost.so_far or 0.0) - held
        if budget < 0.01:
            spent = f"the run has cost {units.money(seen.cost.so_far)}"
            more = f", and its workers may spend {units.money(held)} more" if held > 0 else ""
            hint = "raise --max-cost, the budget of the whole run"
            raise ConfigError(f"--max-cost {most:g}: {spent}{more}, so nothing is left", hint=hint)
        if is_for_lost:  # they get no more than their own shares
            left = (launch.left for launch in seen.launches if launch.lost)
            return min(budget, max(0.01, sum(budget if one is None else one for one in left)))
        return budget

    def _submit(self, workers: int, lost: list[str], seen: Overview | None) -> dict[str, str]:
        """Record a launch, then submit it. Return what the command's result says of it.

        Of two launches at once, which may both start the same lost workers again, at most one submits anything.

        Raises:
            ConfigError: Nothing is left of the budget, the cluster refuses, another launch was made since the run was
                seen, or the run was stopped. The record is removed again, unless the cluster has got workers, or cannot
                say.
        """
        budget = self._budget(seen, is_for_lost=workers == len(lost))
        plan = self._plan_of(workers, budget, lost)
        record_launch(self._store, plan)
        known = {plan.id, *(launch.id for launch in (seen.launches if seen else ()))}
        if others := find_launches(self._store)[0].keys() - known:
            self._store.delete([layout.launch_key(plan.id)])
            raise ConfigError(f"{plan.run}: another launch was made meanwhile ({min(others)})")
        try:
            self._cluster.submit(plan)
        except ConfigError as error:
            error.hint = error.hint or f"if workers are there: batchinfer status {quote(plan.run)}"
            with contextlib.suppress(ConfigError):
                if not self._cluster.look(plan.name, plan.namespace):
                    self._store.delete([layout.launch_key(plan.id)])
            raise
        # `stop --cancel` may have looked for the workers before they were there.
        if any(info.key == layout.STOP_KEY for info in self._store.list(layout.STOP_KEY)):
            self._cluster.cancel(plan.name, plan.namespace)
            record_cancelled(self._store, plan.id)
            raise ConfigError(f"{plan.run}: was stopped meanwhile, so the workers were cancelled")
        say(f"{units.many(workers, 'worker')} submitted on {plan.on} as {plan.name}")
        return {"on": plan.on, "launch": plan.id}

    # -- how it goes

    def _look(self, looks_left: int = MOST_LOOKS) -> Overview:
        """Wait a while and look. After an error of storage do it again, for half an hour."""
        self._clock.sleep(WATCH_SECONDS)
        try:
            return run_status(self._run, open_store=open_store, clock=self._clock)
        except BatchinferError as error:
            if not looks_left:
                raise
            say(f"{error.message}; looking again")
        return self._look(looks_left - 1)

    def _restartable(self, seen: Overview) -> list[str]:
        """Return the lost workers that may be started again.

        They are none once the run has cost or lasted what it may, and no more than the job has manifests: a record in
        the bucket may claim any number.
        """
        most_cost, most_hours = self._options["max_cost"], self._options["max_hours"]
        is_spent = most_cost is not None and (seen.cost.so_far or 0.0) >= most_cost
        hours = (self._clock.now() - self._began) / 3600
        if is_spent or seen.state == "stopping" or (most_hours is not None and hours >= most_hours):
            return []
        lost = [name for launch in seen.launches for name in launch.lost]
        return lost[: self._num_manifests]
