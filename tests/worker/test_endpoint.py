"""Whole runs on an endpoint: what reaches the outputs, what a failing endpoint leaves, and what is told before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchinfer.engines import http
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.storage.opening import open_store
from batchinfer.worker.worker_config import rules_of
from echo_server import FakeEndpoint, fake_endpoint, refusal
from making import Call, make_job, output_lines, read_marker

KEY = "sk-a1B2c3D4e5F6"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits and a key."""
    monkeypatch.setattr(http, "pause_seconds", lambda _: 0.02)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as found:
        yield found


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", rows=40, per_chunk=10)
    return tmp_path / "job"


def asked_of(endpoint: FakeEndpoint) -> list[str]:
    return ["--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"]


def worker(job: Path, endpoint: FakeEndpoint, *more: str, run: str = "runs/a") -> list[str]:
    """The words of a worker over the job's prompts, if `more` does not name another column."""
    base = ["worker", "--job", str(job), "--output", str(job / run), *asked_of(endpoint)]
    length = [] if "--as-chat" in more else ["--max-tokens", "99"]
    return [*base, "--prompt-column", "prompt", *length, *more]


Told = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def call(call: Call) -> Told:
    """Call the command line in this process: its exit status, its result and its log."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        done = call(*arguments)
        assert KEY not in done.out + done.err
        assert "Traceback" not in done.err
        return done.status, done.result, done.err

    return run


def has_key(folder: Path) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]


# --------------------------------------------------------------------------- what comes out


def test_tokens_of_reasoning_are_counted_where_all_tokens_are(
    endpoint, job, tmp_path, call, monkeypatch
):
    plain = endpoint.answer

    def thoughtful(call: Any) -> Any:
        found = plain(call)
        said = json.loads(found.body)
        said["usage"]["completion_tokens_details"] = {"reasoning_tokens": 2}
        return msgspec.structs.replace(found, body=json.dumps(said).encode())

    monkeypatch.setattr(endpoint, "answer", thoughtful)
    assert call(*worker(job, endpoint))[0] == 0
    run = job / "runs/a"
    assert read_marker(open_store(str(run)), "part-00000").reasoning_tokens == 20
    assert call("status", str(run), "--json")[1]["totals"]["reasoning_tokens"] == 80
    assert "80 tokens, " in call("status", str(run))[2]
    page = tmp_path / "page.html"
    assert call("report", str(run), "-o", str(page))[0] == 0
    assert "<dt>reasoning</dt><dd>80 tokens</dd>" in page.read_text()


def test_one_command_and_the_commands_after_it(endpoint, tmp_path, call):
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "word {i} b"}}\n' for i in range(20)))
    dest = tmp_path / "a.jsonl"
    endpoint.rule = lambda text, _body: refusal(400, f"no {KEY}") if text == "word 7 b" else None
    words = ["run", str(tmp_path / "x.jsonl"), "-o", str(dest), *asked_of(endpoint)]
    status, result, log = call(*words)
    assert (status, result["rows"], result["rows_error"]) == (0, 20, 1), log
    rows = [json.loads(line) for line in dest.read_text().splitlines()]
    assert [row["text"] for row in rows] == [None if i == 7 else f"word {i} b" for i in range(20)]
    assert rows[7]["error_code"] == "invalid_request"
    assert all("messages" in body for body in endpoint.bodies), "an endpoint is sent chats"
    run = str(tmp_path / "a.jsonl.batchinfer/run")
    for after in ("status", "verify"):
        assert call(after, run)[0] == 0
    assert call("report", run, "-o", str(tmp_path / "page.html"))[0] == 0
    assert json.loads(Path(run, "run.json").read_text())["recorded"]["options"]["base_urls"] == [
        endpoint.url
    ]
    assert has_key(tmp_path) == []


def test_lines_of_a_batch_file_go_where_they_say_and_come_back_as_they_are(
    endpoint, tmp_path, call
):
    chat = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2}
    asked = [
        ("/v1/chat/completions", {**chat, "logprobs": True, "n": 2, "temperature": 1.0}),
        ("/v1/completions", {"prompt": "d e f", "max_tokens": 2, "logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {**chat, "of_this_server_alone": ["x"]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/responses", {"input": "g h"}),
        ("/v1/no-such", {"input": "x"}),
    ]

    def make_row(index: int) -> dict[str, Any]:
        url, body = asked[index]
        return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": body}

    job = tmp_path / "job"
    make_job(job, rows=6, per_chunk=6, make_row=make_row)
    batch = ("--prompt-column", "", "--request-format", "openai-batch", "--temperature", "0")
    status, result, log = call(*worker(job, endpoint, *batch))
    assert (status, result["errors"]) == (0, {"unknown_url": 1}), log
    found = output_lines(job / "runs/a")
    assert [line["_id"] for line in found] == [f"r{index}" for index in range(6)]
    assert [choice["text"] for choice in found[1]["body"]["choices"]] == ["d e fd e"]
    assert len(found[0]["body"]["choices"]) == 2
    assert len(found[3]["body"]["data"][0]["embedding"]) > 0
    assert found[4]["body"]["output"][0]["content"][0]["text"] == "g h"
    by_text = {str(body.get("logprobs")): body for body in endpoint.bodies if "messages" in body}
    assert by_text["None"]["of_this_server_alone"] == ["x"]
    assert (by_text["True"]["temperature"], by_text["None"]["temperature"]) == (1.0, 0.0)
    assert {body["model"] for body in endpoint.bodies} == {"echo-model"}


# --------------------------------------------------------------------------- what goes wrong


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
    assert has_key(job) == []


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


def test_a_worker_imports_neither_vllm_nor_torch(endpoint, job):
    code = (
        "import sys; from batchinfer.cli.main import main; status = main(sys.argv[1:]);"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *worker(job, endpoint)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == "[] 0"
