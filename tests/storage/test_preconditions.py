from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchinfer.core.errors import AccessDenied, AlreadyExists, ConfigError, PreconditionFailed
from batchinfer.storage import opening
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import check_preconditions, leaving_no_folders
from batchinfer.storage.retrying import NotSupported
from fakes import MemoryStore, forget
from making import make_job, run_worker_here

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


class Undeletable(MemoryStore):
    def delete(self, keys: object) -> None:
        raise AccessDenied("no")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Overwriting, "a second create of one object was tried, and overwrote it"),
        (Overwritten, "a second create of one object was refused, and overwrote it all the same"),
        (Deaf, "a replace with an outdated etag was tried, and overwrote it"),
        (Stubborn, "a replace with the object's current etag was tried, and refused"),
        (Unable, "a conditional write was tried, and the store does not support it"),
    ],
)
def test_a_store_is_refused_with_what_was_tried_and_what_it_did(kind: type[MemoryStore], said: str):
    store = kind(URL)
    with pytest.raises(ConfigError, match=said) as caught:
        check_preconditions(store)
    assert caught.value.exit_status == 2
    assert caught.value.message.startswith(URL)
    assert "conditional writes" in caught.value.hint
    assert list(store.list()) == []


def test_a_run_is_tried_once_and_again_where_it_was_copied_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried = []
    monkeypatch.setattr(opening, "check_preconditions", lambda store: tried.append(store.url))
    job, run, copy = (str(tmp_path / name) for name in ("job", "run", "copy"))
    make_job(job, rows=20, per_chunk=2)
    run_worker_here(job, run)
    run_worker_here(job, run)
    assert tried == [run]
    shutil.copytree(run, copy)
    run_worker_here(job, copy)
    assert tried == [run, copy]


def test_probe_that_cannot_be_removed_is_only_a_warning(caplog):
    check_preconditions(Undeletable(URL))
    assert "cannot remove the probe" in caplog.text


def test_a_probe_of_a_folder_that_is_not_there_leaves_none_of_the_folders_that_it_made(tmp_path):
    root = tmp_path / "a" / "b"
    with leaving_no_folders(str(root)):
        check_preconditions(LocalStore(root))
        assert root.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_gets_a_file_during_its_probe_stays(tmp_path):
    root = tmp_path / "a" / "b"
    with leaving_no_folders(str(root)):
        check_preconditions(LocalStore(root))
        (root / "run.json").write_text("{}")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", root, root / "run.json"]
