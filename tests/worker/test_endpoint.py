"""Whole runs on an endpoint: what a failing endpoint leaves, and what is told before."""

from pathlib import Path
from typing import Any

import pytest

from batchinfer.engines import http
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.worker.worker_config import rules_of
from echo_server import FakeEndpoint, fake_endpoint, refusal
from making import make_job, output_lines

KEY = "sk-a1B2c3D4e5F6"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short waits and a key."""
    monkeypatch.setattr(http, "pause_seconds", lambda _: 0.02)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=40, per_chunk=10)
    return tmp_path / "job"


def worker(job: Path, endpoint: FakeEndpoint, *more: str) -> list[str]:
    """The words of a worker over the job's prompts."""
    base = ["worker", "--job", str(job), "--output", str(job / "runs/a"), "--engine", "openai"]
    asked = ["--base-url", endpoint.url, "--model", "echo-model", "--prompt-column", "prompt"]
    length = [] if "--as-chat" in more else ["--max-tokens", "99"]
    return [*base, *asked, *length, *more]


@pytest.fixture
def call(call):
    """Call the command line in this process: its exit status, its result and its log."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        done = call(*arguments)
        assert KEY not in done.out + done.err
        assert "Traceback" not in done.err
        return done.status, done.result, done.err

    return run


@pytest.mark.parametrize(
    ("no", "status", "said"),
    [(refusal(401, KEY), 2, "OPENAI_API_KEY"), (refusal(503), 33, "answered nothing for 0.5 s")],
)
def test_after_a_refused_key_or_an_outage_the_next_start_goes_on_at_any_url(
    endpoint, job, call, no, status, said
):
    endpoint.rule = lambda _text, _body: no if len(endpoint.bodies) > 15 else None
    options = ("--stall-seconds", "0.5", "--max-concurrency", "4")
    found, result, log = call(*worker(job, endpoint, *options))
    assert (found, result["error_count"]) == (status, 0)
    assert said in log
    with fake_endpoint() as moved:
        found, result, log = call(*worker(job, moved))
        assert (found, result["error_count"]) == (0, 0), log
        assert 0 < len(moved.texts) < 40, "rows that were finished are kept"
    assert [line["_row"] for line in output_lines(job / "runs/a")] == list(range(40))
    files = filter(Path.is_file, job.rglob("*"))
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_options_that_the_endpoint_refuses_end_with_2_before_a_row_is_asked(endpoint, job, call):
    def rule(_text: str, body: dict[str, Any]) -> Any:
        return refusal(400, "top_k must be below 99", param="top_k") if body["top_k"] > 99 else None

    endpoint.rule = rule
    status, result, log = call(*worker(job, endpoint, "--sampling", "top_k=700"))
    assert (status, result["request_count"]) == (2, 0)
    assert "the server refuses the run's options: top_k must be below 99" in log
    assert len(endpoint.bodies) == 1
    assert not (job / "runs/a/run.json").exists(), "better options may still have this run"
    assert call(*worker(job, endpoint, "--sampling", "top_k=9"))[0] == 0


@pytest.mark.parametrize(
    ("option", "status"),
    [("max_completion_tokens=500", 0), ("reasoning_effort=low", 0), ("max_tokens=500", 2)],
)
def test_a_model_that_refuses_max_tokens_is_asked_without(endpoint, job, call, option, status):
    no = refusal(400, "Unsupported parameter: 'max_tokens'", param="max_tokens")
    endpoint.rule = lambda _text, body: no if "max_tokens" in body else None
    assert call(*worker(job, endpoint, "--as-chat", "--sampling", option))[0] == status


def test_a_length_is_filled_by_vllms_own_server_alone():
    servers = ({}, {"engine": "echo"}, {"engine": "openai"}, {"server_command": "serve {port}"})
    filled = [rules_of(EngineConfig(model="m", **fields)).fills_length for fields in servers]
    assert filled == [True, True, False, False]
