"""Program that calls SkyPilot's SDK, version 0.14.1. Its Python may lack batchinfer, so it imports nothing of it.

The argument is the name of a function below. Standard input is what it is asked, as JSON; the last line of standard
output is its answer, as JSON: `{"answer": …}`, or `{"unknown": "reason"}` if the jobs may have been submitted or not.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")


class AnswerLost(Exception):
    """It is not known whether the jobs were submitted."""


def launch(asked: dict[str, Any]) -> list[int]:
    """Submit the jobs and return their ids. After an error, the queue says whether they were submitted all the same."""
    import sky  # type: ignore[import-not-found]

    envs = sorted(asked["task"].pop("envs").items())
    asked["task"]["envs"] = dict(envs)
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
    return sorted(jobs)


def queue(asked: dict[str, Any]) -> dict[str, list[str]]:
    """Return the status and the reason for a failure of each job that SkyPilot knows."""
    import sky

    records = sky.get(sky.jobs.queue_v2(refresh=False, job_ids=asked["jobs"]))[0]
    return {
        str(one.job_id): [one.status.value if one.status else "", one.failure_reason or ""]
        for one in records
    }


def cancel(asked: dict[str, Any]) -> list[int]:
    """Cancel the jobs. Jobs that have ended are left as they are."""
    import sky

    sky.get(sky.jobs.cancel(job_ids=asked["jobs"]))
    jobs: list[int] = asked["jobs"]
    return jobs


if __name__ == "__main__":
    verb = {"launch": launch, "queue": queue, "cancel": cancel}[sys.argv[1]]
    try:
        answer = {"answer": verb(json.load(sys.stdin))}
    except AnswerLost as error:
        answer = {"unknown": str(error)}
    json.dump(answer, sys.stdout)
