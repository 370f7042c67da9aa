"""Clusters, which start the workers of a launch: this machine, Slurm, Kubernetes, SkyPilot and Ray.

Each has a module here with its adapter, which implements the protocol `Cluster` and calls the cluster's own client.
Code outside this package never compares a cluster's name; it asks the adapter.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Record

RESTART_STATUSES = (33, 34, 75)
"""Exit statuses of a worker after which a new start may help: the engine failed, storage failed, or a signal came."""
FINAL_STATUSES = (2, 3)
"""Exit statuses of a worker after which a new start cannot help: wrong configuration, or a rule stopped it."""


WORKER = "worker"


class Plan(Record, frozen=True, kw_only=True):
    """Workers to start. `id` is the id of the launch, and `name` that of its jobs in the cluster."""

    id: str
    name: str
    workers: int
    job: str
    run: str
    model: str
    words: str
    """Options of the worker as words of bash, without --job, --output and --model. If `what` is another command, all of
    its arguments and options, without --rank and --of."""
    what: str = WORKER
    """Command that runs on the cluster: worker, split or collect."""
    environment: dict[str, str] = {}
    """Further environment of the workers."""
    secrets: list[str] = []
    """Names of secrets: environment variables here, or Secrets of Kubernetes."""
    gpu: str = ""
    """GPUs of one worker, as in "L4:1"; "none" or "cpu" for a machine without. Empty: the cluster's default."""
    is_spot: bool | None = None
    options: dict[str, str] = {}
    """Options of the cluster, by name."""
    replaces: list[str] = []
    """Ids of failed workers of earlier launches in whose place some of these workers are started."""

    @property
    def is_cpu_only(self) -> bool:
        """Whether the user asked for workers without a GPU."""
        return self.gpu.lower() in ("none", "cpu")

    def variables(self) -> dict[str, str]:
        """Return the environment that all workers share. The rank, which differs, is not in it."""
        return {
            **self.environment,
            "BATCHINFER_LAUNCH": self.id,
            "BATCHINFER_NUM_WORKERS": str(self.workers),
        }


class OutcomeUnknown(ConfigError):
    """A cluster's client did not say whether the cluster has done what it was asked."""


class ClusterState(NamedTuple):
    """What a cluster says of one worker: one of `STATES`, and the reason in the cluster's own words."""

    state: str
    text: str


WAITING, STARTING, RUNNING, DONE, FAILED, CANCELLED = STATES = (
    "waiting",
    "starting",
    "running",
    "done",
    "failed",
    "cancelled",
)


class Cluster(Protocol):
    """An adapter to one kind of cluster."""

    is_remote: bool
    """Whether workers run where a folder of this machine cannot be seen."""
    options: Mapping[str, str]
    """The options that a launch may give, each with its meaning."""
    jobs_of: str
    """Command that a user runs to see the jobs of a launch, with `{name}` and `{id}` in place of those of its plan."""

    def check(self, plan: Plan) -> None:
        """Refuse a plan that cannot be submitted, before anything is.

        Raises:
            ConfigError: The cluster's client is missing, or the plan asks for something that the cluster lacks.
        """
        ...

    def describe(self, plan: Plan) -> str:
        """Return what `submit` would submit, as text, without the values of secrets."""
        ...

    def submit(self, plan: Plan) -> dict[str, Any]:
        """Submit the workers, and return what names them in the cluster: the handle for the other methods.

        Raises:
            OutcomeUnknown: The cluster may have got the workers or not.
            ConfigError: The cluster refuses, or its client failed; nothing was submitted.
        """
        ...

    def look(self, handle: dict[str, Any], workers: int) -> dict[int, ClusterState]:
        """Return what the cluster knows of each worker, by rank. Ranks of which it knows nothing are left out.

        Raises:
            ConfigError: The client is not here, or the cluster does not answer.
        """
        ...

    def cancel(self, handle: dict[str, Any]) -> None:
        """Ask the cluster to end the workers and to start none of them again.

        Raises:
            ConfigError: The client is not here, or the cluster does not answer.
        """
        ...

    def check_handle(self, plan: Plan, handle: dict[str, Any]) -> None:
        """Refuse a handle that `submit` cannot have returned for this plan: it was read from a bucket, as the plan was.

        Raises:
            ConfigError: It names anything but the jobs of this launch.
        """
        ...

    def cancel_command(self, handle: dict[str, Any]) -> str:
        """Return a command line with which a user cancels the workers without `cancel`."""
        ...


CLUSTERS = {
    "local": "processes of this machine",
    "slurm": "a job array on Slurm",
    "kubernetes": "an Indexed Job on Kubernetes",
    "skypilot": "managed jobs of SkyPilot",
    "ray": "tasks on a Ray cluster",
}
"""All clusters, each with what its workers are there. The module of that name in this package has its `CLUSTER`."""


