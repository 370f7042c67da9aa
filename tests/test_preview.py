"""`worker --preview`, `--show-config` and `--template list`: a look without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli import main
from batchinfer.preview import is_secret, without_secrets
from batchinfer.storage.opening import open_store
from making import ECHO, make_job

REPOSITORY = Path(__file__).resolve().parent.parent


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["worker", *arguments])
    captured = capsys.readouterr()
    lines = captured.out.strip().splitlines()
    return status, json.loads(lines[-1]) if lines else {}, captured.err


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=7, per_chunk=3)
    return str(tmp_path / "job")


def test_preview_shows_the_first_prompts_over_chunk_borders_and_leaves_no_trace(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result, shown = call(capsys, "--job", job, *ECHO, "--preview", "4")
    assert status == 0
    assert [row["row"] for row in result["preview"]] == [0, 1, 2, 3]
    assert result["preview"][3]["prompt"].startswith("hello row 3")
    assert "hello row 3" in shown
    assert not list(open_store(job).list("runs/"))


def test_preview_counts_the_model_s_own_tokens(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(REPOSITORY / "examples" / "demo-model")
    options = ("--job", job, "--model", model, "--messages-column", "prompt")
    status, result, _ = call(capsys, *options, "--preview", "1", "--system-prompt", "Be brief.")
    assert status == 0
    [row] = result["preview"]
    assert row["tokens"] > 10
    assert "Be brief." in row["prompt"]
    assert "<|im_start|>assistant" in row["prompt"]


def test_preview_names_rows_that_would_be_errors(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--job", job, "--engine", "echo", "--prompt-column", "promt", "--preview", "1")
    status, result, shown = call(capsys, *options)
    assert status == 0
    assert result["preview"][0]["code"] == "missing_column"
    assert "did you mean" in shown


def test_show_config_says_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text("sampling: {max_tokens: 9, top_k: 3}\nengine_arg: {hf_token: hf_abc}\n")
    monkeypatch.setenv("BATCHINFER_WORKER_TOP_P", "0.5")
    monkeypatch.setenv("BATCHINFER_WORKER_MAX_TOKENS", "8")
    options = ("--config", str(settings), "--job", "s3://nowhere/job", *ECHO, "--top-k", "4")
    status = main(["worker", *options, "--show-config"])
    captured = capsys.readouterr()
    assert status == 0
    found = json.loads(captured.out)
    assert found["options"]["top-k"] == {"value": 4, "from": "command line"}
    assert found["options"]["top-p"] == {"value": 0.5, "from": "environment"}
    assert found["options"]["max-tokens"] == {"value": 8, "from": "environment"}
    assert found["options"]["temperature"] == {"value": None, "from": "default"}
    assert found["options"]["engine-arg"]["from"] == "settings file"
    assert found["resolved"]["sampling"]["max_tokens"] == 8
    assert found["resolved"]["engine"]["engine_args"] == {"hf_token": "(secret)"}
    assert "hf_abc" not in captured.out + captured.err


def test_show_config_refuses_what_the_worker_would_refuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, shown = call(capsys, *ECHO, "--chat-template-kwargs", "[", "--show-config")
    assert status == 2
    assert "--chat-template-kwargs" in shown


def test_template_list_describes_the_named_templates(capsys: pytest.CaptureFixture[str]) -> None:
    status, result, shown = call(capsys, "--template", "list")
    assert status == 0
    assert "alpaca" in result["templates"]
    assert "alpaca: " in shown


def test_secrets_are_found_however_deep_and_counts_of_tokens_are_none() -> None:
    assert without_secrets({"a": [{"api_key": "x"}], "url": "s3://id:key@b/c"}) == {
        "a": [{"api_key": "(secret)"}],
        "url": "s3://b/c",
    }
    assert not any(map(is_secret, ("max_tokens", "tokenizer", "stop_token_ids", "echo-tokens")))
    assert all(map(is_secret, ("HF_TOKEN", "hf-token", "aws_secret_access_key", "password")))
