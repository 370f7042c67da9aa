from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest

from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.storage import Store, s3_client
from batchinfer.storage.opening import check_preconditions, open_store
from batchinfer.storage.retrying import RetryPolicy
from batchinfer.storage.s3 import S3Store
from lossy_proxy import Proxy
from store_contract import StoreContract

pytestmark = pytest.mark.s3

QUICK = RetryPolicy(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.01)
QUICK_TWICE = RetryPolicy(attempts=2, first_pause_seconds=0.01)
MIB = 1 << 20


@pytest.fixture
def client(s3_environment: str) -> Iterator[object]:
    made = boto3.client("s3")
    yield made
    made.close()


class TestS3Store(StoreContract):
    @pytest.fixture
    def reopen(self, s3_url: Callable[..., str]) -> Callable[[], Store]:
        url = s3_url("some/job")
        return lambda: S3Store(url, retries=QUICK)


class TestS3StoreWithMultipartUploads(TestS3Store):
    @pytest.fixture
    def reopen(self, s3_url: Callable[..., str]) -> Callable[[], Store]:
        url = s3_url("job")
        return lambda: S3Store(url, retries=QUICK, part_bytes=5 * MIB, multipart_bytes=1)


@pytest.fixture
def proxy(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(s3_environment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


def test_lost_reply_to_a_create_is_no_loss(s3_url, proxy: Proxy):
    store = S3Store(s3_url("job"), retries=QUICK)
    proxy.lose(b"PUT ")
    etag = store.create("claims/a", b"nonce 1")
    assert proxy.num_lost == 1
    assert store.get("claims/a") == (b"nonce 1", etag)
    proxy.lose(b"PUT ")
    with pytest.raises(AlreadyExists):
        store.create("claims/a", b"nonce 2")
    assert proxy.num_lost == 2


def test_lost_reply_to_a_replace_is_no_loss(s3_url, proxy: Proxy):
    store = S3Store(s3_url("job"), retries=QUICK)
    etag = store.create("w.json", b"beat 1")
    proxy.lose(b"PUT ")
    after = store.replace("w.json", b"beat 2", etag)
    assert proxy.num_lost == 1
    assert store.get("w.json") == (b"beat 2", after)


def test_lost_reply_to_a_file_is_no_loss(s3_url, proxy: Proxy, tmp_path: Path):
    store = S3Store(s3_url("job"), retries=QUICK)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 * MIB))
    proxy.lose(b"PUT ")
    store.put_file("outputs/a", file)
    assert proxy.num_lost == 1
    assert store.get("outputs/a").data == file.read_bytes()


@pytest.mark.parametrize(
    ("starts_with", "contains"),
    [(b"PUT ", b"partNumber=2"), (b"POST ", b"uploads"), (b"POST ", b"uploadId")],
    ids=["a part", "the start", "the completion"],
)
def test_lost_reply_in_a_multipart_upload_is_no_loss(
    s3_url, proxy: Proxy, tmp_path: Path, starts_with: bytes, contains: bytes
):
    url = s3_url("job")
    store = S3Store(url, retries=QUICK, part_bytes=5 * MIB, multipart_bytes=6 * MIB)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(12 * MIB))
    proxy.lose(starts_with, contains=contains)
    store.put_file("outputs/a", file)
    assert proxy.num_lost == 1
    store.download("outputs/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


def test_lost_replies_to_reads_are_asked_again(s3_url, proxy: Proxy, tmp_path: Path):
    store = S3Store(s3_url("job"), retries=QUICK)
    data = os.urandom(MIB)
    store.create("k", data)
    proxy.lose(b"GET ", times=2)
    assert store.get("k").data == data
    proxy.lose(b"GET ", times=2)
    store.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    proxy.lose(b"GET ", times=2)
    assert [found.key for found in store.list()] == ["k"]
    proxy.lose(b"HEAD ", times=2)
    assert store.stat("k").bytes == MIB
    proxy.lose(b"POST ", times=2)
    store.delete(["k"])
    assert proxy.num_lost == 10


class _Answer(BaseHTTPRequestHandler):
    """Answers all requests of one connection, until the router has forgotten it."""

    protocol_version = "HTTP/1.1"
    server: _BehindRouter

    def setup(self) -> None:
        super().setup()
        self.is_forgotten = threading.Event()
        self.server.connections.append(self)

    def do_GET(self) -> None:
        if self.is_forgotten.is_set():
            self.server.is_over.wait(30)
            return
        self.server.together.wait(30)
        self.send_response(200)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"1")

    def log_message(self, *_: object) -> None:
        pass


