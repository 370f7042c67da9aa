"""The command line as a user meets it: quick help, exit status, one JSON object at the end."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from batchinfer.cli.main import main
from batchinfer.cli.settings import COMMANDS
from making import make_job, run_process, worker_arguments

HEAVY = ("vllm", "torch", "transformers", "pyarrow", "s3fs", "fsspec", "datasets", "botocore")
HEAVY += ("jinja2", "http.client", "yaml")  # a tenth of a second together
ENTRIES = [
    "batchinfer",
    *(f"batchinfer.{name}" for name in ("check", "collect", "split", "worker")),
]


@pytest.mark.parametrize("arguments", [["--help"], ["split", "--help"], ["worker", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from batchinfer.cli.main import main; status = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[] 0"


def test_little_is_imported_before_a_sigterm_is_noticed() -> None:
    """Until then a worker that is stopped ends with -15, after which no cluster brings it back."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import batchinfer.cli.entry;"
        "print({'typing', 're', 'click', 'contextlib'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, Path(__file__).parents[2]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_registered_command_exists_and_has_help(name: str) -> None:
    command = importlib.import_module(COMMANDS[name].module).command
    assert isinstance(command, click.Command)
    assert command.help


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
        (["worker", "--max-token", "9"], "No such option"),
        (["split", "--nonsense"], "No such option"),
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


@pytest.mark.parametrize("place", ["_open_closed_streams", "configure_logging", "main"])
def test_an_interrupt_beside_the_command_itself_is_75_and_a_line(place: str) -> None:
    code = (
        "from batchinfer.cli import main\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        f"main.{place} = interrupt\n"
        "main.run(['split', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "error: interrupted\n")


def test_a_misspelt_command_is_answered_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["splt"]) == 2
    assert "Did you mean 'split'?" in capsys.readouterr().err


def test_a_variable_that_sets_no_option_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    for name, value in {
        "BATCHINFER_SPLIT_NUM_CHUNKZ": "hush",
        "BATCHINFER_SPLIT_ZZZ": "1",
        "BATCHINFER_SPLIT_NUM_CHUNKS": "1",
        "BATCHINFER_STATUS_WHATEVER": "1",
        "BATCHINFER_SPOT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["split", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "job")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "sets no option" in line]
    assert "NUM_CHUNKZ: sets no option, did you mean BATCHINFER_SPLIT_NUM_CHUNKS?" in said[0]
    assert "ZZZ: sets no option" in said[1]
    assert len(said) == 2
    assert "hush" not in "".join(said)


@pytest.mark.parametrize(
    ("name", "value", "option", "set_to"),
    [
        ("WORKER_SEED", "7", "seed", "7"),
        ("WORKER_SAMPLING", "min_tokens=1 x=1", "sampling", ["min_tokens=1", "x=1"]),
        ("WORKER_RETRY_ERRORS", "1", "retry-errors", True),
        ("WORKER_MAX_TOKENS", "7", "max-tokens", 7),
    ],
)
def test_a_variable_is_named_as_its_option(
    name: str,
    value: str,
    option: str,
    set_to: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--seed was set by BATCHINFER_WORKER_RUN_SEED, the name of a parameter that no user ever sees."""
    make_job(tmp_path / "job", rows=2, per_chunk=2)
    monkeypatch.setenv(f"BATCHINFER_{name}", value)
    main(["worker", "--job", str(tmp_path / "job"), "--engine", "echo", "--show-config"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["options"][option] == {"value": set_to, "from": "environment"}


def test_a_retried_request_leaves_only_our_own_line_on_stderr() -> None:
    code = (
        "from batchinfer.cli.logs import configure_logging; configure_logging()\n"
        "from batchinfer.storage.retrying import RetryPolicy, TransientError, retried\n"
        "tries = iter([TransientError('x: no answer'), None])\n"
        "def ask():\n"
        "    if error := next(tries): raise error\n"
        "retried(RetryPolicy(first_pause_seconds=0.01), ask)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split(" ", 1)[1] for line in done.stderr.splitlines()] == [
        "WARNING x: no answer (attempt 1 of 7, the next in about 0 s)"
    ]


@pytest.mark.parametrize("url", ["hf://datasets/org/name", "https://127.0.0.1/x"])
@pytest.mark.parametrize("command", ["split", "worker"])
def test_a_place_that_can_only_be_read_is_refused_before_any_request(
    command: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path / "job", rows=1, per_chunk=1)
    rest = {
        "split": [str(tmp_path / "job/chunks"), "--num-chunks", "1"],
        "worker": ["--job", str(tmp_path / "job"), "--engine", "echo", "--prompt-column", "prompt"],
    }[command]
    assert main([command, *rest, "--output", url]) == 2
    assert "can only be read" in capsys.readouterr().err


def test_a_storage_librarys_own_log_is_not_shown() -> None:
    """gcsfs logs the traceback of what it then raises, and the command line says it in a line."""
    code = (
        "import logging; from batchinfer.cli.main import main; main(['status']); "
        "logging.getLogger('gcsfs').error('out of retries')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Missing argument" in done.stderr
    assert "out of retries" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_leave_the_exit_status_alone(tmp_path: Path, closed: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    command = (
        f"{sys.executable} -m batchinfer split rows.jsonl --output job --num-chunks 1 {closed}"
    )
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False).returncode == 0
    command = f"{sys.executable} -m batchinfer verify job {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("limit", "status"), [("4", 1), ("1", 2)])
def test_a_full_disk_below_stdout_is_said_in_a_line(
    tmp_path: Path, limit: str, status: int
) -> None:
    """After a success, and after a failure that has a result too."""
    make_job(tmp_path / "job", rows=4, per_chunk=2)
    words = worker_arguments(tmp_path / "job", tmp_path / "run", "--limit")
    assert run_process([*words, "4"]).status == 0
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "batchinfer", *words, limit],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == status
    assert "error: stdout: cannot take the result (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr


CONSOLE_SCRIPT = "from batchinfer.cli.entry import start; start()"


@pytest.mark.parametrize(
    ("start", "arguments", "what_happens"),
    [
        *(
            (f"runpy.run_module({name!r}, run_name='__main__')", [], "raise KeyboardInterrupt")
            for name in ENTRIES
        ),
        (CONSOLE_SCRIPT, [], "raise KeyboardInterrupt"),
        # SIGTERM of a machine that is taken away: the status was -15, after which no cluster brings the worker back.
        (
            "runpy.run_module('batchinfer.worker', run_name='__main__')",
            [],
            "os.kill(os.getpid(), 15)",
        ),
        (CONSOLE_SCRIPT, ["worker"], "os.kill(os.getpid(), 15)"),
        (CONSOLE_SCRIPT, ["run"], "os.kill(os.getpid(), 15)"),
    ],
)
def test_an_interruption_while_python_imports_is_a_line(
    start: str, arguments: list[str], what_happens: str
) -> None:
    script = f"""
import os, runpy, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            {what_happens}
sys.meta_path.insert(0, Interrupt())
sys.argv = ["batchinfer", *{arguments!r}]
{start}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "error: interrupted\n")
