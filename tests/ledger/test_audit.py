"""What a run is of: its own job is found wherever it lies, and another's is not taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import FORMAT_VERSION, Run
from batchinfer.ledger.audit import Audit, RunTarget, find_target
from batchinfer.ledger.inventory import take_inventory
from batchinfer.ledger.runs import job_places
from batchinfer.storage.opening import open_store
from making import make_job


def write_run(url: str, job: str, *, recorded: str = "") -> None:
    digest = codec.sha256(open_store(job).get(layout.JOB_KEY).data)
    config = {"job_sha256": digest, "limit": None}
    run = Run(
        format_version=FORMAT_VERSION,
        fingerprint=codec.fingerprint(config),
        nonce="n",
        config=config,
        recorded={"job": recorded},
    )
    open_store(url).create(layout.RUN_KEY, codec.encode(run))


def target_of(url: str, **options: str) -> RunTarget:
    store = open_store(url)
    inventory = take_inventory(store, now=0.0)
    return find_target(store, inventory, open_store, **options)


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=30, per_chunk=10)
    return str(tmp_path / "job")


def test_job_above_the_run_comes_before_the_recorded_place(job: str, tmp_path: Path) -> None:
    make_job(tmp_path / "old", rows=30, per_chunk=10)
    write_run(f"{job}/runs/a", job, recorded=str(tmp_path / "old"))
    found = target_of(f"{job}/runs/a")
    assert found.job_url == job
    assert list(found.expected) == ["part-00000", "part-00001", "part-00002"]


def test_recorded_job_is_taken_where_the_one_above_is_another_which_the_audit_finds_alone(
    job: str, tmp_path: Path
) -> None:
    other = str(tmp_path / "other")
    make_job(other, rows=5, per_chunk=5)
    write_run(f"{other}/runs/a", job, recorded=job)
    assert target_of(f"{other}/runs/a").job_url == job
    write_run(f"{other}/runs/b", job)
    audit = Audit(
        target_of(f"{other}/runs/b"), take_inventory(open_store(f"{other}/runs/b"), now=0.0)
    )
    audit.check_all()
    assert "job" in {finding.fix for finding in audit.findings}


@pytest.mark.parametrize(
    ("recorded", "said"), [("", "run.json"), ("http://127.0.0.1:1/d", "names the job 'http://127")]
)
def test_a_job_that_is_lost_or_elsewhere_is_to_be_named(
    job: str, tmp_path: Path, recorded: str, said: str
) -> None:
    lost = str(tmp_path / "lost {}")
    write_run(lost, job, recorded=recorded)
    with pytest.raises(InputError, match=said) as caught:
        target_of(lost)
    assert caught.value.hint == "name it: --job JOB"
    with pytest.raises(InputError, match=r"no job\.json there"):
        target_of(lost, job_url=str(tmp_path))
    assert target_of(lost, job_url=job).job_url == job


@pytest.mark.parametrize(
    ("recorded", "run_url", "is_followed"),
    [
        ("/data/job", "/out", True),
        ("file:///data/job", "/out", True),
        ("s3://b/job", "s3://b/out", True),
        ("r2://b/job", "s3://b/out", True),
        ("hf://datasets/o/n/job", "hf://datasets/o/n/out", True),
        ("http://127.0.0.1:1/d", "/out", False),
        ("s3://other/job", "s3://b/out", False),
        ("s3://b", "gs://b/out", False),
        ("s3://b/job", "/out", False),
        ("/data/job", "s3://b/out", False),
        ("hf://datasets/o/other/job", "hf://datasets/o/n/out", False),
        ("", "s3://b/elsewhere", False),
    ],
)
def test_recorded_job_is_followed_no_further_than_the_runs_bucket(
    recorded: str, run_url: str, *, is_followed: bool
) -> None:
    """Who can write run.json must not choose whom we ask."""
    places = {"job": recorded} if recorded else {}
    run = Run(format_version=1, fingerprint="f", nonce="n", config={}, recorded=places)
    assert job_places(run, run_url) == ([recorded] if is_followed else [])
    places["job"] = "s3://b/job/"
    assert job_places(run, "s3://b/job/runs/a") == ["s3://b/job"], "it is named once"
    assert job_places(None, "s3://b/a.batchinfer/run") == ["s3://b/a.batchinfer/job"]  # it loads