class _BehindRouter(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.connections: list[_Answer] = []
        self.together = threading.Barrier(4)
        self.is_over = threading.Event()
        super().__init__(("127.0.0.1", 0), _Answer)


def test_connections_that_a_router_may_have_forgotten_are_not_used_again(
    s3_environment, monkeypatch
):
    with _BehindRouter() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        store = S3Store("s3://bucket/job", retries=RetryPolicy(attempts=1, silence_seconds=1))
        with ThreadPoolExecutor(4) as pool:
            assert [found.data for found in pool.map(store.get, ["k"] * 4)] == [b"1"] * 4
        assert len(server.connections) == 4
        for connection in server.connections:
            connection.is_forgotten.set()
        server.together = threading.Barrier(1)
        monkeypatch.setattr(s3_client, "CONNECTION_SECONDS", 0.0)
        try:
            assert store.get("k").data == b"1"
        finally:
            server.is_over.set()
            server.shutdown()


def test_server_that_never_answers_is_a_storage_error_after_the_retries(s3_url, proxy: Proxy):
    store = S3Store(s3_url("job"), retries=QUICK)
    proxy.lose(b"GET ", times=99)
    with pytest.raises(StorageError, match="after 3 attempts") as caught:
        store.get("k")
    assert type(caught.value) is StorageError
    assert "AWS_ENDPOINT_URL" in caught.value.hint
    assert proxy.num_lost >= 3  # the HTTP client asks a second time by itself


def test_server_that_is_not_there_is_a_storage_error(s3_environment, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(StorageError, match="after 3 attempts"):
        S3Store("s3://bucket/job", retries=QUICK).create("k", b"1")


def test_part_of_an_upload_is_never_an_object(s3_url, proxy: Proxy, tmp_path: Path):
    store = S3Store(s3_url("job"), retries=QUICK, part_bytes=5 * MIB, multipart_bytes=6 * MIB)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(12 * MIB))
    proxy.lose(b"PUT ", contains=b"partNumber=3", times=99)
    with pytest.raises(StorageError, match="after 3 attempts"):
        store.put_file("outputs/a", file)
    assert list(store.list()) == []
    assert list(store.list_multipart_uploads()) == []


def test_dangling_uploads_are_listed_and_aborted_by_age(s3_url, client):
    url = s3_url("job")
    store = S3Store(url, retries=QUICK)
    for key in ("job/outputs/a", "job/outputs/b", "other/c"):
        client.create_multipart_upload(Bucket=store.bucket, Key=key)
    keys = [upload.key for upload in store.list_multipart_uploads()]
    assert keys == ["outputs/a", "outputs/b"]
    century = 100 * 365 * 86_400  # this server dates every upload to 2010
    assert store.abort_multipart_uploads(century) == 0
    assert store.abort_multipart_uploads(3600) == 2
    assert list(store.list_multipart_uploads()) == []
    assert len(client.list_multipart_uploads(Bucket=store.bucket)["Uploads"]) == 1


def test_more_than_a_page_of_keys_is_listed_and_deleted(s3_url, client):
    store = S3Store(s3_url("job"), retries=QUICK)
    keys = [f"x/{index:04d}" for index in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        for key in keys:
            pool.submit(client.put_object, Bucket=store.bucket, Key=f"job/{key}", Body=b"1")
    client.put_object(Bucket=store.bucket, Key="job/x/", Body=b"")  # a console's "folder"
    assert [found.key for found in store.list("x/")] == keys
    store.delete(keys)
    assert list(store.list()) == []


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-02T03:04:05Z",
        "2026-01-02T03:04:05.000Z",
        "2026-01-02T03:04:05",
        "Fri, 02 Jan 2026 03:04:05 GMT",
        1767323045,
    ],
)
def test_times_are_read_as_botocore_reads_them(text: object):
    assert s3_client.parse_time(text).timestamp() == 1767323045


