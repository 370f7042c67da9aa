"""Workers as an Indexed Job on Kubernetes, submitted with kubectl. Needs Kubernetes 1.29 or later."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from typing import Any

from batchinfer.clusters import (
    DONE,
    FAILED,
    FINAL_STATUSES,
    RESTART_STATUSES,
    RUNNING,
    WAITING,
    ClusterState,
    Plan,
    check_length,
    command_words,
    run_client,
    strange_handle,
)
from batchinfer.core.errors import ConfigError

_GRACE_SECONDS = 120
"""Seconds between SIGTERM and SIGKILL when a pod is removed."""
_RESTARTS = 20
"""New starts of one worker after failures that count; see `manifest`."""
_PODS = {"Pending": WAITING, "Running": RUNNING, "Succeeded": DONE, "Failed": FAILED}


class Kubernetes:
    """See `Cluster`."""

    is_remote = True
    jobs_of = "kubectl get jobs -l batchinfer/launch={id}"
    options = {
        "image": "the image of the workers, with batchinfer in it (required; see examples/docker)",
        "namespace": "namespace (default: that of kubectl's context)",
        "service-account": "service account of the pods, for access to the bucket",
        "cpu": "cores of one worker (default: 4)",
        "memory": "memory of one worker (default: 16Gi)",
        "shared-memory": "size of /dev/shm, which tensor parallelism needs (default: 8Gi)",
        "node-selector": "LABEL=VALUE that nodes must have, such as a GPU's name",
    }

    def check(self, plan: Plan) -> None:
        """See `Cluster`."""
        if not plan.options.get("image"):
            raise ConfigError(
                "kubernetes: no image for the workers",
                hint="build examples/docker/Dockerfile and give --cluster-option image=REGISTRY/NAME:TAG",
            )
        if plan.is_spot is not None:
            raise ConfigError(
                "--spot/--on-demand: Kubernetes chooses nodes by labels",
                hint="use --cluster-option node-selector=LABEL=VALUE",
            )
        if "=" not in plan.options.get("node-selector", "="):
            raise ConfigError("--cluster-option node-selector: expected LABEL=VALUE")
        check_length(plan)
        if shutil.which("kubectl") is None:
            raise ConfigError("kubernetes: kubectl is not on the PATH", hint="install kubectl")

    def describe(self, plan: Plan) -> str:
        """See `Cluster`."""
        import yaml

        text: str = yaml.safe_dump(manifest(plan), sort_keys=False, allow_unicode=True, width=120)
        return text

    def submit(self, plan: Plan) -> dict[str, Any]:
        """See `Cluster`."""
        run_client(
            ["kubectl", "apply", "-f", "-", *_in_namespace(plan.options)], text=self.describe(plan)
        )
        handle = {"job": job_name(plan)}
        if namespace := plan.options.get("namespace"):
            handle["namespace"] = namespace
        return handle

    def look(self, handle: dict[str, Any], workers: int) -> dict[int, ClusterState]:
        """See `Cluster`. The newest pod of each index counts."""
        selector = f"batch.kubernetes.io/job-name={handle['job']}"
        printed = run_client(
            ["kubectl", "get", "pods", "-l", selector, "-o", "json", *_in_namespace(handle)]
        )
        pods = sorted(
            json.loads(printed)["items"], key=lambda pod: pod["metadata"]["creationTimestamp"]
        )
        found: dict[int, ClusterState] = {}
        for pod in pods:
            index = (
                pod["metadata"]
                .get("annotations", {})
                .get("batch.kubernetes.io/job-completion-index", "")
            )
            if index.isdecimal() and int(index) < workers:
                found[int(index)] = _seen(pod["status"])
        return found

    def cancel(self, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        run_client(_deletion(handle))

    def check_handle(self, plan: Plan, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        namespace = handle.get("namespace", "")
        is_namespace = re.fullmatch(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?", str(namespace))
        if handle.get("job") != job_name(plan) or is_namespace is None:
            raise strange_handle(plan)

    def cancel_command(self, handle: dict[str, Any]) -> str:
        """See `Cluster`."""
        return shlex.join(_deletion(handle))


CLUSTER = Kubernetes()


def job_name(plan: Plan) -> str:
    """Return the name of the Job: lower-case letters, digits and dashes, at most 56 characters.

    With a dash and an index of up to five digits it becomes the name of a host, which may have 63.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", plan.name.lower()).strip("-")
    tail = f"-{plan.id.lower()}"
    return f"{name[: 56 - len(tail)].rstrip('-') or 'batchinfer'}{tail}"


def manifest(plan: Plan) -> dict[str, Any]:
    """Return the Job.

    A worker that ends with 33, 34 or 75, or loses its node, is started again, and that does not count as a failure.
    After 2 or 3 it is not started again. After another end it is, up to `_RESTARTS` times.
    """
    labels = {"app.kubernetes.io/name": "batchinfer", "batchinfer/launch": plan.id}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(plan), "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": plan.workers,
            "parallelism": plan.workers,
            "backoffLimitPerIndex": _RESTARTS,
            "maxFailedIndexes": plan.workers,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailIndex",
                        "onExitCodes": {"operator": "In", "values": list(FINAL_STATUSES)},
                    },
                    {
                        "action": "Ignore",
                        "onExitCodes": {"operator": "In", "values": list(RESTART_STATUSES)},
                    },
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": _pod(plan)},
        },
    }


def _pod(plan: Plan) -> dict[str, Any]:
    """Return the specification of a worker's pod."""
    options = plan.options
    count = plan.gpu.partition(":")[2] or "1"
    gpus = {"nvidia.com/gpu": count} if plan.gpu and not plan.is_cpu_only else {}
    requests = {"cpu": options.get("cpu", "4"), "memory": options.get("memory", "16Gi"), **gpus}
    container: dict[str, Any] = {
        "name": "worker",
        "image": options.get("image", ""),
        "command": ["bash", "-c", _literal(f"exec batchinfer {command_words(plan)}")],
        "env": [
            {
                "name": "BATCHINFER_RANK",
                "valueFrom": {
                    "fieldRef": {
                        "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                    }
                },
            },
            *({"name": key, "value": _literal(value)} for key, value in plan.variables().items()),
        ],
        "envFrom": [{"secretRef": {"name": secret}} for secret in plan.secrets],
        "resources": {"requests": requests, "limits": gpus},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - the place itself
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": [
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": options.get("shared-memory", "8Gi")},
            }
        ],
    }
    if account := options.get("service-account"):
        pod["serviceAccountName"] = account
    if selector := options.get("node-selector"):
        label, _, value = selector.partition("=")
        pod["nodeSelector"] = {label: value}
    return pod


def _literal(text: str) -> str:
    """Return a text of a manifest that Kubernetes turns into `text`: it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$")


def _seen(status: dict[str, Any]) -> ClusterState:
    phase = str(status.get("phase", ""))
    reasons = [phase]
    for container in status.get("containerStatuses", []):
        for state in container.get("state", {}).values():
            if isinstance(state, dict) and state.get("reason"):
                reasons.append(str(state["reason"]))
            if isinstance(state, dict) and "exitCode" in state:
                reasons.append(f"exit status {state['exitCode']}")
    return ClusterState(_PODS.get(phase, FAILED), " ".join(reasons))


def _deletion(handle: dict[str, Any]) -> list[str]:
    words = ["kubectl", "delete", "job", "--ignore-not-found", "--wait=false"]
    return [*words, *_in_namespace(handle), "--", str(handle["job"])]


def _in_namespace(options: dict[str, Any]) -> list[str]:
    return ["--namespace", str(options["namespace"])] if options.get("namespace") else []
