"""Markers that careless hands have damaged: the worker does a chunk again whose marker is empty, cut off or without its
output. Claims are in test_claims.
"""

import json

import pytest

from batchinfer.core import codec, layout
from batchinfer.ledger.publishing import SMALLEST_MARKER_BYTES
from batchinfer.storage.opening import open_store
from making import finished_chunks, make_job, overwrite, read_marker, run_worker_here

CHUNK = "part-00001"
MARKER = layout.marker_key(CHUNK)


@pytest.fixture
def job(memory_url):
    make_job(memory_url, rows=30, per_chunk=10)
    return memory_url


def test_markers_that_were_swapped_are_replaced(job):
    run = open_store(f"{job}/runs/a")
    run_worker_here(job, run.url)
    one, other = (run.get(layout.marker_key(name)).data for name in ("part-00000", CHUNK))
    overwrite(run, layout.marker_key("part-00000"), other)
    overwrite(run, MARKER, one)
    assert run_worker_here(job, run.url)["request_count"] == 20
    assert read_marker(run, CHUNK).chunk == f"chunks/{CHUNK}.jsonl"


@pytest.mark.parametrize("damage", [None, b"", b'{"output":"part-', b"x" * 600, slice(-40)])
def test_a_marker_that_is_damaged_or_lacks_its_output_is_replaced(job, damage):
    run = open_store(f"{job}/runs/a")
    run_worker_here(job, run.url)
    before = read_marker(run, CHUNK)
    if isinstance(damage, slice):
        overwrite(run, MARKER, run.get(MARKER).data[damage])
    else:
        if damage is not None:
            overwrite(run, MARKER, damage)
        if damage is None or len(damage) > SMALLEST_MARKER_BYTES:
            # A listing cannot tell a long text from a marker.
            run.delete([layout.output_key(before.output)])
        assert set(finished_chunks(run)) == {"part-00000", "part-00002"}

    result = run_worker_here(job, run.url)

    assert (result["chunks_done"], result["chunks_skipped"]) == (1, 2)
    marker = read_marker(run, CHUNK)
    data = run.get(layout.output_key(marker.output)).data
    assert (len(data), codec.sha256(data)) == (marker.output_bytes, marker.output_sha256)
    assert marker.nonce != before.nonce


@pytest.mark.parametrize("again", [[], ["--retry-errors"]])
def test_a_marker_of_a_repair_that_is_cut_is_no_success(tmp_path, again):
    job, run = tmp_path / "job", tmp_path / "run"
    make_job(job, rows=4, per_chunk=2, make_row=lambda row: {"prompt": "x" if row else ""})
    run_worker_here(job, run)
    repair = run_worker_here(job, run, "--retry-errors")
    assert (repair["request_count"], repair["rows_resumed"]) == (1, 1), "the failed row alone"
    marker = run / "outputs/part-00000.succeed.1"
    marker.write_bytes(marker.read_bytes()[:-40])
    assert run_worker_here(job, run, *again)["status"] == "SUCCESS"
    assert json.loads(marker.read_bytes())["rows_error"] == 1
