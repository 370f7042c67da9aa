"""The steps of `launch`: check everything, record the launch in the run, submit the workers, watch them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from batchinfer.check.model import GPU_GIB
from batchinfer.cli.options import options_of
from batchinfer.cli.terminal import say
from batchinfer.clusters import Plan, find_cluster
from batchinfer.clusters.launch_records import find_launches, forget_launch, new_id, record_launch
from batchinfer.clusters.skypilot import accelerators
from batchinfer.core import layout, units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import BatchinferError, ConfigError, NoProgress, PolicyStop
from batchinfer.core.prices import Machine, Prices, accelerator_name
from batchinfer.core.shell import in_bash, quote
from batchinfer.engines.engine_config import NODE_OPTIONS
from batchinfer.ledger.jobs import load_job
from batchinfer.runs.launched import cancel_launches, launch_text
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import RunConfig, run_status
from batchinfer.storage import Store
from batchinfer.storage.opening import check_writable, open_store, split_url
from batchinfer.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

WATCH_SECONDS = 30.0
MOST_RESTARTS = 5
"""Restarts in a row without a finished row after which `watch` gives up. Each waits twice as long as the one before."""
MOST_LOOKS = 60
"""Attempts at a look of `watch`."""
_FOLDERS = ("model", "loras", "media_root", "server_args")
"""Parameters of the worker that may name a folder of this machine, which a machine elsewhere does not see."""
_STOPPED = "is stopped, so workers would end at once; `batchinfer stop RUN --resume` lets it go on"
_ENDED = {
    "done": "is done, so workers have nothing to do",
    "stopping": _STOPPED,
    "stopped": _STOPPED,
}


def worker_words(options: dict[str, Any]) -> str:
    """Return the worker's options as words of bash. The contents of files that options name become part of the words.

    How the worker's options are declared, only this function knows.

    Raises:
        ConfigError: A value cannot be read.
    """
    words = []
    for option in options_of(WorkerConfig):
        if option.field in options and option.field not in ("job", "model"):
            for flag, word in option.spell(option.read(options[option.field])):
                words.append(flag if word is None else f"{flag} {in_bash(word)}")
    return " ".join([*words, *map(quote, options.get("server_args", ()))])


class Launch:
    """One `batchinfer launch`: `start` checks everything and submits, `watch` starts lost workers again.

    Args:
        plan: The launch, as far as its options say it.
        options: All options of the command.
        clock: Tells the time.
    """

    def __init__(self, plan: Plan, options: dict[str, Any], clock: Clock | None = None) -> None:
        self._asked = plan
        self._options = options
        self._clock = clock or SystemClock()
        self._cluster = find_cluster(plan.on)
        self._store: Store
        """The run's store; `start` opens it, since a page needs none."""
        self._place = plan.run
        self._began = self._clock.now()
        self._known: set[str] = set()
        """Ids of the run's launches at the last look."""
        self._budgets: dict[str, float] = {}
        """Dollars that each worker of this command's launches may cost, by its id."""
        self._most: int | None = None
        """Most workers to start again at once: a record in the bucket may claim any number. None: not known."""

    def page(self) -> str:
        """Return what would be submitted, ready to be run by hand. Reads no storage, and asks no cluster."""
        if not self._asked.workers:
            raise ConfigError("--workers: is missing", hint="--dry-run looks at no job")
        return self._cluster.page(self._plan(self._asked.workers, self._options["max_cost"]))

    def start(self) -> dict[str, Any]:
        """Check everything, and submit new workers and those that were lost. Return the command's result.

        Raises:
            ConfigError: It would not work, or the run needs no worker. What `batchinfer check` finds is printed before.
        """
        self._refuse()
        self._cluster.page(self._asked)  # refuses a template that is wrong
        self._store = open_store(self._asked.run)
        self._place = self._store.url
        seen = self._look()
        state = seen.state if seen else ""
        if state in _ENDED and not (state == "done" and self._options.get("retry_errors")):
            raise ConfigError(f"{self._asked.run}: {_ENDED[state]}")
        lost = [name for launch in seen.launches for name in launch.lost] if seen else []
        workers = self._asked.workers
        if self._options["check"]:
            self._check(len(lost))
        found = load_job(self._asked.job, open_store) if self._options["check"] else None
        self._most = found[0].num_workers if found else None
        if self._most is not None and workers + len(lost) > self._most:
            raise ConfigError(
                f"--workers {workers + len(lost)}: the job has {self._most} worker manifests",
                hint="make it anew with `batchinfer split --num-workers N`, or start fewer workers",
            )
        result = {"status": "SUCCESS", "run": self._asked.run, "workers": workers + len(lost)}
        if workers + len(lost):
            budget = self._options["max_cost"]
            if budget is not None and seen is not None:
                budget = max(0.01, budget - (seen.cost.so_far or 0.0))
            plan = self._plan(workers + len(lost), budget)
            self._submit(plan, lost)
            result |= {"on": plan.on, "launch": plan.id, "replaces": lost}
        elif seen is None or not self._options["watch"]:
            raise ConfigError("--workers: is missing, and no worker was lost")
        return result

    def watch(self) -> dict[str, Any]:
        """Say how the run goes, and start lost workers again, until the run is done, stopped or has no worker left.

        Raises:
            PolicyStop: The run was stopped; no worker is left and none may be started again; or workers were lost
                again and again.
        """
        restarts, due, best = 0, 0.0, -1
        said: list[str] = []
        while True:
            seen = self._look_until_seen()
            lost = self._restartable(seen)
            alive = sum(view.is_alive for view in seen.workers)
            coming = sum(launch.coming for launch in seen.launches)
            finished = seen.rows_finished
            text = (
                f"{seen.state}: {units.count(finished)} of {units.count(seen.rows.total)} rows, "
                f"{units.many(alive, 'worker')} at work, {coming} to come, {len(lost)} lost, "
                f"{units.money(seen.cost.so_far)}"
            )
            lines = [text, *(launch_text(each) for each in seen.launches if each.lost)]
            if lines != said:
                said = lines
                for line in lines:
                    say(line)
            if seen.state == "done":
                # Machines that would only come to find nothing to do.
                namespace = self._asked.namespace
                for line in cancel_launches(self._store, self._clock, namespace) if coming else ():
                    say(line)
                return {"rows_done": seen.rows.done, "cost": seen.cost.so_far}
            if seen.state == "stopped" or not (alive or coming or lost):
                why = "; ".join(sorted({view.reason for view in seen.workers} - {""}))
                raise PolicyStop(f"{seen.run}: is {seen.state}, and no worker is left ({why})")
            if finished > best:
                restarts, best = 0, finished
            if not lost or seen.state == "stopping" or self._clock.monotonic() < due:
                continue
            if restarts >= MOST_RESTARTS:
                raise NoProgress(
                    f"{seen.run}: workers were started {restarts} times again, and no row was finished since",
                    hint=f"see why: batchinfer status {quote(seen.run)}",
                )
            restarts += 1
            due = self._clock.monotonic() + 2**restarts * WATCH_SECONDS
            try:
                self._submit(self._plan(len(lost), self._left_of(lost, seen)), lost)
            except BatchinferError as error:
                logger.warning("%s", error.message)

    # -- what is refused

    def _refuse(self) -> None:
        """Refuse what workers would find out only on their machines: places that they cannot see, an unknown price."""
        asked = self._asked
        check_writable(asked.run, option="--run")
        ours = {option.flag for option in options_of(WorkerConfig)} | set(NODE_OPTIONS)
        for word in self._options.get("server_args", ()):
            if word.partition("=")[0] in ours:
                raise ConfigError(f"{word.partition('=')[0]}: is no option of launch")
        here = [url for url in (asked.job, asked.run) if split_url(url)[0] in ("file", "memory")]
        for name in _FOLDERS if self._options["check"] else ():
            given = self._options.get(name) or ""
            for value in [given] if isinstance(given, str) else given:
                path = value.partition("=")[2] if name == "loras" else value
                here += [path] if path and Path(path).expanduser().is_dir() else []
        if here and self._cluster.IS_REMOTE:
            raise ConfigError(
                f"{here[0]}: workers on {asked.on} cannot reach a folder of this machine",
                hint="copy it to a bucket; for a model at the same path in their image: --no-check",
            )

        absent = [name for name in asked.secret if not os.environ.get(name)]
        if absent and asked.on != "kubernetes":
            raise ConfigError(
                f"--secret {absent[0]}: has no value here", hint=f"export {absent[0]}=…"
            )
        options, num_gpus = self._options, asked.num_gpus
        machine = Machine("", "", accelerator_name(asked.gpu), num_gpus, bool(options["is_spot"]))
        is_known = options["price_per_hour"] is not None or Prices().price(machine) is not None
        if asked.gpu and options["max_cost"] is not None and not is_known:
            raise ConfigError(
                f"--max-cost: no price of {asked.gpu} is known", hint="say --price-per-hour"
            )

    def _check(self, num_lost: int) -> None:
        """Run `batchinfer check` on all options.

        Raises:
            ConfigError: It finds errors.
        """
        from batchinfer.check.checking import command as check

        asked, names = self._asked, {parameter.name for parameter in check.params}
        gpu = asked.gpu.replace("none", "")
        if asked.on == "skypilot" and not asked.gpu:
            found = accelerators(asked.template)
            gpu = ",".join(one for one in found if one.partition(":")[0] in GPU_GIB)
        workers = (asked.workers + num_lost) or None
        given = {name: value for name, value in self._options.items() if name in names}
        given |= {"output": asked.run, "job": asked.job, "gpu": gpu, "workers": workers}
        given["server_args"] = self._options.get("server_args", ())
        click.get_current_context().invoke(check, **given, sample_rows=50, show=0)

    # -- what is started

    def _plan(self, workers: int, budget: float | None) -> Plan:
        """Return the plan of so many workers, which divide the budget in dollars among them; None: without a limit."""
        share = None if budget is None else round(budget / workers, 4)
        words = worker_words(self._options | {"max_cost": share})
        identity = new_id(self._clock.now(), self._place)
        if share is not None:
            for rank in range(workers):
                self._budgets[layout.launched_worker(identity, rank)] = share
        return msgspec.structs.replace(self._asked, id=identity, workers=workers, words=words)

    def _left_of(self, lost: list[str], seen: Overview) -> float | None:
        """Return the dollars that lost workers have left of their budgets together; None without a limit.

        The budget of a worker of an earlier command is not known. It counts as a share of this command's.
        """
        if self._options["max_cost"] is None:
            return None
        usual: float = self._options["max_cost"] / max(1, len(self._budgets))
        costs = {view.id: view.money.cost or 0.0 for view in seen.workers}
        left = sum(self._budgets.get(name, usual) - costs.get(name, 0.0) for name in lost)
        return max(0.01, left)

    def _submit(self, plan: Plan, replaced: list[str]) -> None:
        """Record the launch, then submit it.

        Of two launches at once, which may both start the same lost workers again, at most one submits anything.

        Raises:
            ConfigError: The cluster refuses, another launch was made since the last look, or the run was stopped. The
                record is removed again, unless the cluster has got workers, or cannot say.
        """
        record_launch(self._store, plan, replaced)
        others = set(find_launches(self._store)[0]) - self._known - {plan.id}
        if others:
            forget_launch(self._store, plan)
            raise ConfigError(f"{plan.run}: another launch was made meanwhile ({min(others)})")
        try:
            self._cluster.submit(plan)
        except ConfigError as error:
            error.hint = error.hint or f"if workers are there: batchinfer status {quote(plan.run)}"
            if self._is_unknown(plan):
                forget_launch(self._store, plan)
            raise
        self._known.add(plan.id)
        # `stop --cancel` may have looked for the workers before they were there.
        if any(info.key == layout.STOP_KEY for info in self._store.list(layout.STOP_KEY)):
            self._cluster.cancel(plan.id, plan.namespace)
            raise ConfigError(f"{plan.run}: was stopped meanwhile, so the workers were cancelled")
        say(f"{units.many(plan.workers, 'worker')} submitted on {plan.on} as {plan.name}")

    def _is_unknown(self, plan: Plan) -> bool:
        """Whether the cluster says that it has no worker of a launch."""
        try:
            return not self._cluster.look(plan.id, plan.workers, plan.namespace)
        except ConfigError:
            return False

    # -- how it goes

    def _look(self) -> Overview | None:
        """Return the run as it is now; None if nothing is there yet."""
        if next(iter(self._store.list()), None) is None:
            return None
        self._known = set(find_launches(self._store)[0])
        asked = self._asked
        config = RunConfig(run=asked.run, job=asked.job, namespace=asked.namespace)
        return run_status(config, open_store=open_store, clock=self._clock)

    def _look_until_seen(self) -> Overview:
        """Wait a while and look. After an error of storage do it again, for half an hour."""
        for looks_left in reversed(range(MOST_LOOKS)):
            self._clock.sleep(WATCH_SECONDS)
            try:
                if seen := self._look():
                    return seen
            except BatchinferError as error:
                if not looks_left:
                    raise
                logger.warning("%s; looking again", error.message)
        raise ConfigError(f"{self._asked.run}: nothing is there any more")

    def _restartable(self, seen: Overview) -> list[str]:
        """Return the lost workers that may be started again: none, once the run has cost or lasted what it may."""
        most_cost, most_hours = self._options["max_cost"], self._options["max_hours"]
        if most_cost is not None and (seen.cost.so_far or 0.0) >= most_cost:
            return []
        if most_hours is not None and self._clock.now() - self._began >= most_hours * 3600:
            return []
        return [name for launch in seen.launches for name in launch.lost][: self._most]
