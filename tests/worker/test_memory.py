"""The memory that a real worker takes, with rows that are large."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from making import ECHO, python

ROW_BYTES = 1 << 20
NUM_ROWS = 600
MEASURE = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "batchinfer", *sys.argv[1:]], stdout=subprocess.DEVNULL)
assert done.returncode == 0
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak_bytes(tmp_path: Path, rows: Iterable[dict[str, str]], *options: str) -> int:
    """The most memory that a worker takes with these rows, in a process of its own."""
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    assert main(["split", str(tmp_path / "a.jsonl"), "--output", job, "--num-chunks", "2"]) == 0
    worker = ["worker", "--job", job, "--output", run, *ECHO, *options]
    return int(python(MEASURE, *worker).split()[-1])


@pytest.mark.slow
def test_large_rows_take_the_memory_that_is_allowed(tmp_path):
    """They took as much as the engine had sequences, and segments of them took 128 MB more."""
    texts = (f"{row} " * (ROW_BYTES // len(f"{row} ")) for row in range(NUM_ROWS))
    options = ("--max-num-seqs", "512", "--echo-latency-seconds", "5", "--checkpoint-seconds", "1")
    # The worker alone takes some 45 MB, and what is built or written at a moment some 50.
    most = 45_000_000 + (256 << 20) + 80_000_000
    assert peak_bytes(tmp_path, ({"prompt": text} for text in texts), *options) < most


def test_media_count_as_memory_of_rows(tmp_path):
    """Rows that name files of 4 MB, 60 of them, with --max-row-memory 32."""
    rows = [{"prompt": f"row {row}", "image": f"{row}.png"} for row in range(60)]
    for row in rows:
        (tmp_path / row["image"]).write_bytes(b"\x89PNG" + os.urandom(4 << 20))
    options = ("--as-chat", "--column", "image=image", "--media-root", str(tmp_path))
    options += ("--echo-latency-seconds", "0.5", "--max-row-memory", "32")
    # Some 150 MB, more on a busy machine. Rows whose media do not count take 270, and without any bound 570.
    assert peak_bytes(tmp_path, rows, *options) < 230_000_000
