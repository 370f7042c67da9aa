"""What every command about a run says when it is given something else: a job, nothing, a newer batchinfer's run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.core import layout
from making import make_job, run_worker_here

COMMANDS = {
    "verify": ("verify", "{}"),
    "clean": ("clean", "{}", "--yes"),
    "stop": ("stop", "{}"),
    "collect": ("collect", "{}", "{}-answers"),
    "status": ("status", "{}"),
    "report": ("report", "{}", "--output", "{}-report.html"),
}
READ_THE_JOB = ("verify", "collect", "status", "report")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", rows=20, per_chunk=10)
    return tmp_path / "job"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with 2 and changes nothing."""
    before = contents(place)
    capsys.readouterr()
    assert main([word.format(place) for word in COMMANDS[command]]) == 2
    assert contents(place) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_is_answered_with_its_runs(
    command: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a job without runs" in refused(command, job, capsys)
    for name in ("b", "a"):
        run_worker_here(job, f"{job}/runs/{name}")
    said = refused(command, job, capsys)
    assert f"{job}: is a job, expected one of its runs (a, b)" in said
    assert f"give {job}/runs/a" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_run_is_refused_with_both_versions(
    command: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = job / "runs/a"
    run_worker_here(job, run)
    newer = json.loads((run / layout.RUN_KEY).read_bytes()) | {"format_version": 2}
    for text in (json.dumps(newer), '{"format_version": 2}'):
        (run / layout.RUN_KEY).write_text(text)
        said = refused(command, run, capsys)
        assert "run.json: format version 2, this batchinfer reads up to 1" in said
        assert "hint: upgrade batchinfer" in said


@pytest.mark.parametrize("command", READ_THE_JOB)
def test_a_newer_job_is_refused_with_both_versions(
    command: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = job / "runs/a"
    run_worker_here(job, run)
    newer = json.loads((job / layout.JOB_KEY).read_bytes()) | {"format_version": 2}
    for text in (json.dumps(newer), '{"format_version": 2}'):
        (job / layout.JOB_KEY).write_text(text)
        said = refused(command, run, capsys)
        assert "job.json: format version 2, this batchinfer reads up to 1" in said
        assert "hint: upgrade batchinfer" in said


def test_places_for_results_that_cannot_be_one_are_mistakes(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(job / "runs/a")
    run_worker_here(job, run)
    file = job.parent / "file"
    file.write_text("x")
    assert main(["report", run, "--output", str(job.parent)]) == 2
    assert "is a folder, expected a file" in capsys.readouterr().err
    assert main(["report", run, "--output", f"{file}/page.html"]) == 2
    assert "expected a place for a folder" in capsys.readouterr().err
    assert main(["collect", run, f"{file}/answers.csv"]) == 2
    assert "expected a place for a folder" in capsys.readouterr().err
    assert main(["collect", run, "s3://"]) == 2
    assert "names nothing" in capsys.readouterr().err
