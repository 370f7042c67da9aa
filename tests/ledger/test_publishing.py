"""Promises P2 to P4: whole or absent, marker last, create-only, the first marker wins."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from batchinfer.core import layout
from batchinfer.core.errors import AccessDenied, PreconditionFailed, StorageError
from batchinfer.core.records import Worker
from batchinfer.ledger import publishing
from batchinfer.ledger.own_record import OwnRecord
from batchinfer.ledger.publishing import Published, build_output
from fakes import HeldLease, MemoryStore, marker_record, meanwhile, worker_record
from making import read_marker

CHUNK = "part-00000"


def publish(
    store: MemoryStore, folder: Path, nonce: str = "n1", leftovers: Sequence[str] = ()
) -> Published:
    built = build_output(folder / "output", [b'{"a":1}', b'{"a":2}'])
    marker, lease = marker_record(), HeldLease(nonce)
    return publishing.publish(store, lease, built, marker, chunk=CHUNK, leftovers=leftovers)


def test_of_two_that_replace_a_damaged_marker_the_first_wins(store, tmp_path, monkeypatch):
    store.create(layout.marker_key(CHUNK), b"damaged")
    meanwhile(monkeypatch, store, "replace", lambda: publish(store, tmp_path))
    published = publish(store, tmp_path, "n2")
    assert (published.is_ours, read_marker(store, CHUNK).nonce) == (False, "n1")


def test_a_store_that_refuses_every_write_is_no_endless_loop(store, tmp_path, monkeypatch):
    store.create(layout.marker_key(CHUNK), b"damaged")
    monkeypatch.setattr(store, "replace", Mock(side_effect=PreconditionFailed("never")))
    with pytest.raises(StorageError, match=r"part-00000\.succeed: the store keeps refusing"):
        publish(store, tmp_path)


def test_an_own_record_that_something_else_has_written_is_written_over(store):
    one, other = (OwnRecord(store, "workers/a.json", Worker) for _ in "ab")
    assert one.write(worker_record(id="first"))
    for own, name in ((other, "second"), (one, "third")):
        own.overwrite(worker_record(id=name))
        assert own.look()[0].id == name


@pytest.mark.parametrize("error", [StorageError("away"), AccessDenied("no permission to delete")])
def test_a_chunk_is_done_once_its_marker_stands_even_if_nothing_can_be_deleted(
    store, tmp_path, monkeypatch, error
):
    """Some buckets grant no right to delete; segments left behind do no harm."""

    monkeypatch.setattr(store, "delete", Mock(side_effect=error))
    assert publish(store, tmp_path, leftovers=["checkpoints/x"]).is_ours
    assert store.stat(layout.output_key(read_marker(store, CHUNK).output))