def find_cluster(name: str) -> Cluster:
    """Return the adapter of a cluster.

    Raises:
        ConfigError: No cluster has this name.
    """
    if name not in CLUSTERS:
        raise ConfigError(
            f"{name!r}: is no cluster that batchinfer knows, "
            f"expected one of {', '.join(CLUSTERS)}{near(name, CLUSTERS)}"
        )
    return cast("Cluster", importlib.import_module(f"batchinfer.clusters.{name}").CLUSTER)


def check_cluster_options(name: str, given: Mapping[str, str]) -> None:
    """Refuse options that a cluster does not have, or whose values are no part of a line.

    Raises:
        ConfigError: One of the names is not among the cluster's options, or a value has control characters.
    """
    known = find_cluster(name).options
    for option, value in given.items():
        if not value.isprintable():
            raise ConfigError(
                f"--cluster-option {option}={value!r}: expected letters that can be printed"
            )
        if option not in known:
            raise ConfigError(
                f"--cluster-option {option}: {name} has no such option, "
                f"expected one of {', '.join(known)}{near(option, known)}"
            )


_MOST_COMMAND_BYTES = 120_000
"""Linux takes 131,071 bytes for a word of a command line or a variable; the rest is for what a cluster adds."""
CLIENT_SECONDS = 60.0
"""Most seconds to wait for a cluster's client."""
_DOUBT = re.compile(r"timed? ?out|time allotted|\bEOF\b|connection reset", re.IGNORECASE)
"""Words of a client that has lost its connection after it may have passed on what it was asked."""


def run_client(
    words: Sequence[str], *, text: str = "", seconds: float = CLIENT_SECONDS, name: str = ""
) -> str:
    """Run a cluster's client and return what it prints.

    Args:
        words: Its command line.
        text: Its standard input.
        seconds: Most seconds to wait for it.
        name: Name of the client for messages; empty for the first word.

    Raises:
        OutcomeUnknown: The client did not end in time, or lost its connection.
        ConfigError: It cannot be started, or it failed.
    """
    name = name or words[0]
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OutcomeUnknown(f"{name}: has not answered for {seconds:.0f} s") from error
    except OSError as error:
        raise ConfigError(f"{name}: {error}") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        is_doubtful = _DOUBT.search(said.splitlines()[-1])
        raise (OutcomeUnknown if is_doubtful else ConfigError)(f"{name}: {said}")
    return done.stdout


def strange_handle(plan: Plan) -> ConfigError:
    """Return the error for a handle that is not one of this launch."""
    return ConfigError(f"launch {plan.id}: its record names jobs that it cannot have submitted")


def check_length(plan: Plan) -> None:
    """Refuse a plan whose options are too long for a cluster that starts each worker with one text.

    Raises:
        ConfigError: They are longer than a word of a command line or the value of a variable may be.
    """
    num_bytes = len(command_words(plan).encode(errors="surrogateescape"))
    if num_bytes > _MOST_COMMAND_BYTES:
        raise ConfigError(
            f"the options of a worker have {num_bytes} bytes with the files that they name, "
            f"expected at most {_MOST_COMMAND_BYTES}",
            hint="make the longest text or file shorter",
        )


def check_secrets_here(plan: Plan) -> None:
    """Refuse a plan with a secret that has no value in this environment, from which workers get it.

    Raises:
        ConfigError: A variable is not set, or empty.
    """
    missing = [name for name in plan.secrets if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"--secret {missing[0]}: has no value in this environment",
            hint=f"export {missing[0]}=…",
        )


def command_words(plan: Plan) -> str:
    """Return the command of the plan's workers as words of bash, from its name on.

    The rank is not in them: a worker takes it from the variable BATCHINFER_RANK, and for other commands bash does.
    """
    from batchinfer.cli.shell import quote

    if plan.what != WORKER:
        # In front of the words, since these may have a -- after which all is an argument.
        return f'{plan.what} --rank "$BATCHINFER_RANK" --of {plan.workers} {plan.words}'
    model = f" --model {quote(plan.model)}" if plan.model else ""
    return (
        f"{WORKER} --job {quote(plan.job)} --output {quote(plan.run)}{model} {plan.words}".rstrip()
    )


def jobs_command(cluster: Cluster, plan: Plan) -> str:
    """Return the command that shows a user the jobs of a launch."""
    from batchinfer.cli.shell import quote

    return cluster.jobs_of.format(name=quote(plan.name), id=quote(plan.id))


def assignments(variables: Mapping[str, str]) -> str:
    """Return variables as bash assigns them: NAME=VALUE for each, with one blank between two."""
    from batchinfer.cli.shell import quote

    return " ".join(f"{name}={quote(value)}" for name, value in variables.items())


def make_log_folder(plan: Plan) -> Path:
    """Make the folder on this machine for the logs of a launch, and return its path.

    Raises:
        ConfigError: It cannot be made.
    """
    folder = log_folder(plan)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--cluster-option log-dir: {folder} cannot be made ({error.strerror})",
            hint="name a folder that can be written to",
        ) from error
    return folder


def log_folder(plan: Plan) -> Path:
    """Return the path of the folder for the logs of a launch. The option `log-dir` names its parent."""
    return Path(plan.options.get("log-dir", "batchinfer-launches")).resolve() / plan.id
