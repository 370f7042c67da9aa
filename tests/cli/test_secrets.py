"""A secret in a URL is repeated nowhere: not on stderr, not on stdout, not in a file that a command writes."""

from __future__ import annotations

import base64
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest
import stamina

from batchinfer.cli import main
from batchinfer.cli.settings import COMMANDS
from making import ECHO, make_job, run_worker_here

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
        "check": [*worker, "--show-config"],
        **{name: [str(job / "runs/a")] for name in RUN_COMMANDS},
        "collect": [str(job / "runs/a"), str(job.parent / "table")],
        "report": [str(job / "runs/a"), "-o", str(job.parent / "page.html")],
        "compare": [str(job / "runs/a"), str(job / "runs/b")],
    }  # fmt: skip


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> int:
    status = main.main(arguments)
    out, err = capfd.readouterr()
    assert SECRET not in out + err, arguments
    return status


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


class _Guarded(BaseHTTPRequestHandler):
    """A web server with one file, for those who give the right password and the right token."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        login = base64.b64encode(f"me:{SECRET}".encode()).decode()
        is_known = self.headers["Authorization"] == f"Basic {login}" and SECRET in self.path
        body = b'{"prompt": "a"}\n{"prompt": "b"}\n'
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_job_and_a_run_from_a_guarded_source_hold_no_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://me:{SECRET}@127.0.0.1:{server.server_port}/x.jsonl?token={SECRET}"
        job, run = str(tmp_path / "job"), str(tmp_path / "run")
        assert call(capfd, "split", url, "--output", job, "--num-chunks", "1") == 0
        server.shutdown()
    assert "…@127.0.0.1" in (tmp_path / "job/job.json").read_text()
    run_worker_here(job, run)
    for name in RUN_COMMANDS:
        places = [str(tmp_path / "table")] if name == "collect" else []
        places += ["-o", str(tmp_path / "page.html")] if name == "report" else []
        assert call(capfd, name, run, *places) == 0, name
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "page.html" for path in found)
    assert [path for path in found if SECRET.encode() in path.read_bytes()] == []


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
