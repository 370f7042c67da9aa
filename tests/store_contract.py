"""Promises of every writable store. The tests of each store inherit the class and say how to open that store."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    ScratchFull,
)
from batchinfer.storage.opening import check_preconditions

BAD_KEYS = ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "./a", "a/..", "a\0b", "a\rb"]


def race(actions: list[Callable[[], str]]) -> tuple[list[str], list[Exception]]:
    """Run all actions at the same time; return what succeeded and what failed."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], str]) -> str | Exception:
        barrier.wait()
        try:
            return action()
        except BatchinferError as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        found = list(pool.map(run, actions))
    etags = [each for each in found if isinstance(each, str)]
    return etags, [each for each in found if isinstance(each, Exception)]


class StoreContract:
    """Inherit, and give the fixture `reopen`: a function that opens the same root anew, as another worker does."""

    @pytest.fixture
    def store(self, reopen):
        return reopen()

    def test_created_object_reads_back(self, store):
        etag = store.create("a/b.json", b"one")
        assert store.get("a/b.json") == (b"one", etag)
        found = store.stat("a/b.json")
        assert (found.key, found.bytes, found.etag) == ("a/b.json", 3, etag)
        assert found.modified > 1.7e9

    def test_absent_object_is_not_found(self, store, tmp_path):
        store.create("a/b", b"one")
        for key in ("a/c", "a", "x/y", "a/b/c"):
            with pytest.raises(ObjectNotFound, match=key):
                store.get(key)
            with pytest.raises(ObjectNotFound, match=key):
                store.stat(key)
            with pytest.raises(ObjectNotFound, match=key):
                store.download(key, tmp_path / "copy")

    def test_second_create_is_refused_and_changes_nothing(self, store):
        etag = store.create("k", b"one")
        with pytest.raises(AlreadyExists, match="k"):
            store.create("k", b"two")
        assert store.create("k", b"one") == etag, "the same bytes are taken for a lost reply"
        assert store.get("k") == (b"one", etag)

    def test_file_becomes_a_whole_object_in_place_of_any_that_is_there(self, store, tmp_path):
        key = "outputs/part-00000.3f2a.jsonl"
        for index, data in enumerate((b"", b"rows\n" * 1000, b"rows\n" * 1000, b"short")):
            file = tmp_path / f"result-{index}"
            file.write_bytes(data)
            store.put_file(key, file)
            assert store.get(key).data == data
            file.unlink()
            assert store.get(key).data == data
            assert store.stat(key).bytes == len(data)
        assert [found.key for found in store.list()] == [key]

    def test_download_to_a_full_disk_is_scratch_full(self, store):
        store.create("k", b"one" * 1000)
        with pytest.raises(ScratchFull, match="/dev"):
            store.download("k", Path("/dev/full"))

    def test_replace_needs_the_current_etag(self, store):
        first = store.create("w.json", b"beat 1")
        second = store.replace("w.json", b"beat 2", first)
        assert second != first
        with pytest.raises(PreconditionFailed, match=r"w\.json"):
            store.replace("w.json", b"ghost", first)
        assert store.replace("w.json", b"beat 2", first) == second, "is taken for a lost reply"
        assert store.get("w.json") == (b"beat 2", second)

    def test_replace_of_an_absent_object_is_refused(self, store):
        etag = store.create("gone", b"one")
        store.delete(["gone"])
        for key in ("gone", "never/was"):
            with pytest.raises(PreconditionFailed, match=key):
                store.replace(key, b"two", etag)
        assert list(store.list()) == []

    def test_list_is_recursive_in_key_order_below_a_string_prefix(self, store):
        keys = ["a", "a-b", "a.txt", "a0", "b/c/d", "b/c.d", "b/c-d", "b/e", "bb", "é/ü"]
        for key in reversed([key for key in keys if key != "a"]):
            store.create(key, key.encode())
        store.create("a", b"a")
        assert [found.key for found in store.list()] == sorted(keys)
        assert [found.key for found in store.list("b")] == ["b/c-d", "b/c.d", "b/c/d", "b/e", "bb"]
        assert [found.key for found in store.list("b/")] == ["b/c-d", "b/c.d", "b/c/d", "b/e"]
        assert [found.key for found in store.list("b/c")] == ["b/c-d", "b/c.d", "b/c/d"]
        assert list(store.list("nothing/")) == []
        for found in store.list():
            there = store.stat(found.key)  # a listing of GCS shows no generations
            assert (found.bytes, found.etag) in [
                there[1:3],
                (there.bytes, there.etag.split(";")[0]),
            ]
            assert found.is_version(there.etag)

    def test_delete_takes_many_and_forgives_absent_ones(self, store):
        for index in range(5):
            store.create(f"x/{index}", b"1")
        store.delete(f"x/{index}" for index in (0, 1, 2, 7))
        store.delete(["never/was", "x/0", "x/3/below"])
        store.delete([])
        assert [found.key for found in store.list()] == ["x/3", "x/4"]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_key_that_leaves_the_root_is_refused(self, store, key, tmp_path):
        file = tmp_path / "file"
        file.write_bytes(b"x")
        for verb in (
            lambda: store.get(key),
            lambda: store.stat(key),
            lambda: store.download(key, tmp_path / "copy"),
            lambda: store.create(key, b"x"),
            lambda: store.put_file(key, file),
            lambda: store.replace(key, b"x", "etag"),
            lambda: store.delete([key]),
        ):
            with pytest.raises(InputError, match="key"):
                verb()

    def test_one_of_sixteen_creators_wins(self, reopen):
        stores = [reopen(), reopen()]
        for round_index in range(4):
            key = f"claims/{round_index}"
            bodies = [b"worker %02d" % index for index in range(16)]
            etags, errors = race(
                [
                    lambda key=key, index=index, body=body: stores[index % 2].create(key, body)
                    for index, body in enumerate(bodies)
                ]
            )
            assert len(etags) == 1
            assert [type(error) for error in errors] == [AlreadyExists] * 15
            held = stores[0].get(key)
            assert held.etag == etags[0]
            assert held.data in bodies

    def test_store_honours_preconditions_and_their_trial_leaves_nothing(self, store):
        check_preconditions(store)
        assert list(store.list()) == []
