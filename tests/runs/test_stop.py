"""`batchinfer stop`: every worker obeys, and goes on only after `--resume`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError, StopRequested
from batchinfer.runs.stop import StopConfig, run_stop
from batchinfer.storage.opening import open_store
from making import (
    finish_process,
    make_job,
    run_process,
    run_worker_here,
    start_process,
    worker_arguments,
)


def stop(run: str, *, resume: bool = False) -> dict[str, Any]:
    config = StopConfig(run=run, resume=resume, reason="too dear")
    return run_stop(config, store=open_store(run), clock=SystemClock())


def test_a_running_worker_ends_with_3_and_keeps_its_rows(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    run = f"{job}/runs/a"
    make_job(job, rows=2000, per_chunk=500)
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
    assert 0 < ended.result["request_count"] < 2000
    with pytest.raises(StopRequested):
        run_worker_here(job, run)
    first = Path(run, layout.STOP_KEY).read_bytes()
    assert stop(run)["was_stopped"] is True
    assert Path(run, layout.STOP_KEY).read_bytes() == first, "a second request changes nothing"
    assert run_process(["stop", "--resume", run]).result["was_stopped"] is True
    assert stop(run, resume=True)["was_stopped"] is False
    assert run_worker_here(job, run)["rows_resumed"] > 0


def test_a_run_that_has_only_begun_can_be_stopped_and_what_is_no_run_cannot(tmp_path: Path) -> None:
    for key in (layout.worker_key("w0"), layout.launch_key("x")):
        run = str(tmp_path / key)
        open_store(run).create(key, b"{}")
        stop(run)
        assert Path(run, layout.STOP_KEY).exists()
    with pytest.raises(InputError, match="no run there"):
        stop(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
