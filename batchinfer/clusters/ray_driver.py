"""The driver of a launch on Ray: one task for each worker, on the nodes of the cluster.

If a node is lost, Ray repeats its tasks on other nodes. A worker that is killed or ends with 33, 34 or 75 is started
again on its node.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from batchinfer.clusters import DONE, FAILED, WAITING, Plan
from batchinfer.clusters.local import WorkerProcess, worker_variables
from batchinfer.clusters.ray import STATES_LINE
from batchinfer.core import codec
from batchinfer.core.processes import describe_exit

_POLL_SECONDS = 1.0


def run_worker(plan: Plan, rank: int) -> int:
    """Keep one worker running until it has ended for good, and return its exit status. This is the task."""
    with tempfile.TemporaryDirectory(prefix="batchinfer-ray-") as folder:
        log = Path(folder) / "worker.log"
        process = WorkerProcess(
            plan, worker_variables(plan, rank, None), log, dies_with_parent=True
        )
        shown = 0
        while not process.has_ended:
            process.tick(is_ending=False)
            if log.exists():
                with log.open("rb") as file:
                    file.seek(shown)
                    new = file.read()
                os.write(2, new)  # Ray shows it in the task's log
                shown += len(new)
            time.sleep(_POLL_SECONDS)
        return process.state.status or 0


def main() -> int:
    """Run all workers of the plan in BATCHINFER_PLAN. Return 1 if one failed, else 0."""
    import ray  # type: ignore[import-not-found]

    plan = codec.json_decoder(Plan).decode(os.environ["BATCHINFER_PLAN"])
    ray.init(address="auto", log_to_driver=False)
    gpus = int(plan.gpu.partition(":")[2] or 1) if plan.gpu and not plan.is_cpu_only else 0
    task = ray.remote(
        num_cpus=float(plan.options.get("num-cpus", "1")),
        num_gpus=gpus,
        max_retries=-1,
        scheduling_strategy="SPREAD",
    )(run_worker)
    tasks = {task.remote(plan, rank): rank for rank in range(plan.workers)}
    states = {str(rank): [WAITING, ""] for rank in range(plan.workers)}
    left = list(tasks)
    while True:
        os.write(1, f"{STATES_LINE}{json.dumps(states)}\n".encode())
        if not left:
            return int(any(state == FAILED for state, _ in states.values()))
        ended, left = ray.wait(left)
        for reference in ended:
            states[str(tasks[reference])] = _ended(ray, reference)


def _ended(ray: object, reference: object) -> list[str]:
    try:
        status: int = ray.get(reference)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - any error of a task is its worker's failure
        return [FAILED, (str(error).splitlines() or [type(error).__name__])[0]]
    return [DONE if status == 0 else FAILED, "" if status == 0 else describe_exit(status)]


if __name__ == "__main__":
    sys.exit(main())
