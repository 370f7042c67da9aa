"""`worker --preview`, `--show-config` and `--template list`: a look without an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.storage.opening import open_store
from batchinfer.worker.preview import is_secret, without_secrets
from making import ECHO, make_job

REPOSITORY = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("option", ["--prompt-column", "--messages-column", "--keep"])
def test_preview_refuses_the_columns_that_the_worker_refuses(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("prompt,n\nx,1\ny,2\n")
    job = str(tmp_path / "job")
    main(["split", str(tmp_path / "rows.csv"), "--output", job, "--num-chunks", "1"])
    columns = {"--prompt-column": "prompt"} if option == "--keep" else {}
    words = [word for pair in (columns | {option: "promt"}).items() for word in pair]
    arguments = ("--job", job, "--engine", "echo", *words)
    worked, _, refused = call(capsys, *arguments)
    previewed, _, shown = call(capsys, *arguments, "--preview", "1")
    assert (previewed, worked) == (2, 2)
    assert f"error: {option} promt: no column of the job" in shown
    assert shown == refused


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


EXAMPLES = ("run", "axolotl-guide", "completions-requests", "openai-batch")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_settings_are_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = REPOSITORY / "examples" / f"{name}.yaml"
    status, result, shown = call(capsys, "--config", str(path), "--show-config")
    assert status == 0, shown
    assert result["options"]["model"]["from"] == "settings file"


def test_every_line_of_the_full_example_is_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (REPOSITORY / "examples" / "run.yaml").read_text()
    for name in ("prompt.jinja", "system.txt", "chat.jinja"):
        (tmp_path / name).write_text("Hello {{ messages }}")
        text = text.replace(name, str(tmp_path / name))
    (tmp_path / "examples.jsonl").write_text('{"a": 1}\n')
    text = text.replace("examples.jsonl", str(tmp_path / "examples.jsonl"))
    settings = tmp_path / "run.yaml"
    settings.write_text(re.sub(r"(?m)^  #(?=\w)", "  ", text))
    status, result, shown = call(capsys, "--config", str(settings), "--show-config")
    assert status == 0, shown
    unset = {
        name
        for name, entry in result["options"].items()
        if entry["from"] == "default" and not name.startswith("echo")
    }
    assert unset <= {"worker-id", "preview", "show-config"}


def test_guide_s_generation_settings_mean_the_same_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = REPOSITORY / "examples" / "axolotl-guide.yaml"
    _, result, _ = call(capsys, "--config", str(path), "--show-config")
    sampling = {name: value for name, value in result["resolved"]["sampling"].items() if value}
    assert (
        sampling.items()
        >= {
            "n": 3,
            "repetition_penalty": 1.18,
            "max_tokens": 500,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 20,
        }.items()
    )
