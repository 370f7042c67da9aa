import shutil
from functools import partial
from unittest.mock import Mock

import pytest

from batchinfer.core.errors import AccessDenied, ConfigError, PreconditionFailed, StorageError
from batchinfer.storage import opening
from batchinfer.storage.opening import check_preconditions
from batchinfer.storage.retrying import NotSupported
from fakes import MemoryStore
from making import make_job, run_worker_here


def overwrite(store: MemoryStore, key: str, data: bytes) -> str:
    store.delete([key])
    return MemoryStore.create(store, key, data)


def replace_any(store: MemoryStore, key: str, data: bytes, _etag: str) -> str:
    return MemoryStore.replace(store, key, data, store.stat(key).etag)


NEVER = Mock(side_effect=PreconditionFailed("never"))
UNABLE = Mock(side_effect=NotSupported("501"))


@pytest.mark.parametrize(
    ("verb", "act", "said"),
    [
        ("create", overwrite, "a second create of one object was tried, and overwrote it"),
        ("replace", replace_any, "a replace with an outdated etag was tried, and overwrote it"),
        ("replace", NEVER, "a replace with the object's current etag was tried, and refused"),
        ("replace", UNABLE, "a conditional write was tried, and the store does not support it"),
    ],
)
def test_a_store_is_refused_with_what_was_tried_and_what_it_did(
    store, monkeypatch, verb, act, said
):
    monkeypatch.setattr(store, verb, partial(act, store))
    with pytest.raises(ConfigError, match=said) as caught:
        check_preconditions(store)
    assert caught.value.exit_status == 2
    assert caught.value.message.startswith(store.url)
    assert "conditional writes" in caught.value.hint
    assert list(store.list()) == []


def test_a_run_is_tried_once_and_again_where_it_was_copied_to(tmp_path, monkeypatch):
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


def test_a_store_that_cannot_be_reached_is_not_asked_again(store, monkeypatch):
    """To remove what was never there took another minute of retries."""
    delete = Mock()
    monkeypatch.setattr(store, "create", Mock(side_effect=StorageError("no answer")))
    monkeypatch.setattr(store, "delete", delete)
    with pytest.raises(StorageError, match="no answer"):
        check_preconditions(store)
    delete.assert_not_called()


def test_probe_that_cannot_be_removed_is_only_a_warning(store, caplog, monkeypatch):
    monkeypatch.setattr(store, "delete", Mock(side_effect=AccessDenied("no")))
    check_preconditions(store)
    assert "cannot remove the probe" in caplog.text
