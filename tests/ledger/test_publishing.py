"""Promises P2 to P4: whole or absent, marker last, create-only, the first marker wins."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import AccessDenied, PreconditionFailed, StorageError
from batchinfer.core.records import Marker
from batchinfer.ledger.publishing import Built, Publisher, build_output
from fakes import MemoryStore, marker_record

CHUNK = "part-00000"
LINES = [b'{"a":1}', b'{"a":2}']


def publisher(store: MemoryStore, nonce: str) -> Publisher:
    return Publisher(store, nonce=nonce, require_lease=lambda: None)


def built(folder: Path, lines: list[bytes] = LINES) -> Built:
    return build_output(folder / "output", lines)


def keys(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list("")]


def current_marker(store: MemoryStore) -> Marker:
    return codec.decode(store.get(layout.marker_key(CHUNK)).data, Marker, name="marker")


def test_who_comes_second_discards_its_own_output(store: MemoryStore, tmp_path: Path) -> None:
    first, second = (
        publisher(store, nonce).publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])
        for nonce in ("n1", "n2")
    )
    assert (first.is_ours, second.is_ours) == (True, False)
    assert second.marker == current_marker(store)
    assert keys(store) == sorted([layout.output_key(first.marker.output), layout.marker_key(CHUNK)])


def test_of_two_that_replace_a_damaged_marker_the_first_wins(
    store: MemoryStore, tmp_path: Path
) -> None:
    store.create(layout.marker_key(CHUNK), b"damaged")
    asked = []

    def lease() -> None:
        asked.append("lease")
        if len(asked) == 3:  # it has seen the damage
            publisher(store, "n1").publish(
                built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[]
            )

    late = Publisher(store, nonce="n2", require_lease=lease)
    published = late.publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])
    assert (published.is_ours, current_marker(store).nonce) == (False, "n1")


def test_a_store_that_refuses_every_write_is_no_endless_loop(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(layout.marker_key(CHUNK), b"damaged")
    monkeypatch.setattr(store, "replace", Mock(side_effect=PreconditionFailed("never")))
    with pytest.raises(StorageError, match=r"part-00000\.succeed: the store keeps refusing"):
        publisher(store, "n1").publish(built(tmp_path), marker_record(), chunk=CHUNK, leftovers=[])


@pytest.mark.parametrize("error", [StorageError("away"), AccessDenied("no permission to delete")])
def test_a_chunk_is_done_once_its_marker_stands_even_if_nothing_can_be_deleted(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Some buckets grant no right to delete; segments left behind do no harm."""

    monkeypatch.setattr(store, "delete", Mock(side_effect=error))
    published = publisher(store, "n1").publish(
        built(tmp_path), marker_record(), chunk=CHUNK, leftovers=["checkpoints/x"]
    )
    assert published.is_ours
    assert layout.output_key(current_marker(store).output) in keys(store)
