"""A chunk's local copy: every line of it, and only if the bytes are those that job.json names."""

from typing import Any

import pytest
import zstandard

from batchinfer.core import codec
from batchinfer.core.errors import InputError, StorageError
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef
from fakes import MemoryStore

TEXT = b'{"a": 1}\n{"a": 2}'
WHOLE = TEXT + b"\n"


def put(store: MemoryStore, data: bytes, key: str = "x.jsonl", **fields: Any) -> ChunkRef:
    store.create(key, data)
    given = {"rows": 2, "sha256": codec.sha256(data), **fields}
    return ChunkRef("x.jsonl", store.url, key, **given)


@pytest.mark.parametrize("data", [TEXT, WHOLE, b"\n\n", b"\n "])
@pytest.mark.parametrize("ending", ["", ".zst", ".zstd"])
def test_a_last_line_without_a_newline_is_a_row(data, ending, store, scratch):
    packed = zstandard.compress(data[:2]) + zstandard.compress(data[2:])
    stored = packed if ending else data
    found = fetch(store, put(store, stored, f"x.jsonl{ending}"), scratch)
    assert (found.num_lines, found.size_bytes) == (2, len(data))
    assert found.path.read_bytes() == data
    assert (found.sha256, found.stored_bytes) == (codec.sha256(stored), len(stored))


@pytest.mark.parametrize(
    ("data", "fields", "said"),
    [
        (WHOLE, {"sha256": codec.sha256(TEXT)}, "sha256 .*, job.json says"),
        (WHOLE, {"rows": 3}, "2 rows, job.json says 3"),
        (WHOLE + b" ", {}, "3 rows, job.json says 2"),
        (WHOLE, {"key": "x.jsonl.zst"}, "not readable as zstd"),
        (zstandard.compress(WHOLE)[:-1], {"key": "x.jsonl.zst"}, "not readable as zstd"),
    ],
)
def test_a_chunk_that_was_changed_is_refused_and_leaves_no_copy(data, fields, said, store, scratch):
    wanted = put(store, data, **fields)
    with pytest.raises(InputError, match=said):
        fetch(store, wanted, scratch)
    with pytest.raises(InputError, match="the chunk is gone"):
        fetch(store, wanted._replace(key="gone.jsonl"), scratch)
    assert not list(scratch.folder.glob("*jsonl*"))


def test_a_download_that_fails_leaves_nothing_on_the_disk(store, scratch, monkeypatch):
    """Each try has a file of its own, so a flaky network filled the disk."""
    wanted = put(store, WHOLE)

    def half(_key, path):
        path.write_bytes(WHOLE[:9])
        raise StorageError("the connection was reset")

    monkeypatch.setattr(store, "download", half)
    with pytest.raises(StorageError, match="reset"):
        fetch(store, wanted, scratch)
    assert [path.name for path in scratch.folder.iterdir()] == ["lock"]
