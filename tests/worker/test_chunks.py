"""Opening chunks: what is taken up is of this very chunk, and takes little memory however much it is."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError
from batchinfer.ledger.checkpoints import FinishedRow, encode_rows, write_segment
from batchinfer.ledger.claims import Taken
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Publisher, build_output
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.chunk_opening import Opened, open_chunk
from batchinfer.worker.worker_config import RunAccess
from fakes import marker_record

NUM_SEGMENTS = 24
ROWS_EACH = 250
ROW_BYTES = 8000
TOTAL_BYTES = NUM_SEGMENTS * ROWS_EACH * ROW_BYTES


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    made = Scratch(tmp_path / "scratch")
    yield made
    made.close()


def put_chunk(tmp_path: Path) -> tuple[Store, str]:
    """A chunk of short rows; return its store and its sha256."""
    source = open_store(str(tmp_path / "job"))
    data = b"{}\n" * (NUM_SEGMENTS * ROWS_EACH)
    source.create("texts.jsonl", data)
    return source, codec.sha256(data)


def output_line(line: int) -> bytes:
    text = b"x" * (ROW_BYTES - 40)
    return b'{"_row":%d,"_id":"","status":200,"body":{"choices":[{"text":"%s"}]}}' % (line, text)


def publisher(run: Store) -> Publisher:
    return Publisher(run, nonce="n", require_lease=lambda: None)


def opened(ref: ChunkRef, run: Store, source: Store, scratch: Scratch) -> Opened:
    claims = SimpleNamespace(take=lambda _name: Taken(""), release=lambda *_: True)
    access = SimpleNamespace(
        store=run,
        fingerprint="f",
        claims=claims,
        publisher=publisher(run),
        scratch=scratch,
        source_at=lambda _url: source,
        checkpointed=(),
    )
    return open_chunk(ref, cast("RunAccess", access), now=0.0)


def peak_of_opening(ref: ChunkRef, source: Store, run: Store, scratch: Scratch) -> int:
    """Open a chunk all of whose rows are finished already; return the most bytes that were held meanwhile."""
    tracemalloc.start()
    try:
        chunk = opened(ref, run, source, scratch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(chunk, OpenChunk)
    num_rows = NUM_SEGMENTS * ROWS_EACH
    assert (chunk.num_left, chunk.counts.rows_resumed, chunk.counts.rows_ok) == (
        0,
        num_rows,
        num_rows,
    )
    for line, payload in enumerate(chunk.spool.payloads()):
        assert payload == output_line(line)
    chunk.close()
    return peak


def test_taking_up_segments_takes_the_memory_of_one_of_them(
    run: Store, scratch: Scratch, tmp_path: Path
) -> None:
    source, sha256 = put_chunk(tmp_path)
    for index in range(NUM_SEGMENTS):
        lines = range(index * ROWS_EACH, (index + 1) * ROWS_EACH)
        rows = [FinishedRow(line=n, ok=True, output=codec.raw(output_line(n))) for n in lines]
        write_segment(
            run,
            layout.segment_key("texts", "w0", index),
            encode_rows(rows)[0],
            chunk_sha256=sha256,
            fingerprint="f",
        )
    ref = ChunkRef(name="texts", root="job", key="texts.jsonl")
    assert peak_of_opening(ref, source, run, scratch) < TOTAL_BYTES / 3


def test_an_output_that_was_edited_is_not_taken_up_for_its_repair(
    run: Store, scratch: Scratch, tmp_path: Path
) -> None:
    """A line cut out of it moved all lines after it to other rows, and the repair vouched for them."""
    data = b"{}\n" * 3
    source = open_store(str(tmp_path / "job"))
    source.create("texts.jsonl", data)
    failed = b'{"_row":0,"_id":"0","status":400,"error":{"code":"c","message":"m"}}'
    lines = [failed, output_line(1), output_line(2)]
    built = build_output(scratch.new_path("output"), iter(lines))
    marker = marker_record(
        chunk="texts.jsonl", chunk_sha256=codec.sha256(data), rows_ok=2, rows_error=1
    )
    published = publisher(run).publish(built, marker, chunk="texts", leftovers=[])
    key = layout.output_key(published.marker.output)
    run.delete([key])
    run.create(key, b"\n".join([failed, output_line(2), b""]))
    ref = ChunkRef(name="texts", root="job", key="texts.jsonl", generation=1, base=0)
    with pytest.raises(InputError, match="is not what its marker vouches for") as caught:
        opened(ref, run, source, scratch)
    assert "--redo texts" in caught.value.hint
