from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import gcsfs.retry
import pytest
from google.auth.exceptions import RefreshError, TransportError

from batchinfer.core.errors import AccessDenied, InputError, StorageError
from batchinfer.split import files
from batchinfer.storage import Store, gcs
from batchinfer.storage.gcs import GcsStore
from batchinfer.storage.opening import check_preconditions
from batchinfer.storage.retrying import RetryPolicy
from store_contract import StoreContract

BUCKET = "bucket"
PAGE = 3
TIME = "2026-01-02T03:04:05.678Z"
MIB = 1 << 20
QUICK = RetryPolicy(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.01)
QUICK_AND_DEAF = RetryPolicy(attempts=3, first_pause_seconds=0.01, silence_seconds=0.1)


class FakeGcs(ThreadingHTTPServer):
    """The part of the JSON API that the store uses, with generations, in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.uploads: dict[str, tuple[str, str | None, bytearray]] = {}
        self.generation = 1000
        self.refusal: tuple[int, str] | None = None
        self.loss: list[int] = []
        """Statuses with which the next pieces of uploads are answered, each saying that the upload is gone."""

    def put(self, name: str, data: bytes, expected: str | None) -> dict[str, str] | None:
        with self.lock:
            held = self.objects.get(name, (b"", 0))[1]
            if expected is not None and int(expected) != held:
                return None
            self.generation += 1
            self.objects[name] = (data, self.generation)
            return self.describe(name)

    def describe(self, name: str) -> dict[str, str]:
        data, generation = self.objects[name]
        return {
            "name": name,
            "size": str(len(data)),
            "generation": str(generation),
            "updated": TIME,
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeGcs

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self.server.refusal:
            status, message = self.server.refusal
            return self.answer(status, {"error": {"code": status, "message": message}})
        found = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
        assert found, self.path
        is_upload, bucket, name = found[1], found[2], unquote(found[3] or "")
        if bucket != BUCKET:
            return self.answer(404, {"error": {"code": 404, "message": "no such bucket"}})
        if is_upload:
            return self.upload(query, body)
        if not name:
            return self.list(query)
        with self.server.lock:
            if name not in self.server.objects:
                return self.answer(404, {"error": {"code": 404, "message": "no such object"}})
            if self.command == "DELETE":
                del self.server.objects[name]
                return self.answer(204)
            if query.get("alt") != "media":
                return self.answer(200, self.server.describe(name))
            data, generation = self.server.objects[name]
        if query.get("generation", str(generation)) != str(generation):
            return self.answer(404, {"error": {"code": 404, "message": "no such generation"}})
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "bytes=0-999999999"))
        return self.answer(
            200, data[int(span[1]) : int(span[2]) + 1], X_Goog_Generation=str(generation)
        )

    do_GET = do_POST = do_DELETE = handle_request  # noqa: N815 - http.server's names

    def list(self, query: dict[str, str]) -> None:
        with self.server.lock:
            names = sorted(name for name in self.server.objects if name.startswith(query["prefix"]))
            names = [name for name in names if name > query.get("pageToken", "")]
            items = [self.server.describe(name) for name in names[:PAGE]]
        more = {"nextPageToken": names[PAGE - 1]} if len(names) > PAGE else {}
        self.answer(200, {"items": items, **more} if items else {})

    def upload(self, query: dict[str, str], body: bytes) -> None:
        server = self.server
        expected = query.get("ifGenerationMatch")
        if query["uploadType"] == "resumable" and "upload_id" not in query:
            if expected == "0" and query["name"] in server.objects:
                return self.answer(412, {"error": {"code": 412, "message": "exists"}})
            upload_id = str(len(server.uploads))
            server.uploads[upload_id] = (query["name"], expected, bytearray())
            host = f"http://127.0.0.1:{server.server_port}"
            return self.answer(200, {}, Location=f"{host}{self.path}&upload_id={upload_id}")
        if "upload_id" in query:
            name, expected, data = server.uploads[query["upload_id"]]
            if self.command == "DELETE":
                return self.answer(499)
            if server.loss:
                return self.answer(server.loss.pop())
            data += body
            last, total = re.fullmatch(
                r"bytes \d+-(\d+)/(\d+)", self.headers["Content-Range"]
            ).groups()
            if int(last) + 1 < int(total):
                return self.answer(308, Range=f"bytes=0-{last}")
            made = server.put(name, bytes(data), expected)
        else:
            made = server.put(query["name"], body, expected)
        if made is None:
            return self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        return self.answer(200, made)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGcs]:
    made = FakeGcs()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{made.server_port}")
    # Only the fake is asked, also for credentials.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


class TestGcsStore(StoreContract):
    @pytest.fixture
    def reopen(self, server: FakeGcs) -> Callable[[], Store]:
        return lambda: GcsStore(f"gs://{BUCKET}/some/job")


# gcsfs sends pieces as plain bytes, which aiohttp dislikes.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_large_file_becomes_visible_with_its_last_piece(server: FakeGcs, tmp_path: Path):
    store = GcsStore(f"gs://{BUCKET}", resumable_bytes=MIB)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 4096 * 33)
    store.put_file("outputs/a", file)
    store.download("outputs/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_missing_bucket_is_named(server: FakeGcs, tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 2 * MIB)
    for verb in (
        lambda store: list(store.list()),
        lambda store: store.get("k"),
        lambda store: store.stat("k"),
        lambda store: store.download("k", tmp_path / "copy"),
        lambda store: store.create("k", b"1"),
        lambda store: store.put_file("k", file),
        lambda store: GcsStore(store.url, retries=QUICK, resumable_bytes=1).put_file("k", file),
        lambda store: store.replace("k", b"1", "1"),
    ):
        with pytest.raises(InputError, match="'nowhere'") as caught:
            verb(GcsStore("gs://nowhere/job"))
        assert "gcloud storage buckets create" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "message"), [(403, "caller has no storage.objects.create"), (401, "who are you")]
)
def test_refused_access_says_what_to_do(server: FakeGcs, status: int, message: str):
    server.refusal = (status, message)
    store = GcsStore(f"gs://{BUCKET}/job")
    for verb in (
        lambda: store.create("k", b"1"),
        lambda: store.get("k"),
        lambda: check_preconditions(store),
    ):
        with pytest.raises(AccessDenied) as caught:
            verb()
        assert re.search("gcloud|role", caught.value.hint)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gcsfs repeat without pauses."""

    async def sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=sleep))


