"""Every kind of request to S3, spoilt in every way: the store does what it was asked to do, exactly once.

The faults are on the wire, so they hold for obstore, whose own repetition is off, and for what the adapter makes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists, PreconditionFailed, StorageError
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.prompts.types import PromptConfig
from batchinfer.storage import Store, clouds
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import RetryPolicy
from batchinfer.worker.start import run_worker
from batchinfer.worker.worker_config import WorkerConfig, real_environment
from lossy_proxy import FAULTS, Proxy
from making import make_job, read_marker

pytestmark = pytest.mark.s3

MIB = 1 << 20
QUICK = RetryPolicy(attempts=9, first_pause_seconds=0.01, longest_pause_seconds=0.1)


@pytest.fixture
def proxy(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(clouds, "_SILENCE", {"quick": "500ms", "patient": "1s"})
    made = Proxy(s3_environment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


SMALL, LARGE = b"old", os.urandom(MIB)
FILES = {"whole": os.urandom(5 * MIB), "in parts": os.urandom(clouds.PART_BYTES + 1)}


class Kind(NamedTuple):
    """A kind of request: how its line begins, what it contains, and a verb that sends it and checks the effect."""

    starts_with: bytes
    contains: bytes
    check: Callable[[Store, Path], bool]


def download(store: Store, scratch: Path) -> bool:
    store.download("large", scratch / "copy")
    return (scratch / "copy").read_bytes() == LARGE


def upload(store: Store, scratch: Path, size: str = "whole") -> bool:
    (scratch / "file").write_bytes(FILES[size])
    store.put_file("new", scratch / "file")
    return store.get("new").data == FILES[size]


upload_in_parts = partial(upload, size="in parts")


def create(store: Store, _: Path) -> bool:
    etag = store.create("new", b"new")
    return store.get("new") == (b"new", etag)


def replace(store: Store, _: Path) -> bool:
    etag = store.replace("k", b"newer", store.stat("k").etag)
    return store.get("k") == (b"newer", etag)


def delete(store: Store, _: Path) -> bool:
    store.delete(["k"])
    return [found.key for found in store.list()] == ["large"]


KINDS = {
    "get": Kind(b"GET ", b"k ", lambda store, _: store.get("k").data == SMALL),
    "download": Kind(b"GET ", b"large ", download),
    "stat": Kind(b"HEAD ", b"k ", lambda store, _: store.stat("k").bytes == len(SMALL)),
    "list": Kind(
        b"GET ",
        b"list-type=2",
        lambda store, _: [each.key for each in store.list()] == ["k", "large"],
    ),
    "create": Kind(b"PUT ", b"new ", create),
    "put_file": Kind(b"PUT ", b"new ", upload),
    "replace": Kind(b"PUT ", b"k ", replace),
    "delete": Kind(b"POST ", b"?delete", delete),
    "start of parts": Kind(b"POST ", b"?uploads", upload_in_parts),
    "a part": Kind(b"PUT ", b"partNumber=2", upload_in_parts),
    "end of parts": Kind(b"POST ", b"uploadId", upload_in_parts),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_request_is_sent_again(
    s3_url: Callable[..., str], proxy: Proxy, tmp_path: Path, fault: str
):
    """All kinds at the same time, each in a bucket of its own."""

    def try_kind(name: str) -> bool:
        kind, scratch = KINDS[name], tmp_path / name
        scratch.mkdir()
        store = open_store(s3_url("job"), retries=QUICK)
        store.create("k", SMALL)
        store.create("large", LARGE)
        proxy.fail(fault, kind.starts_with + f"/{store.bucket}".encode(), contains=kind.contains)
        return kind.check(store, scratch)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        assert dict(zip(KINDS, pool.map(try_kind, KINDS), strict=True)) == dict.fromkeys(
            KINDS, True
        )
    assert proxy.is_spent


REQUESTS = {
    "job.json": (b"GET ", b"/job/job.json"),
    "stop request": (b"HEAD ", b"/run/stop"),
    "run.json": (b"PUT ", b"/run/run.json"),
    "probe": (b"PUT ", b"/probes/"),
    "worker's record": (b"PUT ", b"/run/workers/"),
    "listing of outputs": (b"GET ", b"outputs"),
    "listing of checkpoints": (b"GET ", b"checkpoints"),
    "claim": (b"PUT ", b"/run/claims/"),
    "chunk": (b"GET ", b"/job/chunks/"),
    "output": (b"PUT ", b"outputs/part-00001."),
    "marker": (b"PUT ", b".succeed "),
    "removal": (b"POST ", b"?delete"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_gets_over_a_spoilt_request_in_every_phase(
    s3_url: Callable[..., str], proxy: Proxy, fault: str
):
    bucket = s3_url()
    job, run = f"{bucket}/job", f"{bucket}/run"
    make_job(job, rows=6, per_chunk=2)
    for starts_with, contains in REQUESTS.values():
        proxy.fail(fault, starts_with, contains=contains)
    environment = dataclasses.replace(
        real_environment(grace_seconds=1.0, show_progress=lambda *_: None),
        open_store=partial(open_store, retries=QUICK),
    )
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=run,
        worker_id="w0",
        engine=EngineConfig(engine="echo"),
        prompt=PromptConfig(prompt_column="prompt"),
    )
    result = run_worker(config, environment)
    assert proxy.is_spent, proxy.lines
    assert (result["status"], result["request_count"], result["chunks_done"]) == ("SUCCESS", 6, 3)
    store = open_store(run)
    assert len(list(store.list(layout.OUTPUTS))) == 6, "an output and a marker for each chunk"
    for index in range(3):
        marker = read_marker(store, layout.chunk_name(index, 3))
        data = store.get(layout.OUTPUTS + marker.output).data
        assert codec.sha256(data) == marker.output_sha256
    assert list(store.list(layout.CLAIMS)) == []


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_a_lost_reply_that_is_somebody_elses_write_is_no_success(
    s3_url: Callable[..., str], proxy: Proxy, verb: str
):
    """The request is sent again, finds other bytes than it has sent, and says so."""
    url = s3_url("job")
    ours, theirs = open_store(url, retries=QUICK), open_store(url, retries=QUICK)
    etag = ours.create("k", b"first")
    if verb == "create":
        ours.delete(["k"])
    proxy.fail("cut", b"PUT ", contains=b"/job/k")
    theirs_etag = (
        theirs.create("k", b"theirs") if verb == "create" else theirs.replace("k", b"theirs", etag)
    )
    with pytest.raises((AlreadyExists, PreconditionFailed)):
        ours.create("k", b"ours") if verb == "create" else ours.replace("k", b"ours", etag)
    assert ours.get("k") == (b"theirs", theirs_etag)


NO_ANSWERS = {
    "no body": b"Content-Length: 900\r\n\r\n",
    "half a body": b"Content-Length: 900\r\n\r\n<?xml version='1.0'?>\n<ListBu",
    "half a header": b"Content-Le",
    "an empty body": b"Content-Length: 0\r\n\r\n",
    "a web page": b"Content-Type: text/html\r\nContent-Length: 14\r\n\r\n<html>x</html>",
}
VERBS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete(["k"]),
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
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("reply", NO_ANSWERS.values(), ids=NO_ANSWERS)
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_an_answer_that_no_store_gives_is_no_answer(
    s3_environment: str, monkeypatch, verb: Callable[[Store], object], reply: bytes
):
    """A cut connection or a proxy's page is no empty listing, no deletion without failures, and no object."""
    with always_answering(reply) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        retries = RetryPolicy(attempts=2, first_pause_seconds=0.01, longest_pause_seconds=0.01)
        with pytest.raises(StorageError, match="after 2 attempts"):
            verb(open_store("s3://bucket/job", retries=retries))


