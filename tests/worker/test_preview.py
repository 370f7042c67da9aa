"""`worker --preview` and `--template list`: a look without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.storage.opening import open_store
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


def test_template_list_describes_the_named_templates(capsys: pytest.CaptureFixture[str]) -> None:
    status, result, shown = call(capsys, "--template", "list")
    assert status == 0
    assert "alpaca" in result["templates"]
    assert "alpaca: " in shown
