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
from making import finish_process, make_job, run_worker_here, start_process, worker_arguments


def stop(run: str, *, resume: bool = False) -> dict[str, Any]:
    return run_stop(StopConfig(run=run, resume=resume), store=open_store(run), clock=SystemClock())


def test_a_running_worker_ends_with_3_and_none_starts_before_the_run_is_resumed(
    tmp_path: Path,
) -> None:
    job, run = str(tmp_path / "job"), str(tmp_path / "job/runs/a")
    make_job(job, rows=200, per_chunk=50)
    options = ["--echo-latency-seconds", "9", "--lease-seconds", "1", "--checkpoint-seconds", "0.3"]
    options += ["--max-num-seqs", "8", "--grace-seconds", "0.5"]
    process = start_process(worker_arguments(job, run, *options))
    while process.poll() is None and not any(Path(run, layout.CHECKPOINTS).glob("*/*.jsonl")):
        time.sleep(0.05)
    assert (stop(run)["stopped"], stop(run)["was_stopped"]) == (True, True)
    first = Path(run, layout.STOP_KEY).read_bytes()
    assert json.loads(first)["requested"]
    assert finish_process(process).status == StopRequested.exit_status == 3
    with pytest.raises(StopRequested):
        run_worker_here(job, run)
    stop(run)
    assert Path(run, layout.STOP_KEY).read_bytes() == first, "a second request changes nothing"
    assert stop(run, resume=True)["was_stopped"] is True
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
