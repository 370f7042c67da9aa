"""Workers as a job array on Slurm; `slurm.sh` is the template.

Job and run must be in a bucket or on storage that all nodes share. The workers run with this Python, which must be on
such storage, too. What --sbatch-arg says stands in the script itself, so that it can be submitted by hand.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path

from batchinfer.clusters import Fate, Plan, fill, indexes, name_of, run_client
from batchinfer.core.errors import ConfigError
from batchinfer.core.shell import quote

IS_REMOTE = False
_ENDED = "COMPLETED CANCELLED"
_COMING = "PENDING REQUEUED SUSPENDED STOPPED CONFIGURING RUNNING RESIZING COMPLETING STAGE_OUT"
_LINE = re.compile(r"\d+_\[?([0-9,-]+)[^|]*\|(\w+)(.*)")


def page(plan: Plan) -> str:
    """See `Cluster`."""
    # sbatch reads double quotes and backslashes in its lines as JSON has them.
    options = (f"#SBATCH {json.dumps(one, ensure_ascii=False)}" for one in plan.sbatch_arg)
    fields = {
        "name": plan.name,
        "last": plan.workers - 1,
        "gres": f"gpu:{plan.gpu.lower() or 1}" if plan.num_gpus else "none",
        "options": "\n".join(options),
        "exports": "\n".join(f"export {quote(variable)}" for variable in plan.variables),
        "command": f"{quote(sys.executable)} -m batchinfer {plan.command}",
    }
    return fill(plan.template or Path(__file__).with_suffix(".sh"), fields)


def submit(plan: Plan) -> None:
    """See `Cluster`. sbatch passes this environment on to the workers."""
    printed = run_client("sbatch", "--parsable", text=page(plan)).strip()
    if re.fullmatch(r"\d+(;.*)?", printed) is None:
        raise ConfigError(f"sbatch: answered {printed!r}, expected the number of a job")


def look(launch: str, _workers: int, _namespace: str) -> dict[int, Fate]:
    """See `Cluster`. squeue forgets ended jobs after some minutes; sacct, if it is set up, knows them longer."""
    name, printed = f"--name={name_of(launch)}", ""
    since = datetime.strptime(launch[:8], "%Y%m%d") - timedelta(days=1)  # noqa: DTZ007 - a day
    with contextlib.suppress(ConfigError):
        ask = ("sacct", "-X", "-n", "-P", f"--starttime={since:%Y-%m-%d}", name)
        printed = run_client(*ask, "--format=JobID,State,ExitCode")
    printed += run_client("squeue", "--me", "--noheader", "--states=all", name, "--format=%i|%T|%r")
    found: dict[int, Fate] = {}
    for line in filter(None, map(_LINE.match, printed.splitlines())):
        is_over = "ended" if line[2] in _ENDED.split() else "lost"
        text = f"{line[2]}{line[3].replace('|', ' ')}"
        fate = Fate("coming" if line[2] in _COMING.split() else is_over, text)
        found |= dict.fromkeys(indexes(line[1]), fate)
    return found


def cancel(launch: str, _namespace: str) -> None:
    """See `Cluster`."""
    run_client("scancel", f"--name={name_of(launch)}")