@pytest.fixture
def silent_endpoint(server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        yield


@pytest.mark.timeout(60)
def test_server_that_never_answers_is_a_storage_error(silent_endpoint, no_pauses, tmp_path: Path):
    store = GcsStore(f"gs://{BUCKET}/job", retries=QUICK_AND_DEAF, resumable_bytes=1)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    for verb in (
        lambda: store.get("k"),
        lambda: list(store.list()),
        lambda: store.create("k", b"1"),
        lambda: store.put_file("k", file),
    ):
        with pytest.raises(StorageError, match="no answer") as caught:
            verb()
        assert type(caught.value) is StorageError


@pytest.mark.timeout(60)
def test_sources_on_a_server_that_never_answers_end_too(silent_endpoint, no_pauses, monkeypatch):
    short = gcs.patience(0.2)
    monkeypatch.setattr(gcs, "patience", lambda: short)
    with pytest.raises(StorageError):
        files.locate(f"gs://{BUCKET}/rows.jsonl")


class Metadata:
    """Credentials of a machine whose metadata server does not answer for a while."""

    valid = False
    expiry = None

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def refresh(self, request: object) -> None:
        if self.errors:
            raise self.errors.pop()
        self.valid = True

    def apply(self, headers: dict[str, str]) -> None:
        headers["Authorization"] = "Bearer token"


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


UNREACHABLE = chained(RefreshError("compute"), TransportError("nobody answers"))


@pytest.mark.parametrize(
    "error",
    [TransportError("nobody answers"), UNREACHABLE, RefreshError("503", retryable=True)],
    ids=["token endpoint", "metadata server", "overloaded"],
)
def test_credentials_that_cannot_be_refreshed_for_a_while_are_asked_for_again(
    server: FakeGcs, no_pauses, error: Exception
):
    store = GcsStore(f"gs://{BUCKET}/job", retries=QUICK)
    # gcsfs itself tries six times after the errors that it repeats.
    tries = 1 if type(error) is TransportError else 6
    credentials = store._fs.credentials.credentials = Metadata(*[error] * 2 * tries)
    store.create("k", b"1")
    assert credentials.valid
    store._fs.credentials.credentials = Metadata(*[error] * 3 * tries)
    with pytest.raises(StorageError, match="after 3 attempts") as caught:
        store.get("k")
    assert type(caught.value) is StorageError, "exit 34, for which a worker is started again"


@pytest.mark.parametrize(
    "error",
    [
        RefreshError("invalid_grant"),
        chained(RefreshError("compute"), TransportError("Status: 404", object())),
    ],
    ids=["revoked", "machine without a role"],
)
def test_credentials_that_are_refused_are_access_denied(
    server: FakeGcs, no_pauses, error: Exception
):
    store = GcsStore(f"gs://{BUCKET}/job", retries=QUICK)
    store._fs.credentials.credentials = Metadata(*[error] * 6)
    with pytest.raises(AccessDenied, match="credentials"):
        store.get("k")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("status", [404, 410])
def test_upload_that_the_service_lost_is_started_again(
    server: FakeGcs, tmp_path: Path, status: int
):
    store = GcsStore(f"gs://{BUCKET}/job", retries=QUICK, resumable_bytes=MIB)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 4096 * 33)
    server.loss = [status] * 2
    store.put_file("outputs/a", file)
    store.download("outputs/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    server.loss = [status] * 3
    with pytest.raises(StorageError, match="after 3 attempts") as caught:
        store.put_file("outputs/b", file)
    assert type(caught.value) is StorageError
    assert [found.key for found in store.list()] == ["outputs/a"]
