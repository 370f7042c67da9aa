"""What `status`, `verify` and the next start say right after a worker was killed: the same as the bucket."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.runs.status import RunConfig, run_status
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage.opening import open_store
from making import make_job, run_worker_process, start_process, worker_arguments

ROWS = 400
OPTIONS = ("--worker-id", "w0", "--checkpoint-seconds", "0.2", "--max-num-seqs", "16")
SLOW = ("--echo-latency-seconds", "0.2", "--lease-seconds", "120")


def rows_in_segments(run: str) -> int:
    """Number of different rows in the segments of chunks without a marker."""
    store = open_store(run)
    found = set()
    for info in store.list(layout.CHECKPOINTS):
        name = info.key.split("/")[1]
        lines = store.get(info.key).data.splitlines()[1:]
        found |= {(name, json.loads(line)["line"]) for line in lines}
    done = {layout.parse_marker(info.key) for info in store.list(layout.OUTPUTS)}
    return len({row for row in found if (row[0], 0) not in done})


class Later(SystemClock):
    """The system's clock, so far ahead that a worker that was killed just now is gone."""

    def now(self) -> float:
        return super().now() + 200.0


def verified(run: str) -> dict[str, Any]:
    return run_verify(VerifyConfig(run=run), open_store=open_store, clock=SystemClock()).result


def test_status_verify_and_the_next_start_agree_after_a_kill(tmp_path: Path) -> None:
    """The worker is killed long after its last heartbeat, with chunks done and rows checkpointed since."""
    job = tmp_path / "job"
    make_job(job, rows=ROWS, per_chunk=50)
    run = str(job / "runs" / "a")
    process = start_process(worker_arguments(job, run, *OPTIONS, *SLOW))
    try:
        outputs, deadline = Path(run) / "outputs", time.monotonic() + 240
        while len(list(outputs.glob("*.succeed"))) < 2 or not rows_in_segments(run):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    checkpointed, num_markers = rows_in_segments(run), len(list(outputs.glob("*.succeed")))
    rows = run_status(RunConfig(run=run), open_store=open_store, clock=Later()).rows
    assert rows.done == verified(run)["rows_ok"] == 50 * num_markers
    assert rows.in_progress == checkpointed
    assert rows.waiting == ROWS - rows.done - checkpointed

    again = run_worker_process(job, run, *OPTIONS, "--log-format", "json")
    assert again.status == 0
    assert again.result["rows_resumed"] == checkpointed
    assert again.result["request_count"] == rows.waiting
