"""Workers as tasks of a job on a running Ray cluster, whose nodes have batchinfer installed."""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any

import msgspec

from batchinfer.clusters import (
    CANCELLED,
    FAILED,
    WAITING,
    ClusterState,
    OutcomeUnknown,
    Plan,
    check_length,
    strange_handle,
)
from batchinfer.core.errors import ConfigError

_ADDRESS = "http://127.0.0.1:8265"
_DRIVER = "python -m batchinfer.clusters.ray_driver"


class Ray:
    """See `Cluster`."""

    is_remote = True
    jobs_of = "ray job list | grep {id}"
    options = {
        "address": f"address of the dashboard (default: RAY_ADDRESS, else {_ADDRESS})",
        "num-cpus": "cores of one worker (default: 1)",
    }

    def check(self, plan: Plan) -> None:
        """See `Cluster`."""
        if plan.is_spot is not None:
            raise ConfigError(
                "--spot/--on-demand: a Ray cluster's nodes are there already", hint="leave it out"
            )
        if plan.secrets:
            raise ConfigError(
                f"--secret {plan.secrets[0]}: Ray shows the environment of its jobs to all its users",
                hint="give the nodes credentials of their own",
            )
        check_length(plan)
        _client(_address(plan.options))

    def describe(self, plan: Plan) -> str:
        """See `Cluster`."""
        return json.dumps(_job(plan), indent=2, ensure_ascii=False)

    def submit(self, plan: Plan) -> dict[str, Any]:
        """See `Cluster`."""
        address = _address(plan.options)
        try:
            job = _client(address).submit_job(**_job(plan))
        except RuntimeError as error:
            raise ConfigError(f"ray: {error}") from error
        except (
            OSError
        ) as error:  # the requests of Ray's client: the connection was lost, or no answer came
            raise OutcomeUnknown(f"ray: {error}") from error
        return {"job": job, "address": address}

    def look(self, handle: dict[str, Any], workers: int) -> dict[int, ClusterState]:
        """See `Cluster`. The states come from the last line that the job's driver has written about them."""
        client = _client(handle["address"])
        try:
            status = str(client.get_job_status(handle["job"]).value)
            log = client.get_job_logs(handle["job"])
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"ray: {error}") from error
        lines = [line for line in log.splitlines() if line.startswith(STATES_LINE)]
        states: dict[str, list[str]] = json.loads(lines[-1][len(STATES_LINE) :]) if lines else {}
        over = {"FAILED": FAILED, "STOPPED": CANCELLED}.get(status)
        found = {}
        for rank in range(workers):
            state, text = states.get(str(rank), [WAITING, status])
            is_over = over is not None and state not in ("done", "failed")
            found[rank] = (
                ClusterState(over, status) if over and is_over else ClusterState(state, text)
            )
        return found

    def cancel(self, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        try:
            _client(handle["address"]).stop_job(handle["job"])
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"ray: {error}") from error

    def check_handle(self, plan: Plan, handle: dict[str, Any]) -> None:
        """See `Cluster`. Only the cluster of this environment is asked, whatever the record says."""
        address = _address({})
        if handle.get("job") != _job_name(plan) or handle.get("address") != address:
            raise strange_handle(plan)

    def cancel_command(self, handle: dict[str, Any]) -> str:
        """See `Cluster`."""
        return shlex.join(["ray", "job", "stop", "--address", handle["address"], handle["job"]])


CLUSTER = Ray()
STATES_LINE = "batchinfer states: "
"""Beginning of a line of the driver's log. The rest is a JSON object: for each rank its state and the reason."""


def _job(plan: Plan) -> dict[str, Any]:
    # Ray replaces $NAME and ${NAME} in values of variables. JSON has another spelling of the dollar.
    text = msgspec.json.encode(plan).decode().replace("$", "\\u0024")
    return {
        "entrypoint": _DRIVER,
        # The id is a part of the dashboard's URLs.
        "submission_id": _job_name(plan),
        "runtime_env": {"env_vars": {"BATCHINFER_PLAN": text, **plan.environment}},
    }


def _job_name(plan: Plan) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', plan.name)}-{plan.id}"


def _address(options: dict[str, str]) -> str:
    return options.get("address") or os.environ.get("RAY_ADDRESS") or _ADDRESS


def _client(address: str) -> Any:
    try:
        from ray.job_submission import (  # type: ignore[import-not-found]
            JobSubmissionClient,
        )
    except ImportError as error:
        raise ConfigError(
            "ray: not installed here", hint="pip install 'ray[default]', the cluster's version"
        ) from error
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray: no cluster answers at {address} ({error})",
            hint="give --address http://HOST:8265",
        ) from error
