"""`worker --preview` and `--prompt-template list`: a look without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.storage.opening import open_store
from making import ECHO, make_job


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["worker", *arguments])
    captured = capsys.readouterr()
    lines = captured.out.strip().splitlines()
    return status, json.loads(lines[-1]) if lines else {}, captured.err


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=7, per_chunk=3)
    return str(tmp_path / "job")


def test_preview_shows_the_first_requests_over_chunk_borders_and_leaves_no_trace(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--as-chat", "--system-prompt", "Be brief.", "--max-tokens", "9")
    status, result, shown = call(capsys, "--job", job, *ECHO, *options, "--preview", "4")
    assert status == 0
    assert [row["row"] for row in result["preview"]] == [0, 1, 2, 3]
    row = result["preview"][3]
    assert row["path"] == "/v1/chat/completions"
    assert row["body"]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert row["body"]["messages"][1]["content"].startswith("hello row 3")
    assert row["body"]["max_tokens"] == 9
    assert "hello row 3" in shown
    assert not list(open_store(job).list("runs/"))


@pytest.mark.parametrize("option", ["--prompt-column", "--messages-column"])
def test_preview_refuses_the_columns_that_the_worker_refuses(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("prompt,n\nx,1\ny,2\n")
    job = str(tmp_path / "job")
    main(["split", str(tmp_path / "rows.csv"), "--output", job, "--num-chunks", "1"])
    arguments = ("--job", job, "--engine", "echo", option, "promt")
    worked, _, refused = call(capsys, *arguments)
    previewed, _, shown = call(capsys, *arguments, "--preview", "1")
    assert (previewed, worked) == (2, 2)
    assert f"error: {option} promt: no column of the job" in shown
    assert shown == refused


def test_preview_names_rows_that_would_be_errors_and_media_that_would_be_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "image": "https://example.com/a.png"}, {"image": None}]
    make_job(tmp_path / "job", rows=2, per_chunk=2, make_row=rows.__getitem__)
    options = ("--job", str(tmp_path / "job"), *ECHO, "--as-chat", "--column", "image=image")
    status, result, shown = call(capsys, *options, "--preview", "2")
    assert status == 0
    good, bad = result["preview"]
    assert good["media"] == ["https://example.com/a.png"]
    assert "media: https://example.com/a.png" in shown
    assert bad["code"] == "missing_column"
    assert "error row: missing_column: " in shown


def test_template_list_describes_the_named_templates(capsys: pytest.CaptureFixture[str]) -> None:
    status, result, shown = call(capsys, "--prompt-template", "list")
    assert status == 0
    assert "alpaca" in result["templates"]
    assert "alpaca: " in shown
