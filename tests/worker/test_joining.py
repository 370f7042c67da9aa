"""What the workers of one run must agree on, and which columns a run needs."""

import json
from pathlib import Path
from unittest import mock

import pytest

from batchinfer.core.errors import ConfigError, RunMismatch
from making import make_job, run_worker_here


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=6, per_chunk=3)
    return str(tmp_path / "job")


def test_options_of_the_server_are_of_the_run_unless_they_only_suit_a_machine(job):
    run = f"{job}/runs/a"
    slow = ("--tokenizer-mode", "slow")
    run_worker_here(job, run, *slow, "--kv-cache-memory-bytes", "1")
    with pytest.raises(RunMismatch, match=r"server_options\.code_revision"):
        run_worker_here(job, run, *slow, "--code-revision", "abc")
    with pytest.raises(RunMismatch, match=r"server_options\.tokenizer_mode"):
        run_worker_here(job, run)
    result = run_worker_here(job, run, *slow, "--max-num-seqs", "3", "--gpu-memory-utilization=.5")
    assert result["chunks_skipped"] == 2
    recorded = json.loads(Path(run, "run.json").read_text())
    assert recorded["config"]["server_options"] == {"tokenizer_mode": "slow"}
    assert recorded["recorded"]["server_args"] == [*slow, "--kv-cache-memory-bytes", "1"]


def test_a_source_that_cannot_be_opened_is_refused_before_anything_is_claimed(job, monkeypatch):
    """It was found only when its chunk was opened, in the middle of a paid run."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    path = Path(job, "job.json")
    content = json.loads(path.read_text())
    content["chunks"][1]["file"] = "r2://bucket/rows.jsonl"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"r2://bucket.*: no endpoint"):
        run_worker_here(job, f"{job}/runs/a")
    assert not Path(job, "runs/a/run.json").exists()
    assert not Path(job, "runs/a/claims").exists()


def test_options_with_which_no_row_can_be_asked_are_refused_before_the_engine_loads(job):
    """It was found when the model was loaded, as an error without a hint, and tried again by whoever watched."""
    begin = mock.Mock(side_effect=AssertionError("the engine was opened"))
    with (
        mock.patch("batchinfer.engines.echo.EchoTarget.look", begin),
        pytest.raises(ConfigError, match="best_of: 1, expected a whole number from n, which is 3"),
    ):
        run_worker_here(job, f"{job}/runs/a", "--n", "3", "--sampling", "best_of=1")
