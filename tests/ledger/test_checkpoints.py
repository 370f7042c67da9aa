"""Checkpoint segments: what is finished is found again, and damage costs only its own rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest

from batchinfer.core import layout
from batchinfer.core.codec import raw
from batchinfer.ledger import checkpoints
from batchinfer.ledger.checkpoints import (
    FinishedRow,
    Segments,
    batches,
    encode_deaths,
    encode_rows,
    write_segment,
)
from batchinfer.storage import ObjectInfo
from fakes import MemoryStore
from making import overwrite

CHUNK = "part-00000"
SHA256 = "a" * 64
OTHER_SHA256 = "b" * 64
FIRST_ROW = 70


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"memory://{request.node.name}")


def row(line: int, text: str = "x", *, ok: bool = True) -> FinishedRow:
    return FinishedRow(
        line=line,
        ok=ok,
        code="" if ok else "c",
        prompt_tokens=3,
        output=raw(b'{"t":"%s"}' % text.encode()),
    )


def segment(
    store: MemoryStore,
    records: bytes,
    *,
    worker: str = "w0",
    seq: int = 1,
    chunk_sha256: str = SHA256,
    fingerprint: str = "f",
) -> str:
    key = layout.segment_key(CHUNK, worker, seq)
    write_segment(store, key, records, chunk_sha256=chunk_sha256, fingerprint=fingerprint)
    return key


def read(store: MemoryStore, name: str = CHUNK) -> tuple[Segments, list[FinishedRow]]:
    found = Segments(
        store,
        name,
        chunk_sha256=SHA256,
        fingerprint="f",
        first_row=FIRST_ROW,
        num_lines=3,
    )
    return found, list(found.rows())


def encoded(*rows: FinishedRow) -> bytes:
    return encode_rows(rows)[0]


def test_outputs_are_cut_out_of_their_records_by_position() -> None:
    data, payloads = encode_rows([row(3, "\u2028 and “quotes”"), row(0, "b")])
    cut = [(line, data[offset : offset + length].decode()) for line, offset, length in payloads]
    assert cut == [(3, '{"t":"\u2028 and “quotes”"}'), (0, '{"t":"b"}')]
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 2


def test_a_segment_of_other_text_is_not_taken_up_and_goes_with_the_marker(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [
        segment(store, encoded(row(0)), seq=1),
        segment(store, encoded(row(1)), seq=2, chunk_sha256=OTHER_SHA256),
        segment(store, encode_deaths([2], 1), seq=3, chunk_sha256=OTHER_SHA256),
        segment(store, encoded(row(2)), seq=4, fingerprint="of another configuration"),
        segment(store, encoded(row(2)), seq=5, fingerprint=""),
    ]
    with caplog.at_level(logging.WARNING):
        found, rows = read(store)
    assert [each.line for each in rows] == [0]
    assert (found.deaths, found.num_outdated) == ({}, 4)
    assert sorted(found.keys) == keys
    (warning,) = caplog.messages
    assert "part-00000: 4 checkpoint segments answer another text" in warning


@pytest.mark.parametrize(
    "data",
    [
        encoded(row(0), row(1)),
        b"not json\n" + encoded(row(0)),
        b"\xff\n",
        b"\n",
        b"{}\n",
        b'{"chunk_sha256":"%s"}\n' % SHA256.encode() + encoded(row(0)),
        b'{"chunk_sha256":"%s","fingerprint":"f"}\n' % SHA256.encode() + encoded(row(0)),
    ],
)
def test_a_segment_that_does_not_say_what_it_answers_is_not_taken_up(
    store: MemoryStore, data: bytes
) -> None:
    key = layout.segment_key(CHUNK, "w0", 1)
    store.create(key, data)
    found, rows = read(store)
    assert (rows, found.num_outdated, found.keys) == ([], 1, [key])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"line":1,', b'"line":2,'),
        (b'{"t":"yes"}', b'{"t":"not"}'),
        (b'"line":1,', b'"line":1,"cached_tokens":0,'),
    ],
)
def test_a_segment_whose_bytes_have_changed_is_not_taken_up(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, before: bytes, after: bytes
) -> None:
    key = segment(store, encoded(row(0)) + encoded(row(1, "yes")))
    whole = segment(store, encoded(row(2)), seq=2)
    data = store.get(key).data
    assert before in data
    for changed in (data.replace(before, after), data.splitlines(keepends=True)[0], data[:-1]):
        overwrite(store, key, changed)
        assert [each.line for each in read(store)[1]] == [2]
    found, _ = read(store)
    assert found.keys == [key, whole]
    assert f"{key}: was changed after it was written" in caplog.text


def test_a_row_whose_answer_is_of_another_row_is_not_taken_up(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = [b'{"_row":%d,"status":"ok"}' % (FIRST_ROW + number) for number in (0, 2, 1)]
    rows = [
        msgspec.structs.replace(row(line), output=raw(output))
        for line, output in enumerate(outputs)
    ]
    key = segment(store, encoded(*rows))
    assert [each.line for each in read(store)[1]] == [0]
    assert f"{key}: line 1 has the answer to row 72, expected row 71" in caplog.text


def test_batches_are_small_in_rows_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(line) for line in range(7)]
    monkeypatch.setattr(checkpoints, "_BATCH_ROWS", 3)
    assert list(batches(iter(rows))) == [rows[:3], rows[3:6], rows[6:]]
    monkeypatch.setattr(checkpoints, "_BATCH_BYTES", 2 * len(b'{"t":"x"}'))
    assert [len(batch) for batch in batches(rows)] == [2, 2, 2, 1]
    assert list(batches([])) == []


@pytest.mark.parametrize(
    "damage",
    [
        b"not json",
        b'{"line": "x"}',
        b'{"line": 99, "ok": true, "output": {}}',
        b'{"line": 3, "ok": true, "output": {}}',
        b'{"line": -1, "ok": true, "output": {}}',
        b'{"line": 1, "ok": true}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_record_costs_only_its_own_row(store: MemoryStore, damage: bytes) -> None:
    segment(store, encoded(row(0)) + damage + b"\n" + encoded(row(2)))
    assert [each.line for each in read(store)[1]] == [0, 2]


def test_a_foreign_object_among_the_segments_is_left_alone(store: MemoryStore) -> None:
    store.create(f"checkpoints/{CHUNK}/notes.txt", b"mine")
    found, rows = read(store)
    assert (rows, found.keys, found.num_outdated) == ([], [], 0)


def test_a_segment_that_vanishes_means_look_for_the_marker(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = segment(store, encoded(row(0)))
    listed = list(store.list(""))
    store.delete([key])

    def as_before(_prefix: str) -> Iterator[ObjectInfo]:
        return iter(listed)

    monkeypatch.setattr(store, "list", as_before)
    assert read(store)[0].has_vanished


def test_segments_of_a_chunk_whose_name_begins_alike_are_not_its_own(store: MemoryStore) -> None:
    key = layout.segment_key("part-000001", "w0", 1)
    write_segment(store, key, encoded(row(0)), chunk_sha256=SHA256, fingerprint="f")
    assert read(store, "part-00000")[1] == []
