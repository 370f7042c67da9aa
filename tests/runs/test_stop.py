"""`batchinfer stop`: every worker obeys, and goes on only after `--resume`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError, StopRequested
from batchinfer.runs.stop import StopConfig, run_stop
from batchinfer.storage.opening import open_store
from making import make_job, run_worker_here


def stop(run: str, *, resume: bool = False) -> dict[str, Any]:
    config = StopConfig(run=run, resume=resume, reason="too dear")
    return run_stop(config, store=open_store(run), clock=SystemClock())


def test_no_worker_starts_before_the_run_is_resumed(tmp_path: Path) -> None:
    """The simulation stops workers that run."""
    job, run = str(tmp_path / "job"), str(tmp_path / "job/runs/a")
    make_job(job, rows=20, per_chunk=10)
    run_worker_here(job, run, "--limit", "5")
    assert (stop(run)["stopped"], stop(run)["was_stopped"]) == (True, True)
    first = Path(run, layout.STOP_KEY).read_bytes()
    assert json.loads(first)["reason"] == "too dear"
    with pytest.raises(StopRequested):
        run_worker_here(job, run)
    stop(run)
    assert Path(run, layout.STOP_KEY).read_bytes() == first, "a second request changes nothing"
    assert stop(run, resume=True)["was_stopped"] is True
    assert stop(run, resume=True)["was_stopped"] is False
    assert run_worker_here(job, run, "--limit", "5")["status"] == "SUCCESS"


def test_a_run_that_has_only_begun_can_be_stopped_and_what_is_no_run_cannot(tmp_path: Path) -> None:
    for key in (layout.worker_key("w0"), layout.launch_key("x")):
        run = str(tmp_path / key)
        open_store(run).create(key, b"{}")
        stop(run)
        assert Path(run, layout.STOP_KEY).exists()
    with pytest.raises(InputError, match="no run there"):
        stop(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
