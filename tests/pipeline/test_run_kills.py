"""`batchinfer run` is killed at random instants, and right after each change that it makes on a disk.

The same command then ends the same. Random instants are seldom the short ones between two changes, such as those around
DEST's last rename. The commands are forks of a process that has imported what they need.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FORKS = """
import json, os, random, signal, sys, tempfile, threading, time
from pathlib import Path
import pyarrow.parquet
from batchinfer.cli.main import main
import batchinfer.collect.collecting, batchinfer.pipeline.command, batchinfer.pipeline.steps, batchinfer.split.append
import batchinfer.split.sources, batchinfer.split.writer, batchinfer.worker.command, batchinfer.worker.start

folder, sources = Path(sys.argv[1]), sys.argv[2].split()
tempfile.tempdir = str(folder / "tmp")
os.mkdir(tempfile.tempdir)


def start(dest, names, options, prepare=lambda: None):
    pid = os.fork()
    if pid == 0:
        log = os.open(f"{dest}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 70
        try:
            prepare()
            status = main(["run", *names, "-o", str(dest), "--engine", "echo", *options])
        finally:
            os._exit(status)
    return pid


def end_of(pid, seconds=120.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

AT_ANY_INSTANT = (
    FORKS
    + """
OPTIONS = ["--checkpoint-seconds", "0.2", "--echo-latency-seconds", "0.02", "--max-num-seqs", "8"]
wanted = folder / "undisturbed.parquet"
started = time.monotonic()
assert end_of(start(wanted, sources, OPTIONS)) == 0, Path(f"{wanted}.log").read_text()
whole = time.monotonic() - started
chance = random.Random(7)
kills, number = 0, 0
while kills < 30:
    number += 1
    dest, status = folder / f"killed-{number}.parquet", None
    while status != 0:
        seconds = chance.uniform(0.0, whole) if kills < 30 else 120.0
        status = end_of(start(dest, sources, OPTIONS), seconds)
        said = Path(f"{dest}.log").read_text()
        assert status in (0, -signal.SIGKILL), (status, said)
        kills += status != 0
    assert dest.read_bytes() == wanted.read_bytes(), (number, said)
    left = os.listdir(tempfile.tempdir)
    assert left == [], (number, left, said)  # the last one removed what the killed ones left
print(json.dumps({"kills": kills}))
"""
)

AFTER_EACH_CHANGE = (
    FORKS
    + """
first = sys.argv[3].split()
OPTIONS = ["--seed", "7", "--checkpoint-seconds", "0.05", "--max-attempts", "1000"]


def kill_after(point, counts):
    lock, done = threading.Lock(), [0]

    def wrap(name):
        change = getattr(os, name)

        def changed(*arguments, **options):
            result = change(*arguments, **options)
            with lock:
                done[0] += 1
                counts.write_text(f"{done[0]} {name} {arguments[-1]}")
                if done[0] == point:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, changed)

    for name in ("link", "replace", "rename", "unlink"):
        wrap(name)


def run(dest, names, point=None):
    def prepare():
        if point is not None:
            kill_after(point, Path(f"{dest}.count"))

    return end_of(start(dest, names, OPTIONS, prepare))


def begin(dest):
    if first:
        assert run(dest, first) == 0, Path(f"{dest}.log").read_text()


wanted = folder / "undisturbed.parquet"
begin(wanted)
assert run(wanted, sources, point=0) == 0, Path(f"{wanted}.log").read_text()
total = int(Path(f"{wanted}.count").read_text().split()[0])
kills, places = 0, []
for point in range(1, total + 1):
    dest = folder / f"killed-{point}.parquet"
    begin(dest)
    status = run(dest, sources, point=point)
    if status == -signal.SIGKILL:
        kills += 1
        places.append(Path(f"{dest}.count").read_text().split()[-1])
        status = run(dest, sources)
    said = Path(f"{dest}.log").read_text()
    assert status == 0, (point, places[-1:], said)
    assert dest.read_bytes() == wanted.read_bytes(), (point, places[-1:], said)
    for name in ("job/job.json", "job/manifests/all.txt"):
        mine, other = (Path(f"{one}.batchinfer") / name for one in (dest, wanted))
        assert mine.read_bytes() == other.read_bytes(), (point, name)
print(json.dumps({"kills": kills, "places": places}))
"""
)


def run_program(program: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.chaos
def test_killed_at_any_instant_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    many = [{"text": f"row {index} " + "y " * (index % 11)} for index in range(400)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in many))
    assert run_program(AT_ANY_INSTANT, str(tmp_path), str(rows))["kills"] == 30


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("is_later", [False, True])
def test_killed_after_any_change_it_ends_with_the_same_bytes(
    tmp_path: Path, is_later: bool
) -> None:
    """With `is_later` the killed command is one to which a new file was added, and which appends it."""
    sources = []
    for name, count in (("first", 24), ("later", 9)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(count)))
        sources.append(str(path))
    first = sources[0] if is_later else ""
    found = run_program(AFTER_EACH_CHANGE, str(tmp_path), " ".join(sources), first)
    assert found["kills"] >= 30
    for part in ("job.json", "run.json", ".succeed", "collecting.json", ".parquet"):
        assert any(place.endswith(part) for place in found["places"]), (part, found["places"])
