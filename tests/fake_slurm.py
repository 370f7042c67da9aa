"""Stands in for Slurm: sbatch, squeue and scancel that run the tasks of an array as processes here.

The variable FAKE_SLURM names the folder of the state, FAKE_SLURM_FATE what happens to the next submission: refused;
silent, with an empty answer; lost, when the job is submitted and the answer says otherwise; or broken, when all tasks
fail before they begin.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "squeue", "scancel")


def install(folder: Path) -> None:
    """Put the commands into a folder."""
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:
        (folder / name).write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        (folder / name).chmod(0o755)


def tasks() -> list[dict]:
    """The states of all tasks, those of the oldest job first."""
    paths = sorted(Path(os.environ["FAKE_SLURM"]).glob("*-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def _set(task: dict, **fields) -> None:
    path = Path(os.environ["FAKE_SLURM"]) / f"{task['job']:04d}-{task['index']:04d}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(task | fields))
    temporary.replace(path)


def _get(task: dict) -> dict:
    return next(
        one for one in tasks() if (one["job"], one["index"]) == (task["job"], task["index"])
    )


def sbatch(root: Path) -> None:
    script, fate = sys.stdin.read(), os.environ.get("FAKE_SLURM_FATE", "")
    if fate == "refused":
        sys.exit("sbatch: error: Invalid partition name specified")
    if fate == "silent":
        return
    job = len(list(root.glob("*.sh"))) + 1
    (root / f"{job}.sh").write_text(script)
    name = re.findall(r"--job-name=(\S+)", script)[-1]
    last = int(re.findall(r"--array=0-(\d+)", script)[-1])
    for index in range(last + 1):
        task = {"job": job, "index": index, "name": name, "state": "PENDING", "pid": 0}
        _set(task, state="FAILED" if fate == "broken" else "PENDING")
        if fate != "broken" and os.fork() == 0:
            os.setsid()
            with Path(os.devnull).open("r+") as null:
                for number in (0, 1, 2):
                    os.dup2(null.fileno(), number)
            _run(root, task)
            os._exit(0)
    if fate == "lost":
        sys.exit("sbatch: error: Batch job submission failed: Socket timed out")
    print(job)


def _run(root: Path, task: dict) -> None:
    """Run one task, unless it is cancelled."""
    place = {"SLURM_ARRAY_JOB_ID": str(task["job"]), "SLURM_ARRAY_TASK_ID": str(task["index"])}
    if _get(task)["state"] == "CANCELLED":
        return
    script = root / f"{task['job']}.sh"
    process = subprocess.Popen(["bash", str(script)], env={**os.environ, **place})
    _set(task, state="RUNNING", pid=process.pid)
    status = process.wait()
    if _get(task)["state"] != "CANCELLED":
        _set(task, state="COMPLETED" if status == 0 else "FAILED", status=status)


def squeue(_root: Path) -> None:
    name = next(word for word in sys.argv if word.startswith("--name=")).partition("=")[2]
    for task in tasks():
        if task["name"] == name:
            print(f"{task['job']}_{task['index']}|{task['state']}|None")


def scancel(_root: Path) -> None:
    (word,) = sys.argv[1:]
    name = word.partition("--name=")[2]
    assert name
    for task in tasks():
        if task["name"] == name and task["state"] in ("PENDING", "RUNNING", "REQUEUED"):
            _set(task, state="CANCELLED")
            with contextlib.suppress(ProcessLookupError):
                if task["pid"]:
                    os.kill(task["pid"], signal.SIGTERM)


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](Path(os.environ["FAKE_SLURM"]))
