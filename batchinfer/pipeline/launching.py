"""The steps of `launch`: check everything, record the launch in the run, submit the workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from batchinfer.check.command import make_config, run_check, tell
from batchinfer.check.steps import CheckWorld
from batchinfer.cli.run_options import OPTIONS
from batchinfer.cli.settings import without_secrets
from batchinfer.cli.shell import in_bash, quote
from batchinfer.clusters import (
    WORKER,
    Cluster,
    OutcomeUnknown,
    Plan,
    check_cluster_options,
    find_cluster,
    jobs_command,
)
from batchinfer.clusters.launches import (
    FoundLaunch,
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
from batchinfer.core.records import Job, Record
from batchinfer.core.redaction import redact
from batchinfer.ledger.jobs import OpenStore, load_job
from batchinfer.ledger.spending import describe_machine
from batchinfer.pipeline.splitting import DataSet
from batchinfer.runs.status import Status, StatusConfig
from batchinfer.storage import Store
from batchinfer.storage.opening import join_url, local_path, split_url

logger = logging.getLogger(__name__)

LAUNCHING_SECONDS = 900.0
"""Seconds for which a launch without a record of what it submitted counts as under way, not as killed."""


_SHOWN = 5
_UNITS = {"job": "worker manifest", "data set": "row"}


class LaunchConfig(Record, frozen=True, kw_only=True):
    """Options of `launch` that are not the worker's.

    `workers` is the number of new workers. If it is None, the estimate says how many to start.
    """

    sources: list[str]
    """The job; or a data set, whose job is made at `job`."""
    run: str
    job: str = ""
    """Place for the job of a data set. If it is empty, the job goes above the run, if that is at JOB/runs/NAME."""
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


def outcome_unknown(
    error: OutcomeUnknown, cluster: Cluster, plan: Plan, then: str
) -> OutcomeUnknown:
    """Return the error for workers that may have been submitted. `then` is what to do when those there are ended."""
    look = jobs_command(cluster, plan)
    started = "workers" if plan.what == WORKER else "ranks"
    return OutcomeUnknown(
        f"{error.message}; the {started} may have been submitted or not",
        hint=f"look for them: {look}; end those that are there, {then}",
    )


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
        self._job_url = ""
        self._job: Job | None = None
        self._data: DataSet | None = None
        self._known: set[str] = set()
        """Ids of the run's launches when `plan` looked."""
        self._asked: dict[str, Any] = options
        """Options of the workers, with the price that `plan` has found."""

    def plan(self) -> Plan:
        """Check everything, and return what to submit. Only a probe object is written, and removed again.

        Raises:
            ConfigError: It would not work. What `batchinfer check` finds is printed before.
            InputError: There is neither a job nor a data set, or another data set's job is at its place.
        """
        config = self.config
        check_cluster_options(config.cluster, config.options)
        self._refuse_nodes()
        self._find_job()
        self._asked = self._options | self._price()
        words = worker_options(self._asked)
        failed = self._failed(self._launches())
        workers = self._number(failed)
        plan = Plan(
            id=new_id(self._clock.now()),
            name=config.name,
            workers=workers,
            job=_absolute(self._job_url),
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
        return plan

    def splits(self) -> str:
        """Return a sentence that says what `submit` will split before anything else; empty if that is nothing."""
        if self._data is None or (self._job and not self._data.has_new_rows(self._job)):
            return ""
        rows = units.many(self._data.counted.rows, "row")
        names = " ".join(self._data.sources)
        if self._job is not None:
            return f"{names}: new files are appended to the job {self._job_url} first"
        return f"{names}: {rows}, split into the job {self._job_url} first"

    def submit(self, plan: Plan) -> dict[str, Any]:
        """Split the data set, if there is one. Record the launch, submit it, and record what was submitted.

        Raises:
            InputError: The data set has changed since `plan`.
            OutcomeUnknown: The cluster may have got the workers or not. The record of the launch stays.
            ConfigError: The cluster refuses, or there is another launch since `plan`. The record is removed again.
            StorageError: What was submitted cannot be recorded.
        """
        if self._data is not None:
            self._data.split(plan.workers)
        store = self._open_store(plan.run)
        record_launch(store, self.config.cluster, self._recorded(plan), self._clock.now())
        try:
            self._refuse_other(store, plan)
            handle = self.cluster.submit(plan)
        except OutcomeUnknown as error:
            record = join_url(plan.run, layout.launch_key(plan.id))
            then = f"remove {record}, and launch again"
            raise outcome_unknown(error, self.cluster, plan, then) from error
        except BatchinferError:
            forget_launch(store, plan)
            raise
        try:
            record_submission(store, plan, handle, self._clock.now())
        except BatchinferError as error:
            error.hint = (
                f"the workers were submitted, but `stop --cancel` will not know them; to cancel them: "
                f"{self.cluster.cancel_command(handle)}"
            )
            raise
        return handle

    def _recorded(self, plan: Plan) -> Plan:
        """Return the plan as its record shows it to all who can read the run: without the values of secrets."""
        shown = {"engine_args": without_secrets(self._asked["engine_args"])}
        return msgspec.structs.replace(
            plan,
            words=redact(worker_options(self._asked | shown)),
            environment=without_secrets(plan.environment),
        )

    # -- how many

    def _failed(self, launches: list[FoundLaunch]) -> list[str]:
        """Return the ids of the run's workers that failed and were not launched again."""
        if not launches:
            return []
        status = Status(
            StatusConfig(run=self.config.run, job=self._job_url),
            open_store=self._open_store,
            clock=self._clock,
        )
        seen = status.look()
        for note in seen.notes:
            logger.warning("%s", note)
        return [name for launch in seen.launches for name in launch.failed]

    def _number(self, failed: list[str]) -> int:
        """Check everything, and return the number of workers: new ones, and one for each that failed.

        Raises:
            ConfigError: There are more than the job can use, or none, or the check found errors.
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
        most, what = self._most()
        again = f", and {len(failed)} that failed are started again" if failed else ""
        if workers > most:
            raise ConfigError(
                f"--workers {workers - len(failed)}: the {what} has {units.many(most, _UNITS[what])}{again}",
                hint="leave --workers out to start only those again"
                if failed
                else f"launch at most {most}"
                + (f", or split again with --num-workers {workers}" if what == "job" else ""),
            )
        if failed:
            shown = ", ".join(failed[:_SHOWN]) + (", …" if len(failed) > _SHOWN else "")
            logger.info(
                "%s, of them %d in place of workers that failed: %s",
                *(units.many(workers, "worker"), min(workers, len(failed)), shown),
            )
        return workers

    def _most(self) -> tuple[int, str]:
        """Return the largest number of workers, and whether the job or the data set has it."""
        if self._job is not None:
            return self._job.num_workers, "job"
        assert self._data is not None
        return self._data.counted.rows, "data set"

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

    def _refuse_nodes(self) -> None:
        """Refuse options that say which machine of a model's one is: all workers of a launch have the same options."""
        options = self._options
        given = {
            "--nnodes": options["nnodes"] > 1,
            "--node-rank": options["node_rank"] > 0,
            "--headless": options["headless"],
        }
        for option, is_given in given.items():
            if is_given:
                raise ConfigError(
                    f"{option}: a worker that is launched runs on one machine",
                    hint="a model over several machines: `sky jobs launch --num-nodes 2 worker.yaml`, "
                    "or start its nodes by hand; docs/features.md has both",
                )

    def _find_job(self) -> None:
        """Find the job, or the data set and the place of its job. Nothing is written."""
        config = self.config
        source = config.sources[0]
        if len(config.sources) == 1 and (found := self._load(source)):
            if config.job and _absolute(config.job) != _absolute(source):
                raise ConfigError(
                    f"--job: {source} is a job already", hint="leave --job out, or name a data set"
                )
            self._job_url, self._job = source, found
            self._refuse_local_places()
            return
        self._job_url = config.job or layout.job_above(config.run)
        if not self._job_url:
            raise InputError(
                f"{source}: no job.json there",
                hint=f"make the job first: batchinfer split SOURCE --output {source}; "
                "or, if this is a data set, say where its job goes: --job URL",
            )
        self._refuse_local_places()
        try:
            self._data = DataSet(config.sources, self._job_url, self._open_store)
        except InputError as error:
            raise InputError(
                f"{source}: no job.json there, and no data set either: {error.message}",
                hint=error.hint,
            ) from error
        self._job = self._load(self._job_url)
        if self._job is not None:
            self._data.refuse_other_job(self._job)

    def _load(self, url: str) -> Job | None:
        """Return the job at a URL, or None if there is none, because it is a file or a data set on the Hub, say."""
        scheme = split_url(url)[0]
        if scheme == "hf" or (scheme == "file" and not local_path(url).is_dir()):
            return None
        found = load_job(url, self._open_store)
        return found[0] if found else None

    def _refuse_local_places(self) -> None:
        if not self.cluster.is_remote:
            return
        for what, url in (("the job", self._job_url), ("--run", self.config.run)):
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
            "sources": () if self._job else tuple(config.sources),
            "manifests": (),
            "job": self._job_url if self._job else None,
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

    def _refuse_other(self, store: Store, plan: Plan) -> None:
        """Refuse to submit if another launch was recorded since `plan` looked, as both may start workers that failed.

        Of two launches that are made at once, each finds the record of the other, or the second that of the first.
        """
        launches, _ = find_launches(store)
        others = {launch.record.plan.id for launch in launches} - self._known - {plan.id}
        if others:
            raise ConfigError(
                f"{store.url}: another launch was made meanwhile ({min(others)}), so this one submitted nothing",
                hint=f"see what it started: batchinfer status {quote(store.url)}; then launch what is still lacking",
            )

    def _launches(self) -> list[FoundLaunch]:
        """Return the launches of the run. Refuse a launch while another one of the run is being submitted."""
        store: Store = self._open_store(self.config.run)
        launches, notes = find_launches(store)
        for note in notes:
            logger.warning("%s", note)
        self._known = {launch.record.plan.id for launch in launches}
        for launch in launches:
            age = max(0.0, self._clock.now() - launch.created)
            if launch.handle is None and age < LAUNCHING_SECONDS:
                raise ConfigError(
                    f"{store.url}: the launch {launch.record.plan.id} has been under way for {units.duration(age)}",
                    hint="wait for it; if it was killed, remove "
                    + join_url(store.url, layout.launch_key(launch.record.plan.id)),
                )
        return launches
