"""Promise P6: one configuration per run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, RunMismatch
from batchinfer.ledger.runs import UNKNOWN, check_same, differing_keys, edit_of, join_run, read_run
from fakes import MemoryStore

CONFIG = {"model": "m", "sampling": {"temperature": 0.5}, "dtype": "bfloat16"}


def test_the_first_worker_writes_it_and_others_read_it_though_what_is_only_recorded_differs(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = join_run(store, CONFIG, {"engine_version": "0.32.0", "gpu": "L4"}, nonce="a")
    assert first.fingerprint == codec.fingerprint(CONFIG)
    other = {"engine_version": "0.33.0", "gpu": "H100"}
    with caplog.at_level("WARNING", logger="batchinfer"):
        assert join_run(store, dict(reversed(CONFIG.items())), other, nonce="b") == first
    assert "0.32.0" in caplog.text
    assert "H100" not in caplog.text


def test_files_of_a_model_that_have_changed_are_named_as_such(store: MemoryStore) -> None:
    run = join_run(store, {"model_identity": "a1"}, {}, nonce="a")
    with pytest.raises(RunMismatch, match=r'"b2" \(the model.s files are not those with which'):
        check_same(run, {"model_identity": "b2"}, url="u")


def test_what_is_not_known_yet_is_not_compared(store: MemoryStore) -> None:
    run = join_run(store, CONFIG, {}, nonce="a")
    check_same(run, {**CONFIG, "dtype": UNKNOWN}, url="u")
    with pytest.raises(RunMismatch):
        check_same(run, {**CONFIG, "dtype": UNKNOWN, "model": "m2"}, url="u")


def test_a_key_that_only_one_side_has_is_a_difference() -> None:
    assert differing_keys({"a": 1}, {"b": None}) == [("a", "1", "null")]


def edit(store: MemoryStore, change: Callable[[dict[str, Any]], None]) -> None:
    """Write run.json anew, as somebody with an editor would."""
    contents = json.loads(store.get(layout.RUN_KEY).data)
    change(contents)
    store.delete([layout.RUN_KEY])
    store.create(layout.RUN_KEY, codec.encode(contents))


def test_a_configuration_that_was_edited_is_refused(store: MemoryStore) -> None:
    """It would be joined under the fingerprint of answers that were made with another one."""
    edited = {**CONFIG, "seed": 7}
    join_run(store, CONFIG, {}, nonce="a")
    edit(store, lambda contents: contents.update(config=edited))
    with pytest.raises(InputError, match="it was edited") as caught:
        read_run(store)
    assert "first worker" in caught.value.hint
    with pytest.raises(InputError, match="it was edited"):
        join_run(store, edited, {}, nonce="b")
    found = read_run(store, may_be_edited=True)
    assert found is not None
    assert codec.fingerprint(edited) in edit_of(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "0; touch /tmp/x"),
        ("limit", "1; touch /tmp/x"),
        ("limit", 1.5),
        ("seed", True),
        ("job_sha256", 5),
        ("prompt", "p"),
    ],
)
def test_what_is_no_number_or_mapping_is_damage(
    store: MemoryStore, key: str, value: object
) -> None:
    config = {**CONFIG, key: value}
    join_run(store, CONFIG, {}, nonce="a")
    fingerprint = codec.fingerprint(config)
    edit(store, lambda contents: contents.update(config=config, fingerprint=fingerprint))
    with pytest.raises(InputError, match=rf"\$\.config\.{key}") as caught:
        read_run(store, may_be_edited=True)
    assert "verify" not in caught.value.hint
