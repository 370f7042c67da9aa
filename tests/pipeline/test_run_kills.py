"""`batchinfer run` is killed right after a change that it makes on a disk, and the same command then ends the same.

The commands are forks of a process that has imported what they need.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

AFTER_CHANGES = """
import json, os, signal, sys, tempfile, threading
from pathlib import Path
import pyarrow.parquet
from batchinfer.cli.main import main
import batchinfer.collect.collecting, batchinfer.pipeline.run, batchinfer.pipeline.work_folder, batchinfer.split.append
import batchinfer.split.sources, batchinfer.split.writer, batchinfer.worker.command, batchinfer.worker.start

folder, sources, first, step = Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split(), int(sys.argv[4])
OPTIONS = ["--engine", "echo", "--seed", "7", "--checkpoint-seconds", "0.05"]
tempfile.tempdir = str(folder / "tmp")
os.mkdir(tempfile.tempdir)


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
    pid = os.fork()
    if pid == 0:
        log = os.open(f"{dest}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 70
        try:
            if point is not None:
                kill_after(point, Path(f"{dest}.count"))
            status = main(["run", *names, "-o", str(dest), *OPTIONS])
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin(dest):
    if first:
        assert run(dest, first) == 0, Path(f"{dest}.log").read_text()


wanted = folder / "undisturbed.parquet"
begin(wanted)
assert run(wanted, sources, point=0) == 0, Path(f"{wanted}.log").read_text()
total = int(Path(f"{wanted}.count").read_text().split()[0])
places = []
for point in range(1, total + 1, step):
    dest = folder / f"killed-{point}.parquet"
    begin(dest)
    status = run(dest, sources, point=point)
    if status == -signal.SIGKILL:
        places.append(Path(f"{dest}.count").read_text().split()[-1])
        status = run(dest, sources)
    said = Path(f"{dest}.log").read_text()
    assert status == 0, (point, places[-1:], said)
    assert dest.read_bytes() == wanted.read_bytes(), (point, places[-1:], said)
    for name in ("job/job.json", "job/manifests/all.txt"):
        mine, other = (Path(f"{one}.batchinfer") / name for one in (dest, wanted))
        assert mine.read_bytes() == other.read_bytes(), (point, name)
    assert os.listdir(tempfile.tempdir) == [], "the last one removed what the killed ones left"
print(json.dumps(places))
"""


@pytest.mark.chaos
@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_after_a_change_it_ends_with_the_same_bytes(
    tmp_path: Path, is_later: bool, step: int
) -> None:
    """With `is_later` the killed command is one to which a new file was added, and which appends it."""
    sources = []
    for name, count in (("first", 24), ("later", 9)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(count)))
        sources.append(str(path))
    words = [str(tmp_path), " ".join(sources), sources[0] if is_later else "", str(step)]
    command = [sys.executable, "-c", AFTER_CHANGES, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    places = json.loads(done.stdout)
    assert len(places) >= 30 / step
    for part in ("job.json", "run.json", ".succeed", "collecting.json") if step == 1 else ():
        assert any(place.endswith(part) for place in places), (part, places)
