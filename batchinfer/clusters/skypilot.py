"""Workers as managed jobs of SkyPilot, by its Python SDK. worker.yaml is the template.

SkyPilot needs older packages than vLLM, so it usually has an environment of its own. Its SDK is therefore called in
another process, `skypilot_client.py`, by this Python if it has SkyPilot, else by that of the `sky` on the PATH.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from batchinfer.cli.shell import quote
from batchinfer.clusters import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    STARTING,
    WAITING,
    WORKER,
    ClusterState,
    OutcomeUnknown,
    Plan,
    check_length,
    check_secrets_here,
    command_words,
    run_client,
    strange_handle,
)
from batchinfer.core.errors import ConfigError

logger = logging.getLogger(__name__)

_CLIENT = Path(__file__).with_name("skypilot_client.py")
_CLIENT_SECONDS = 600.0
_EXAMPLES = {"envs": "worker.yaml", "pool": "examples/skypilot/pool.yaml"}
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
        "pool-workers": "make the pool first, of so many machines; it stays up until you take it down",
        "pool-template": "task file of a pool that is made (default: examples/skypilot/pool.yaml)",
        "infra": "where, as in aws/us-east-1 or k8s/context",
        "extra": "what to install on the machines: vllm (default), cpu, or vllm,gcs for a bucket on Google",
    }

    def check(self, plan: Plan) -> None:
        """See `Cluster`."""
        check_secrets_here(plan)
        check_length(plan)
        _check_pool(plan.options)
        task_of(plan)
        pool_of(plan)
        _python()

    def describe(self, plan: Plan) -> str:
        """See `Cluster`."""
        task, pool = task_of(plan), pool_of(plan)
        secrets = {
            name: "***" if value else value for name, value in (task.get("secrets") or {}).items()
        }
        shown = {**task, "secrets": secrets | dict.fromkeys(plan.secrets, "***")}
        name = plan.options.get("pool", "")
        where = f", pool {name}" if name else ""
        text = f"# sky jobs launch: {plan.name}-{plan.id}, {plan.workers} jobs{where}\n{_as_yaml(shown)}"
        return f"# sky jobs pool apply: {name}\n{_as_yaml(pool)}---\n{text}" if pool else text

    def submit(self, plan: Plan) -> dict[str, Any]:
        """See `Cluster`."""
        name = f"{plan.name}-{plan.id}"
        asked = {
            "task": task_of(plan),
            "secrets": {key: os.environ[key] for key in plan.secrets},
            "name": name,
            "pool": plan.options.get("pool"),
            "pool_task": pool_of(plan),
            "workers": plan.workers,
        }
        handle = {"name": name, **_call("launch", asked)}
        if asked["pool_task"] and not handle["made_pool"]:
            logger.info("the pool %s was there already, and is used as it is", asked["pool"])
        return handle

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
        """See `Cluster`. Jobs of another name stay, and so does a pool: its name is only what the record says."""
        _call("cancel", {"jobs": handle["jobs"], "name": handle["name"]})
        if pool := handle.get("made_pool"):
            raise ConfigError(
                f"its jobs are cancelled; a pool that was made for them stays up: "
                f"sky jobs pool down -y -- {quote(pool)}"
            )

    def check_handle(self, plan: Plan, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        jobs = handle.get("jobs")
        are_ids = isinstance(jobs, list) and jobs and all(type(job) is int for job in jobs)
        is_pool = isinstance(handle.get("made_pool", ""), str)
        if not are_ids or not is_pool or handle.get("name") != f"{plan.name}-{plan.id}":
            raise strange_handle(plan)

    def cancel_command(self, handle: dict[str, Any]) -> str:
        """See `Cluster`. A pool can only be taken down when its jobs have ended."""
        jobs = " ".join(map(str, handle["jobs"]))
        pool = handle.get("made_pool", "")
        return f"sky jobs cancel -y {jobs}" + (
            f" && sky jobs pool down -y {shlex.quote(pool)}" if pool else ""
        )


CLUSTER = SkyPilot()


def task_of(plan: Plan) -> dict[str, Any]:
    """Return the task that is submitted: the template with this plan's environment and resources.

    Raises:
        ConfigError: The template cannot be read, or has no `envs`.
    """
    is_pool = bool(plan.options.get("pool"))
    default = "examples/skypilot/pool-job.yaml" if is_pool else "worker.yaml"
    task = _read_template(plan.options.get("template", default), "envs", "template")
    task["envs"] |= {
        "MODEL_NAME": plan.model,
        "OUTPUT_BUCKET": plan.run,
        "DATA_BUCKET": plan.job,
        "WORKER_WORDS": plan.words if plan.what == WORKER else "",
        **plan.variables(),
    }
    if plan.what != WORKER:
        command = f"exec .venv/bin/batchinfer {command_words(plan)}"
        task["run"] = f'export BATCHINFER_RANK="${{SKYPILOT_JOB_RANK:-0}}"\n{command}\n'
    return _with_machine(task, plan)


def pool_of(plan: Plan) -> dict[str, Any] | None:
    """Return the task of the pool that is made for this plan, of the same machines as `task_of` asks for; None if none.

    Raises:
        ConfigError: The template cannot be read, or has no `pool`.
    """
    workers = plan.options.get("pool-workers")
    if not workers:
        return None
    template = plan.options.get("pool-template", "examples/skypilot/pool.yaml")
    task = _read_template(template, "pool", "pool-template")
    task["pool"] = {"workers": int(workers)}
    return _with_machine(task, plan)


def _check_pool(options: dict[str, str]) -> None:
    """Refuse options of pools that contradict each other."""
    workers = options.get("pool-workers")
    if options.get("pool") and options.get("extra") and not workers:
        raise ConfigError(
            "--cluster-option extra: a pool's machines are set up already",
            hint="leave it out, or make the pool: --cluster-option pool-workers=N",
        )
    if options.get("pool-template") and not workers:
        raise ConfigError("--cluster-option pool-template: needs --cluster-option pool-workers=N")
    if workers and not options.get("pool"):
        raise ConfigError("--cluster-option pool-workers: needs the pool's name, --pool NAME")
    if workers and not (workers.isdecimal() and int(workers)):
        raise ConfigError(f"--cluster-option pool-workers={workers}: expected a number from 1")


def _read_template(path: str, key: str, option: str) -> dict[str, Any]:
    """Return the task in a file, which has a dictionary at `key`.

    Raises:
        ConfigError: The file cannot be read, or lacks the key.
    """
    import yaml

    try:
        task = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"skypilot: the template {path} cannot be read ({error})",
            hint=f"run this in a checkout of batchinfer, or give --cluster-option {option}=FILE",
        ) from error
    if not isinstance(task, dict) or not isinstance(task.get(key), dict):
        raise ConfigError(f"skypilot: {path} has no {key}, expected a task as in {_EXAMPLES[key]}")
    return task


def _as_yaml(task: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=120)
    return text


def _with_machine(task: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the task with the plan's machine: what is installed, its GPUs, place and market."""
    extra = plan.options.get("extra", None if plan.what == WORKER else "")
    if extra is not None:
        task.setdefault("envs", {})["BATCHINFER_EXTRA"] = extra
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
