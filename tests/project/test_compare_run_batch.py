"""The comparison of docs/migrating.md, our half of it: what it says is what comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.vllm
def test_2000_mixed_requests_bad_ones_among_them_are_all_answered_though_it_was_killed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/compare_run_batch.py"), "--only", "batchinfer"]  # fmt: skip
    done = subprocess.run(
        [*command, "--work-dir", str(tmp_path)], capture_output=True, text=True, env=dict(os.environ)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["batchinfer"]["first"]["exit_status"] == -9
    assert result["batchinfer"]["second"]["result"]["request_count"] < 2000
    found = result["check"]
    assert (found["requests"], found["answers"], found["errors"]) == (2000, 1950, 50)
    assert found["greedy_chats_right"] > 0.9 * found["greedy_chats"]
