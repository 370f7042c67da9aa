"""Every kind of request to S3, spoilt in every way: the store does what it was asked to do, exactly once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import StorageError
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import PromptConfig
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import RetryPolicy, TransientError
from batchinfer.storage.s3 import S3Store
from batchinfer.worker.config import WorkerConfig, real_environment
from batchinfer.worker.start import run_worker
from lossy_proxy import FAULTS, Proxy
from making import make_job, read_marker

pytestmark = pytest.mark.s3

MIB = 1 << 20
QUICK = RetryPolicy(
    attempts=9, first_pause_seconds=0.01, longest_pause_seconds=0.1,
    silence_seconds=0.5,
)  # fmt: skip


@pytest.fixture
def proxy(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(s3_environment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


SMALL, LARGE, FILE = b"old", os.urandom(MIB), os.urandom(5 * MIB + 1)
IN_PARTS = {"part_bytes": 5 * MIB, "multipart_bytes": 5 * MIB}


class Kind(NamedTuple):
    """A kind of request: how its line begins, what it contains, and a verb that sends it and checks the effect."""

    starts_with: bytes
    contains: bytes
    check: Callable[[S3Store, Path], bool]


def download(store: S3Store, scratch: Path) -> bool:
    store.download("large", scratch / "copy")
    return (scratch / "copy").read_bytes() == LARGE


def upload(store: S3Store, scratch: Path) -> bool:
    (scratch / "file").write_bytes(FILE)
    store.put_file("new", scratch / "file")
    return store.get("new").data == FILE


def upload_in_parts(store: S3Store, scratch: Path) -> bool:
    parts = S3Store(store.url, retries=QUICK, **IN_PARTS)
    return upload(parts, scratch)


def create(store: S3Store, _: Path) -> bool:
    etag = store.create("new", b"new")
    return store.get("new") == (b"new", etag)


def replace(store: S3Store, _: Path) -> bool:
    etag = store.replace("k", b"newer", store.stat("k").etag)
    return store.get("k") == (b"newer", etag)


def delete(store: S3Store, _: Path) -> bool:
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
    "list_multipart_uploads": Kind(
        b"GET ", b"?uploads", lambda store, _: list(store.list_multipart_uploads()) == []
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_request_is_sent_again(
    s3_url: Callable[..., str], proxy: Proxy, tmp_path: Path, fault: str
):
    """All kinds at the same time, each in a bucket of its own."""

    def try_kind(name: str) -> bool:
        kind, scratch = KINDS[name], tmp_path / name
        scratch.mkdir()
        store = S3Store(s3_url("job"), retries=QUICK)
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
    "manifest": (b"GET ", b"/manifests/all.txt"),
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


def test_an_address_where_nothing_ever_answered_is_said_within_15_seconds(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    attempts = []
    monkeypatch.setattr("batchinfer.storage.retrying.UNREACHABLE_SECONDS", 0.0)
    monkeypatch.setattr(
        "batchinfer.storage.retrying.logger.log", lambda *words: attempts.append(words)
    )
    with pytest.raises(StorageError) as caught:
        open_store("s3://bucket/x").get("job.json")
    assert not isinstance(caught.value, TransientError)
    assert "AWS_ENDPOINT_URL" in caught.value.hint
    assert len(attempts) == 1
