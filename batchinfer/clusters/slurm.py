"""Workers as a job array on Slurm.

Job and run must be in a bucket or on storage that all nodes share. The workers run with this Python, which must be on
such storage, too.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from typing import Any

from batchinfer.clusters import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    STARTING,
    WAITING,
    ClusterState,
    Plan,
    assignments,
    check_secrets_here,
    command_words,
    log_folder,
    make_log_folder,
    run_client,
    strange_handle,
)
from batchinfer.core.errors import ConfigError

_WARNING_SECONDS = 120
"""Seconds between USR1, after which a worker saves what it has, and the end of the job's time."""

# 75 means "stopped by a signal". The job is then queued again only if its time was over. After scancel it should not
# be, and Slurm itself queues a preempted job again.
_SCRIPT = """\
#!/bin/bash
{directives}

export BATCHINFER_RANK=$SLURM_ARRAY_TASK_ID
{exports}
worker= is_ending= is_out_of_time=
end() {{
  is_ending=yes
  [ -z "$worker" ] || kill -TERM $worker
}}
trap 'is_out_of_time=yes; end' USR1
trap end TERM
{command} &
worker=$!
[ -z "$is_ending" ] || kill -TERM $worker
wait $worker
status=$?
while kill -0 $worker 2>/dev/null; do
  wait $worker
  status=$?
done
case $status in
  33 | 34) again=yes ;;
  75) again=$is_out_of_time ;;
  *) again= ;;
esac
if [ -n "$again" ]; then
  echo "batchinfer: the worker ended with $status; this job is queued again" >&2
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit $status
"""

_STATES = {
    "PENDING": WAITING,
    "REQUEUED": WAITING,
    "REQUEUE_HOLD": FAILED,
    "SPECIAL_EXIT": FAILED,
    "CONFIGURING": STARTING,
    "RUNNING": RUNNING,
    "COMPLETING": RUNNING,
    "SUSPENDED": WAITING,
    "PREEMPTED": WAITING,
    "COMPLETED": DONE,
    "CANCELLED": CANCELLED,
}
_ARRAY_TASKS = re.compile(r"^\d+_\[?([0-9,\-]+)")


class Slurm:
    """See `Cluster`."""

    is_remote = False
    jobs_of = "squeue --me --name={name}"
    options = {
        "log-dir": "folder of logs on shared storage (default: batchinfer-launches)",
        **{
            name: f"sbatch's --{name}"
            for name in (
                "account", "constraint", "cpus-per-task", "gres", "mem", "nodelist", "partition", "qos",
                "reservation", "time",
            )
        },
    }  # fmt: skip

    def check(self, plan: Plan) -> None:
        """See `Cluster`."""
        if plan.is_spot is not None:
            raise ConfigError(
                "--spot/--on-demand: Slurm has no spot market",
                hint="choose a partition: --cluster-option partition=NAME",
            )
        check_secrets_here(plan)  # sbatch passes this environment on
        _require_client()

    def describe(self, plan: Plan) -> str:
        """See `Cluster`."""
        return _SCRIPT.format(
            directives="\n".join(f"#SBATCH {word}" for word in _directives(plan)),
            exports=f"export {assignments(plan.variables())}",
            command=f"{shlex.quote(sys.executable)} -m batchinfer {command_words(plan)}",
        )

    def submit(self, plan: Plan) -> dict[str, Any]:
        """See `Cluster`."""
        folder = make_log_folder(plan)
        printed = run_client(["sbatch", "--parsable"], text=self.describe(plan))
        return {"job": printed.strip().partition(";")[0], "logs": str(folder)}

    def look(self, handle: dict[str, Any], workers: int) -> dict[int, ClusterState]:
        """See `Cluster`. squeue forgets ended jobs after some minutes; sacct, if it is set up, knows them longer."""
        job = str(handle["job"])
        found: dict[int, ClusterState] = {}
        for command in (
            ["sacct", "-X", "-n", "-P", "-j", job, "-o", "JobID,State,ExitCode"],
            ["squeue", "-h", "-t", "all", "-j", job, "-o", "%i|%T|%r"],
        ):
            try:
                printed = run_client(command)
            except ConfigError as error:
                is_forgotten = "Invalid job id" in error.message
                if command[0] == "squeue" and not found and not is_forgotten:
                    raise
                continue
            for line in printed.splitlines():
                found |= _states_of(line, workers)
        return found

    def cancel(self, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        run_client(["scancel", "--", str(handle["job"])])

    def check_handle(self, plan: Plan, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        if re.fullmatch(r"[0-9]{1,18}", str(handle.get("job"))) is None:
            raise strange_handle(plan)

    def cancel_command(self, handle: dict[str, Any]) -> str:
        """See `Cluster`."""
        return f"scancel {handle['job']}"


CLUSTER = Slurm()


def _directives(plan: Plan) -> list[str]:
    words = [
        f"--job-name={plan.name}",
        f"--array=0-{plan.workers - 1}",
        "--requeue",
        "--open-mode=append",
        f"--output={str(log_folder(plan)).replace('%', '%%')}/worker-%a.log",
        f"--signal=B:USR1@{_WARNING_SECONDS}",
    ]
    if plan.gpu and not plan.is_cpu_only:
        words.append(f"--gres=gpu:{plan.gpu.lower()}")
    words += [f"--{name}={value}" for name, value in plan.options.items() if name != "log-dir"]
    return list(map(_quote, words))


def _quote(word: str) -> str:
    r"""Quote a word of an #SBATCH line: sbatch reads double quotes and backslashes there, but no other quotes of bash.

    >>> print(_quote("--job-name=night run"), _quote("--mem=4G"))
    "--job-name=night run" --mem=4G
    """
    if not re.search(r"[\s\"'\\#]", word):
        return word
    escaped = re.sub(r'(["\\])', r"\\\1", word)
    return f'"{escaped}"'


def _states_of(line: str, workers: int) -> dict[int, ClusterState]:
    """Return the states in one line of squeue or sacct, by rank.

    >>> found = _states_of("12_[2-3]|PENDING|Resources", 4)
    >>> {rank: f"{seen.state}: {seen.text}" for rank, seen in found.items()}
    {2: 'waiting: PENDING Resources', 3: 'waiting: PENDING Resources'}
    """
    job, _, rest = line.partition("|")
    match = _ARRAY_TASKS.match(job)
    if match is None:
        return {}
    state, _, more = rest.partition("|")
    word = state.partition(" ")[0].rstrip("+")
    seen = ClusterState(_STATES.get(word, FAILED), " ".join(filter(None, (state, more))))
    ranks: dict[int, ClusterState] = {}
    for part in match[1].split(","):
        first, dash, last = part.partition("-")
        for rank in range(int(first), int(last if dash else first) + 1):
            if rank < workers:
                ranks[rank] = seen
    return ranks


def _require_client() -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "slurm: sbatch is not on the PATH", hint="run this on a login node of the Slurm cluster"
        )
