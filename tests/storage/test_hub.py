from types import SimpleNamespace

import pytest
from huggingface_hub import errors as client_errors

from batchinfer.core.errors import (
    AccessDenied,
    InputError,
    ObjectNotFound,
    ScratchFull,
    StorageError,
)
from batchinfer.storage.hub import ReadOnlyStore, hub_errors
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import TransientError
from fakes import QUICK, caused
from fixtures_hub import Fault

REPOSITORY = "datasets/org/name"
FILES = {"data/a.txt": b"alpha", "data/b/c.txt": b"gamma" * 1000, "README.md": b"# read me"}


@pytest.fixture
def store(hub):
    hub.put("org/name", "main", FILES)
    return ReadOnlyStore(f"hf://{REPOSITORY}", retries=QUICK)


def test_objects_can_be_read_and_absent_ones_are_not_found(store, tmp_path):
    held = store.get("data/a.txt")
    assert held.data == b"alpha"
    assert held.etag
    found = store.stat("data/b/c.txt")
    assert (found.key, found.bytes) == ("data/b/c.txt", 5000)
    assert found.etag != held.etag
    store.download("data/b/c.txt", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == FILES["data/b/c.txt"]
    for verb in (store.get, store.stat, lambda key: store.download(key, tmp_path / "copy")):
        with pytest.raises(ObjectNotFound, match=r"data/nothing\.txt"):
            verb("data/nothing.txt")


def test_a_repository_is_listed_in_key_order(store, hub):
    assert [(found.key, found.bytes) for found in store.list()] == [
        ("README.md", 9),
        ("data/a.txt", 5),
        ("data/b/c.txt", 5000),
    ]
    assert [found.key for found in store.list("data/b")] == ["data/b/c.txt"]
    inside = open_store(f"hf://{REPOSITORY}@{hub.branches['org/name']['main']}/data")
    assert [found.key for found in inside.list()] == ["a.txt", "b/c.txt"]
    assert inside.get("a.txt").data == b"alpha"


def test_trouble_is_tried_again_or_told(store, hub):
    def refuse(status: int, times: int) -> None:
        hub.faults[:] = [Fault(verb, "a.txt", status) for verb in ("GET", "HEAD")] * times

    refuse(503, 1)
    assert store.stat("data/a.txt").bytes == 5
    refuse(403, 9)
    with pytest.raises(AccessDenied) as caught:
        store.get("data/a.txt")
    assert "HF_TOKEN" in caught.value.hint
    refuse(500, 99)
    with pytest.raises(StorageError, match="after 3 attempts"):
        store.get("data/a.txt")


def make_error(kind: type[Exception], status: int | None = None) -> Exception:
    """An error of a client as it raises it, whatever its constructor takes."""
    error = kind.__new__(kind)
    Exception.__init__(error, "from the test")
    if status is not None:
        error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (make_error(client_errors.GatedRepoError, 403), AccessDenied, "with access"),
        (make_error(client_errors.RepositoryNotFoundError, 401), InputError, "HF_TOKEN"),
        (make_error(client_errors.RevisionNotFoundError, 404), InputError, "branch"),
        (make_error(client_errors.OfflineModeIsEnabled), InputError, "HF_HUB_OFFLINE"),
        (make_error(client_errors.LocalEntryNotFoundError), TransientError, "HF_ENDPOINT"),
        (make_error(client_errors.HfHubHTTPError, 429), TransientError, "answered 429"),
        (ConnectionError("no route"), TransientError, "HTTPS_PROXY"),
        (OSError(28, "No space left on device"), ScratchFull, "--scratch-dir"),
        (PermissionError(13, "Permission denied", "/cache"), AccessDenied, "HF_HOME"),
        (PermissionError("403"), AccessDenied, "HF_TOKEN"),
        (FileNotFoundError("x"), ObjectNotFound, ""),
        (caused(FileNotFoundError("x"), ConnectionError("no route")), TransientError, ""),
        (caused(RuntimeError("an upload"), ConnectionError("no route")), TransientError, ""),
        (RuntimeError("Task error: CAS Client Error: sending request"), TransientError, ""),
    ],
)
def test_an_error_of_the_hub_is_said_in_our_words(error, raised, said):
    with pytest.raises(raised, match=r"^the subject: ") as caught, hub_errors("the subject"):
        raise error
    assert type(caught.value) is raised
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__cause__ is error
