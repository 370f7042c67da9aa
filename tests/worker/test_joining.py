"""What a worker refuses before it claims or loads anything."""

import json

import pytest

from batchinfer.core.errors import ConfigError
from making import make_job, run_worker_here


def test_a_source_that_cannot_be_opened_is_refused_before_anything_is_claimed(
    tmp_path, monkeypatch
):
    """It was found only when its chunk was opened, in the middle of a paid run."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    job, path = tmp_path / "job", tmp_path / "job/job.json"
    make_job(job, rows=6, per_chunk=3)
    content = json.loads(path.read_text())
    content["chunks"][1]["file"] = "s3://bucket/rows.jsonl"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"s3://bucket.* is no URL"):
        run_worker_here(job, job / "runs/a")
    assert not (job / "runs/a/run.json").exists()
    assert not (job / "runs/a/claims").exists()
