"""Read task files with SkyPilot itself, for test_skypilot.py; runs in SkyPilot's own environment.

Reads one JSON request a line from stdin and answers each with one line: the task as SkyPilot sees
it, or the error that it raises. Needs no credentials and no cloud.
"""

import json
import sys

import sky
import yaml
from sky.client.cli import command as sky_cli
from sky.skylet import log_lib


def read(request: dict) -> dict:
    config = yaml.safe_load(request["text"])
    task = sky.Task.from_yaml_config(config, env_overrides=sorted(request["envs"].items()))
    if request["gpus"]:
        task.set_resources_override(sky_cli._parse_override_params(gpus=request["gpus"]))
    task.expand_and_validate_file_mounts()
    return {
        "candidates": [
            {
                "accelerators": resources.accelerators,
                "use_spot": resources.use_spot,
                "job_recovery": resources.job_recovery,
            }
            for resources in task.resources
        ],
        "file_mounts": task.file_mounts or {},
        "storage_mounts": len(task.storage_mounts or {}),
        # What SkyPilot would run on the machine: it sources the shell's profile, goes to the
        # workdir and exports the variables before our text.
        "setup_script": log_lib.make_task_bash_script(task.setup or "true", env_vars=task.envs),
        "run_script": log_lib.make_task_bash_script(task.run or "true", env_vars=task.envs),
    }


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # SkyPilot prints hints
    for line in sys.stdin:
        try:
            answer = read(json.loads(line))
        except Exception as error:  # noqa: BLE001 - every refusal is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
