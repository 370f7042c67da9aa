"""Workers as a job array on Slurm; `slurm.sh` is the template.

Job and run must be in a bucket or on storage that all nodes share. The workers run with this Python, which must be on
such storage, too. What --sbatch-arg says stands in the script itself, so that it can be submitted by hand.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

from batchinfer.clusters import Fate, Plan, fill, indexes, run_client
from batchinfer.core.errors import ConfigError
from batchinfer.core.shell import quote

_COMING = "PENDING REQUEUED SUSPENDED STOPPED CONFIGURING RUNNING RESIZING COMPLETING STAGE_OUT"
_KINDS = dict.fromkeys(_COMING.split(), "coming") | {"COMPLETED": "ended", "CANCELLED": "ended"}
_LINE = re.compile(r"^\d+_\[?([0-9,-]+)[^|\n]*\|(\w+)(.*)", re.MULTILINE)


def page(plan: Plan) -> str:
    """See `Cluster`."""
    # sbatch reads double quotes and backslashes in its lines as JSON has them.
    options = (f"#SBATCH {json.dumps(one, ensure_ascii=False)}" for one in plan.sbatch_arg)
    fields = {
        "name": plan.name,
        "last": plan.workers - 1,
        "gres": "none" if plan.gpu == "none" else f"gpu:{plan.gpu.lower() or 1}",
        "options": "\n".join(options),
        "exports": "\n".join(f"export {quote(variable)}" for variable in plan.env),
        "command": f"{quote(sys.executable)} -m batchinfer worker {plan.words}",
    }
    return fill(plan.template or Path(__file__).with_suffix(".sh"), fields)


def submit(plan: Plan) -> None:
    """See `Cluster`. sbatch passes this environment on to the workers."""
    if not run_client("sbatch", "--parsable", text=page(plan)).strip():
        raise ConfigError("sbatch: answered nothing, expected the number of a job")


def look(name: str, _namespace: str) -> dict[int, Fate]:
    """See `Cluster`. squeue forgets ended jobs after some minutes; sacct, if it is set up, knows them longer.

    Both are asked about all users: another one may have made the launch, or cancelled the job.
    """
    option, printed = f"--name={name}", ""
    with contextlib.suppress(ConfigError):
        ask = ["sacct", "-X", "-n", "-P", "--allusers", "--starttime=now-90days", option]
        printed = run_client(*ask, "--format=JobID,State,ExitCode")
    ask = ["squeue", "--array", "--noheader", "--states=all", option]
    printed += run_client(*ask, "--format=%i|%T|%r")
    found: dict[int, Fate] = {}
    for ranks, state, more in _LINE.findall(printed):
        fate = Fate(_KINDS.get(state, "lost"), state + more.replace("|", " "))
        found |= dict.fromkeys(indexes(ranks), fate)
    return found


def cancel(name: str, _namespace: str) -> None:
    """See `Cluster`."""
    run_client("scancel", f"--name={name}")
