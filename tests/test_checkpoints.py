"""Checkpoint segments: what is finished is found again, and damage costs only its own rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchinfer import layout
from batchinfer.checkpoints import (
    FinishedRow,
    encode_deaths,
    encode_row,
    read_segments,
    write_segment,
)
from batchinfer.codec import raw
from batchinfer.storage import ObjectInfo
from batchinfer.storage.memory import MemoryStore

CHUNK = "part-00000"


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
    store: MemoryStore, data: bytes, *, worker: str = "w0", epoch: int = 1, seq: int = 1
) -> str:
    key = layout.segment_key(CHUNK, epoch, worker, seq)
    write_segment(store, key, data)
    return key


def encoded(*rows: FinishedRow) -> bytes:
    return b"".join(encode_row(each)[0] for each in rows)


def test_the_output_is_cut_out_of_its_record_by_position() -> None:
    record, offset = encode_row(row(3, "\u2028 and “quotes”"))
    output = '{"t":"\u2028 and “quotes”"}'.encode()
    assert record[offset : offset + len(output)] == output
    assert record.endswith(b"}\n")
    assert record.count(b"\n") == 1


def test_rows_of_all_segments_are_found_and_the_first_copy_counts(store: MemoryStore) -> None:
    keys = [
        segment(store, encoded(row(0, "a"), row(2, "c")), seq=1),
        segment(store, encoded(row(2, "later"), row(1, "b", ok=False)), worker="w1", seq=1),
    ]
    found = read_segments(store, CHUNK, 3)
    assert {line: bytes(each.output) for line, each in found.rows.items()} == {
        0: b'{"t":"a"}',
        2: b'{"t":"c"}',
        1: b'{"t":"b"}',
    }
    assert (found.rows[1].ok, found.rows[1].code, found.rows[0].prompt_tokens) == (False, "c", 3)
    assert sorted(found.keys) == sorted(keys)
    assert not found.vanished


def test_engine_deaths_add_up_over_segments(store: MemoryStore) -> None:
    segment(store, encode_deaths([1, 2]), epoch=1)
    segment(store, encode_deaths([2]), epoch=2)
    assert read_segments(store, CHUNK, 3).deaths == {1: 1, 2: 2}


@pytest.mark.parametrize(
    "damage",
    [
        b"not json",
        b'{"line": "x"}',
        b'{"line": 99, "ok": true, "output": {}}',
        b'{"line": 1, "ok": true}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_record_costs_only_its_own_row(store: MemoryStore, damage: bytes) -> None:
    segment(store, encoded(row(0)) + damage + b"\n" + encoded(row(2)))
    assert sorted(read_segments(store, CHUNK, 3).rows) == [0, 2]


def test_a_foreign_object_among_the_segments_is_left_alone(store: MemoryStore) -> None:
    store.create(f"checkpoints/{CHUNK}/notes.txt", b"mine")
    found = read_segments(store, CHUNK, 3)
    assert (found.rows, found.keys) == ({}, [])


def test_a_segment_that_vanishes_means_look_for_the_marker(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = segment(store, encoded(row(0)))
    listed = list(store.list(""))
    store.delete([key])

    def as_before(_prefix: str) -> Iterator[ObjectInfo]:
        return iter(listed)

    monkeypatch.setattr(store, "list", as_before)
    assert read_segments(store, CHUNK, 3).vanished


def test_segments_of_a_chunk_whose_name_begins_alike_are_not_its_own(store: MemoryStore) -> None:
    write_segment(store, layout.segment_key("part-000001", 1, "w0", 1), encoded(row(0)))
    assert read_segments(store, "part-00000", 3).rows == {}
