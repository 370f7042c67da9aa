"""What the benchmarks' figures rest on: measured processes, and the stub's counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from making import python

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_finds_what_it_imports():
    """In a process of its own: modules of tests have such names, too."""
    scripts = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    python(f"import {', '.join(scripts)}", cwd=ROOT / "benchmarks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "recovery.py --quick",
        "bookkeeping.py --quick --only claims",
        "bookkeeping.py --quick --only checkpoints",
        "large_job.py --chunks 30",
        "collect.py --rows 500 --repeat 1",
    ],
)
def test_scripts_that_need_no_vllm_run(command):
    """The first four had failed since the format of runs had changed."""
    script, *options = command.split()
    subprocess.run([sys.executable, ROOT / "benchmarks" / script, *options], check=True)


def test_a_command_is_measured_with_its_children_and_ends_the_benchmark_when_it_fails(
    monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import run

    child = "x = bytearray(2**27); print(sum(range(10**6)))"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ended = run([sys.executable, "-c", parent + "; print('{\"a\": 1}')"])
    assert ended.last_object == {"a": 1}
    assert ended.usage.peak_bytes > 2**27
    assert ended.usage.cpu_seconds > 0
    assert ended.cpu == {}, "only counted from a line of the log on"
    waits = "import sys\nprint('go', file=sys.stderr)\nwhile not open('seen').read(): print(file=sys.stderr)"

    def is_ready(line: str) -> bool:
        seen.write_text("" if line == "go\n" else line)  # the next line is read after a look
        return line == "go\n"

    (seen := tmp_path / "seen").touch()
    monkeypatch.chdir(tmp_path)
    watched = run([sys.executable, "-c", waits], is_ready=is_ready)
    assert list(watched.cpu) == ["driver"]
    with pytest.raises(SystemExit, match="exit 3\nwhy"):
        run([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])


def test_the_stub_counts_by_place_and_forgets_what_was_deleted(
    monkeypatch,
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import s3_stub

    from batchinfer.core.errors import AlreadyExists
    from batchinfer.storage.opening import open_store

    with s3_stub.serving(2, 1) as endpoint:
        for name, value in s3_stub.variables(endpoint).items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://stub/job/runs/default")
        store.create("claims/part-00001.json", b"{}")
        with pytest.raises(AlreadyExists):
            store.create("claims/part-00001.json", b"[]")
        store.delete(["claims/part-00001.json"])
        assert not list(store.list("claims/"))
        assert len(list(store.list("outputs/"))) == 2, "an output and its marker"
        assert open_store("s3://stub/job").get("chunks/part-00001.jsonl").data.count(b"\n") == 1
        came = s3_stub.read_counts(endpoint)

    assert came["PUT claims/"] == 2
    assert came["DELETE claims/"] == 1
    assert came["LIST claims/"] == came["LIST outputs/"] == 1
    assert came["GET chunks/"] == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_2000_mixed_requests_bad_ones_among_them_are_all_answered_though_it_was_killed(
    tmp_path,
):
    """The comparison of docs/migrating.md, our half of it: what it says is what comes out."""
    script = ROOT / "benchmarks/compare_run_batch.py"
    command = [sys.executable, script, "--only", "batchinfer", "--work-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["batchinfer"]["first"]["exit_status"] == -9
    assert result["batchinfer"]["second"]["result"]["request_count"] < 2000
    found = result["check"]
    assert (found["requests"], found["answers"], found["errors"]) == (2000, 1950, 50)
    assert found["greedy_chats_right"] > 0.9 * found["greedy_chats"]