UPLOAD = """
import sys
from pathlib import Path
from batchinfer.storage.opening import open_store
store = open_store(sys.argv[1])
for index in range(10_000):
    store.put_file(f"{sys.argv[3]}-{index}", Path(sys.argv[2]))
    print("done", flush=True)
"""


def test_a_killed_uploader_never_shows_a_part(s3_url: Callable[..., str], tmp_path: Path):
    url, file = s3_url("job"), tmp_path / "file"
    file.write_bytes(FILES["in parts"])
    store = open_store(url, retries=QUICK)
    for number, num_lines in enumerate((1, 2, 3)):
        command = [sys.executable, "-c", UPLOAD, url, str(file), str(number)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        for _ in range(num_lines):
            process.stdout.readline()
        threading.Event().wait(0.05)  # somewhere in the next upload
        process.kill()
        process.wait()
        process.stdout.close()
        found = list(store.list(f"{number}-"))
        assert len(found) >= num_lines
        for info in found:
            assert store.get(info.key).data == FILES["in parts"]
        store.delete([info.key for info in found])


WAIT = """
import signal
from batchinfer.storage.opening import open_store
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
try:
    open_store("s3://bucket/job").get("k")
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_signals_are_heard_while_a_server_is_silent(s3_environment: str, monkeypatch):
    """obstore does not return before an answer or a time-out, and Python's handlers wait for that."""
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
                    assert process.wait(10) == 0
                    assert time.monotonic() - start < 10
            finally:
                process.kill()


def test_a_listing_takes_the_pages_of_its_prefix_and_no_others(monkeypatch):
    """Pages of 1000, from the prefix on and not far behind it."""
    store = open_store("memory://many/job")
    for index in range(3000):
        store.create(f"outputs/part-{index:05d}", b"1")
    pages = []
    monkeypatch.setattr(
        clouds.ObstoreClient, "list", _counting(clouds.ObstoreClient.list, pages.append)
    )
    assert [info.key[-5:] for info in store.list("outputs/part-014")] == [
        f"{n:05d}" for n in range(1400, 1500)
    ]
    assert len(pages) == 1
    assert len(list(store.list())) == 3000
    assert len(pages) == 4


def _counting(
    real: Callable[..., Iterator[Any]], note: Callable[[Any], None]
) -> Callable[..., Iterator[Any]]:
    def listed(*words: Any) -> Iterator[Any]:
        for page in real(*words):
            note(page)
            yield page

    return listed