def test_a_key_of_odd_characters_is_listed_as_it_is(s3_url, client):
    store = S3Store(s3_url("job"), retries=QUICK)
    keys = ["x/a b", "x/a&b", "x/a%20b", "x/\u00e4+<>"]
    for key in keys:
        store.create(key, key.encode())
    found = list(store.list("x/"))
    assert sorted(info.key for info in found) == sorted(keys)
    assert all(abs(info.modified - time.time()) < 600 for info in found)
    assert all(store.stat(info.key) == info._replace(modified=int(info.modified)) for info in found)


def test_whole_bucket_can_be_the_root(s3_url):
    store = open_store(s3_url())
    assert isinstance(store, S3Store)
    etag = store.create("job.json", b"{}")
    assert store.get("job.json") == (b"{}", etag)
    assert [found.key for found in store.list()] == ["job.json"]
    assert store.url == f"s3://{store.bucket}"


def test_sibling_with_the_same_start_is_outside(s3_url, client):
    store = S3Store(s3_url("job"), retries=QUICK)
    client.put_object(Bucket=store.bucket, Key="job2/x", Body=b"1")
    assert list(store.list()) == []


def test_missing_bucket_is_named(s3_environment, tmp_path):
    store = S3Store("s3://no-such-bucket-here/job", retries=QUICK)
    file = tmp_path / "file"
    file.write_bytes(b"1")
    for verb in (
        lambda: store.get("k"),
        lambda: store.stat("k"),
        lambda: store.download("k", tmp_path / "copy"),
        lambda: list(store.list()),
        lambda: store.create("k", b"1"),
        lambda: store.put_file("k", file),
        lambda: store.replace("k", b"1", '"0"'),
        lambda: store.delete(["k"]),
        lambda: check_preconditions(store),
    ):
        with pytest.raises(InputError, match="no-such-bucket-here") as caught:
            verb()
        assert "aws s3 mb" in caught.value.hint


def test_invalid_bucket_name_is_refused(s3_environment):
    with pytest.raises(InputError, match="bucket"):
        S3Store("s3://Not A Bucket/job", retries=QUICK).get("k")


def test_missing_credentials_are_access_denied(s3_url, monkeypatch):
    url = s3_url("job")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="credentials") as caught:
        S3Store(url, retries=QUICK).get("k")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def test_credentials_that_cannot_be_had_for_a_moment_are_asked_for_again(
    s3_url, monkeypatch, tmp_path
):
    store = S3Store(s3_url("job"), retries=QUICK)
    counter, config, source = (tmp_path / name for name in ("counter", "config", "source.sh"))
    source.write_text(
        f"echo >>{counter}; [ $(wc -l <{counter}) -gt 2 ] || exit 1\n"
        """echo '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b"}'\n"""
    )
    config.write_text(f"[profile p]\ncredential_process = sh {source}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "p")
    store.create("k", b"1")
    assert len(counter.read_text()) == 3
    source.write_text("exit 1\n")
    with pytest.raises(StorageError, match="after 3 attempts") as caught:
        S3Store(store.url, retries=QUICK).get("k")
    assert type(caught.value) is StorageError, "exit 34, for which a worker is started again"
    assert "AWS_PROFILE" in caught.value.hint


def test_unknown_profile_is_access_denied(s3_url, monkeypatch):
    url = s3_url("job")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AccessDenied, match="nobody"):
        S3Store(url, retries=QUICK).get("k")


