"""Markers that careless hands have damaged: the worker does a chunk again whose marker is empty, cut off or without its
output. Claims are in test_claims.
"""

from __future__ import annotations

import pytest

from batchinfer.core import codec, layout
from batchinfer.ledger.publishing import SMALLEST_MARKER_BYTES
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from making import (
    finished_chunks,
    make_job,
    output_key,
    overwrite,
    read_marker,
    run_worker_here,
)

CHUNK = "part-00001"
MARKER = layout.marker_key(CHUNK)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    url = f"memory://{request.node.name}"
    make_job(url, rows=30, per_chunk=10)
    return url


def is_sound(store: Store, name: str) -> bool:
    marker = read_marker(store, name)
    data = store.get(layout.output_key(marker.output)).data
    return (len(data), codec.sha256(data)) == (marker.output_bytes, marker.output_sha256)


@pytest.mark.parametrize("damage", [b"", b'{"output":"part-', b"x" * 600])
def test_an_unreadable_marker_is_replaced_once_its_chunk_is_opened(job: str, damage: bytes) -> None:
    run = open_store(f"{job}/runs/a")
    run_worker_here(job, run.url)
    output = output_key(run, CHUNK)
    overwrite(run, MARKER, damage)
    if len(damage) > SMALLEST_MARKER_BYTES:
        run.delete([output])  # a listing cannot tell; without its output it is opened
    assert set(finished_chunks(run)) == {"part-00000", "part-00002"}

    result = run_worker_here(job, run.url)

    assert (result["chunks_done"], result["chunks_skipped"]) == (1, 2)
    assert is_sound(run, CHUNK)


def test_a_marker_whose_output_is_gone_is_replaced(job: str) -> None:
    run = open_store(f"{job}/runs/a")
    run_worker_here(job, run.url)
    before = read_marker(run, CHUNK)
    run.delete([output_key(run, CHUNK)])

    result = run_worker_here(job, run.url)

    assert result["chunks_done"] == 1
    assert is_sound(run, CHUNK)
    assert read_marker(run, CHUNK).nonce != before.nonce
