from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from batchinfer.storage import Store
from batchinfer.storage.memory import MemoryStore, forget
from store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def reopen(self, request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
        url = f"memory://{request.node.name.replace('/', '_')}"
        yield lambda: MemoryStore(url)
        forget(url)


def test_nested_urls_share_objects():
    MemoryStore("memory://nested/job").create("runs/a/run.json", b"{}")
    run = MemoryStore("memory://nested/job/runs/a/")
    assert run.get("run.json").data == b"{}"
    assert run.url == "memory://nested/job/runs/a"
    assert list(MemoryStore("memory://nested/jo").list()) == []
    forget("memory://nested")
    assert list(run.list()) == []


def test_time_comes_from_the_given_clock():
    store = MemoryStore("memory://clock", clock=lambda: 1.8e9)
    store.create("k", b"1")
    assert store.stat("k").modified == 1.8e9
    forget("memory://clock")
