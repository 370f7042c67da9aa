"""Promise P6: one configuration per run."""

from __future__ import annotations

import pytest

from batchinfer import codec, layout
from batchinfer.errors import InputError, RunMismatch
from batchinfer.records import FORMAT_VERSION
from batchinfer.runconfig import UNKNOWN, check_same, differing_keys, join_run, read_run
from batchinfer.storage.memory import MemoryStore

CONFIG = {"model": "m", "sampling": {"temperature": 0.5}, "dtype": "bfloat16"}


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"memory://{request.node.name}")


def test_the_first_worker_writes_it_and_the_others_read_it(store: MemoryStore) -> None:
    first = join_run(store, CONFIG, {"gpu": "L4"}, nonce="a", is_safe=True)
    second = join_run(
        store, dict(reversed(CONFIG.items())), {"gpu": "H100"}, nonce="b", is_safe=True
    )
    assert second == first
    assert first.fingerprint == codec.fingerprint(CONFIG)


def test_what_is_only_recorded_may_differ(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    join_run(store, CONFIG, {"engine_version": "0.32.0", "gpu": "L4"}, nonce="a", is_safe=True)
    with caplog.at_level("WARNING", logger="batchinfer"):
        join_run(
            store, CONFIG, {"engine_version": "0.33.0", "gpu": "H100"}, nonce="b", is_safe=True
        )
    assert "0.32.0" in caplog.text
    assert "H100" not in caplog.text


def test_another_configuration_is_refused_with_every_difference(store: MemoryStore) -> None:
    join_run(store, CONFIG, {}, nonce="a", is_safe=True)
    other = {"model": "m2", "sampling": {"temperature": 0.7}, "dtype": "bfloat16"}
    with pytest.raises(RunMismatch) as caught:
        join_run(store, other, {}, nonce="b", is_safe=True)
    assert 'model: the run has "m", this worker "m2"' in caught.value.message
    assert "sampling.temperature: the run has 0.5, this worker 0.7" in caught.value.message
    assert read_run(store).fingerprint == codec.fingerprint(CONFIG)  # type: ignore[union-attr]


def test_what_is_not_known_yet_is_not_compared(store: MemoryStore) -> None:
    run = join_run(store, CONFIG, {}, nonce="a", is_safe=True)
    check_same(run, {**CONFIG, "dtype": UNKNOWN}, url="u")
    with pytest.raises(RunMismatch):
        check_same(run, {**CONFIG, "dtype": UNKNOWN, "model": "m2"}, url="u")


def test_a_key_that_only_one_side_has_is_a_difference() -> None:
    assert differing_keys({"a": 1}, {"b": None}) == [("a", "1", "null")]


def test_a_damaged_and_a_newer_run_are_told_apart(store: MemoryStore) -> None:
    store.create(layout.RUN_KEY, b"{")
    with pytest.raises(InputError, match="not a readable run record"):
        read_run(store)
    store.delete([layout.RUN_KEY])
    run = join_run(store, CONFIG, {}, nonce="a", is_safe=True)
    newer = codec.encode(run).replace(
        f'"format_version":{FORMAT_VERSION}'.encode(), b'"format_version":99'
    )
    store.delete([layout.RUN_KEY])
    store.create(layout.RUN_KEY, newer)
    with pytest.raises(InputError, match="format version 99"):
        read_run(store)
