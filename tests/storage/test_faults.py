"""Every kind of request to S3, spoilt in every way: the store does what it was asked to do, exactly once.

The faults are on the wire, so they hold for obstore, whose own repetition is off, and for what the adapter makes of it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from obstore.store import MemoryStore

from batchinfer.core.errors import StorageError
from batchinfer.storage import Store, bucket, clouds
from batchinfer.storage.bucket import BucketStore
from batchinfer.storage.cloud_errors import Cloud
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried
from lossy_proxy import FAULTS, Proxy, Rule

pytestmark = pytest.mark.s3

MIB = 1 << 20
LEAST_PART = 5 * MIB
"""S3 takes no smaller part of an upload but the last."""
QUICK = RetryPolicy(attempts=30, first_pause_seconds=0.01, longest_pause_seconds=0.1)


@pytest.fixture
def proxy(s3_environment, monkeypatch):
    monkeypatch.setattr(clouds, "_SILENCE", {"quick": "1s", "patient": "2s"})
    monkeypatch.setattr(bucket, "PART_BYTES", LEAST_PART)
    made = Proxy(s3_environment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


SMALL, LARGE = b"old", os.urandom(MIB)
FILES = {"whole": os.urandom(5 * MIB), "in parts": os.urandom(LEAST_PART + 1)}


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
    return keys_of(store) == ["large"]


def keys_of(store: Store) -> list[str]:
    return [found.key for found in store.list()]


KINDS: dict[str, tuple[bytes, bytes, Callable[[Store, Path], bool]]] = {
    "get": (b"GET ", b"k ", lambda store, _: store.get("k").data == SMALL),
    "download": (b"GET ", b"large ", download),
    "range": (b"GET ", b"large ", lambda store, _: store.get_range("large", 0, MIB) == LARGE),
    "stat": (b"HEAD ", b"k ", lambda store, _: store.stat("k").bytes == len(SMALL)),
    "list": (b"GET ", b"list-type=2", lambda store, _: keys_of(store) == ["k", "large"]),
    "create": (b"PUT ", b"new ", create),
    "put_file": (b"PUT ", b"new ", upload),
    "replace": (b"PUT ", b"k ", replace),
    "delete": (b"POST ", b"?delete", delete),
    "start of parts": (b"POST ", b"?uploads", upload_in_parts),
    "a part": (b"PUT ", b"partNumber=2", upload_in_parts),
    "end of parts": (b"POST ", b"uploadId", upload_in_parts),
}
"""How the line of a request begins, what it contains, and a verb that sends it and checks the effect."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_request_is_sent_again(s3_url, proxy, tmp_path, fault):
    """All kinds at the same time, each in a bucket of its own."""

    def try_kind(name: str) -> bool:
        starts_with, contains, check = KINDS[name]
        (tmp_path / name).mkdir()
        store = open_store(s3_url("job"), retries=QUICK)
        store.create("k", SMALL)
        store.create("large", LARGE)
        start = starts_with + f"/{store.bucket}".encode()
        proxy.rules.append(Rule(fault, start, contains))
        return check(store, tmp_path / name)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        assert dict(zip(KINDS, pool.map(try_kind, KINDS), strict=True)) == dict.fromkeys(
            KINDS, True
        )
    assert not any(rule.times for rule in proxy.rules)


def test_an_upload_whose_parts_cannot_be_removed_is_sent_again(s3_url, proxy, tmp_path):
    """The refusal hid what had failed before, and ended a worker with status 2, which starts no new one."""
    proxy.rules += [Rule("503", b"PUT ", b"partNumber=2"), Rule("403", b"DELETE ", b"uploadId=")]
    assert upload_in_parts(open_store(s3_url("job"), retries=QUICK), tmp_path)
    assert not any(rule.times for rule in proxy.rules)


WAIT = """
import ctypes, functools, os, signal
from batchinfer.storage.opening import open_store
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
# Sends a Ctrl-C at the very end of its handler, which is in C, so Python does not look for signals after it.
kill = ctypes.CDLL(None).kill
kill.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.py_object
signal.signal(signal.SIGUSR1, functools.partial(kill, os.getpid(), signal.SIGINT))
try:
    open_store("s3://bucket/job").get("k")
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_signals_are_heard_while_a_server_is_silent(s3_environment, monkeypatch):
    """obstore does not return before an answer or a time-out, and Python's handlers wait for that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
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
                    process.send_signal(signal.SIGUSR1)
                    assert process.stdout.readline() == "stopped\n"
                    assert process.wait(60) == 0
                    assert time.monotonic() - start < 60
            finally:
                process.kill()


def test_a_listing_takes_the_pages_of_its_prefix_and_no_others_and_each_key_once(monkeypatch):
    """Pages of 1000, from the prefix on and not far behind it. A page that fails is asked for again behind the last."""
    client = MemoryStore()
    store = BucketStore("s3://many/job", client, Cloud("S3"), retries=QUICK)
    for index in range(3000):
        store.create(f"outputs/part-{index:05d}", b"1")
    pages, failing, listed = [], [], client.list

    def noted(*words, **options):
        for page in listed(*words, **options):
            if len(pages) in failing:
                raise TransientError(f"page {failing.remove(len(pages))}")
            pages.append(page)
            yield page

    monkeypatch.setattr(client, "list", noted)
    found = [info.key[-5:] for info in store.list("outputs/part-014")]
    assert found == [f"{number:05d}" for number in range(1400, 1500)]
    assert len(pages) == 1
    failing += [1, 2, 3]
    found = [info.key[-5:] for info in store.list()]
    assert found == [f"{number:05d}" for number in range(3000)]
    assert len(pages) == 4


def test_a_file_of_any_size_goes_up_in_parts_as_many_as_stores_take(tmp_path):
    """Of one above 80 GiB, 10,000 parts went up, and the next was refused."""
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 1 << 40)  # takes no room
    client = Mock(put=Mock(return_value={"e_tag": '"e"', "version": None}))
    BucketStore("s3://bucket", client, Cloud("S3")).put_file("k", tmp_path / "file")
    part_bytes = client.put.call_args.kwargs["chunk_size"]
    assert bucket.PART_BYTES < part_bytes < 1 << 27
    assert part_bytes * 10_000 >= 1 << 40


def test_what_takes_long_to_send_gets_more_time_and_a_record_is_soon_sent_again(tmp_path):
    (tmp_path / "file").write_bytes(LARGE)
    quick, patient = (Mock(put=Mock(return_value={"e_tag": '"e"', "version": None})) for _ in "ab")
    store = BucketStore("s3://bucket", quick, Cloud("S3"), patient=patient)
    store.put_file("k", tmp_path / "file")
    store.create("large", LARGE)
    assert (quick.put.call_count, patient.put.call_count) == (0, 2)
    store.create("small", SMALL)
    assert (quick.put.call_count, patient.put.call_count) == (1, 2)


def test_a_request_is_not_tried_again_when_its_time_is_over():
    request = Mock(side_effect=lambda: time.sleep(0.1) or failed())
    failed = Mock(side_effect=TransientError("away"))
    with pytest.raises(StorageError, match="after 1 attempt"):
        retried(RetryPolicy(attempts=3, total_seconds=0.05, first_pause_seconds=0.0), request)
