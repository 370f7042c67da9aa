"""Checkpoint segments: what is finished is found again, and damage costs only its own rows.

The simulation shows that rows come back in place, and what becomes of a segment that vanishes.
"""

from __future__ import annotations

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
from fakes import MemoryStore
from making import overwrite

CHUNK = "part-00000"
SHA256 = "a" * 64
FIRST_ROW = 70


def row(line: int, output: bytes = b'{"t":"x"}') -> FinishedRow:
    return FinishedRow(line=line, ok=True, prompt_tokens=3, output=raw(output))


def encoded(*rows: FinishedRow) -> bytes:
    return encode_rows(rows)[0]


def segment(store: MemoryStore, records: bytes, seq: int = 1, **of: str) -> str:
    key = layout.segment_key(CHUNK, "w0", seq)
    write_segment(store, key, records, **({"chunk_sha256": SHA256, "fingerprint": "f"} | of))
    return key


def read(store: MemoryStore) -> tuple[Segments, list[int]]:
    """The chunk's segments, and the lines whose rows they give."""
    found = Segments(
        store, CHUNK, chunk_sha256=SHA256, fingerprint="f", first_row=FIRST_ROW, num_lines=3
    )
    return found, [each.line for each in found.rows()]


def test_a_segment_of_other_text_is_not_taken_up_and_goes_with_the_marker(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [
        segment(store, encoded(row(0)), 1),
        segment(store, encoded(row(1)), 2, chunk_sha256="b" * 64),
        segment(store, encode_deaths([2], 1), 3, chunk_sha256="b" * 64),
        segment(store, encoded(row(2)), 4, fingerprint="of another configuration"),
        segment(store, encoded(row(2)), 5, fingerprint=""),
    ]
    store.create(f"checkpoints/{CHUNK}/notes.txt", b"mine")
    segment_of_another = layout.segment_key(f"{CHUNK}1", "w0", 1)
    write_segment(store, segment_of_another, encoded(row(1)), chunk_sha256=SHA256, fingerprint="f")
    found, lines = read(store)
    assert lines == [0]
    assert (found.deaths, found.num_outdated) == ({}, 4)
    assert sorted(found.keys) == keys
    assert "part-00000: 4 checkpoint segments answer another text" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        encoded(row(0), row(1)),
        b"not json\n" + encoded(row(0)),
        b"\xff\n",
        b"\n",
        b"{}\n",
        b'{"chunk_sha256":"%s","fingerprint":"f"}\n' % SHA256.encode() + encoded(row(0)),
    ],
)
def test_a_segment_that_does_not_say_what_it_answers_is_not_taken_up(
    store: MemoryStore, data: bytes
) -> None:
    key = layout.segment_key(CHUNK, "w0", 1)
    store.create(key, data)
    found, lines = read(store)
    assert (lines, found.num_outdated, found.keys) == ([], 1, [key])


def test_a_segment_whose_bytes_have_changed_is_not_taken_up(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    key = segment(store, encoded(row(0), row(1)))
    whole = segment(store, encoded(row(2)), 2)
    data = store.get(key).data
    for changed in (
        data.replace(b'"line":1', b'"line":2'),
        data.replace(b'{"t":"x"}', b'{"t":"y"}', 1),
        data.splitlines(keepends=True)[0],
        data[:-1],
    ):
        assert changed != data
        overwrite(store, key, changed)
        found, lines = read(store)
        assert (lines, found.keys) == ([2], [key, whole])
    assert f"{key}: was changed after it was written" in caplog.text


def test_a_row_whose_answer_is_of_another_row_is_not_taken_up(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = (FIRST_ROW, FIRST_ROW + 2, FIRST_ROW + 1)
    key = segment(store, encoded(*(row(n, b'{"_row":%d}' % numbers[n]) for n in range(3))))
    assert read(store)[1] == [0]
    assert "line 1 has the answer to row 72, expected row 71" in caplog.text
    assert key in caplog.text


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
    assert read(store)[1] == [0, 2]


def test_batches_are_small_in_rows_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(line) for line in range(7)]
    monkeypatch.setattr(checkpoints, "_BATCH_ROWS", 3)
    assert list(batches(iter(rows))) == [rows[:3], rows[3:6], rows[6:]]
    monkeypatch.setattr(checkpoints, "_BATCH_BYTES", 2 * len(b'{"t":"x"}'))
    assert [len(batch) for batch in batches(rows)] == [2, 2, 2, 1]
    assert list(batches([])) == []
