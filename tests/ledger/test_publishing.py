"""Promises P2 to P4: whole or absent, marker last, create-only, the first marker wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import AccessDenied, StorageError, Superseded
from batchinfer.core.records import Marker
from batchinfer.ledger.publishing import Built, Publisher, build_output
from fakes import MemoryStore, marker_record

CHUNK = "part-00000"
LINES = [b'{"a":1}', b'{"a":2}']


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"memory://{request.node.name}")


def publisher(store: MemoryStore, nonce: str) -> Publisher:
    return Publisher(store, nonce=nonce, require_lease=lambda: None)


def built(folder: Path, lines: list[bytes] = LINES) -> Built:
    return build_output(folder / "output", lines)


def keys(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list("")]


def current_marker(store: MemoryStore) -> Marker:
    return codec.decode(store.get(layout.marker_key(CHUNK)).data, Marker, name="marker")


def test_an_output_is_its_lines_each_with_a_newline(tmp_path: Path) -> None:
    output = built(tmp_path)
    data = output.path.read_bytes()
    assert data == b'{"a":1}\n{"a":2}\n'
    assert (output.bytes, output.sha256) == (len(data), codec.sha256(data))


def test_a_large_output_is_hashed_in_blocks_without_a_seam(tmp_path: Path) -> None:
    lines = [bytes([65 + index % 26]) * 700_001 for index in range(5)]
    output = built(tmp_path, lines)
    assert output.path.read_bytes() == b"".join(line + b"\n" for line in lines)
    assert output.sha256 == codec.sha256(output.path.read_bytes())


def test_the_marker_vouches_for_the_output(store: MemoryStore, tmp_path: Path) -> None:
    output = built(tmp_path)
    published = publisher(store, "n1").publish(output, marker_record(), chunk=CHUNK, leftovers=[])
    assert published.is_ours
    marker = current_marker(store)
    data = store.get(layout.output_key(marker.output)).data
    assert layout.chunk_of_output(layout.output_key(marker.output)) == CHUNK
    assert (marker.output_bytes, marker.output_sha256) == (len(data), codec.sha256(data))


@pytest.mark.parametrize("marker", [b"", b"damaged"])
def test_the_lease_is_asked_for_right_before_every_write(
    store: MemoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    marker: bytes,
) -> None:
    if marker:
        store.create(layout.marker_key(CHUNK), marker)
    events: list[str] = []
    for name in ("create", "put_file", "replace"):
        write = getattr(store, name)

        def recorded(
            *arguments: object, write: Callable[..., str] = write, **options: object
        ) -> str:
            events.append("write")
            return write(*arguments, **options)

        monkeypatch.setattr(store, name, recorded)
    ours = Publisher(store, nonce="n1", require_lease=lambda: events.append("lease"))
    published = ours.publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])
    assert published.is_ours
    assert events.count("write") >= 2
    assert events == ["lease", "write"] * (len(events) // 2)


@pytest.mark.parametrize("failing", ["put_file", "create"])
def test_a_failure_at_any_write_leaves_no_marker_without_its_output(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    output = built(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(store, failing, _fail)
        with pytest.raises(StorageError):
            publisher(store, "n1").publish(
                output, marker_record(), chunk=CHUNK, leftovers=["checkpoints/x"]
            )
    found = keys(store)
    if layout.marker_key(CHUNK) in found:
        assert layout.output_key(current_marker(store).output) in found
    again = publisher(store, "n1").publish(output, marker_record(), chunk=CHUNK, leftovers=[])
    assert again.is_ours
    assert current_marker(store).output in {key.removeprefix(layout.OUTPUTS) for key in keys(store)}


@pytest.mark.parametrize("error", [StorageError("away"), AccessDenied("no permission to delete")])
def test_a_chunk_is_done_once_its_marker_stands_even_if_nothing_can_be_deleted(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Some buckets grant no right to delete; segments left behind do no harm."""

    def refuse(_keys: object) -> None:
        raise error

    monkeypatch.setattr(store, "delete", refuse)
    published = publisher(store, "n1").publish(
        built(tmp_path), marker_record(), chunk=CHUNK, leftovers=["checkpoints/x"]
    )
    assert published.is_ours
    assert layout.output_key(current_marker(store).output) in keys(store)


def _fail(*_: object, **__: object) -> None:
    raise StorageError("the bucket is away")


def test_the_first_marker_wins_and_the_second_discards_its_own_output(
    store: MemoryStore, tmp_path: Path
) -> None:
    publisher(store, "n1").publish(
        built(tmp_path), marker_record(worker="first"), chunk=CHUNK, leftovers=[]
    )
    second = publisher(store, "n2").publish(
        built(tmp_path, [b'{"other":1}']), marker_record(worker="second"), chunk=CHUNK, leftovers=[]
    )
    assert not second.is_ours
    assert second.marker.worker == "first"
    assert keys(store) == [layout.output_key(second.marker.output), layout.marker_key(CHUNK)]


def test_every_try_has_a_name_of_its_own(store: MemoryStore, tmp_path: Path) -> None:
    """A name that is used again may be deleted by whoever had it before, or be overwritten by a late write."""
    ours, names = publisher(store, "n1"), set()
    for number in range(3):
        published = ours.publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])
        names.add(published.marker.output)
        store.delete(keys(store))
        assert len(names) == number + 1


def test_a_second_with_equal_bytes_does_not_discard_the_firsts_output(
    store: MemoryStore, tmp_path: Path
) -> None:
    publisher(store, "n1").publish(
        built(tmp_path), marker_record(worker="first"), chunk=CHUNK, leftovers=[]
    )
    publisher(store, "n2").publish(
        built(tmp_path), marker_record(worker="second"), chunk=CHUNK, leftovers=[]
    )
    assert layout.output_key(current_marker(store).output) in keys(store)


def test_leftovers_go_only_after_the_marker(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("checkpoints/part-00000/000001-w0-000001.jsonl", b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(store, "create", _fail)
        with pytest.raises(StorageError):
            publisher(store, "n1").publish(
                built(tmp_path),
                marker_record(),
                chunk=CHUNK,
                leftovers=["checkpoints/part-00000/000001-w0-000001.jsonl"],
            )
    assert "checkpoints/part-00000/000001-w0-000001.jsonl" in keys(store)


def test_a_superseded_worker_makes_nothing_visible(store: MemoryStore, tmp_path: Path) -> None:
    def superseded() -> None:
        raise Superseded("a newer start exists")

    ghost = Publisher(store, nonce="n", require_lease=superseded)
    with pytest.raises(Superseded):
        ghost.publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])
    assert keys(store) == []


def test_a_repaired_chunk_gets_a_new_output_and_the_next_marker(
    store: MemoryStore, tmp_path: Path
) -> None:
    publisher(store, "n1").publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])
    repaired = publisher(store, "n2").publish(
        built(tmp_path, [b'{"a":1}', b'{"a":3}']),
        marker_record(generation=1),
        chunk=CHUNK,
        leftovers=[],
    )
    assert repaired.marker.output != current_marker(store).output
    assert layout.marker_key(CHUNK, 1) in keys(store)
    assert store.get(layout.output_key(current_marker(store).output)).data == b'{"a":1}\n{"a":2}\n'
