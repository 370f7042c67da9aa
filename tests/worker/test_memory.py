"""The memory that a real worker takes, with rows that are large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.cli.main import main

ROW_BYTES = 1 << 20
NUM_ROWS = 600
MEASURE = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "batchinfer", *sys.argv[1:]], stdout=subprocess.DEVNULL)
assert done.returncode == 0
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_large_rows_take_the_memory_that_is_allowed(tmp_path: Path) -> None:
    """They took as much as the engine had sequences, and segments of them took 128 MB more."""
    with (tmp_path / "a.jsonl").open("w") as file:
        for row in range(NUM_ROWS):
            file.write(json.dumps({"prompt": f"{row} " * (ROW_BYTES // len(f"{row} "))}) + "\n")
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    assert main(["split", str(tmp_path / "a.jsonl"), "--output", job, "--num-chunks", "2"]) == 0
    options = ["--engine", "echo", "--max-num-seqs", "512", "--echo-latency-seconds", "5"]
    options += ["--prompt-column", "prompt", "--checkpoint-seconds", "1"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "worker", "--job", job, "--output", run, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    # The worker alone takes some 45 MB, and what is built or written at a moment some 50.
    assert int(done.stdout.split()[-1]) < 45_000_000 + (256 << 20) + 80_000_000


def test_media_count_as_memory_of_rows(tmp_path: Path) -> None:
    """Rows that name files of 4 MB, 60 of them, with --max-row-memory 32."""
    (tmp_path / "photos").mkdir()
    with (tmp_path / "a.jsonl").open("w") as file:
        for row in range(60):
            (tmp_path / f"photos/{row}.png").write_bytes(b"\x89PNG" + os.urandom(4 << 20))
            file.write(json.dumps({"prompt": f"row {row}", "image": f"photos/{row}.png"}) + "\n")
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    assert main(["split", str(tmp_path / "a.jsonl"), "--output", job, "--num-chunks", "2"]) == 0
    options = ["--engine", "echo", "--echo-latency-seconds", "0.5", "--prompt-column", "prompt"]
    options += ["--as-chat", "--column", "image=image", "--media-root", str(tmp_path)]
    options += ["--max-row-memory", "32"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "worker", "--job", job, "--output", run, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    # Some 150 MB, more on a busy machine. Rows whose media do not count take 270, and without any bound 570.
    assert int(done.stdout.split()[-1]) < 230_000_000
