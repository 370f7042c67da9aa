"""Preemption notices, from a fake metadata service on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import BatchinferError, Interrupted
from batchinfer.ledger.checkpoints import Segments
from batchinfer.ledger.claims import decode_claim
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage.opening import open_store
from batchinfer.worker.background import ThreadBackground
from batchinfer.worker.notices import (
    FAILURES_BEFORE_SILENCE,
    AwsService,
    GcpService,
    find_service,
    watch,
)
from making import (
    Finished,
    finish_process,
    make_job,
    run_worker_here,
    start_process,
    worker_arguments,
)

TOKEN = "the-token"
AWS_NOTICE = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}


class Metadata(ThreadingHTTPServer):
    """Both clouds' services. `is_ending` lets them announce the end; `tokens` are those that still hold."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_ending = False
        self.is_broken = False
        self.tokens: set[str] = set()
        self.questions: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        self.server.questions.append(self.path)
        if self.path != "/latest/api/token":
            return self.answer(404)
        if not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            return self.answer(400)
        self.server.tokens.add(TOKEN)
        return self.answer(200, TOKEN)

    def do_GET(self) -> None:
        server = self.server
        server.questions.append(self.path)
        if server.is_broken:
            return self.answer(503, "<html>")
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] not in server.tokens:
                return self.answer(401)
            return (
                self.answer(200, json.dumps(AWS_NOTICE)) if server.is_ending else self.answer(404)
            )
        if self.path == "/computeMetadata/v1/instance/preempted":
            if self.headers["Metadata-Flavor"] != "Google":
                return self.answer(403)
            return self.answer(200, "TRUE" if server.is_ending else "FALSE")
        return self.answer(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


SERVICES = [AwsService, GcpService]


@pytest.mark.parametrize("kind", SERVICES)
def test_there_is_no_notice_until_the_cloud_gives_one(metadata: Metadata, kind: type) -> None:
    service = kind(metadata.url)
    assert [service.notice(), service.notice()] == [None, None]
    metadata.is_ending = True
    assert service.notice()


def test_aws_says_when(metadata: Metadata) -> None:
    metadata.is_ending = True
    notice = AwsService(metadata.url).notice()
    assert notice == "AWS will terminate this machine at 2030-01-01T00:00:00Z"


def test_a_token_is_asked_for_once_and_anew_when_it_has_expired(metadata: Metadata) -> None:
    service = AwsService(metadata.url)
    service.notice()
    service.notice()
    assert metadata.questions.count("/latest/api/token") == 1
    metadata.tokens.clear()
    with pytest.raises(OSError, match="401"):
        service.notice()
    assert service.notice() is None
    assert metadata.questions.count("/latest/api/token") == 2


def test_a_proxy_is_not_asked(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert GcpService(metadata.url).notice() is None


class TestWhichService:
    @pytest.mark.parametrize(("cloud", "kind"), [("AWS", AwsService), ("gcp", GcpService)])
    def test_skypilot_says_the_cloud(self, tmp_path: Path, cloud: str, kind: type) -> None:
        assert isinstance(find_service({"cloud": cloud}, {}, dmi=tmp_path), kind)

    @pytest.mark.parametrize(
        ("vendor", "kind"), [("Amazon EC2\n", AwsService), ("Google\n", GcpService)]
    )
    def test_the_machine_itself_says_its_maker(
        self, tmp_path: Path, vendor: str, kind: type
    ) -> None:
        (tmp_path / "sys_vendor").write_text(vendor)
        assert isinstance(find_service({"cloud": "kubernetes"}, {}, dmi=tmp_path), kind)

    @pytest.mark.parametrize("vendor", [None, "Dell Inc.\n", "QEMU\n"])
    def test_elsewhere_nobody_is_asked(self, tmp_path: Path, vendor: str | None) -> None:
        if vendor:
            (tmp_path / "sys_vendor").write_text(vendor)
        assert find_service({"cloud": "lambda"}, {}, dmi=tmp_path) is None

    def test_only_web_addresses_are_taken(self, tmp_path: Path) -> None:
        environment = {"BATCHINFER_METADATA_URL": "file:///etc"}
        assert find_service({"cloud": "aws"}, environment, dmi=tmp_path) is None


class FakeBackground(ThreadBackground):
    """Runs a repeated function when told to."""

    def every(self, interval_seconds: float, work):
        self.look = work
        return self

    def cancel(self) -> None:
        pass


class TestTheWatcher:
    @pytest.fixture
    def background(self) -> Iterator[FakeBackground]:
        background = FakeBackground(num_threads=1)
        yield background
        background.close()

    def test_a_notice_is_passed_on_once(
        self, metadata: Metadata, background: FakeBackground
    ) -> None:
        found: list[BatchinferError] = []
        watch(GcpService(metadata.url), background, found.append)
        background.look()
        assert not found
        metadata.is_ending = True
        background.look()
        background.look()
        assert [type(error) for error in found] == [Interrupted]
        assert found[0].exit_status == 75

    def test_a_service_that_fails_now_and_then_is_asked_again(
        self, metadata: Metadata, background: FakeBackground
    ) -> None:
        found: list[BatchinferError] = []
        watch(GcpService(metadata.url), background, found.append)
        background.look()
        metadata.is_broken = True
        for _ in range(FAILURES_BEFORE_SILENCE + 1):
            background.look()
        metadata.is_broken, metadata.is_ending = False, True
        background.look()
        assert len(found) == 1

    def test_a_service_that_never_answers_is_left_alone(
        self, metadata: Metadata, background: FakeBackground
    ) -> None:
        metadata.is_broken = True
        watch(GcpService(metadata.url), background, lambda _: None)
        for _ in range(FAILURES_BEFORE_SILENCE + 5):
            background.look()
        assert len(metadata.questions) == FAILURES_BEFORE_SILENCE

    @pytest.mark.parametrize("kind", SERVICES)
    def test_nobody_there_is_no_error(self, background: FakeBackground, kind: type) -> None:
        watch(kind("http://127.0.0.1:9"), background, lambda _: None)
        background.look()


@pytest.mark.parametrize("cloud", ["AWS", "GCP"])
def test_a_worker_told_of_its_end_keeps_its_rows_and_gives_its_claims_back(
    metadata: Metadata, tmp_path: Path, cloud: str
) -> None:
    job = tmp_path / "job"
    chunks = make_job(job, rows=3000, per_chunk=500).chunks
    run = open_store(f"{job}/runs/a")

    ended = worker_that_is_told(metadata, job, cloud)

    assert (ended.status, ended.result["exit_status"]) == (75, 75), ended.stderr
    assert "preemption notice" in ended.result["reason"]
    num_done = ended.result["request_count"]
    assert 0 < num_done < 3000
    fingerprint = ended.result["fingerprint"]
    segments = [
        Segments(
            run,
            chunk.name,
            chunk_sha256=chunk.sha256,
            fingerprint=lambda: fingerprint,
            first_row=chunk.first_row,
            num_lines=500,
        )
        for chunk in chunks
    ]
    kept = sum(len({row.line for row in each.rows()}) for each in segments)
    assert kept + 500 * ended.result["chunks_done"] == num_done
    claims = [decode_claim(run.get(info.key).data, info.key) for info in run.list(layout.CLAIMS)]
    assert claims
    assert all(claim.worker == "" for claim in claims)

    result = run_worker_here(job, run.url)

    assert result["rows_resumed"] == kept
    config = VerifyConfig(run=run.url, is_deep=True)
    verdict = run_verify(config, open_store=open_store, clock=SystemClock())
    assert verdict.is_sound
    assert verdict.result["rows_ok"] == 3000


def test_without_notices_the_service_is_not_asked(metadata: Metadata, tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=10, per_chunk=5)
    metadata.is_ending = True
    options = ["--no-notices", "--echo-latency-seconds", "1"]
    process = start_process(
        worker_arguments(tmp_path / "job", tmp_path / "job/runs/a", *options),
        environment=environment_of(metadata, "AWS"),
    )
    assert finish_process(process).status == 0
    assert not metadata.questions


def environment_of(metadata: Metadata, cloud: str) -> dict[str, str]:
    return {
        "SKYPILOT_CLUSTER_INFO": json.dumps({"cloud": cloud}),
        "BATCHINFER_METADATA_URL": metadata.url,
    }


def worker_that_is_told(metadata: Metadata, job: Path, cloud: str) -> Finished:
    """Run a worker with slow rows; the cloud announces its end once some of them are done."""
    options = ["--echo-latency-seconds", "1", "--grace-seconds", "3", "--checkpoint-seconds", "0.5"]
    process = start_process(
        worker_arguments(job, job / "runs/a", *options), environment=environment_of(metadata, cloud)
    )
    checkpoints = job / "runs/a" / layout.CHECKPOINTS
    while process.poll() is None and not any(checkpoints.glob("*/*.jsonl")):
        time.sleep(0.05)
    metadata.is_ending = True
    return finish_process(process)
