from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchinfer.core.errors import AccessDenied, AlreadyExists, PreconditionFailed, StorageError
from batchinfer.storage import Preconditions
from batchinfer.storage.hub import ReadOnlyStore
from batchinfer.storage.local import LocalStore
from batchinfer.storage.memory import MemoryStore, forget
from batchinfer.storage.opening import leaving_no_folders, probe
from batchinfer.storage.retrying import NotSupported, RetryPolicy, TransientError, retried

URL = "memory://probing"


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    forget(URL)


class Overwriting(MemoryStore):
    def create(self, key: str, data: bytes) -> str:
        self.delete([key])
        return super().create(key, data)


class Overwritten(MemoryStore):
    """Says that the create is refused, and overwrites all the same."""

    def create(self, key: str, data: bytes) -> str:
        try:
            return super().create(key, data)
        except AlreadyExists:
            super().replace(key, data, self.stat(key).etag)
            raise


class Deaf(MemoryStore):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        return super().replace(key, data, self.stat(key).etag)


class Stubborn(MemoryStore):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        raise PreconditionFailed("never")


class Unable(MemoryStore):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        raise NotSupported("501")


class Unwritable(MemoryStore):
    def create(self, key: str, data: bytes) -> str:
        raise AccessDenied("no")


class Undeletable(MemoryStore):
    def delete(self, keys: object) -> None:
        raise AccessDenied("no")


class Failing(MemoryStore):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        raise StorageError("down")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (MemoryStore, Preconditions(create=True, replace=True)),
        (Overwriting, Preconditions(create=False, replace=True)),
        (Overwritten, Preconditions(create=False, replace=True)),
        (Deaf, Preconditions(create=True, replace=False)),
        (Stubborn, Preconditions(create=True, replace=False)),
        (Unable, Preconditions(create=True, replace=False)),
    ],
)
def test_probe_says_what_the_store_does(kind: type[MemoryStore], expected: Preconditions):
    store = kind(URL)
    assert probe(store) == expected
    assert list(store.list()) == []


def test_read_only_store_is_access_denied():
    with pytest.raises(AccessDenied):
        probe(Unwritable(URL))
    with pytest.raises(AccessDenied, match="read-only"):
        probe(ReadOnlyStore("http://127.0.0.1/x"))


def test_probe_that_cannot_be_removed_is_only_a_warning(caplog):
    assert probe(Undeletable(URL)).is_safe
    assert "cannot remove the probe" in caplog.text


def test_outage_is_no_finding():
    with pytest.raises(StorageError, match="down"):
        probe(Failing(URL))
    assert list(MemoryStore(URL).list()) == []


def test_transient_errors_end_as_storage_errors_that_count():
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise TransientError("flaky", hint="look")

    with pytest.raises(StorageError, match=r"flaky \(after 3 attempts\)") as caught:
        retried(RetryPolicy(attempts=3, first_pause_seconds=0.001), fail)
    assert type(caught.value) is StorageError
    assert caught.value.hint == "look"
    assert len(tries) == 3


def test_a_probe_of_a_folder_that_is_not_there_leaves_none_of_the_folders_that_it_made(tmp_path):
    root = tmp_path / "a" / "b"
    with leaving_no_folders(str(root)):
        probe(LocalStore(root))
        assert root.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_gets_a_file_during_its_probe_stays(tmp_path):
    root = tmp_path / "a" / "b"
    with leaving_no_folders(str(root)):
        probe(LocalStore(root))
        (root / "run.json").write_text("{}")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", root, root / "run.json"]
