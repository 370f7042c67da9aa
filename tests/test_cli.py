"""The command line as a user meets it: quick help, exit status, one JSON object at the end."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import click
import pytest

from batchinfer.commands import COMMANDS
from making import make_job, run_process, worker_arguments

HEAVY = ("vllm", "torch", "transformers", "pyarrow", "s3fs", "fsspec", "datasets", "botocore")


@pytest.mark.parametrize("arguments", [["--help"], ["split", "--help"], ["worker", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from batchinfer.cli import main; status = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[] 0"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_registered_command_exists_and_has_help(name: str) -> None:
    command = importlib.import_module(COMMANDS[name].module).command
    assert isinstance(command, click.Command)
    assert command.help
    undocumented = [
        option.opts[0]
        for option in command.params
        if isinstance(option, click.Option) and not option.help and len(option.opts[0]) < 4
    ]
    assert undocumented == []


@pytest.mark.parametrize("module", ["split", "worker"])
def test_modules_run_as_commands(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"batchinfer.{module}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"batchinfer {module}" in done.stdout


def test_the_last_line_of_stdout_is_the_result(tmp_path: pytest.TempPathFactory) -> None:
    make_job(f"{tmp_path}/job", rows=3, per_chunk=2)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "batchinfer",
            *worker_arguments(f"{tmp_path}/job", f"{tmp_path}/run"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["request_count"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["worker", "--nonsense"], "No such option"),
        (["worker", "--limit", "0", "--job", "x"], "0 is not in the range"),
        (["worker", "--engine", "echo"], "no --manifest and no --job"),
        (["worker", "--job", "/nowhere/job", "--engine", "echo"], "no job.json there"),
        (
            [
                "worker",
                "--manifest",
                "nowhere/x.txt",
                "--output",
                "r",
                "--engine",
                "vlm",
                "--model",
                "m",
            ],
            "nowhere/x.txt",
        ),
    ],
)
def test_a_users_mistake_is_exit_2_and_no_traceback(arguments: list[str], message: str) -> None:
    done = run_process(arguments)
    assert done.status == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
