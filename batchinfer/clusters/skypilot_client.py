"""Program that calls SkyPilot's SDK, version 0.14.1. Its Python may lack batchinfer, so it imports nothing of it.

The argument is the name of a function below. Standard input is what it is asked, as JSON; the last line of standard
output is its answer, as JSON: `{"answer": …}`, or `{"unknown": "reason"}` if the jobs may have been submitted or not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_POOL_SECONDS, _POLL_SECONDS = 300.0, 5.0
"""Most seconds to wait until the jobs of a pool have ended, and seconds between two looks."""

os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")


class AnswerLost(Exception):
    """It is not known whether the jobs were submitted."""


def launch(asked: dict[str, Any]) -> dict[str, Any]:
    """Make the pool if asked, submit the jobs, and return their ids and the name of the pool that was made, or "".

    After an error, the queue says whether the jobs were submitted all the same. If not, the pool is taken down again.
    """
    pool = _make_pool(asked["pool"], asked["pool_task"]) if asked["pool_task"] else ""
    try:
        return {"jobs": sorted(_submit(asked)), "made_pool": pool}
    except AnswerLost as error:
        also = f"; the pool {pool} was made (sky jobs pool down {pool})" if pool else ""
        raise AnswerLost(f"{error}{also}") from error
    except Exception:
        if pool:
            _take_down(pool)
        raise


def _submit(asked: dict[str, Any]) -> list[int]:
    import sky  # type: ignore[import-not-found]

    task = sky.Task.from_yaml_config(
        asked["task"], secrets_overrides=sorted(asked["secrets"].items())
    )
    try:
        request = sky.jobs.launch(
            task, name=asked["name"], pool=asked["pool"], num_jobs=asked["workers"]
        )
        jobs, _ = sky.stream_and_get(request, output_stream=sys.stderr)
    except Exception as error:
        try:
            records = sky.get(sky.jobs.queue_v2(refresh=False, name_match=asked["name"]))[0]
        except Exception:  # noqa: BLE001 - of any kind: the queue cannot be asked
            raise AnswerLost(str(error)) from error
        jobs = [one.job_id for one in records]
        if not jobs:
            raise
        if len(jobs) < asked["workers"]:
            text = f"{error}; {len(jobs)} of {asked['workers']} jobs are there"
            raise AnswerLost(text) from error
    return list(jobs)


def _make_pool(name: str, config: dict[str, Any]) -> str:
    """Make a pool and return its name; "" if it is there already, which is then left as it is."""
    import sky

    if _pool_status(name):
        return ""
    task = sky.Task.from_yaml_config(config)
    request = sky.jobs.pool_apply(task, name, sky.serve.UpdateMode.ROLLING)
    sky.stream_and_get(request, output_stream=sys.stderr)
    return name


def _pool_status(name: str) -> str:
    """Return the status of a pool; "" if there is none."""
    import sky

    try:
        records = sky.get(sky.jobs.pool_status([name]))
    except sky.exceptions.ClusterNotUpError:
        return ""
    return str(getattr(records[0]["status"], "value", records[0]["status"])) if records else ""


def _take_down(name: str) -> None:
    """Take a pool down. SkyPilot only does so once its jobs have ended, so it is asked repeatedly."""
    import sky

    until = time.monotonic() + _POOL_SECONDS
    while _pool_status(name) not in ("", "SHUTTING_DOWN"):
        if time.monotonic() > until:
            raise RuntimeError(f"the pool {name} has jobs that do not end, and stays up")
        sky.get(sky.jobs.pool_down([name]))
        time.sleep(_POLL_SECONDS)


def queue(asked: dict[str, Any]) -> dict[str, list[str]]:
    """Return the status and the reason for a failure of each job that SkyPilot knows."""
    import sky

    records = sky.get(sky.jobs.queue_v2(refresh=False, job_ids=asked["jobs"]))[0]
    return {
        str(one.job_id): [one.status.value if one.status else "", one.failure_reason or ""]
        for one in records
    }


def cancel(asked: dict[str, Any]) -> list[int]:
    """Cancel those of the jobs that have the name of the launch. Jobs that have ended are left as they are."""
    import sky

    records = sky.get(sky.jobs.queue_v2(refresh=False, job_ids=asked["jobs"]))[0]
    jobs = [one.job_id for one in records if one.job_name == asked["name"]]
    if jobs:
        sky.get(sky.jobs.cancel(job_ids=jobs))
    return jobs


if __name__ == "__main__":
    verb = {"launch": launch, "queue": queue, "cancel": cancel}[sys.argv[1]]
    try:
        answer = {"answer": verb(json.load(sys.stdin))}
    except AnswerLost as error:
        answer = {"unknown": str(error)}
    json.dump(answer, sys.stdout)
