"""Opening chunks: what is taken up is of this very chunk, and takes little memory however much it is."""

import tracemalloc
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, StorageError
from batchinfer.core.records import FinishedRow
from batchinfer.ledger.checkpoints import encode_rows, write_segment
from batchinfer.ledger.claims import Taken
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import build_output, publish
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from batchinfer.storage.scratch import Scratch
from batchinfer.worker import chunk_opening
from batchinfer.worker.chunk_opening import Opened, open_chunk
from counting_store import CountingStore
from fakes import HeldLease, marker_record
from making import overwrite

NUM_SEGMENTS = 24
ROWS_EACH = 250
ROW_BYTES = 8000
NUM_ROWS = NUM_SEGMENTS * ROWS_EACH
REF = ChunkRef(name="texts", root="job", key="texts.jsonl", rows_to_do=NUM_ROWS)
FAILED = b'{"_row":0,"_id":"","status":400,"error":{"code":"c","message":"m"}}'


@pytest.fixture
def source(tmp_path):
    """A job's folder with a chunk of short rows."""
    made = open_store(str(tmp_path / "job"))
    made.create(REF.key, b"{}\n" * NUM_ROWS)
    return made


def output_line(line: int) -> bytes:
    text = b"x" * (ROW_BYTES - 40)
    return b'{"_row":%d,"_id":"","status":200,"body":{"choices":[{"text":"%s"}]}}' % (line, text)


def error_line(line: int) -> bytes:
    text = b"x" * (ROW_BYTES - 60)
    error = b'{"code":"c","message":"%s"}' % text
    return b'{"_row":%d,"_id":"","status":400,"error":%s}' % (line, error)


def finished(line: int, output: bytes, *, is_ok: bool) -> FinishedRow:
    return FinishedRow(line=line, ok=is_ok, code="" if is_ok else "c", output=codec.raw(output))


def save(run: Store, source: Store, number: int, *rows: FinishedRow) -> None:
    """Write a segment of the chunk."""
    sums = {"chunk_sha256": codec.sha256(source.get(REF.key).data), "fingerprint": "f"}
    write_segment(run, layout.segment_key("texts", "w0", number), encode_rows(rows)[0], **sums)


def opened(ref: ChunkRef, run: Store, source: Store, scratch: Scratch) -> Opened:
    access = SimpleNamespace(
        store=run,
        fingerprint="f",
        retry_errors=False,
        claims=SimpleNamespace(take=lambda _name: Taken(""), release=lambda *_: True),
        scratch=scratch,
        source_at=lambda _url: source,
    )
    return open_chunk(ref, access, now=0.0)


@pytest.mark.parametrize("make_line", [output_line, error_line])
def test_taking_up_segments_takes_the_memory_of_one_of_them(store, source, scratch, make_line):
    """All rows of the chunk are finished already."""
    is_ok = make_line is output_line
    for index in range(NUM_SEGMENTS):
        lines = range(index * ROWS_EACH, (index + 1) * ROWS_EACH)
        save(store, source, index, *(finished(n, make_line(n), is_ok=is_ok) for n in lines))
    tracemalloc.start()
    try:
        chunk = opened(REF, store, source, scratch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counts = chunk.counts
    assert (chunk.num_left, counts.rows_resumed) == (0, NUM_ROWS)
    assert (counts.rows_ok, counts.rows_error) == ((NUM_ROWS, 0) if is_ok else (0, NUM_ROWS))
    for line, payload in enumerate(chunk.spool.payloads()):
        assert payload == make_line(line)
    chunk.close()
    assert peak < NUM_ROWS * ROW_BYTES / 3


def test_an_answer_comes_before_an_error_of_the_same_row(store, source, scratch):
    """The row was asked again with --retry-errors: a later start without it took up the error."""
    failed, answered = finished(0, FAILED, is_ok=False), finished(0, output_line(0), is_ok=True)
    for number, row in enumerate([failed, answered, failed]):
        save(store, source, number, row)
    counting = CountingStore(store)
    chunk = opened(REF, counting, source, scratch)
    assert (chunk.counts.rows_ok, chunk.counts.rows_error) == (1, 0)
    assert counting.requests["list"] == 1, (
        "of a segment that comes between two looks a part would be taken up"
    )
    chunk.close()


def test_an_output_that_was_edited_is_not_taken_up_for_its_repair(store, source, scratch):
    """A line cut out of it moved all lines after it to other rows, and the repair vouched for them."""
    built = build_output(scratch.new_path("output"), [FAILED, output_line(1), output_line(2)])
    sha256 = codec.sha256(source.get(REF.key).data)
    marker = marker_record(chunk=REF.key, chunk_sha256=sha256, rows_ok=2, rows_error=1)
    published = publish(store, HeldLease("n"), built, marker, chunk="texts", leftovers=[])
    cut = FAILED + b"\n" + output_line(2) + b"\n"
    overwrite(store, layout.output_key(published.marker.output), cut)
    with pytest.raises(InputError, match="is not what its marker vouches for") as caught:
        opened(REF._replace(generation=1, base=0), store, source, scratch)
    assert "--redo texts" in caught.value.hint


def test_answers_to_another_text_are_not_taken_up_for_a_repair(store, source, scratch):
    """job.json was put back to an older one: the new marker vouched for answers to rows that were gone."""
    built = build_output(scratch.new_path("output"), [FAILED, output_line(1)])
    marker = marker_record(chunk=REF.key, chunk_sha256="0" * 64, rows_ok=1, rows_error=1)
    publish(store, HeldLease("n"), built, marker, chunk="texts", leftovers=[])
    with pytest.raises(InputError, match="was changed after it was done"):
        opened(REF._replace(generation=1, base=0), store, source, scratch)


def test_a_chunk_that_cannot_be_opened_leaves_no_copy(store, source, scratch, monkeypatch):
    """Each attempt left one, and nobody counted them: the disk was full in the end."""
    monkeypatch.setattr(chunk_opening, "Spool", Mock(side_effect=StorageError("too many files")))
    with pytest.raises(StorageError, match="too many files"):
        opened(REF, store, source, scratch)
    assert [path.name for path in scratch.folder.iterdir()] == ["lock"]
