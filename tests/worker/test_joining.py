"""What a worker refuses before it claims or loads anything."""

import json
from pathlib import Path
from unittest import mock

import pytest

from batchinfer.core.errors import ConfigError
from making import make_job, run_worker_here


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=6, per_chunk=3)
    return str(tmp_path / "job")


def test_a_source_that_cannot_be_opened_is_refused_before_anything_is_claimed(job, monkeypatch):
    """It was found only when its chunk was opened, in the middle of a paid run."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    path = Path(job, "job.json")
    content = json.loads(path.read_text())
    content["chunks"][1]["file"] = "s3://bucket/rows.jsonl"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"s3://bucket.* is no URL"):
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
