"""A secret in a URL is repeated nowhere: not on stderr, not on stdout, not in a file that a command writes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import stamina

from batchinfer.cli import main
from batchinfer.cli.settings import COMMANDS
from making import ECHO, make_job

SECRET = "wJalrXUtnFEMI"
URLS = [
    f"s3://AKIA1:{SECRET}/K7MDENG@bucket/x.jsonl",
    f"s3:/AKIA1:{SECRET}@bucket/x.jsonl",
    f"http://me:{SECRET}@127.0.0.1:9/x.jsonl?token={SECRET}",
]
RUN_COMMANDS = ("status", "verify", "clean", "stop", "report", "collect")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A server that is not there is asked once."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", rows=2, per_chunk=1)
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path / "job"


def base_arguments(job: Path) -> dict[str, list[str]]:
    """Arguments with which each command gets as far as it can without doing much."""
    worker = [*ECHO, "--manifest", f"{job}/manifests/all.txt", "--output", str(job / "runs/a")]
    return {
        "split": [str(job.parent / "x.jsonl"), "--output", str(job.parent / "out"), "--num-chunks", "1"],
        "run": [str(job.parent / "x.jsonl"), "-o", str(job.parent / "a.jsonl"), *ECHO],
        "generate": ["--engine", "echo", "--prompt", "a", "--json"],
        "chat": ["--engine", "echo"],
        "convert": ["composer-to-hf", str(job.parent / "x.pt"), str(job.parent / "model")],
        "launch": [str(job), "--run", str(job / "runs/a"), "--on", "slurm", *ECHO, "--workers", "1", "--dry-run"],
        "worker": [*worker, "--show-config"],
        "check": worker,
        **{name: [str(job / "runs/a")] for name in RUN_COMMANDS},
        "collect": [str(job / "runs/a"), str(job.parent / "table")],
        "report": [str(job / "runs/a"), "-o", str(job.parent / "page.html")],
        "compare": [str(job / "runs/a"), str(job / "runs/b")],
    }  # fmt: skip


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
    main.main(arguments)
    assert SECRET not in "".join(capfd.readouterr()), arguments


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_of_a_command_repeats_a_secret(
    name: str, job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_arguments(job)[name]
    command: click.Command = importlib.import_module(f"batchinfer.{COMMANDS[name][0]}").command
    for url in URLS:
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                call(capfd, name, *base, max(parameter.opts, key=len), url)
        call(capfd, name, *base, url)
        call(capfd, name, *base, f"--{url}", "--hf-overrides", f"model={url}")
        call(capfd, url)
        (job.parent / "settings.yaml").write_text(f"{url!r}: 1\n")
        call(capfd, name, *base, "--config", str(job.parent / "settings.yaml"))
        with monkeypatch.context() as patch:
            patch.setenv(f"BATCHINFER_{name.upper()}_LOG_LEVEL", url)
            patch.setenv("AWS_ENDPOINT_URL", url)
            patch.setenv("HTTP_PROXY", url)
            call(capfd, name, *base, "--log-format", "json")


@pytest.mark.full  # `convert` needs torch
@pytest.mark.parametrize("url", URLS)
def test_no_place_of_a_url_repeats_a_secret(
    url: str, job: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text(f"{url}\n")
    run = str(job / "runs/a")
    calls = [
        ["split", f"{url}*", "--output", str(tmp_path / "out"), "--num-chunks", "1"],
        ["worker", *ECHO, "--manifest", str(tmp_path / "list.txt"), "--output", run],
        ["run", url, "-o", str(tmp_path / "a.jsonl"), *ECHO],
        ["convert", "hf-to-onnx", url, str(tmp_path / "model")],
        ["convert", "mpt-to-ft", url, str(tmp_path / "model"), "--gpus", "1"],
        ["convert", "composer-to-hf", str(tmp_path / "x.pt"), url],
        *([name, url] for name in RUN_COMMANDS),
        ["collect", run, url],
    ]
    for arguments in calls:
        call(capfd, *arguments)


def test_a_crash_shows_its_traceback_without_the_secret() -> None:
    code = (
        "from batchinfer.cli import main\n"
        "def crash(_): raise RuntimeError('cannot open http://me:SECRET@host/x?token=SECRET')\n"
        "main.main = crash\n"
        "main.run([])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: cannot open http://…@host/x?token=…" in done.stderr
    assert "SECRET" not in done.stdout + done.stderr.replace("raise RuntimeError", "")
