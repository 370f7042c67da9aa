"""Leases and claims in races, and with what careless hands leave. The simulation shows who holds what, and how long."""

import itertools
from unittest import mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    LeaseLapsed,
    PreconditionFailed,
    StorageError,
    Superseded,
)
from batchinfer.core.records import Claim, WorkerLease
from batchinfer.ledger.claims import Claims, Held, Lease, Taken
from fakes import FakeClock, MemoryStore, meanwhile, worker_record
from making import put_raw

STARTS = itertools.count()
"""Numbers the starts of workers: each start has a nonce of its own."""


def take_lease(store: MemoryStore, worker_id: str, clock: FakeClock) -> Lease:
    lease = Lease(store, worker_id, clock, lease_seconds=120, nonce=f"{next(STARTS):016x}")
    lease.take(lambda _: worker_record())
    return lease


def claims_of(store: MemoryStore, worker_id: str, clock: FakeClock) -> tuple[Claims, Lease]:
    lease = take_lease(store, worker_id, clock)
    return Claims(store, lease, clock), lease


def taken(outcome: Taken | Held | None) -> Taken:
    assert isinstance(outcome, Taken)
    return outcome


def test_a_lease_ends_with_its_closing(store, clock, monkeypatch):
    """An upload that was still under way published its chunk, which others had taken over by the record."""
    lease = take_lease(store, "w0", clock)
    seen: list[bool] = []
    meanwhile(monkeypatch, store, "replace", lambda: seen.append(lease.is_held()))
    lease.close(worker_record(state="done"))
    assert seen == [False]
    with pytest.raises(LeaseLapsed, match="has ended"):
        lease.require()
    lease.renew(worker_record())  # the heartbeat of another thread, begun as the worker ends
    assert not lease.is_held()
    assert b'"state":"done"' in store.get(layout.worker_key("w0")).data


def test_a_renewal_that_a_freeze_held_up_takes_nothing_from_a_later_one(store, clock, monkeypatch):
    """The lease counted from before the freeze, so nothing was saved until the next heartbeat: seed 12415379."""
    lease = take_lease(store, "w0", clock)

    def renew_late() -> None:
        clock.seconds += 200
        lease.renew(worker_record())

    meanwhile(monkeypatch, store, "replace", renew_late)
    lease.renew(worker_record())
    assert lease.is_held()


@pytest.mark.parametrize("damage", [None, b"", b"{}"])
def test_a_start_that_was_superseded_leaves_a_damaged_record_to_its_successor(store, clock, damage):
    """It wrote its own record anew, and the successor took itself for superseded."""
    earlier = take_lease(store, "a", clock)
    lease = take_lease(store, "a", clock)
    with pytest.raises(Superseded):
        earlier.renew(worker_record())
    store.delete([layout.worker_key("a")])
    if damage is not None:
        put_raw(store, layout.worker_key("a"), damage)
    for write in (earlier.renew, earlier.close):
        with pytest.raises(Superseded):
            write(worker_record())
    with pytest.raises(Superseded):
        earlier.require()
    lease.renew(worker_record())
    assert lease.is_held()


def test_two_renewals_of_one_worker_at_once_leave_the_later_record(store, clock, monkeypatch):
    """The heartbeat's thread may be writing while the main thread writes that the worker is done."""
    lease = take_lease(store, "w0", clock)
    meanwhile(monkeypatch, store, "replace", lambda: lease.renew(worker_record(state="running")))
    lease.renew(worker_record(state="done"))
    assert codec.decode(store.get("workers/w0.json").data, WorkerLease, name="w").state == "done"


@pytest.mark.parametrize("data", [b"", b"{", b'{"worker":"../x","nonce":""}'])
def test_a_claim_that_cannot_be_read_keeps_nobody_from_its_chunk(store, clock, data):
    key = layout.claim_key("part-00000")
    put_raw(store, key, data)
    taken(claims_of(store, "a", clock)[0].take("part-00000"))
    assert codec.decode(store.get(key).data, Claim, name=key).worker == "a"


def test_a_claim_holds_for_the_longer_lease_of_the_two_workers(store, clock):
    patient = Lease(store, "b", clock, lease_seconds=600, nonce="n")
    patient.take(lambda _: worker_record())
    taken(Claims(store, patient, clock).take("part-00000"))
    claims, _ = claims_of(store, "a", clock)
    for seconds in (0, 130, 460):
        clock.seconds += seconds
        assert isinstance(claims.take("part-00000"), Held)
    clock.seconds += 20
    taken(claims.take("part-00000"))
    taken(Claims(store, patient, clock).take("part-00001"))
    take_lease(store, "b", clock)  # a newer start
    taken(claims.take("part-00001"))


def test_a_heartbeat_while_a_newer_start_is_noticed_leaves_its_record(store, clock, monkeypatch):
    """Threads of chunks look at the record, too, and a heartbeat may come between reading and comparing."""
    old, new = take_lease(store, "a", clock), take_lease(store, "a", clock)

    def beat() -> None:
        with pytest.raises(Superseded):
            old.renew(worker_record())

    meanwhile(monkeypatch, codec, "decode", beat)
    with pytest.raises(Superseded):
        old.confirm()
    record = codec.decode(store.get(layout.worker_key("a")).data, WorkerLease, name="record")
    assert record.nonce == new.nonce


def test_a_store_that_refuses_every_write_is_no_endless_loop(store, clock, monkeypatch):
    """A gateway that changes etags was asked some 200 times a second for ever, without a word."""
    claims, lease = claims_of(store, "a", clock)
    taken(claims.take("part-00000"))
    monkeypatch.setattr(store, "replace", mock.Mock(side_effect=PreconditionFailed("never")))
    with pytest.raises(StorageError, match=r"claims/part-00000\.json: the store keeps refusing"):
        claims.take("part-00000")
    with pytest.raises(StorageError, match=r"workers/a\.json: the store keeps refusing"):
        lease.take(lambda _: worker_record())
