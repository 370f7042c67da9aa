"""`--dedupe` from the command line: what is answered once, what is counted, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Request, Sampling
from batchinfer.ledger.runs import read_run
from batchinfer.prompts import Prepared
from batchinfer.runs.resume_command import worker_command
from batchinfer.storage.opening import open_store
from batchinfer.worker.repeats import repeat_key
from making import make_job, run_worker_here

GREEDY = ("--temperature", "0", "--no-timing")


def repeated_row(index: int) -> dict[str, Any]:
    return {"prompt": f"say {index % 5}", "note": index}


def lines_of(run: Path) -> list[dict[str, Any]]:
    paths = sorted((run / "outputs").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", rows=40, per_chunk=8, make_row=repeated_row)
    return tmp_path / "job"


def test_the_outputs_are_those_of_a_run_without_it(job: Path, tmp_path: Path) -> None:
    plain = run_worker_here(job, tmp_path / "plain", *GREEDY, "--keep", "note")
    result = run_worker_here(job, tmp_path / "run", *GREEDY, "--keep", "note", "--dedupe")
    lines = lines_of(tmp_path / "run")
    assert lines == lines_of(tmp_path / "plain")
    assert [line["source"]["note"] for line in lines] == list(range(40))
    assert result["fingerprint"] == plain["fingerprint"]
    assert result["request_count"] == result["response_count"] == 40
    assert result["rows_copied"] == 35
    assert "rows_copied" not in plain
    for name, key in (("input", "total_prompt_tokens"), ("output", "total_tokens_generated")):
        assert result[key] == plain[key] / 8, "what the engine had of it"
        assert result["tokens_copied"][name] == plain[key] * 7 / 8


def test_status_report_and_the_command_that_resumes_show_it(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run_worker_here(job, run, *GREEDY, "--dedupe")
    assert main(["status", str(run)]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out.splitlines()[-1])
    assert summary["rows_copied"] == 35
    assert summary["tokens_copied"]["output"] > 0
    assert "35 rows had a request that was answered already" in shown.err
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "rows copied" in page
    found = read_run(open_store(str(run)))
    assert found is not None
    assert " --dedupe" in worker_command(found, str(run), str(job))
    assert main(["verify", str(run), "--deep"]) == 0


def test_it_is_refused_where_every_row_has_its_own_seed(job: Path, tmp_path: Path) -> None:
    for temperature in ((), ("--temperature", "0.7")):
        with pytest.raises(ConfigError, match="--dedupe: rows with equal requests") as caught:
            run_worker_here(job, tmp_path / "run", *temperature, "--dedupe")
        assert "--temperature 0" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_of_requests_only_those_that_must_have_the_same_answer_are_answered_once(
    tmp_path: Path,
) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0},
        {"temperature": 0, "max_tokens": 3},
    ]
    bodies = [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | kind for kind in kinds
    ]
    requests = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": bodies[i % 4]}
        for i in range(12)
    ]  # fmt: skip
    make_job(tmp_path / "job", rows=12, per_chunk=12, make_row=lambda index: requests[index])
    arguments = ["--job", str(tmp_path / "job"), "--output", str(tmp_path / "run")]
    arguments += ["--engine", "echo", "--request-format", "openai-batch", "--dedupe"]
    assert main(["worker", *arguments]) == 0
    worker = json.loads(open_store(str(tmp_path / "run")).get(worker_key(tmp_path / "run")).data)
    assert worker["rows_copied"] == 6, "of three kinds two rows each"
    assert worker["rows_ok"] == 12


@pytest.mark.parametrize(
    "difference",
    [
        {"adapter": "pirate"},
        {"text": "hello "},
        {"text": None, "token_ids": [1]},
        {"sampling": Sampling(temperature=0.0, max_tokens=5)},
        {"sampling": Sampling(temperature=0.0, structured={"regex": "a+"})},
    ],
)
def test_requests_that_differ_in_anything_but_their_row_are_not_equal(
    difference: dict[str, Any],
) -> None:
    request = Request(key=("a", 0), text="hello", sampling=Sampling(temperature=0.0))
    prepared = Prepared(key=("a", 0), row=0, id="0", request=request, is_repeatable=True)
    other = msgspec.structs.replace(request, key=("b", 7))
    assert key_of(prepared, other) == key_of(prepared, request)
    assert key_of(prepared, msgspec.structs.replace(other, **difference)) != key_of(
        prepared, request
    )


def key_of(prepared: Prepared, request: Request) -> bytes:
    key = repeat_key(msgspec.structs.replace(prepared, request=request))
    assert key is not None
    return key


def worker_key(run: Path) -> str:
    [path] = (run / "workers").glob("*.json")
    return f"workers/{path.name}"


def test_rows_of_checkpoints_are_kept_and_need_no_answer_again(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchinfer.worker.outgoing import PublishQueue

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(PublishQueue, "start", lambda _self: None)
        patch.setattr("batchinfer.worker.start._Start._drain", interrupt)
        with pytest.raises(RuntimeError):
            run_worker_here(job, run, *GREEDY, "--dedupe")
    assert not list((run / "outputs").glob("*")) if (run / "outputs").exists() else True
    result = run_worker_here(job, run, *GREEDY, "--dedupe")
    assert (result["rows_resumed"], result["rows_copied"]) == (40, 0)
    assert [line["_row"] for line in lines_of(run)] == list(range(40))


def interrupt(*_: object) -> None:
    raise RuntimeError("killed")
