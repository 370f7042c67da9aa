"""The command line as a user meets it: its exit status, whatever becomes of its streams and whoever interrupts it."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.cli.logs import JsonFormatter
from making import make_job, python, run_process, worker_arguments

ENTRIES = ["batchinfer", "batchinfer.split", "batchinfer.worker"]


@pytest.mark.parametrize("arguments", [["--help"], ["split", "--help"], ["worker", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from batchinfer.cli.main import main; status = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], status)"
    )
    assert python(code, *arguments).splitlines()[-1] == "[] 0"


def test_a_log_of_json_holds_neither_secrets_nor_control_characters():
    said = {"msg": "http://me:SECRET@host \x9b31m", "fields": {"url": "s3://id:SECRET@b \u202e"}}
    line = JsonFormatter().format(logging.makeLogRecord(said))
    assert line.isprintable()
    assert "SECRET" not in line
    assert json.loads(line)["message"] == "http://…@host \\x9b31m"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(("words", "status"), [("split a.jsonl -o job", 0), ("verify job", 2)])
def test_closed_streams_leave_the_exit_status_alone(tmp_path, words, status, closed):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    command = f"{sys.executable} -m batchinfer {words} {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path).returncode == status


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("last", "what"), [("4", "result"), ("-", "answers")])
def test_a_full_disk_below_stdout_is_said_in_a_line(tmp_path, last, what):
    """By a worker, and by `run`."""
    make_job(tmp_path / "job", rows=4, per_chunk=2)
    words = worker_arguments(tmp_path / "job", tmp_path / "run", "--limit")
    assert run_process([*words, "4"]).status == 0
    if last == "-":
        words = ["run", f"{tmp_path}/job/manifests/all.txt", "--engine", "echo", "--output"]
    command = [sys.executable, "-m", "batchinfer", *words, last]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert f"error: stdout: cannot take the {what} (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr


CONSOLE = "from batchinfer.cli.entry import start; start()"
KEYBOARD = "raise KeyboardInterrupt"
SIGTERM = "os.kill(os.getpid(), 15)"
"""As of a machine that is taken away: the status was -15, after which no cluster brings the worker back."""


HEAVY = ("vllm", "torch", "transformers", "pyarrow", "obstore", "fsspec", "datasets", "botocore")


@pytest.mark.parametrize(
    ("start", "arguments", "what_happens"),
    [
        *((f"runpy.run_module({name!r}, run_name='__main__')", [], KEYBOARD) for name in ENTRIES),
        (CONSOLE, [], KEYBOARD),
        ("runpy.run_module('batchinfer.worker', run_name='__main__')", [], SIGTERM),
        (CONSOLE, ["worker"], SIGTERM),
        (CONSOLE, ["run"], SIGTERM),
    ],
)
def test_an_interruption_while_python_imports_is_a_line(start, arguments, what_happens):
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "error: interrupted\n")
