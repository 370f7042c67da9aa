"""Workers as an Indexed Job on Kubernetes, created with kubectl; `kubernetes.yaml` is the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchinfer.clusters import Fate, Plan, fill, indexes, name_of, run_client
from batchinfer.core.errors import ConfigError
from batchinfer.core.shell import quote

IS_REMOTE = True
_INDEX = "batch.kubernetes.io/job-completion-index"


def page(plan: Plan) -> str:
    """See `Cluster`."""
    if not (plan.image or plan.template):
        hint = "build examples/docker/Dockerfile, and give --image REGISTRY/NAME:TAG"
        raise ConfigError("--image: is missing", hint=hint)
    command = f"export {' '.join(map(quote, plan.variables))}; exec batchinfer {plan.command}"
    fields = {
        "name": plan.name,
        "launch": plan.id,
        "workers": plan.workers,
        "gpus": _as_yaml(str(plan.num_gpus)),
        "image": _as_yaml(plan.image),
        "command": _as_yaml(command.replace("$", "$$")),  # $(NAME) is Kubernetes's own
        "secrets": _as_yaml([{"secretRef": {"name": name}} for name in plan.secret]),
    }
    return fill(plan.template or Path(__file__).with_suffix(".yaml"), fields)


def submit(plan: Plan) -> None:
    """See `Cluster`."""
    run_client("kubectl", "create", "--filename=-", *_in(plan.namespace), text=page(plan))


def look(launch: str, workers: int, namespace: str) -> dict[int, Fate]:
    """See `Cluster`. The newest pod of each index counts; which indexes are over, the Job says."""
    ask = ("kubectl", "get", "jobs,pods", f"--selector=batchinfer/launch={launch}", "--output=json")
    items = json.loads(run_client(*ask, *_in(namespace)))["items"]
    found: dict[int, Fate] = {}
    for item in sorted(items, key=lambda one: str(one["metadata"]["creationTimestamp"])):
        index = item["metadata"].get("annotations", {}).get(_INDEX, "")
        if item["kind"] == "Pod" and index.isdecimal():
            found[int(index)] = Fate("coming", _said(item["status"]))
    for status in (item["status"] for item in items if item["kind"] == "Job"):
        ended = indexes(status.get("completedIndexes", ""))
        lost = indexes(status.get("failedIndexes", ""))
        if any(
            (one["type"], one["status"]) == ("Failed", "True")
            for one in status.get("conditions", [])
        ):
            lost = set(range(workers)) - ended
        for rank in ended | lost:
            text = found[rank].text if rank in found else ""
            found[rank] = Fate("lost" if rank in lost else "ended", text)
    return found


def cancel(launch: str, namespace: str) -> None:
    """See `Cluster`."""
    options = ("--ignore-not-found", "--wait=false", *_in(namespace))
    run_client("kubectl", "delete", "job", *options, "--", name_of(launch))


def _as_yaml(value: Any) -> str:
    """Return a text, or lists and mappings of texts, as YAML on one line, with escapes for all that is not ASCII."""
    import yaml

    return str(
        yaml.safe_dump(value, default_flow_style=True, default_style='"', width=1 << 30)
    ).strip()


def _said(status: dict[str, Any]) -> str:
    """Return the state of a pod in words: its phase, and the reasons of its containers."""
    words = [str(status.get("phase", ""))]
    for container in status.get("containerStatuses", []):
        for state in container.get("state", {}).values():
            words += [str(state["reason"])] if state.get("reason") else []
            words += [f"exit status {state['exitCode']}"] if "exitCode" in state else []
    return " ".join(words)


def _in(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []
