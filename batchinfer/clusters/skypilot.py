"""Workers as managed jobs of SkyPilot, by its Python SDK. worker.yaml is the template.

SkyPilot needs older packages than vLLM, so it usually has an environment of its own. Its SDK is therefore called in
another process, `skypilot_client.py`, by this Python if it has SkyPilot, else by that of the `sky` on the PATH.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from batchinfer.clusters import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    STARTING,
    WAITING,
    ClusterState,
    OutcomeUnknown,
    Plan,
    run_client,
)
from batchinfer.core.errors import ConfigError

_CLIENT = Path(__file__).with_name("skypilot_client.py")
_CLIENT_SECONDS = 600.0
_STATES = {
    "PENDING": WAITING,
    "SUBMITTED": WAITING,
    "STARTING": STARTING,
    "RUNNING": RUNNING,
    "WINDING_DOWN": RUNNING,
    "RECOVERING": STARTING,
    "CANCELLING": CANCELLED,
    "CANCELLED": CANCELLED,
    "SUCCEEDED": DONE,
}


class SkyPilot:
    """See `Cluster`."""

    is_remote = True
    jobs_of = "sky jobs queue | grep {id}"
    options = {
        "template": "task file of the workers (default: worker.yaml; with a pool, examples/skypilot/pool-job.yaml)",
        "pool": "run on the machines of this pool",
        "infra": "where, as in aws/us-east-1 or k8s/context",
        "extra": "what to install on the machines: vllm (default), cpu, or vllm,gcs for a bucket on Google",
    }

    def check(self, plan: Plan) -> None:
        """See `Cluster`."""
        missing = [name for name in plan.secrets if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"--secret {missing[0]}: has no value in this environment",
                hint=f"export {missing[0]}=…",
            )
        if plan.options.get("pool") and plan.options.get("extra"):
            raise ConfigError(
                "--cluster-option extra: a pool's machines are set up already", hint="leave it out"
            )
        task_of(plan)
        _python()

    def describe(self, plan: Plan) -> str:
        """See `Cluster`."""
        import yaml

        task = task_of(plan)
        shown = {
            **task,
            "secrets": {**task.get("secrets", {}), **dict.fromkeys(plan.secrets, "***")},
        }
        text: str = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=120)
        pool = f", pool {plan.options['pool']}" if plan.options.get("pool") else ""
        return f"# sky jobs launch: {plan.name}-{plan.id}, {plan.workers} jobs{pool}\n{text}"

    def submit(self, plan: Plan) -> dict[str, Any]:
        """See `Cluster`."""
        name = f"{plan.name}-{plan.id}"
        asked = {
            "task": task_of(plan),
            "secrets": {key: os.environ[key] for key in plan.secrets},
            "name": name,
            "pool": plan.options.get("pool"),
            "workers": plan.workers,
        }
        return {"name": name, "jobs": _call("launch", asked)}

    def look(self, handle: dict[str, Any], workers: int) -> dict[int, ClusterState]:
        """See `Cluster`. Ranks follow the order of the jobs' ids."""
        records = _call("queue", {"jobs": handle["jobs"]})
        found = {}
        for rank, job in enumerate(sorted(handle["jobs"])[:workers]):
            record = records.get(str(job))
            if record is not None:
                found[rank] = ClusterState(
                    _STATES.get(record[0], FAILED), " ".join(filter(None, record))
                )
        return found

    def cancel(self, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        _call("cancel", {"jobs": handle["jobs"]})


CLUSTER = SkyPilot()


def task_of(plan: Plan) -> dict[str, Any]:
    """Return the task that is submitted: the template with this plan's environment and resources.

    Raises:
        ConfigError: The template cannot be read, or has no `envs`.
    """
    import yaml

    is_pool = bool(plan.options.get("pool"))
    default = "examples/skypilot/pool-job.yaml" if is_pool else "worker.yaml"
    path = Path(plan.options.get("template", default))
    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"skypilot: the template {path} cannot be read ({error})",
            hint="run this in a checkout of batchinfer, or give --cluster-option template=FILE",
        ) from error
    if not isinstance(task, dict) or not isinstance(task.get("envs"), dict):
        raise ConfigError(
            f"skypilot: {path} has no envs, expected the task of a worker, as in worker.yaml"
        )
    task = copy.deepcopy(task)
    task["envs"] |= {
        "MODEL_NAME": plan.model,
        "OUTPUT_BUCKET": plan.run,
        "DATA_BUCKET": plan.job,
        "WORKER_WORDS": plan.words,
        **plan.variables(),
    }
    if extra := plan.options.get("extra"):
        task["envs"]["BATCHINFER_EXTRA"] = extra
    resources = task.setdefault("resources", {})
    if plan.is_cpu_only:
        resources.pop("accelerators", None)
    elif plan.gpu:
        resources["accelerators"] = plan.gpu
    if plan.is_spot is not None:
        resources.pop("any_of", None)
        resources["use_spot"] = plan.is_spot
    if infra := plan.options.get("infra"):
        resources["infra"] = infra
    return task


def _python() -> str:
    """Return the path of a Python that has SkyPilot: this one, or that of the `sky` on the PATH.

    Raises:
        ConfigError: There is none.
    """
    if importlib.util.find_spec("sky") is not None:
        return sys.executable
    program = shutil.which("sky")
    if program is not None:
        with open(program, "rb") as file:  # noqa: PTH123 - one line of a script
            line = file.readline().decode(errors="replace").strip()
        python = line.removeprefix("#!").strip()
        if line.startswith("#!") and Path(python).is_file():
            return python
    raise ConfigError(
        "skypilot: not installed here, and no `sky` on the PATH",
        hint="python3 -m venv ~/sky && ~/sky/bin/pip install 'skypilot[aws]==0.14.1', then put ~/sky/bin on the PATH",
    )


def _call(verb: str, asked: dict[str, Any]) -> Any:
    """Run a function of `skypilot_client.py` and return its answer. An error says "launch", for example, first."""
    words = [_python(), str(_CLIENT), verb]
    try:
        printed = run_client(
            words, text=json.dumps(asked), seconds=_CLIENT_SECONDS, name=f"skypilot: {verb}"
        )
    except OutcomeUnknown:
        raise
    except ConfigError as error:
        last = error.message.splitlines()[-1].removeprefix(f"skypilot: {verb}: ")
        raise ConfigError(
            f"skypilot: {verb} failed: {last}", hint="see `sky check` and `sky api status`"
        ) from error
    answer = json.loads(printed.strip().splitlines()[-1])
    if "unknown" in answer:
        raise OutcomeUnknown(f"skypilot: {verb}: {answer['unknown']}")
    return answer["answer"]