def test_endpoint_and_key_of_a_profile_are_used(s3_url, monkeypatch, tmp_path):
    url = s3_url("job")
    config = tmp_path / "config"
    config.write_text(
        "[profile r2]\naws_access_key_id = a\naws_secret_access_key = b\nregion = auto\n"
        f"endpoint_url = {os.environ['AWS_ENDPOINT_URL']}\n"
    )
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "r2")
    store = open_store(url.replace("s3://", "r2://"))
    store.create("k", b"1")
    assert store.get("k").data == b"1"


def test_r2_without_an_endpoint_says_what_to_set(s3_environment, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(ConfigError, match="endpoint") as caught:
        open_store("r2://bucket/job")
    assert "r2.cloudflarestorage.com" in caught.value.hint


def test_endpoint_without_a_scheme_is_a_config_error(s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9000") as caught:
        S3Store("s3://bucket/job", retries=QUICK).get("k")
    assert "AWS_ENDPOINT_URL" in caught.value.hint


class Aborting(S3Store):
    """A server whose first upload somebody aborts right before a request of one kind.

    S3 then answers 404 (NoSuchUpload) where moto answers 500.
    """

    aborted_before = ""
    aborted_id = ""

    def _call(self, method: str, **arguments: object) -> object:
        if method == self.aborted_before:
            self.aborted_before = ""
            self.aborted_id = str(arguments["UploadId"])
            super()._call("abort_multipart_upload", Key=arguments["Key"], UploadId=self.aborted_id)
        if self.aborted_id and arguments.get("UploadId") == self.aborted_id:
            raise ObjectNotFound(f"{arguments['Key']}: no such object")
        return super()._call(method, **arguments)


@pytest.mark.parametrize("request_name", ["upload_part", "complete_multipart_upload"])
def test_an_upload_that_was_aborted_meanwhile_begins_again(
    s3_url, tmp_path: Path, request_name: str
):
    """`batchinfer clean` aborts uploads that have been unfinished for long, as those of a frozen machine."""
    store = Aborting(s3_url("job"), retries=QUICK, multipart_bytes=MIB)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(6 * MIB))
    store.aborted_before = request_name
    store.put_file("output", file)
    assert store.aborted_before == ""
    assert store.get("output").data == file.read_bytes()
    assert list(store.list_multipart_uploads()) == []


ANSWER = (
    b"HTTP/1.1 %d X\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n"
    b"Connection: close\r\n\r\n%s"
)


class Scripted:
    """A server that gives scripted answers, one a connection, and 200 with an ETag when they are used up."""

    def __init__(self, *answers: tuple[int, str] | tuple[int, str, str]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.answers = list(answers)
        self.num_requests = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(1 << 16)
                if b"100-continue" in request:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    connection.recv(1 << 16)
                self.num_requests += 1
                if not self.answers:
                    connection.sendall(
                        b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
                    )
                    continue
                status, code, *more = self.answers.pop(0)
                message = more[0] if more else "no"
                body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                if request.startswith(b"HEAD "):
                    body = b""
                connection.sendall(ANSWER % (status, len(body), body))


PAGE = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>"
NO_ANSWERS = {
    "no body": b"Content-Length: 900\r\n\r\n",
    "half a body": b"Content-Length: 900\r\n\r\n<ListBucketResult>",
    "half a header": b'x-amz-id: 1\r\nETag: "9a03',
    "a web page": b"Content-Type: text/html\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE),
    "another answer": b"Content-Length: 27\r\n\r\n<Other><Key>k</Key></Other>",
}
VERBS = {
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete(["k"]),
    "list_multipart_uploads": lambda store: list(store.list_multipart_uploads()),
    "get": lambda store: store.get("k"),
    "stat": lambda store: store.stat("k"),
    "create": lambda store: store.create("k", b"1"),
    "replace": lambda store: store.replace("k", b"1", '"e"'),
}


@contextlib.contextmanager
def always_answering(reply: bytes) -> Iterator[str]:
    """A server that answers every request with status 200 and `reply`, and then closes the connection."""

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    request = connection.recv(1 << 16)
                    if request.startswith((b"POST ", b"PUT ")):
                        connection.settimeout(0.2)
                        with contextlib.suppress(TimeoutError):
                            while b"100-continue" not in request and connection.recv(1 << 16):
                                pass
                    connection.sendall(b"HTTP/1.1 200 OK\r\n" + reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("reply", NO_ANSWERS.values(), ids=NO_ANSWERS)
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_answer_that_no_s3_server_gives_is_no_answer(
    s3_environment, monkeypatch, verb: Callable[[S3Store], object], reply: bytes
):
    """A cut connection or a proxy's page is no empty listing, no deletion without failures, and no object."""
    with always_answering(reply) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(StorageError, match="after 2 attempts") as caught:
            verb(S3Store("s3://bucket/job", retries=QUICK_TWICE))
        assert "AWS_ENDPOINT_URL" in caught.value.hint


def test_an_empty_answer_to_a_listing_is_no_empty_listing(s3_environment, monkeypatch):
    with always_answering(b"Content-Length: 0\r\n\r\n") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = S3Store("s3://bucket/job", retries=QUICK_TWICE)
        with pytest.raises(StorageError, match="it is empty"):
            list(store.list())
        with pytest.raises(StorageError, match="it has no ETag"):
            store.create("k", b"1")
        store.delete(["k"])  # some stores say nothing if nothing failed


def test_an_object_of_an_answer_without_a_length_is_no_object(s3_environment, monkeypatch):
    """A header that was cut short after the ETag would make every object look empty."""
    with always_answering(b'ETag: "abc"\r\n') as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = S3Store("s3://bucket/job", retries=QUICK_TWICE)
        for verb in (store.get, store.stat):
            with pytest.raises(StorageError, match="it has no length"):
                verb("k")


@pytest.mark.parametrize(
    ("item", "lacks"),
    [
        ("<Contents><Key>job/k</Key><Size>1</Size></Contents>", "ETag"),
        ("<Contents><Key>job/k</Key><ETag>e</ETag></Contents>", "Size"),
        ("<IsTruncated>true</IsTruncated>", "NextContinuationToken"),
    ],
)
def test_a_listing_that_lacks_a_field_is_a_storage_error(
    s3_environment, monkeypatch, item: str, lacks: str
):
    body = f"<?xml version='1.0'?>\n<ListBucketResult>{item}</ListBucketResult>".encode()
    with always_answering(b"Content-Length: %d\r\n\r\n%s" % (len(body), body)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(StorageError, match=lacks):
            list(S3Store("s3://bucket/job", retries=QUICK_TWICE).list())


@pytest.fixture
def scripted(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scripted]]:
    made: list[Scripted] = []

    def make(*answers: tuple[int, str]) -> Scripted:
        made.append(Scripted(*answers))
        monkeypatch.setenv("AWS_ENDPOINT_URL", made[-1].url)
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "ConditionalRequestConflict"),
        (500, "InternalError"),
        (503, "SlowDown"),
        (403, "RequestTimeTooSkewed"),
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
        (502, "BadGateway"),
    ],
)
def test_passing_trouble_is_tried_again(scripted, status: int, code: str):
    server = scripted((status, code), (status, code))
    assert S3Store("s3://bucket/job", retries=QUICK).create("k", b"1") == '"e"'
    assert server.num_requests == 3


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", AccessDenied),
        (403, "SignatureDoesNotMatch", AccessDenied),
        (400, "ExpiredToken", AccessDenied),
        (400, "AuthorizationHeaderMalformed", ConfigError),
        (404, "NoSuchBucket", InputError),
        (501, "NotImplemented", StorageError),
        (400, "InvalidRequest", StorageError),
    ],
)
def test_lasting_trouble_is_reported_at_once(scripted, status: int, code: str, expected: type):
    server = scripted(*[(status, code)] * 9)
    with pytest.raises(expected, match="bucket"):
        S3Store("s3://bucket/job", retries=QUICK).create("k", b"1")
    assert server.num_requests == 1


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (501, "NotImplemented", "no"),
        (400, "MissingContentMD5", "no"),
        (400, "InvalidRequest", "Missing required header for this request: Content-MD5"),
    ],
)
def test_store_that_takes_no_bulk_deletion_is_asked_one_by_one(
    scripted, status: int, code: str, message: str
):
    server = scripted((status, code, message))
    S3Store("s3://bucket/job", retries=QUICK).delete(["a", "b"])
    assert server.num_requests == 3


