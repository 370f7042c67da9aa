"""Engines that start processes: this machine, Slurm, Kubernetes, SkyPilot and Ray. `launch` hands them workers.

Each is one object of the table `CLUSTERS`, behind the protocol `Cluster`: submit, look at, cancel. Nothing outside this
room compares their names. An adapter uses the cluster's own client, and imports it when it is needed.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record

RESTART_STATUSES = (33, 34, 75)
"""Exit statuses of a worker after which a new start may help: the engine failed, storage failed, or it was stopped."""
FINAL_STATUSES = (2, 3)
"""Exit statuses of a worker that no restart changes: wrong configuration, or a rule that stops the run."""


class Plan(Record, frozen=True, kw_only=True):
    """Workers to start. `id` names the launch, and `name` is the name of the jobs in the cluster."""

    id: str
    name: str
    workers: int
    job: str
    run: str
    model: str
    words: str
    """Options of the worker as words of bash, without --job, --output and --model."""
    environment: dict[str, str] = {}
    """Further environment of the workers."""
    secrets: list[str] = []
    """Names of secrets: environment variables here, or Secrets of Kubernetes."""
    gpu: str = ""
    """GPUs of one worker, as in "L4:1". Empty: as the cluster's own template says, or none."""
    is_spot: bool | None = None
    options: dict[str, str] = {}
    """Options of the cluster, by name."""

    def variables(self) -> dict[str, str]:
        """Environment of every worker; its rank is not in it."""
        return {
            **self.environment,
            "BATCHINFER_LAUNCH": self.id,
            "BATCHINFER_NUM_WORKERS": str(self.workers),
        }


class ClusterState(NamedTuple):
    """What a cluster says of one worker: one of `STATES`, and why, in the cluster's own words."""

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

    def check(self, plan: Plan) -> None:
        """Find out, before anything is submitted, whether the client and what it needs are there.

        Raises:
            ConfigError: They are not, or the plan cannot be submitted there.
        """
        ...

    def describe(self, plan: Plan) -> str:
        """Return exactly what `submit` would submit, as text. Secrets are left out."""
        ...

    def submit(self, plan: Plan) -> dict[str, Any]:
        """Submit the workers, and return what names them in the cluster: the handle for the other methods.

        Raises:
            ConfigError: The cluster refuses.
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


CLUSTERS = {
    "local": "processes of this machine",
    "slurm": "a job array on Slurm",
    "kubernetes": "an Indexed Job on Kubernetes",
    "skypilot": "managed jobs of SkyPilot",
    "ray": "tasks on a Ray cluster",
}
"""All clusters, each with what its workers are there. The module of that name has the adapter as CLUSTER."""


def find_cluster(name: str) -> Cluster:
    """Return the adapter of a cluster.

    Raises:
        ConfigError: No cluster has this name.
    """
    if name not in CLUSTERS:
        near = difflib.get_close_matches(name, CLUSTERS, n=1)
        raise ConfigError(
            f"{name!r}: is no cluster that batchinfer knows, expected one of {', '.join(CLUSTERS)}",
            hint=f"did you mean {near[0]}?" if near else "",
        )
    return cast("Cluster", importlib.import_module(f"batchinfer.clusters.{name}").CLUSTER)


def check_cluster_options(name: str, given: Mapping[str, str]) -> None:
    """Refuse options that a cluster does not have.

    Raises:
        ConfigError: One of the names is not among the cluster's options.
    """
    known = find_cluster(name).options
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            raise ConfigError(
                f"--cluster-option {option}: {name} has no such option, expected one of {', '.join(known) or 'none'}",
                hint=f"did you mean {near[0]}?" if near else "",
            )


def worker_words(plan: Plan) -> str:
    """Return the options of a worker of this plan as words of bash; its rank comes from the environment."""
    from batchinfer.cli.shell import quote

    model = f" --model {quote(plan.model)}" if plan.model else ""
    return f"--job {quote(plan.job)} --output {quote(plan.run)}{model} {plan.words}".rstrip()
