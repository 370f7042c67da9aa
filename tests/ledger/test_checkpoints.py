"""Checkpoint segments: what is finished is found again, and what answers another text or was changed is not.

The simulation shows that rows come back in place, and what becomes of a segment that vanishes.
"""

import hashlib

from batchinfer.core import layout
from batchinfer.core.codec import raw
from batchinfer.ledger.checkpoints import (
    FinishedRow,
    Segments,
    encode_deaths,
    encode_rows,
    write_segment,
)
from fakes import MemoryStore

CHUNK = "part-00000"
SHA256 = "a" * 64


def row(line: int, output: bytes = b'{"t":"x"}') -> FinishedRow:
    return FinishedRow(line=line, ok=True, prompt_tokens=3, output=raw(output))


def encoded(*rows: FinishedRow) -> bytes:
    return encode_rows(rows)[0]


def segment(store: MemoryStore, records: bytes, seq: int = 1, **of: str) -> str:
    key = layout.segment_key(CHUNK, "w0", seq)
    write_segment(store, key, records, **({"chunk_sha256": SHA256, "fingerprint": "f"} | of))
    return key


def test_a_segment_has_the_bytes_that_the_format_says(store):
    records = encode_rows([row(7), FinishedRow(line=8, ok=False, code="c", output=raw(b"{}"))])[0]
    records += encode_deaths([9], 512)
    assert records.splitlines() == [
        b'{"prompt_tokens":3,"line":7,"ok":true,"output":{"t":"x"}}',
        b'{"line":8,"ok":false,"code":"c","output":{}}',
        b'{"line":9,"engine_deaths":1,"rows_in_flight":512}',
    ]
    key = segment(store, records)
    assert key == "checkpoints/part-00000/w0-000001.0.jsonl"
    header = b'{"chunk_sha256":"%s","fingerprint":"f","sha256":"%s"}\n'
    sums = SHA256.encode(), hashlib.sha256(records).hexdigest().encode()
    assert store.get(key).data == header % sums + records


SILENT = [
    encoded(row(0), row(1)),
    b"not json\n" + encoded(row(0)),
    b"\xff\n",
    b"\n",
    b"{}\n",
    b'{"chunk_sha256":"%s","fingerprint":"f"}\n' % SHA256.encode() + encoded(row(0)),
]
"""Segments that do not say what they answer."""


def test_a_segment_of_other_text_is_not_taken_up_and_goes_with_the_marker(store, caplog):
    keys = [
        segment(store, encoded(row(0)), 1),
        segment(store, encoded(row(1)), 2, chunk_sha256="b" * 64),
        segment(store, encode_deaths([2], 1), 3, chunk_sha256="b" * 64),
        segment(store, encoded(row(2)), 4, fingerprint="of another configuration"),
        segment(store, encoded(row(2)), 5, fingerprint=""),
    ]
    for seq, data in enumerate(SILENT, 6):
        keys.append(layout.segment_key(CHUNK, "w0", seq))
        store.create(keys[-1], data)
    store.create(f"checkpoints/{CHUNK}/notes.txt", b"mine")
    segment_of_another = layout.segment_key(f"{CHUNK}1", "w0", 1)
    write_segment(store, segment_of_another, encoded(row(1)), chunk_sha256=SHA256, fingerprint="f")
    found = Segments(store, CHUNK, chunk_sha256=SHA256, fingerprint="f")
    assert [each.line for each in found.rows()] == [0]
    assert not found.deaths
    assert sorted(found.keys) == keys
    assert caplog.text.count("is of another text or configuration") == 10
