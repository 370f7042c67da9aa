"""Every event of a worker is one line with a stable name, and `core.events` lists them all."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.events import EVENTS
from making import make_job, worker_arguments

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, *options: str) -> list[str]:
    words = worker_arguments(folder, folder / "runs/a", "--worker-id", "logs-w0")
    return [sys.executable, "-m", "batchinfer", *words, "--log-format", "json", *options]


def read(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def named(entries: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry["fields"] for entry in entries if entry.get("event") == event]


@pytest.fixture(scope="module")
def logs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of a worker that is killed with rows checkpointed, and of its second start."""
    folder = tmp_path_factory.mktemp("logs")
    rows = [{"prompt": None if index == 3 else f"row {index}"} for index in range(160)]
    make_job(folder, rows=160, per_chunk=40, make_row=rows.__getitem__)
    slow = command(folder, "--echo-latency-seconds", "3", "--checkpoint-seconds", "0.2")
    with (folder / "first.log").open("w") as log:
        process = subprocess.Popen(slow, stderr=log, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while '"checkpoints"' not in (folder / "first.log").read_text():
                assert process.poll() is None, (folder / "first.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    second = subprocess.run(command(folder), capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    return read((folder / "first.log").read_text()), read(second.stderr)


def test_a_start_is_told_from_loading_to_its_first_checkpoint(logs: Any) -> None:
    first, _ = logs
    events = [entry["event"] for entry in first if "event" in entry]
    for before, after in (
        ("worker_started", "engine_loading"),
        ("engine_loading", "engine_ready"),
        ("worker_started", "manifests_read"),
        ("engine_ready", "checkpoints"),
        ("chunk_open", "checkpoints"),
    ):
        assert events.index(before) < events.index(after)
    assert named(first, "worker_started")[0] == {"worker": "logs-w0", "start": 1, "attempt": 1}
    assert "worker_ended" not in events, "it was killed"


def test_a_second_start_says_that_the_first_was_killed(logs: Any) -> None:
    _, second = logs
    assert named(second, "worker_resumed")[0]["is_kill"] is True
    assert named(second, "worker_started")[0]["start"] == 2
    assert sum(fields["resumed"] for fields in named(second, "chunk_open")) > 0
    first, _ = logs
    done = named(first, "chunk_done") + named(second, "chunk_done")
    assert len(done) == 4
    assert sum(sum(fields["errors"].values()) for fields in done) == 1
    assert second[-1]["event"] == "worker_ended"
    assert second[-1]["fields"]["state"] == "done"


def test_every_event_in_the_code_is_listed_and_the_other_way_round() -> None:
    used: set[str] = set()
    for path in (ROOT / "batchinfer").rglob("*.py"):
        if path.name != "events.py":
            used |= set(
                re.findall(r'\b(?:event\(|tell\(\s*logger,)\s*"([a-z_]+)"', path.read_text())
            )
    outcomes = {f"chunk_{outcome}" for outcome in ("done", "lost", "released")}  # by f-string
    assert used | outcomes == set(EVENTS)
