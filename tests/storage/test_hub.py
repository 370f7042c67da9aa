from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import errors as client_errors

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.storage.hub import ReadOnlyStore, hub_errors
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import RetryPolicy, TransientError

QUICK = RetryPolicy(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.01)
REPOSITORY = "datasets/org/name"
COMMIT = "c" * 40
FILES = {"data/a.txt": b"alpha", "data/b/c.txt": b"gamma" * 1000, "README.md": b"# read me"}


class Server(ThreadingHTTPServer):
    """Files below /files/, and as much of the Hub's API as its file system asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.refusals: list[int] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if self.server.refusals:
            return self.answer(self.server.refusals.pop(0))
        if found := re.fullmatch(f"/(?:files|{REPOSITORY}/resolve/[^/]+)/(.+)", path):
            if found[1] not in FILES:
                return self.answer(404, X_Error_Code="EntryNotFound")
            data = FILES[found[1]]
            facts = {"ETag": f'"{found[1]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, end = int(span[1]), int(span[2] or len(data) - 1)
                facts["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                return self.answer(206, data[start : end + 1], **facts)
            return self.answer(200, data, **facts)
        if re.fullmatch(f"/api/{REPOSITORY}(/revision/[^/]+)?", path):
            return self.answer(200, {"id": "org/name", "sha": COMMIT, "siblings": [], "tags": []})
        if re.fullmatch(f"/api/{REPOSITORY}/paths-info/[^/]+", path):
            asked = json.loads(body)["paths"]
            return self.answer(200, [entry for entry in entries() if entry["path"] in asked])
        if found := re.fullmatch(f"/api/{REPOSITORY}/tree/[^/]+/?(.*)", path):
            start = f"{found[1]}/" if found[1] else ""
            return self.answer(200, [item for item in entries() if item["path"].startswith(start)])
        return self.answer(404, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = handle_request  # noqa: N815 - http.server's names


def entries() -> list[dict[str, Any]]:
    files = [
        {"type": "file", "path": path, "size": len(data), "oid": f"oid-{path}"}
        for path, data in FILES.items()
    ]
    return files + [{"type": "directory", "path": path, "oid": path} for path in ("data", "data/b")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    import huggingface_hub.constants as hub

    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    # HF_ENDPOINT is read once, at the first import.
    monkeypatch.setattr(hub, "ENDPOINT", made.url)
    template = hub.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", made.url)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(params=["http", "hf"])
def store(request: pytest.FixtureRequest, server: Server) -> ReadOnlyStore:
    url = f"{server.url}/files" if request.param == "http" else f"hf://{REPOSITORY}"
    return ReadOnlyStore(url, retries=QUICK)


def test_objects_can_be_read(store: ReadOnlyStore, tmp_path: Path):
    held = store.get("data/a.txt")
    assert held.data == b"alpha"
    assert held.etag
    found = store.stat("data/b/c.txt")
    assert (found.key, found.bytes) == ("data/b/c.txt", 5000)
    assert found.etag != held.etag
    store.download("data/b/c.txt", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == FILES["data/b/c.txt"]


def test_absent_objects_are_not_found(store: ReadOnlyStore, tmp_path: Path):
    for verb in (store.get, store.stat, lambda key: store.download(key, tmp_path / "copy")):
        with pytest.raises(ObjectNotFound, match=r"data/nothing\.txt"):
            verb("data/nothing.txt")


def test_keys_that_leave_the_root_are_refused(store: ReadOnlyStore):
    with pytest.raises(InputError):
        store.get("../other")


def test_writing_is_refused(store: ReadOnlyStore, tmp_path: Path):
    for verb in (
        lambda: store.create("k", b"1"),
        lambda: store.put_file("k", tmp_path / "file"),
        lambda: store.replace("k", b"1", "etag"),
        lambda: store.delete(["k"]),
    ):
        with pytest.raises(AccessDenied, match="read-only"):
            verb()


def test_repository_is_listed_in_key_order(server: Server):
    store = open_store(f"hf://{REPOSITORY}")
    assert [(found.key, found.bytes) for found in store.list()] == [
        ("README.md", 9),
        ("data/a.txt", 5),
        ("data/b/c.txt", 5000),
    ]
    assert [found.key for found in store.list("data/b")] == ["data/b/c.txt"]
    inside = open_store(f"hf://{REPOSITORY}@{COMMIT}/data")
    assert [found.key for found in inside.list()] == ["a.txt", "b/c.txt"]
    assert inside.get("a.txt").data == b"alpha"


def test_web_server_cannot_be_listed(server: Server):
    with pytest.raises(InputError, match="listed"):
        open_store(f"{server.url}/files").list()


def test_passing_trouble_is_tried_again(server: Server):
    store = ReadOnlyStore(f"{server.url}/files", retries=QUICK)
    server.refusals = [503, 503]
    assert store.stat("data/a.txt").bytes == 5


def test_refusal_and_outage_are_told_apart(server: Server):
    store = ReadOnlyStore(f"{server.url}/files", retries=QUICK)
    server.refusals = [403] * 9
    with pytest.raises(AccessDenied) as caught:
        store.get("data/a.txt")
    assert "HF_TOKEN" in caught.value.hint
    server.refusals = [500] * 99
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
        (make_error(client_errors.GatedRepoError, 403), AccessDenied, "terms"),
        (make_error(client_errors.LocalTokenNotFoundError), AccessDenied, "HF_TOKEN"),
        (make_error(client_errors.RepositoryNotFoundError, 401), InputError, "HF_TOKEN"),
        (make_error(client_errors.RevisionNotFoundError, 404), InputError, "branch"),
        (make_error(client_errors.HFValidationError), InputError, ""),
        (make_error(client_errors.OfflineModeIsEnabled), InputError, "HF_HUB_OFFLINE"),
        (make_error(client_errors.BadRequestError, 400), InputError, ""),
        (make_error(client_errors.LocalEntryNotFoundError), TransientError, "HF_ENDPOINT"),
        (make_error(client_errors.RemoteEntryNotFoundError, 404), ObjectNotFound, ""),
        (make_error(client_errors.HfHubHTTPError, 401), AccessDenied, "HF_TOKEN"),
        (make_error(client_errors.HfHubHTTPError, 429), TransientError, "answered 429"),
        (make_error(client_errors.HfHubHTTPError, 503), TransientError, "answered 503"),
        (make_error(client_errors.HfHubHTTPError, 418), StorageError, ""),
        (make_error(client_errors.HfHubHTTPError), TransientError, "again"),
        (ConnectionError("no route"), TransientError, "HTTPS_PROXY"),
        (FileNotFoundError("x"), ObjectNotFound, ""),
    ],
)
def test_an_error_of_the_hub_is_said_in_our_words(
    error: Exception, raised: type[BatchinferError], said: str
) -> None:
    with pytest.raises(raised, match=r"^the subject: ") as caught, hub_errors("the subject"):
        raise error
    assert type(caught.value) is raised
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__cause__ is error


def test_an_outage_behind_a_file_that_is_not_found_is_an_outage() -> None:
    outage = FileNotFoundError("x")
    outage.__cause__ = ConnectionError("no route")
    with pytest.raises(TransientError), hub_errors("the subject"):
        raise outage


@pytest.mark.parametrize("error", [KeyError("a bug"), InputError("ours")])
def test_what_no_client_raised_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, hub_errors("the subject"):
        raise error
    assert caught.value is error
