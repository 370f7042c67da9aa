"""Stands in for SkyPilot's SDK in the process of its client: it keeps calls, pools and jobs in a file.

The variable FAKE_SKY names the folder of the file. FAKE_FATE says how a submission ends: refused, or lost, when the
jobs are submitted and the answer does not come back.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STATE = Path(os.environ.get("FAKE_SKY", ".")) / "state.json"


def _read() -> dict[str, Any]:
    if not STATE.exists():
        return {"calls": [], "pools": {}, "jobs": {}}
    state: dict[str, Any] = json.loads(STATE.read_text())
    return state


def _write(**fields: Any) -> None:
    STATE.write_text(json.dumps({**_read(), **fields}))


def _note(*call: Any) -> None:
    _write(calls=[*_read()["calls"], call])


class exceptions:  # noqa: N801 - as in the SDK
    class ClusterNotUpError(Exception):
        pass


class serve:  # noqa: N801
    class UpdateMode:
        ROLLING = "rolling"


class Task:
    def __init__(self, config: dict[str, Any], secrets: list[Any]) -> None:
        self.config, self.secrets = config, secrets

    @classmethod
    def from_yaml_config(cls, config: dict[str, Any], secrets_overrides: Any = ()) -> Task:
        return cls(config, list(secrets_overrides))


def get(answer: Any) -> Any:
    return answer


def stream_and_get(answer: Any, output_stream: Any) -> Any:
    output_stream.write("submitting")
    return answer


class jobs:  # noqa: N801
    @staticmethod
    def launch(task: Task, name: str, pool: str | None, num_jobs: int) -> Any:
        launch = task.config["envs"]["BATCHINFER_LAUNCH"]
        _note("launch", name, pool, num_jobs, launch, task.secrets)
        fate = os.environ.get("FAKE_FATE")
        if fate == "refused":
            raise ValueError("no such GPU")
        _write(jobs={str(number + 4): "RUNNING" for number in range(num_jobs)}, name=name)
        if fate == "lost":
            raise OSError("timed out")
        return [number + 4 for number in range(num_jobs)], None

    @staticmethod
    def queue_v2(refresh: bool, name_match: str = "", job_ids: list[int] | None = None) -> Any:
        records = [
            SimpleNamespace(
                job_id=int(job),
                job_name=_read()["name"],
                status=SimpleNamespace(value=status),
                failure_reason="",
            )
            for job, status in _read()["jobs"].items()
        ]
        return records, len(records), {}, 0

    @staticmethod
    def cancel(job_ids: list[int]) -> None:
        _note("cancel", job_ids)
        _write(jobs={str(job): "CANCELLED" for job in job_ids})

    @staticmethod
    def pool_status(names: list[str]) -> list[dict[str, Any]]:
        pools = _read()["pools"]
        return [{"status": SimpleNamespace(value=pools[name])} for name in names if name in pools]

    @staticmethod
    def pool_apply(task: Task, name: str, mode: str) -> None:
        _note("pool_apply", name, task.config["pool"], task.config["resources"]["accelerators"])
        _write(pools={name: "READY"})

    @staticmethod
    def pool_down(names: list[str]) -> None:
        _note("pool_down", names)
        _write(pools=dict.fromkeys(names, "SHUTTING_DOWN"))
