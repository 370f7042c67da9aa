"""`batchinfer stop`: every worker obeys, and goes on only after `--resume`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError, StopRequested
from batchinfer.runs.stop import StopConfig, run_stop
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage.opening import open_store
from making import (
    finish_process,
    make_job,
    run_process,
    run_worker_here,
    start_process,
    worker_arguments,
)


@pytest.fixture
def job(tmp_path: Path) -> str:
    url = str(tmp_path / "job")
    make_job(url, rows=2000, per_chunk=500)
    return url


def stop(run: str, *, resume: bool = False) -> dict:
    return run_stop(
        StopConfig(run=run, resume=resume, reason="too dear"),
        store=open_store(run),
        clock=SystemClock(),
    )


def test_a_running_worker_ends_with_3_and_keeps_its_rows(job: str) -> None:
    run = f"{job}/runs/a"
    options = ["--echo-latency-seconds", "2", "--lease-seconds", "1", "--checkpoint-seconds", "0.3"]
    process = start_process(worker_arguments(job, run, *options, "--grace-seconds", "0.5"))
    while process.poll() is None and not any(Path(run, layout.CHECKPOINTS).glob("*/*.jsonl")):
        time.sleep(0.05)

    stopped = run_process(["stop", run, "--reason", "too dear"])

    assert stopped.status == 0
    assert (stopped.result["stopped"], stopped.result["was_stopped"]) == (True, False)
    assert json.loads(Path(run, layout.STOP_KEY).read_bytes())["reason"] == "too dear"
    ended = finish_process(process)
    assert (ended.status, ended.result["exit_status"]) == (3, 3), ended.stderr
    assert f"batchinfer stop --resume {run}" in ended.stderr
    assert 0 < ended.result["request_count"] < 2000

    with pytest.raises(StopRequested):
        run_worker_here(job, run)
    resumed = run_process(["stop", "--resume", run])
    assert (resumed.result["stopped"], resumed.result["was_stopped"]) == (False, True)
    assert run_worker_here(job, run)["rows_resumed"] > 0
    config = VerifyConfig(run=run, is_deep=True)
    assert run_verify(config, open_store=open_store, clock=SystemClock()).is_sound


def test_stopping_and_resuming_twice_changes_nothing(job: str) -> None:
    run = f"{job}/runs/a"
    run_worker_here(job, run)
    store = open_store(run)
    assert stop(run)["was_stopped"] is False
    first = store.get(layout.STOP_KEY)
    assert stop(run)["was_stopped"] is True
    assert store.get(layout.STOP_KEY) == first
    assert stop(run, resume=True)["was_stopped"] is True
    assert stop(run, resume=True)["was_stopped"] is False


def test_a_run_whose_workers_are_still_loading_can_be_stopped(job: str) -> None:
    run = f"{job}/runs/a"
    process = start_process(
        worker_arguments(job, run, "--echo-load-seconds", "60", "--lease-seconds", "1")
    )
    while process.poll() is None and not any(Path(run, layout.WORKERS).glob("*.json")):
        time.sleep(0.05)
    assert not Path(run, layout.RUN_KEY).exists()
    stop(run)
    assert finish_process(process).status == 3


def test_what_is_no_run_cannot_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run there"):
        stop(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    assert run_process(["stop", str(tmp_path / "nowhere")]).status == 2


@pytest.mark.s3
def test_the_same_on_s3(s3_url) -> None:
    job = s3_url("job")
    make_job(job, rows=20, per_chunk=10)
    run_worker_here(job, f"{job}/runs/a")
    assert stop(f"{job}/runs/a")["was_stopped"] is False
    with pytest.raises(StopRequested):
        run_worker_here(job, f"{job}/runs/a")
    stop(f"{job}/runs/a", resume=True)
    assert run_worker_here(job, f"{job}/runs/a")["chunks_skipped"] == 2
