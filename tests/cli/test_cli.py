"""The command line as a user meets it: quick help, exit status, one JSON object at the end."""

import errno
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from making import make_job, python, run_process, worker_arguments

HEAVY = ("vllm", "torch", "transformers", "pyarrow", "obstore", "fsspec", "datasets", "botocore")
HEAVY += ("jinja2", "http.client", "yaml")  # a tenth of a second together
ENTRIES = ["batchinfer", "batchinfer.split", "batchinfer.worker"]


@pytest.mark.parametrize("arguments", [["--help"], ["split", "--help"], ["worker", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from batchinfer.cli.main import main; status = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], status)"
    )
    assert python(code, *arguments).splitlines()[-1] == "[] 0"


def test_little_is_imported_before_a_sigterm_is_noticed():
    """Until then a worker that is stopped ends with -15, after which no cluster brings it back."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import batchinfer.cli.entry;"
        "print({'typing', 're', 'click', 'contextlib'} & sys.modules.keys())"
    )
    command = [sys.executable, "-I", "-S", "-c", code, Path(__file__).parents[2]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_variable_that_sets_no_option_is_warned_of(tmp_path, monkeypatch, call):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    for name in ("SPLIT_NUM_CHUNKZ", "SPLIT_ZZZ", "SPLIT_NUM_CHUNKS", "STATUS_WHATEVER", "SPOT"):
        monkeypatch.setenv(f"BATCHINFER_{name}", "1")
    err = call("split", tmp_path / "a.jsonl", "--output", tmp_path / "job").err
    said = [line.partition(" BATCHINFER_")[2] for line in err.splitlines() if "sets no" in line]
    hint = "did you mean 'BATCHINFER_SPLIT_NUM_CHUNKS'?"
    assert said[0] == f"SPLIT_NUM_CHUNKZ: sets no option; {hint}", "its value may be a secret"
    assert said[1:] == ["SPLIT_ZZZ: sets no option; see --help"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(("words", "status"), [("split a.jsonl -o job", 0), ("verify job", 2)])
def test_closed_streams_leave_the_exit_status_alone(tmp_path, words, status, closed):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    command = f"{sys.executable} -m batchinfer {words} {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path).returncode == status


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("last", "status", "what"),
    [("4", 1, "result"), ("1", 2, "result"), ("-", 1, "answers"), ("--prometheus", 1, "text")],
)
def test_a_full_disk_below_stdout_is_said_in_a_line(tmp_path, last, status, what):
    """After a success, after a failure that has a result too, by `run`, and by metrics."""
    make_job(tmp_path / "job", rows=4, per_chunk=2)
    words = worker_arguments(tmp_path / "job", tmp_path / "run", "--limit")
    assert run_process([*words, "4"]).status == 0
    if last == "-":
        words = ["run", f"{tmp_path}/job/manifests/all.txt", "--engine", "echo", "--output"]
    if last == "--prometheus":
        words = ["status", f"{tmp_path}/run"]
    command = [sys.executable, "-m", "batchinfer", *words, last]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == status
    assert f"error: stdout: cannot take the {what} (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr


def test_trouble_of_the_place_where_a_command_runs_is_said_in_a_line(call, tmp_path, monkeypatch):
    """Names in Latin-1, a folder that is gone, and files that must not be opened ended in tracebacks."""
    assert "'caf\\udce9.csv': is not UTF-8" in call("run", "caf\udce9.csv", "-o", "a.csv").err
    here = tmp_path / os.fsdecode(b"caf\xe9")
    here.mkdir()
    monkeypatch.chdir(here)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    run = call("run", "rows.jsonl", "-o", "a.jsonl", "--engine", "echo")
    assert (run.status, "caf\\udce9/a.jsonl.batchinfer/job': is not UTF-8" in run.err) == (2, True)
    shutil.rmtree(here)
    gone = call("status", "job/runs/a")
    assert (gone.status, "the current folder is gone" in gone.err) == (2, True)
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=OSError(errno.EMFILE, "")))
    assert "ulimit -n" in call("status", "job/runs/a").err


CONSOLE = "from batchinfer.cli.entry import start; start()"
KEYBOARD = "raise KeyboardInterrupt"
SIGTERM = "os.kill(os.getpid(), 15)"
"""As of a machine that is taken away: the status was -15, after which no cluster brings the worker back."""


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