def test_refused_head_hints_at_the_listing_permission(scripted):
    scripted(*[(403, "AccessDenied")] * 9)
    with pytest.raises(AccessDenied) as caught:
        S3Store("s3://bucket/job", retries=QUICK).stat("k")
    assert "s3:ListBucket" in caught.value.hint


def test_read_only_bucket_is_access_denied_by_the_probe(scripted):
    scripted(*[(403, "AccessDenied")] * 9)
    with pytest.raises(AccessDenied):
        check_preconditions(S3Store("s3://bucket/job", retries=QUICK))


EXIT = """
import sys
from pathlib import Path
from batchinfer.storage.opening import open_store
store = open_store(sys.argv[1])
store.create("k", b"1")
store.put_file("f", Path(sys.argv[2]))
next(store.list())
raise SystemExit(7)
"""


def test_process_that_used_the_store_can_exit(s3_url, tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * MIB)
    command = [sys.executable, "-W", "error", "-c", EXIT, s3_url("job"), str(file)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


WAIT = """
import signal
from batchinfer.storage.s3 import S3Store
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
try:
    S3Store("s3://bucket/job").get("k")
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_signals_are_heard_while_a_server_is_silent(s3_environment, monkeypatch):
    """A stop signal must not wait for the 60 seconds after which a silent connection is given up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        command = [sys.executable, "-c", WAIT]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                connection, _ = silent.accept()
                with connection:
                    connection.recv(1 << 16)  # so the request is on its way
                    start = time.monotonic()
                    process.send_signal(signal.SIGTERM)
                    assert process.stdout.readline() == "heard\n"
                    process.send_signal(signal.SIGINT)
                    assert process.stdout.readline() == "stopped\n"
                    assert time.monotonic() - start < 10
            finally:
                process.kill()


UPLOAD = """
import sys
from pathlib import Path
from batchinfer.storage.s3 import S3Store
store = S3Store(sys.argv[1], part_bytes=5 << 20, multipart_bytes=1)
print("ready", flush=True)
for index in range(10_000):
    store.put_file(f"{sys.argv[3]}-{index}", Path(sys.argv[2]))
    print("done", flush=True)
"""


def test_killed_uploader_never_shows_a_part(s3_url, tmp_path: Path):
    url = s3_url("job")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(12 * MIB))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    store = S3Store(url, retries=QUICK)
    for round_index, num_lines in enumerate((1, 2, 3)):
        process = subprocess.Popen(
            [sys.executable, "-c", UPLOAD, url, str(file), str(round_index)], stdout=subprocess.PIPE
        )
        for _ in range(num_lines):
            process.stdout.readline()
        threading.Event().wait(0.05)  # somewhere in the next upload
        process.kill()
        process.wait()
        process.stdout.close()
        found = list(store.list(f"{round_index}-"))
        assert len(found) >= num_lines - 1
        for info in found:
            assert hashlib.sha256(store.get(info.key).data).hexdigest() == sha256
        store.delete([info.key for info in found])
    store.abort_multipart_uploads(-3600)
    assert list(store.list_multipart_uploads()) == []
