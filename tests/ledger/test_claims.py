"""Leases and claims: one holder at a time, ghosts stop, the dead are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import LeaseLapsed, StorageError, Superseded
from batchinfer.core.records import Claim, WorkerLease
from batchinfer.ledger.claims import Claims, Held, Lease, Taken
from batchinfer.storage import Object
from fakes import FakeClock, MemoryStore, worker_record


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"memory://{request.node.name}")


STARTS = itertools.count()
"""Numbers the starts of workers: each start has a nonce of its own."""


def take_lease(store: MemoryStore, worker_id: str, clock: FakeClock) -> Lease:
    lease = Lease(store, worker_id, clock, lease_seconds=120, nonce=f"{next(STARTS):016x}")
    lease.take(lambda _: worker_record())
    return lease


def claims_of(store: MemoryStore, worker_id: str, clock: FakeClock) -> tuple[Claims, Lease]:
    lease = take_lease(store, worker_id, clock)
    return Claims(store, lease, clock), lease


def held(outcome: Taken | Held) -> Held:
    assert isinstance(outcome, Held)
    return outcome


def taken(outcome: Taken | Held | None) -> Taken:
    assert isinstance(outcome, Taken)
    return outcome


def claim_of(store: MemoryStore) -> Claim:
    """The claim of the first chunk."""
    return codec.decode(store.get(layout.claim_key("part-00000")).data, Claim, name="claim")


def lose_record(store: MemoryStore, damage: bytes | None) -> None:
    """Remove the record of worker a, or damage it."""
    key = layout.worker_key("a")
    if damage is None:
        store.delete([key])
    else:
        store.replace(key, damage, store.stat(key).etag)


class TestLease:
    def test_a_start_sees_the_record_that_it_replaces(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        first = take_lease(store, "w0", clock)
        first.renew(worker_record())
        before = Lease(store, "w0", clock, lease_seconds=120, nonce="x").take(
            lambda _: worker_record()
        )
        assert before is not None
        assert (before.nonce, before.beat) == (first.nonce, 2)

    def test_a_ghost_finds_its_successor_and_never_takes_back(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        ghost = take_lease(store, "w0", clock)
        successor = take_lease(store, "w0", clock)
        with pytest.raises(Superseded):
            ghost.renew(worker_record())
        with pytest.raises(Superseded):
            ghost.require()
        assert not ghost.is_held()
        assert (
            codec.decode(store.get("workers/w0.json").data, WorkerLease, name="w").nonce
            == successor.nonce
        )

    def test_every_renewal_changes_the_record_even_if_nothing_else_did(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        lease = take_lease(store, "w0", clock)
        etags = set()
        for _ in range(3):
            lease.renew(worker_record())
            etags.add(store.stat("workers/w0.json").etag)
        beats = codec.decode(store.get("workers/w0.json").data, WorkerLease, name="w").beat
        assert (len(etags), beats) == (3, 4)

    def test_a_lease_that_is_not_renewed_in_time_counts_as_lost(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        lease = take_lease(store, "w0", clock)
        clock.sleep(119)
        assert lease.is_held()
        clock.sleep(2)
        assert not lease.is_held()
        with pytest.raises(StorageError, match="not renewed"):
            lease.require()
        lease.renew(worker_record())
        lease.require()

    @pytest.mark.parametrize("has_earlier_start", [False, True])
    def test_a_lease_counts_from_before_its_first_write(
        self, store: MemoryStore, clock: FakeClock, *, has_earlier_start: bool
    ) -> None:
        """Others see the record before its write is answered, and count from then."""
        if has_earlier_start:
            take_lease(store, "a", clock)
        for name in ("create", "replace"):
            write = getattr(store, name)

            def slow(*arguments: object, write: Callable[..., str] = write) -> str:
                etag = write(*arguments)
                clock.sleep(100.0)
                return etag

            setattr(store, name, slow)
        lease = take_lease(store, "a", clock)
        assert lease.is_held()
        clock.sleep(21.0)
        assert not lease.is_held()

    def test_a_lease_ends_with_its_closing(
        self, store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An upload that was still under way published its chunk, which others had taken over by the record."""
        lease = take_lease(store, "w0", clock)
        seen: list[bool] = []
        replace = store.replace

        def look_and_replace(key: str, data: bytes, etag: str) -> str:
            seen.append(lease.is_held())
            return replace(key, data, etag)

        monkeypatch.setattr(store, "replace", look_and_replace)
        lease.close(worker_record())
        assert seen == [False]
        with pytest.raises(LeaseLapsed, match="has ended"):
            lease.require()
        lease.renew(worker_record())  # the heartbeat of another thread, begun as the worker ends
        assert not lease.is_held()

    def test_a_storage_failure_is_kept_and_the_next_renewal_tries_again(
        self, store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = take_lease(store, "w0", clock)
        with monkeypatch.context() as patched:
            patched.setattr(store, "replace", _fail)
            clock.sleep(100)
            lease.renew(worker_record())
        assert lease.error is not None
        clock.sleep(30)
        assert not lease.is_held(), "a renewal that failed must not count"
        lease.renew(worker_record())
        assert lease.error is None
        assert lease.is_held()

    @pytest.mark.parametrize("damage", [None, b"", b"{", b'{"id": 1}'])
    def test_a_record_removed_or_damaged_by_hand_is_written_again(
        self, store: MemoryStore, clock: FakeClock, damage: bytes | None
    ) -> None:
        lease = take_lease(store, "a", clock)
        for write in (lease.renew, lease.close):
            lose_record(store, damage)
            write(worker_record())
            assert lease.is_held() == (write == lease.renew)
            stored = codec.decode(store.get(layout.worker_key("a")).data, WorkerLease, name="w")
            assert stored.nonce == lease.nonce

    @pytest.mark.parametrize("damage", [None, b"", b"{}"])
    def test_a_start_that_was_superseded_leaves_a_damaged_record_to_its_successor(
        self, store: MemoryStore, clock: FakeClock, damage: bytes | None
    ) -> None:
        """It wrote its own record anew, and the successor took itself for superseded."""
        earlier = take_lease(store, "a", clock)
        lease = take_lease(store, "a", clock)
        with pytest.raises(Superseded):
            earlier.renew(worker_record())
        lose_record(store, damage)
        for write in (earlier.renew, earlier.close):
            with pytest.raises(Superseded):
                write(worker_record())
        lease.renew(worker_record())
        assert lease.is_held()


def _fail(*_: object) -> str:
    raise StorageError("the bucket is away")


class TestClaims:
    def test_a_chunk_has_one_holder(self, store: MemoryStore, clock: FakeClock) -> None:
        first, _ = claims_of(store, "a", clock)
        second, _ = claims_of(store, "b", clock)
        taken(first.take("part-00000"))
        assert held(second.take("part-00000")).claim.worker == "a"

    def test_a_restarted_worker_has_its_own_chunks_at_once(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        claims_of(store, "a", clock)[0].take("part-00000")
        again, _ = claims_of(store, "a", clock)
        taken(again.take("part-00000"))
        assert again.is_ours(claim_of(store))

    def test_a_ghost_does_not_take_its_successors_claim(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        ghost, _ = claims_of(store, "a", clock)
        successor, _ = claims_of(store, "a", clock)
        taken(successor.take("part-00000"))
        with pytest.raises(Superseded):
            ghost.take("part-00000")
        assert successor.is_ours(claim_of(store))
        assert not ghost.is_ours(claim_of(store))

    @pytest.mark.parametrize("damage", [None, b"", b"{", b'{"id": 1}'])
    def test_a_worker_that_lost_its_record_has_its_own_chunks_at_once(
        self, store: MemoryStore, clock: FakeClock, damage: bytes | None
    ) -> None:
        claims, _ = claims_of(store, "a", clock)
        claims.take("part-00000")
        claims.take("part-00001")
        lose_record(store, damage)
        again, _ = claims_of(store, "a", clock)
        seen = Held(claim_of(store), store.stat(layout.claim_key("part-00000")).etag)
        assert again.look(seen) is None
        assert not again.is_ours(seen.claim)
        taken(again.take_over("part-00000", seen))
        taken(again.take("part-00001"))
        assert again.is_ours(claim_of(store))

    def test_a_start_that_lives_on_takes_nothing_from_the_start_that_followed_its_lost_record(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        ghost, ghost_lease = claims_of(store, "a", clock)
        store.delete([layout.worker_key("a")])
        lease = take_lease(store, "a", clock)
        successor = Claims(store, lease, clock)
        successor.take("part-00000")
        assert not ghost.is_ours(claim_of(store))
        with pytest.raises(Superseded):
            ghost.take("part-00000")
        assert not ghost_lease.is_held()
        assert successor.is_ours(claim_of(store))

    def test_a_claim_lapses_when_its_owners_heart_stood_still_for_a_lease(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        """At the instant at which others may take its chunks, it holds its own lease no more."""
        claims, lease = claims_of(store, "dead", clock)
        claims.take("part-00000")
        observer, _ = claims_of(store, "b", clock)
        seen = held(observer.take("part-00000"))
        assert observer.look(seen) is not None
        clock.sleep(119)
        assert observer.look(seen) is not None
        lease.require()
        clock.sleep(1)
        assert observer.look(seen) is None
        with pytest.raises(LeaseLapsed):
            lease.require()
        taken(observer.take_over("part-00000", seen))
        assert observer.is_ours(claim_of(store))

    def test_a_watcher_that_slept_over_an_answer_takes_no_claim(
        self, store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The answer was of before its sleep, and the owner's heart had beaten meanwhile."""
        ours, _ = claims_of(store, "w0", clock)
        theirs, _ = claims_of(store, "w1", clock)
        ours.take("part-00000")
        found = held(theirs.take("part-00000"))
        assert theirs.look(found) is not None
        clock.sleep(60)
        get = store.get

        def get_and_sleep(key: str) -> Object:
            answer = get(key)
            clock.sleep(70)
            return answer

        monkeypatch.setattr(store, "get", get_and_sleep)
        assert theirs.look(found) is not None
        assert theirs.look(found) is None

    def test_an_owner_whose_heart_beats_keeps_its_claim(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        owner, lease = claims_of(store, "alive", clock)
        owner.take("part-00000")
        observer, _ = claims_of(store, "b", clock)
        seen = held(observer.take("part-00000"))
        for _ in range(10):
            clock.sleep(60)
            lease.renew(worker_record())
            assert observer.look(seen) is not None

    def test_the_owners_wall_clock_does_not_matter(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        skewed = FakeClock(now=clock.seconds - 7 * 86_400)
        claims_of(store, "skewed", skewed)[0].take("part-00000")
        observer, _ = claims_of(store, "b", clock)
        assert observer.look(held(observer.take("part-00000"))) is not None

    def test_a_claim_of_an_earlier_start_lapses_at_once(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        claims_of(store, "a", clock)[0].take("part-00000")
        take_lease(store, "a", clock)
        observer, _ = claims_of(store, "b", clock)
        assert observer.look(held(observer.take("part-00000"))) is None

    @pytest.mark.parametrize("state", ["done", "stopped", "failed"])
    def test_a_claim_of_a_worker_that_ended_lapses_at_once(
        self, store: MemoryStore, clock: FakeClock, state: str
    ) -> None:
        owner, lease = claims_of(store, "a", clock)
        owner.take("part-00000")
        lease.renew(worker_record(state=state))
        observer, _ = claims_of(store, "b", clock)
        assert observer.look(held(observer.take("part-00000"))) is None

    def test_of_two_that_take_over_one_wins(self, store: MemoryStore, clock: FakeClock) -> None:
        claims_of(store, "dead", clock)[0].take("part-00000")
        first, _ = claims_of(store, "b", clock)
        second, _ = claims_of(store, "c", clock)
        seen = held(first.take("part-00000"))
        taken(first.take_over("part-00000", seen))
        assert second.take_over("part-00000", seen) is None

    def test_a_released_chunk_can_be_taken_by_anyone(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        first, _ = claims_of(store, "a", clock)
        etag = taken(first.take("part-00000")).etag
        first.release("part-00000", etag)
        second, _ = claims_of(store, "b", clock)
        taken(second.take("part-00000"))

    def test_releasing_a_claim_that_was_taken_over_leaves_it_alone(
        self, store: MemoryStore, clock: FakeClock
    ) -> None:
        first, _ = claims_of(store, "a", clock)
        etag = taken(first.take("part-00000")).etag
        second, _ = claims_of(store, "b", clock)
        taken(second.take_over("part-00000", Held(claim_of(store), etag)))
        first.release("part-00000", etag)
        assert claim_of(store).worker == "b"


def test_two_renewals_of_one_worker_at_once_leave_the_later_record(
    store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat's thread may be writing while the main thread writes that the worker is done."""
    lease = take_lease(store, "w0", clock)
    replace = store.replace

    def overtaken(key: str, data: bytes, etag: str) -> str:
        monkeypatch.setattr(store, "replace", replace)
        lease.renew(worker_record(state="running"))
        return replace(key, data, etag)

    monkeypatch.setattr(store, "replace", overtaken)
    lease.renew(worker_record(state="done"))
    assert codec.decode(store.get("workers/w0.json").data, WorkerLease, name="w").state == "done"
