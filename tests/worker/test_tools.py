"""Whole runs with tools: kills, tables, refusals. The engine echoes, so a prompt that is a call becomes one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.prompts import constraint_process
from making import make_job

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NUM_ROWS = 24


def call_of(index: int) -> str:
    return json.dumps([{"name": "add", "parameters": {"a": index}}], separators=(",", ":"))


def make_row(index: int) -> dict[str, Any]:
    return {"prompt": call_of(index) if index % 3 else "no call"}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """Workers of this process do not try the constraint of a forced call, which takes seconds. Others do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint_process, "BACKEND", "no_such_package_here")
        yield


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=NUM_ROWS, per_chunk=8, make_row=make_row)
    return str(tmp_path / "job")


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "tools.json").write_text(json.dumps([ADD]))
    return str(tmp_path / "tools.json")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a job, a file of tools, and a run that ended undisturbed. Its start takes seconds."""
    folder = tmp_path_factory.mktemp("calm")
    make_job(folder / "job", rows=NUM_ROWS, per_chunk=8, make_row=make_row)
    (folder / "tools.json").write_text(json.dumps([ADD]))
    assert main(words(f"{folder}/job", f"{folder}/run", f"{folder}/tools.json")) == 0
    return folder


def words(job: str, run: str, tools: str) -> list[str]:
    return [
        "worker", "--job", job, "--output", run, "--engine", "echo", "--prompt-column", "prompt", "--as-chat",
        "--tools", tools, "--tool-choice", "required", "--no-timing", "--worker-id", "w0",
    ]  # fmt: skip


def lines_of(run: str | Path) -> list[bytes]:
    return [
        line
        for path in sorted(Path(run, "outputs").glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def test_calls_survive_a_kill_with_the_ids_of_an_undisturbed_run(
    job: str, tools: str, tmp_path: Path, calm: Path
) -> None:
    killed = str(tmp_path / "killed")
    slow = [*words(job, killed, tools), "--checkpoint-rows", "2", "--checkpoint-seconds", "0.05"]
    slow += ["--max-num-seqs", "2", "--echo-latency-seconds", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-m", "batchinfer", *slow],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(Path(killed, "checkpoints").rglob("*.jsonl")):
        assert process.poll() is None, "the worker ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(lines_of(killed)) < NUM_ROWS
    assert main(words(job, killed, tools)) == 0
    assert lines_of(killed) == lines_of(calm / "run")
    found = [json.loads(line) for line in lines_of(calm / "run")]
    for index, line in enumerate(found):
        [choice] = line["choices"]
        if index % 3 == 0:
            assert (choice["text"], "tool_calls" in choice) == ("no call", False)
            continue
        [call] = choice["tool_calls"]
        assert call["function"] == {
            "name": "add",
            "arguments": json.dumps({"a": index}).replace(" ", ""),
        }
        assert (choice["text"], choice["finish_reason"]) == ("", "tool_calls")
    ids = [one["choices"][0]["tool_calls"][0]["id"] for one in found if one["_row"] % 3]
    assert len({*ids}) == len(ids)


def test_a_table_has_the_calls_as_json(calm: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    assert main(["collect", f"{calm}/run", str(tmp_path / "table.parquet")]) == 0
    column = pq.read_table(tmp_path / "table.parquet")["tool_calls"].to_pylist()  # type: ignore[no-untyped-call]
    assert column[0] is None
    assert json.loads(column[1])[0]["function"]["name"] == "add"


def test_other_tools_are_another_run_and_a_resumed_one_gets_them_from_its_command(
    tools: str, calm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{calm}/run"
    Path(tools).write_text(json.dumps([ADD, {**ADD, "function": {"name": "sub"}}]))
    capsys.readouterr()
    assert main(words(f"{calm}/job", run, tools)) == 2
    assert "tools" in capsys.readouterr().err
    config = json.loads(Path(run, "run.json").read_text())["config"]
    assert config["prompt"]["tools"] == [ADD]
    assert "tool_call_parser" not in config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tool-choice", "auto", "--tool-call-parser", "hermess"], "did you mean 'hermes'"),
        (["--tool-choice", "none", "--reasoning-parser", "qwen33"], "did you mean 'qwen3'"),
        (["--tool-choice", "none", "--thinking-budget", "5"], "add --reasoning-parser"),
        (["--tool-choice", "auto"], "add --tool-call-parser"),
        (["--tool-choice", "ad"], "did you mean 'add'"),
        (["--regex", "a"], "with a constraint"),
    ],
)
def test_options_that_cannot_work_end_worker_and_check_before_anything_is_made(
    job: str,
    tools: str,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [*words(job, str(tmp_path / "run"), tools), *options]
    assert main(given) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert not (tmp_path / "run").exists()
    looked = [word for word in given[1:] if word not in ("--worker-id", "w0")]
    assert main(["check", *looked]) == 2
    problems = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
    assert any(message in f"{one['message']} {one['hint']}" for one in problems)


def test_an_endpoint_parses_its_own_answers(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["worker", "--job", job, "--output", str(tmp_path / "run"), "--prompt-column", "prompt"]
    given += ["--engine", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    assert main([*given, "--tool-call-parser", "hermes"]) == 2
    assert "--tool-call-parser with --engine openai" in capsys.readouterr().err
