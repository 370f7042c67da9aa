"""What a run has cost, while records are lost, looks fail, and another thread asks."""

from __future__ import annotations

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import StorageError
from batchinfer.ledger.spending import Spending
from batchinfer.storage import Object
from batchinfer.storage.memory import MemoryStore
from fakes import FakeClock, worker_record

PRICE = 3600.0
"""Dollars an hour: a dollar a second."""


class WatchedStore(MemoryStore):
    """Calls `before_get` with the key of an object that is about to be read."""

    def __init__(self) -> None:
        super().__init__("memory://spending")
        self.before_get = lambda _key: None

    def get(self, key: str) -> Object:
        self.before_get(key)
        return super().get(key)


def write(store: WatchedStore, clock: FakeClock, name: str, seconds: float) -> None:
    key = layout.worker_key(name)
    store.delete([key])
    record = worker_record(
        id=name, state="done", started=clock.now() - seconds, heartbeat=clock.now(), up_seconds=seconds
    )  # fmt: skip
    store.create(key, codec.encode(record))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> WatchedStore:
    """The records of two workers that have run for 100 and 10 seconds."""
    made = WatchedStore()
    write(made, clock, "w0", 100.0)
    write(made, clock, "w1", 10.0)
    return made


@pytest.fixture
def spending(store: WatchedStore, clock: FakeClock) -> Spending:
    made = Spending(store, clock, PRICE)
    made.look()
    assert made.cost == pytest.approx(110.0)
    return made


def test_a_look_that_fails_counts_no_record_twice(
    store: WatchedStore, clock: FakeClock, spending: Spending
) -> None:
    write(store, clock, "w0", 5.0)  # lost, and begun anew
    write(store, clock, "w1", 11.0)

    def fail(key: str) -> None:
        if key.endswith("w1.json"):
            raise StorageError("no answer")

    store.before_get = fail
    for _ in range(3):
        with pytest.raises(StorageError):
            spending.look()
        assert spending.cost == pytest.approx(110.0)
    store.before_get = lambda _key: None
    spending.look()
    assert spending.cost == pytest.approx(100.0 + 5.0 + 11.0)


def test_the_cost_during_a_look_is_that_of_the_look_before(
    store: WatchedStore, clock: FakeClock, spending: Spending
) -> None:
    write(store, clock, "w0", 5.0)
    write(store, clock, "w1", 11.0)
    seen = []
    store.before_get = lambda _key: seen.append(spending.cost)
    spending.look()
    assert seen == pytest.approx([110.0, 110.0])
    assert spending.cost == pytest.approx(116.0)
