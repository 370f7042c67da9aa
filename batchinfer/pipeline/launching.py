"""The steps of `launch`: check everything, record the launch in the run, submit the workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from batchinfer.check.command import make_config, run_check, tell
from batchinfer.check.steps import CheckWorld
from batchinfer.cli.run_options import OPTIONS
from batchinfer.cli.shell import in_bash, quote
from batchinfer.clusters import (
    Cluster,
    OutcomeUnknown,
    Plan,
    check_cluster_options,
    find_cluster,
)
from batchinfer.clusters.launches import (
    find_launches,
    forget_launch,
    new_id,
    record_launch,
    record_submission,
)
from batchinfer.core import layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, ConfigError, InputError
from batchinfer.core.prices import accelerator_count
from batchinfer.core.records import Record
from batchinfer.ledger.jobs import OpenStore, load_job
from batchinfer.ledger.spending import describe_machine
from batchinfer.runs.status import Status, StatusConfig
from batchinfer.storage import Store
from batchinfer.storage.opening import join_url, local_path, split_url

logger = logging.getLogger(__name__)

LAUNCHING_SECONDS = 900.0
"""Seconds for which a launch without a record of what it submitted counts as under way, not as killed."""


_SHOWN = 5


class LaunchConfig(Record, frozen=True, kw_only=True):
    """Options of `launch` that are not the worker's.

    `workers` is the number of new workers. If it is None, the estimate says how many to start.
    """

    source: str
    run: str
    cluster: str
    workers: int | None = None
    hours: float | None = None
    gpu: str = ""
    is_spot: bool | None = None
    name: str = "batchinfer"
    environment: dict[str, str] = {}
    secrets: list[str] = []
    options: dict[str, str] = {}
    is_checked: bool = True


def worker_options(options: Mapping[str, Any]) -> str:
    """Return a worker's options as words of bash. The contents of files that options name become part of the words.

    Options with their default value are left out, and so are those of `OWN`.

    Raises:
        ConfigError: A value cannot be read.
    """
    words = []
    for option in OPTIONS:
        if option.parameter in options and option.parameter not in OWN:
            for flag, word in option.spell(option.read(options[option.parameter])):
                words.append(flag if word is None else f"{flag} {in_bash(word)}")
    return " ".join(words)


def _absolute(url: str) -> str:
    """Return a path of this machine as an absolute path, and any other URL without a slash at its end."""
    if split_url(url)[0] == "file":
        return str(local_path(url).resolve())
    return layout.without_slash(url)


OWN = ("manifests", "job", "output", "worker_id", "model", "show_config", "preview")
"""Parameters of the worker that `worker_options` leaves out: `launch` gives them, or they are no use there."""


class Launch:
    """One launch: `plan` checks everything, then `submit` hands the workers to the cluster."""

    def __init__(
        self,
        config: LaunchConfig,
        options: dict[str, Any],
        *,
        open_store: OpenStore,
        world: CheckWorld,
        clock: Clock,
    ) -> None:
        self.config = config
        self.cluster: Cluster = find_cluster(config.cluster)
        self._options = options
        self._open_store = open_store
        self._world = world
        self._clock = clock

    def plan(self) -> Plan:
        """Check everything, and return what to submit. Only a probe object is written, and removed again.

        Raises:
            ConfigError: It would not work. What `batchinfer check` finds is printed before.
            InputError: There is no job.
        """
        config = self.config
        check_cluster_options(config.cluster, config.options)
        self._refuse_local_places()
        found = load_job(config.source, self._open_store)
        if found is None:
            raise InputError(
                f"{config.source}: no job.json there",
                hint=f"make the job first: batchinfer split SOURCE --output {config.source}",
            )
        words = worker_options(self._options | self._price())
        failed = self._failed()
        workers = self._number(failed, most=found[0].num_workers)
        plan = Plan(
            id=new_id(self._clock.now()),
            name=config.name,
            workers=workers,
            job=_absolute(config.source),
            run=_absolute(config.run),
            model=self._options["model"] or "",
            words=words,
            environment=self._spot() | config.environment,
            secrets=config.secrets,
            gpu=config.gpu,
            is_spot=config.is_spot,
            options=config.options,
            replaces=failed[:workers],
        )
        self.cluster.check(plan)
        self._refuse_second()
        return plan

    def submit(self, plan: Plan) -> dict[str, Any]:
        """Record the launch below the run, submit it, and record what was submitted.

        Raises:
            OutcomeUnknown: The cluster may have got the workers or not. The record of the launch stays.
            ConfigError: The cluster refuses. The record of the launch is removed again.
        """
        store = self._open_store(plan.run)
        record_launch(store, self.config.cluster, plan, self._clock.now())
        try:
            handle = self.cluster.submit(plan)
        except OutcomeUnknown as error:
            look = self.cluster.jobs_of.format(name=quote(plan.name), id=plan.id)
            raise OutcomeUnknown(
                f"{error.message}; the workers may have been submitted or not",
                hint=f"look for them: {look}; end those that are there, remove "
                f"{join_url(plan.run, layout.launch_key(plan.id))}, and launch again",
            ) from error
        except BatchinferError:
            forget_launch(store, plan)
            raise
        record_submission(store, plan, handle, self._clock.now())
        return handle

    # -- how many

    def _failed(self) -> list[str]:
        """Return the ids of the run's workers that failed and were not launched again."""
        store = self._open_store(self.config.run)
        launches, _ = find_launches(store)
        if not launches:
            return []
        status = Status(
            StatusConfig(run=self.config.run, job=self.config.source),
            open_store=self._open_store,
            clock=self._clock,
        )
        seen = status.look()
        for note in seen.notes:
            logger.warning("%s", note)
        return [name for launch in seen.launches for name in launch.failed]

    def _number(self, failed: list[str], *, most: int) -> int:
        """Check everything, and return the number of workers: new ones, and one for each that failed.

        Raises:
            ConfigError: There are more than `most`, or none, or the check found errors.
        """
        config = self.config
        asked = config.workers + len(failed) if config.workers is not None else None
        if asked is None and config.hours is None:
            asked = len(failed) or None
        workers = self._check(asked) or asked
        if workers is None:
            raise ConfigError(
                "--workers: is missing, and the estimate lacks a rate",
                hint="say --workers N, or --hours H with --rate or --rate-from RUN",
            )
        again = f", and {len(failed)} that failed are started again" if failed else ""
        if workers > most:
            raise ConfigError(
                f"--workers {workers - len(failed)}: the job has {units.many(most, 'worker manifest')}{again}",
                hint="leave --workers out to start only those again"
                if failed
                else f"launch at most {most}, or split again with --num-workers {workers}",
            )
        if failed:
            shown = ", ".join(failed[:_SHOWN]) + (", …" if len(failed) > _SHOWN else "")
            logger.info(
                "%s, of them %d in place of workers that failed: %s",
                *(units.many(workers, "worker"), min(workers, len(failed)), shown),
            )
        return workers

    # -- money

    def _price(self) -> dict[str, float]:
        """Return the option --price-per-hour for the workers, if --max-cost needs it and the user did not give it.

        The price is looked up here, because SkyPilot's catalog may be on this machine and not on those of the workers.

        Raises:
            ConfigError: The price is not known.
        """
        config, options = self.config, self._options
        if options["max_cost"] is None or options["price_per_hour"] is not None:
            return {}
        if not self.cluster.is_remote and not config.gpu:
            return {}  # the workers look it up themselves
        cloud, _, place = config.options.get("infra", "").partition("/")
        region = place.partition("/")[0]
        machine = describe_machine(
            {"cloud": cloud, "region": "" if region == "*" else region},
            device=config.gpu,
            num_gpus=accelerator_count(config.gpu) or 1,
            is_spot=config.is_spot,
        )
        price = self._world.prices.price(machine)
        if price is None:
            raise ConfigError(
                f"--max-cost: no price of a worker's machine is known ({config.gpu or 'no --gpu'})",
                hint="say what it costs: --price-per-hour DOLLARS (0.35, for example)",
            )
        logger.info("a worker's machine costs $%g an hour (%s)", price.per_hour, price.source)
        return {"price_per_hour": price.per_hour}

    def _spot(self) -> dict[str, str]:
        """Return the variable that tells workers whether they run on spot machines, if the user has said so."""
        is_spot = self.config.is_spot
        return {} if is_spot is None else {"BATCHINFER_SPOT": "1" if is_spot else "0"}

    # -- checks

    def _refuse_local_places(self) -> None:
        if not self.cluster.is_remote:
            return
        for what, url in (("the job", self.config.source), ("--run", self.config.run)):
            if split_url(url)[0] in ("file", "memory"):
                raise ConfigError(
                    f"{what} {url}: workers on {self.config.cluster} cannot reach a folder of this machine",
                    hint="split to a bucket, as in s3://bucket/job",
                )

    def _check(self, workers: int | None) -> int | None:
        """Run `check` on all options and print what it finds.

        Returns how many workers it advises, if `workers` is None and it can.
        """
        if not self.config.is_checked:
            return None
        config = self.config
        options = {
            **self._options,
            "sources": (),
            "manifests": (),
            "job": config.source,
            "output": config.run,
            "task_files": (),
            "gpu": "" if config.gpu.lower() in ("none", "cpu") else config.gpu,
            "workers": workers,
            "hours": config.hours,
            "is_spot": config.is_spot,
            "sample_rows": 50,
            "show": 0,
            "synthetic": None,
            "delimiter": "",
        }
        result = run_check(make_config(options), self._world)
        tell(result)
        if result["errors"]:
            raise ConfigError(
                f"would not work: {units.many(result['errors'], 'error')}, listed above",
                hint="nothing was submitted; --no-check leaves the check out",
            )
        advised: int | None = result.get("workers_advised")
        return advised if workers is None else None

    def _refuse_second(self) -> None:
        """Refuse a launch while another one of the same run is being submitted."""
        store: Store = self._open_store(self.config.run)
        launches, notes = find_launches(store)
        for note in notes:
            logger.warning("%s", note)
        for launch in launches:
            age = self._clock.now() - launch.created
            if launch.handle is None and age < LAUNCHING_SECONDS:
                raise ConfigError(
                    f"{store.url}: the launch {launch.record.plan.id} has been under way for {units.duration(age)}",
                    hint=f"wait for it; if it was killed, remove {layout.launch_key(launch.record.plan.id)}",
                )
