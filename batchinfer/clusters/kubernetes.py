"""Workers as an Indexed Job on Kubernetes, created with kubectl; `kubernetes.yaml` is the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchinfer.clusters import Fate, Plan, fill, indexes, run_client
from batchinfer.core.errors import ConfigError
from batchinfer.core.shell import quote

_INDEX = "batch.kubernetes.io/job-completion-index"


def page(plan: Plan) -> str:
    """See `Cluster`."""
    if not (plan.image or plan.template):
        raise ConfigError("--image: is missing", hint="examples/docker/Dockerfile makes one")
    command = f"export {' '.join(map(quote, plan.env))}; exec batchinfer worker {plan.words}"
    command = command.replace("$", "$$")  # $(NAME) is Kubernetes's own
    fields = {
        "name": plan.name,
        "namespace": plan.namespace,
        "workers": plan.workers,
        "gpus": 0 if plan.gpu == "none" else plan.gpu.partition(":")[2] or 1,
        "image": plan.image,
        "command": json.dumps(command, ensure_ascii=False),
        "secrets": json.dumps([{"secretRef": {"name": name}} for name in plan.secret]),
    }
    return fill(plan.template or Path(__file__).with_suffix(".yaml"), fields)


def submit(plan: Plan) -> None:
    """See `Cluster`."""
    options = ("--filename=-", f"--namespace={plan.namespace}")
    run_client("kubectl", "create", *options, text=page(plan))


def look(name: str, namespace: str) -> dict[int, Fate]:
    """See `Cluster`. The newest pod of each index counts; which indexes are over, the Job says."""
    ask = ("kubectl", "get", "jobs,pods", f"--selector=batchinfer/launch={name}", "--output=json")
    items = json.loads(run_client(*ask, f"--namespace={namespace}"))["items"]
    found: dict[int, Fate] = {}
    for item in sorted(items, key=lambda one: str(one["metadata"]["creationTimestamp"])):
        if (index := item["metadata"].get("annotations", {}).get(_INDEX, "")).isdecimal():
            found[int(index)] = Fate("coming", _said(item["status"]))
    for status in (item["status"] for item in items if item["kind"] == "Job"):
        ended = indexes(status.get("completedIndexes", ""))
        lost = indexes(status.get("failedIndexes", ""))
        conditions = {(one["type"], one["status"]) for one in status.get("conditions", [])}
        for rank in ended | lost | (found.keys() if ("Failed", "True") in conditions else set()):
            text = found[rank].text if rank in found else ""
            found[rank] = Fate("ended" if rank in ended else "lost", text)
    return found


def cancel(name: str, namespace: str) -> None:
    """See `Cluster`."""
    options = ("--ignore-not-found", "--wait=false", f"--namespace={namespace}")
    run_client("kubectl", "delete", "job", *options, "--", name)


def _said(status: dict[str, Any]) -> str:
    """Return the state of a pod in words: its phase, and the reasons of its containers."""
    containers = status.get("containerStatuses", [])
    states = [state for one in containers for state in one.get("state", {}).values()]
    words = [state["reason"] for state in states if state.get("reason")]
    words += [f"exit status {state['exitCode']}" for state in states if "exitCode" in state]
    return " ".join([status.get("phase", ""), *words])
