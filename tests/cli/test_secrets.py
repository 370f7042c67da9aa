"""A secret in a URL is repeated nowhere: not on stderr, not on stdout, not in a file that a command writes."""

import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import click
import pytest
import stamina

from batchinfer.cli import main
from batchinfer.cli.settings import COMMANDS
from making import make_job

SECRET = "wJalrXUtnFEMI"
URLS = [
    f"s3://AKIA1:{SECRET}/K7MDENG@bucket/x.jsonl",
    f"s3:/AKIA1:{SECRET}@bucket/x.jsonl",
    f"http://me:{SECRET}@127.0.0.1:9/x.jsonl?token={SECRET}",
]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A job and a file of rows. A server that is not there is asked once."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)
    make_job("job", rows=2, per_chunk=1)
    Path("x.jsonl").write_text('{"prompt": "a"}\n')
    stamina.set_testing(True, attempts=1)
    yield
    stamina.set_testing(False)


WORKER = "--engine echo --prompt-column prompt --manifest job/manifests/all.txt --output job/runs/a"
ARGUMENTS = {
    "split": "x.jsonl --output out --num-chunks 1",
    "run": "x.jsonl -o a.jsonl --engine echo --prompt-column prompt",
    "generate": "--engine echo --prompt a --json",
    "chat": "--engine echo",
    "convert": "composer-to-hf x.pt model",
    "launch": "job --run job/runs/a --on slurm --engine echo --prompt-column prompt --workers 1 --dry-run",
    "worker": f"{WORKER} --show-config",
    "check": WORKER,
    **dict.fromkeys(("status", "verify", "clean", "stop"), "job/runs/a"),
    "collect": "job/runs/a table",
    "report": "job/runs/a -o page.html",
    "compare": "job/runs/a job/runs/b",
}
"""With which each command gets as far as it can without doing much."""


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
    main.main(arguments)
    assert SECRET not in "".join(capfd.readouterr()), arguments


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_and_no_word_of_a_command_repeats_a_secret(name, capfd, monkeypatch):
    base = [name, *ARGUMENTS[name].split()]
    places = list(itertools.takewhile(lambda place: base[place][:1] != "-", range(1, len(base))))
    command: click.Command = importlib.import_module(f"batchinfer.{COMMANDS[name][0]}").command
    for url in URLS:
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                call(capfd, *base, max(parameter.opts, key=len), url)
        for place in places:
            call(capfd, *base[:place], url, *base[place + 1 :])
        call(capfd, *base, url)
        call(capfd, *base, f"--{url}", "--hf-overrides", f"model={url}")
        call(capfd, url)
        Path("settings.yaml").write_text(f"{url!r}: 1\n")
        call(capfd, *base, "--config", "settings.yaml")
        with monkeypatch.context() as patch:
            patch.setenv(f"BATCHINFER_{name.upper()}_LOG_LEVEL", url)
            patch.setenv("AWS_ENDPOINT_URL", url)
            patch.setenv("HTTP_PROXY", url)
            call(capfd, *base, "--log-format", "json")


def test_a_crash_shows_its_traceback_without_the_secret():
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
