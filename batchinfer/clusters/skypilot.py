"""Workers as managed jobs of SkyPilot, by its command `sky`; worker.yaml is the template.

SkyPilot needs older packages than vLLM, so it usually has an environment of its own, whose `sky` is on the PATH.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import batchinfer
from batchinfer.clusters import Fate, Plan, run_client
from batchinfer.core.errors import ConfigError
from batchinfer.core.shell import quote
from batchinfer.core.yaml_text import parse_yaml

_CHECKOUT = Path(batchinfer.__file__).resolve().parents[1]
_CLIENT_SECONDS = 600.0


def page(plan: Plan) -> str:
    """See `Cluster`."""
    words, folder = _launching(plan)
    return f"cd {quote(folder)} && {' '.join(map(quote, words))}\n"


def submit(plan: Plan) -> None:
    """See `Cluster`. `sky` takes the values of secrets from this environment."""
    words, folder = _launching(plan)
    run_client(*words, seconds=_CLIENT_SECONDS, folder=folder)


def look(name: str, _namespace: str) -> dict[int, Fate]:
    """See `Cluster`. Ranks follow the order of the jobs' ids."""
    found = [(str(job["status"]), job.get("failure_reason") or "") for job in _jobs(name)]
    kinds = {"SUCCEEDED": "ended", "CANCELLED": "ended", "FAILED": "lost"}  # also FAILED_SETUP
    return {
        rank: Fate(kinds.get(status.partition("_")[0], "coming"), f"{status} {reason}".strip())
        for rank, (status, reason) in enumerate(found)
    }


def cancel(name: str, _namespace: str) -> None:
    """See `Cluster`."""
    if alive := [str(int(job["job_id"])) for job in _jobs(name) if not job.get("end_at")]:
        run_client("sky", "jobs", "cancel", "-y", "--", *alive, seconds=_CLIENT_SECONDS)


def accelerators(template: str, known: list[str]) -> str:
    """Return the known ones of the GPUs of which SkyPilot takes one for a worker, as in "L4:1,A100:2"."""
    path = Path(template or _CHECKOUT / "worker.yaml")
    if not path.is_file():
        raise ConfigError(f"{path}: is not there", hint="--template FILE names a task of SkyPilot")
    task = parse_yaml(path.read_text("utf-8", errors="replace"), f"--template {path}")
    resources = task.get("resources") if isinstance(task, dict) else None
    if not isinstance(resources, dict):
        raise ConfigError(f"--template {path}: is no task with resources")
    # They come as L4, L4:1, a list of these, {L4: 1}, or {L4:1}, which YAML reads as a key without a value.
    found = re.findall(r"([A-Za-z][\w-]*)(?:'?: ?(\d+))?", str(resources.get("accelerators")))
    return ",".join(f"{name}:{number or 1}" for name, number in found if name in known)


def _launching(plan: Plan) -> tuple[list[str], str]:
    """Return the command line that submits the jobs, and the folder from which paths in the template count."""
    accelerators(plan.template, [])  # refuses what is no task
    template = plan.template or str(_CHECKOUT / "worker.yaml")
    variables = [f"MODEL_NAME={plan.model}", f"OUTPUT_BUCKET={plan.run}", f"DATA_BUCKET={plan.job}"]
    variables += [f"WORKER_WORDS={plan.words}", *plan.env]
    words = ["sky", "jobs", "launch", "-y", "-d", *([f"--gpus={plan.gpu}"] if plan.gpu else [])]
    # By their name `status` and `stop --cancel` find the workers.
    words += [*plan.sky_arg, f"--name={plan.name}", f"--num-jobs={plan.workers}"]
    words += [f"--env={variable}" for variable in variables]
    words += [f"--secret={name}" for name in plan.secret]
    return [*words, template], str(Path.cwd() if plan.template else _CHECKOUT)


def _jobs(name: str) -> list[dict[str, Any]]:
    """Return SkyPilot's records of a launch's jobs, the oldest first."""
    ask = ("sky", "jobs", "queue", "--all", "--all-users", "--verbose", "--output=json")
    printed = run_client(*ask, seconds=_CLIENT_SECONDS)
    found = re.search(r"^\[\]?$", printed, re.MULTILINE)  # other lines may stand around the list
    if found is None:
        raise ConfigError(f"sky: has not answered with a list of jobs ({printed[-200:]!r})")
    jobs, _ = json.JSONDecoder().raw_decode(printed, found.start())
    named = [job for job in jobs if job["job_name"] == name]
    return sorted(named, key=lambda job: int(job["job_id"]))
