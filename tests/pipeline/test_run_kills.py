"""`batchinfer run` is killed before each change that it makes to files, and the same command then ends the same."""

import json
from pathlib import Path

import pytest

from crashing import crash_everywhere
from making import run_process

WORK = "a.parquet.batchinfer"
WANTED = ("a.parquet", f"{WORK}/job/job.json", f"{WORK}/job/manifests/all.txt")
STEPS = ["run/run.json", "job/job.json", ".succeed", "collecting.json", "a.parquet"]


@pytest.mark.chaos
@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_anywhere_it_ends_with_the_same_bytes(tmp_path, is_later, step, monkeypatch):
    """With `is_later` the killed command is one to which a new file was added, and which appends it."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("first", 24), ("later", 9)):
        rows = (json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(count))
        Path(f"{name}.jsonl").write_text("".join(rows))
    options = ["-o", "a.parquet", "--engine", "echo", "--seed", "7", "--checkpoint-seconds", "0.05"]
    if is_later:
        assert run_process(["run", "first.jsonl", *options]).status == 0
    command = ["run", "first.jsonl", "later.jsonl", *options]
    killed = crash_everywhere(command, WANTED, tmp_path, step=step)
    assert len(killed) >= 50 / step
    for part in STEPS[is_later:] if step == 1 else ():  # the later command finds its run
        assert any(part in place for place in killed), part
