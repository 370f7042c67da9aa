"""What `status`, `report`, `verify` and the next start say right after a worker was killed: the same as the bucket."""

from __future__ import annotations

import json
import signal
import time
from typing import Any, NamedTuple

import pytest

from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import StatusConfig, run_status
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage.opening import open_store
from making import Finished, make_job, run_worker_process, start_process, worker_arguments

ROWS = 400
OPTIONS = ("--worker-id", "w0", "--checkpoint-seconds", "0.2", "--max-num-seqs", "16")


class Killed(NamedTuple):
    """A run right after its worker was killed, and what the next start of the worker did with it."""

    url: str
    checkpointed: int
    """Different rows in the segments of chunks without a marker."""
    num_markers: int
    status: Overview
    verified: dict[str, Any]
    again: Finished


def rows_in_segments(run: str) -> int:
    store = open_store(run)
    found = set()
    for info in store.list(layout.CHECKPOINTS):
        name = info.key.split("/")[1]
        lines = store.get(info.key).data.splitlines()[1:]
        found |= {(name, json.loads(line)["line"]) for line in lines}
    done = {layout.parse_marker(info.key) for info in store.list(layout.OUTPUTS)}
    return len({row for row in found if (row[0], 0) not in done})


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A worker that is killed long after its last heartbeat, with chunks done and rows checkpointed since."""
    job = tmp_path_factory.mktemp("killed") / "job"
    make_job(job, rows=ROWS, per_chunk=50)
    run = str(job / "runs" / "a")
    slow = ("--echo-latency-seconds", "0.2", "--lease-seconds", "120")
    process = start_process(worker_arguments(job, run, *OPTIONS, *slow))
    try:
        outputs, deadline = job / "runs" / "a" / "outputs", time.monotonic() + 60
        while len(list(outputs.glob("*.succeed"))) < 2 or not rows_in_segments(run):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    checkpointed, num_markers = rows_in_segments(run), len(list(outputs.glob("*.succeed")))
    status = look(run)
    verified = run_verify(VerifyConfig(run=run), open_store=open_store, clock=SystemClock()).result
    again = run_worker_process(job, run, *OPTIONS, "--log-format", "json")
    return Killed(run, checkpointed, num_markers, status, verified, again)


def look(run: str) -> Overview:
    return run_status(StatusConfig(run=run), open_store=open_store, clock=SystemClock())


def events(log: str, name: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [entry["fields"] for entry in entries if entry.get("event") == name]


def test_status_counts_what_lies_in_the_bucket(killed: Killed) -> None:
    rows = killed.status.rows
    assert rows.done == killed.verified["rows_ok"] == 50 * killed.num_markers
    assert rows.in_progress == killed.checkpointed
    assert rows.waiting == ROWS - rows.done - killed.checkpointed


def test_the_next_start_goes_on_from_the_same_numbers(killed: Killed) -> None:
    assert killed.again.status == 0
    (read,) = events(killed.again.stderr, "manifests_read")
    assert read == {
        "chunks": ROWS // 50,
        "done_before": killed.num_markers,
        "rows_checkpointed": killed.checkpointed,
    }
    opened = events(killed.again.stderr, "chunk_open")
    assert sum(chunk["resumed"] for chunk in opened) == killed.checkpointed
    assert killed.again.result["rows_resumed"] == killed.checkpointed
    assert killed.again.result["request_count"] == killed.status.rows.waiting
    (view,) = look(killed.url).workers
    assert view.rows_resumed == killed.checkpointed
