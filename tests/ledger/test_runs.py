"""Promise P6: one configuration per run. And its job: it is found wherever it lies, and another is not taken for it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import Run
from batchinfer.ledger.runs import find_job, job_places, join_run, read_run
from batchinfer.ledger.spending import machine_of
from batchinfer.storage.opening import open_store
from fakes import MemoryStore, worker_record
from making import make_job, overwrite

CONFIG = {"model": "m", "sampling": {"temperature": 0.5}, "dtype": "bfloat16"}


def test_the_first_worker_writes_it_and_others_read_it_though_what_is_only_recorded_differs(
    store, caplog
):
    first = join_run(store, CONFIG, {"engine_version": "0.32.0", "gpu": "L4"}, nonce="a")
    assert first.fingerprint == codec.fingerprint(CONFIG)
    other = {"engine_version": "0.33.0", "gpu": "H100"}
    with caplog.at_level("WARNING", logger="batchinfer"):
        assert join_run(store, dict(reversed(CONFIG.items())), other, nonce="b") == first
    assert "0.32.0" in caplog.text
    assert "H100" not in caplog.text


def test_a_worker_pays_for_the_gpus_of_all_replicas_and_all_their_parts(store):
    parts = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    run = join_run(store, CONFIG, parts, nonce="a")
    record = worker_record(engine={"device": "NVIDIA L4", "num_replicas": 4})
    assert machine_of(record, run).gpus == 24
    assert machine_of(record).gpus == 4


def edit(store: MemoryStore, change: Callable[[dict[str, Any]], None]) -> None:
    """Write run.json anew, as somebody with an editor would."""
    contents = json.loads(store.get(layout.RUN_KEY).data)
    change(contents)
    overwrite(store, layout.RUN_KEY, codec.encode(contents))


def test_a_configuration_that_was_edited_is_refused(store):
    """It would be joined under the fingerprint of answers that were made with another one."""
    edited = {**CONFIG, "seed": 7}
    join_run(store, CONFIG, {}, nonce="a")
    edit(store, lambda contents: contents.update(config=edited))
    with pytest.raises(InputError, match=codec.fingerprint(edited)) as caught:
        read_run(store)
    assert "first worker" in caught.value.hint
    with pytest.raises(InputError, match="was edited"):
        join_run(store, edited, {}, nonce="b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("limit", "1; touch /tmp/x"),
        ("job_sha256", 5),
        ("prompt", "p"),
    ],
)
def test_what_is_no_number_or_mapping_is_damage(store, key, value):
    config = {**CONFIG, key: value}
    join_run(store, CONFIG, {}, nonce="a")
    fingerprint = codec.fingerprint(config)
    edit(store, lambda contents: contents.update(config=config, fingerprint=fingerprint))
    with pytest.raises(InputError, match=rf"\$\.config\.{key}") as caught:
        read_run(store)
    assert "verify" not in caught.value.hint


def test_of_two_jobs_a_run_is_of_the_one_whose_checksum_it_has(tmp_path):
    job, other = str(tmp_path / "job"), str(tmp_path / "other")
    make_job(job, rows=30, per_chunk=10)
    make_job(other, rows=5, per_chunk=5)
    config = {"job_sha256": codec.sha256(open_store(job).get(layout.JOB_KEY).data)}
    run = Run(format_version=1, fingerprint="f", nonce="n", config=config, recorded={"job": job})
    assert find_job(run, f"{other}/runs/a", open_store)[1] == job
    with pytest.raises(InputError, match="is another job"):
        find_job(run, f"{other}/runs/a", open_store, asked_url=other)


@pytest.mark.parametrize(
    ("recorded", "run_url", "is_followed"),
    [
        ("/data/job", "/out", True),
        ("s3://b/job", "s3://b/out", True),
        ("hf://datasets/o/n/job", "hf://datasets/o/n/out", True),
        ("http://127.0.0.1:1/d", "/out", False),
        ("s3://other/job", "s3://b/out", False),
        ("/data/job", "s3://b/out", False),
        ("hf://datasets/o/other/job", "hf://datasets/o/n/out", False),
    ],
)
def test_recorded_job_is_followed_no_further_than_the_runs_bucket(
    recorded, run_url, *, is_followed
):
    """Who can write run.json must not choose whom we ask."""
    places = {"job": recorded} if recorded else {}
    run = Run(format_version=1, fingerprint="f", nonce="n", config={}, recorded=places)
    assert job_places(run, run_url) == ([recorded] if is_followed else [])
    places["job"] = "s3://b/job/"
    assert job_places(run, "s3://b/job/runs/a") == ["s3://b/job"], "it is named once"
    assert job_places(run, "s3://b/moved/runs/a") == ["s3://b/moved", "s3://b/job"]
    assert job_places(None, "s3://b/a.batchinfer/run") == ["s3://b/a.batchinfer/job"]  # it loads
