"""Every event of a worker is one line with a stable name, and `core.events` lists them all."""

import json
import re
from pathlib import Path
from typing import Any

from batchinfer.core.events import EVENTS
from making import make_job, run_process, start_process, worker_arguments

ROOT = Path(__file__).resolve().parents[2]


def read(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def named(entries: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry["fields"] for entry in entries if entry.get("event") == event]


def test_a_start_and_the_one_after_its_kill_are_told_in_events(tmp_path):
    rows = [{"prompt": None if index == 3 else f"row {index}"} for index in range(160)]
    make_job(tmp_path, rows=160, per_chunk=40, make_row=rows.__getitem__)
    words = worker_arguments(tmp_path, tmp_path / "runs/a", "--worker-id", "logs-w0")
    words += ["--log-format", "json"]
    slow = ["--echo-latency-seconds", "3", "--checkpoint-seconds", "0.2"]
    with start_process([*words, *slow]) as process:
        first: list[dict[str, Any]] = []
        while not named(first, "checkpoints"):
            first += read(next(process.stderr))
        process.kill()
    events = [entry["event"] for entry in first if "event" in entry]
    story = ["worker_started", "engine_loading", "engine_ready", "checkpoints"]
    assert sorted(story, key=events.index) == story
    assert {"manifests_read", "chunk_open"} <= set(events)
    assert named(first, "worker_started") == [{"worker": "logs-w0", "start": 1, "attempt": 1}]
    done = run_process(words)
    assert done.status == 0, done.err
    second = read(done.err)
    assert named(second, "worker_resumed")[0]["is_kill"] is True
    assert named(second, "worker_started")[0]["start"] == 2
    assert sum(fields["resumed"] for fields in named(second, "chunk_open")) > 0
    chunks = named(first, "chunk_done") + named(second, "chunk_done")
    assert len(chunks) == 4
    assert sum(sum(fields["errors"].values()) for fields in chunks) == 1
    assert (second[-1]["event"], second[-1]["fields"]["state"]) == ("worker_ended", "done")


def test_every_event_in_the_code_is_listed_and_the_other_way_round():
    paths = [path for path in (ROOT / "batchinfer").rglob("*.py") if path.name != "events.py"]
    pattern = r'\b(?:event\(|tell\(\s*logger,)\s*"([a-z_]+)"'
    used = {name for path in paths for name in re.findall(pattern, path.read_text())}
    outcomes = {f"chunk_{outcome}" for outcome in ("done", "lost", "released")}  # by f-string
    assert used | outcomes == set(EVENTS)
