"""Every event of a worker is one line with a stable name, and `core.events` lists them all."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.terminal import say
from batchinfer.core.events import EVENTS

ROOT = Path(__file__).resolve().parents[2]


def make_job(folder: Path, num_chunks: int, rows: int, bad_row: int | None = None) -> None:
    from batchinfer.core import codec
    from batchinfer.core.records import Chunk, Job

    (folder / "chunks").mkdir(parents=True)
    (folder / "manifests").mkdir()
    chunks = []
    for index in range(num_chunks):
        lines = [
            b"not json\n" if (index, row) == (0, bad_row) else b'{"prompt": "row %d"}\n' % row
            for row in range(rows)
        ]
        data, name = b"".join(lines), f"part-{index:05d}"
        (folder / "chunks" / f"{name}.jsonl").write_bytes(data)
        chunks.append(
            Chunk(
                name=name,
                first_row=index * rows,
                rows=rows,
                bytes=len(data),
                sha256=codec.sha256(data),
            )
        )
    job = Job(
        format_version=1,
        sources=[],
        columns=["prompt"],
        rows=num_chunks * rows,
        chunks=chunks,
        num_workers=1,
    )
    (folder / "job.json").write_bytes(codec.encode_pretty(job))
    manifest = "".join(f"chunks/{chunk.name}.jsonl\n" for chunk in chunks)
    (folder / "manifests" / "all.txt").write_text(manifest)


def command(folder: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "batchinfer", "worker", "--engine", "echo", "--log-format", "json"),
        *(
            "--manifest",
            str(folder / "manifests" / "all.txt"),
            "--output",
            str(folder / "runs" / "a"),
        ),
        *("--prompt-column", "prompt", "--worker-id", "logs-w0", *options),
    ]


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
    make_job(folder, num_chunks=4, rows=40, bad_row=3)
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


def test_every_chunk_and_the_end_are_told_with_their_sums(logs: Any) -> None:
    first, second = logs
    done = named(second, "chunk_done") + named(first, "chunk_done")
    assert len(done) == 4
    ended = named(second, "worker_ended")
    assert len(ended) == 1
    assert ended[0]["state"] == "done"
    assert second[-1]["event"] == "worker_ended"


def test_a_bad_row_is_told_once_and_counted_at_the_end(logs: Any) -> None:
    first, second = logs
    assert named(first + second, "row_error")[0]["code"] == "invalid_json"
    failed = sum(sum(fields["errors"].values()) for fields in named(first + second, "chunk_done"))
    assert failed == 1


def test_every_line_is_an_object_with_time_level_and_message(logs: Any) -> None:
    for entry in (*logs[0], *logs[1]):
        assert {"time", "level", "logger", "message"} <= set(entry)
        assert ("event" in entry) == ("fields" in entry)


def test_every_event_that_a_worker_logs_is_listed(logs: Any) -> None:
    seen = {entry["event"] for entry in (*logs[0], *logs[1]) if "event" in entry}
    assert seen <= set(EVENTS)


def test_every_event_in_the_code_is_listed_and_the_other_way_round() -> None:
    used: set[str] = set()
    for path in (ROOT / "batchinfer").rglob("*.py"):
        if path.name != "events.py":
            used |= set(re.findall(r'\bevent\(\s*"([a-z_]+)"', path.read_text()))
    outcomes = {f"chunk_{outcome}" for outcome in ("done", "lost", "released")}  # by f-string
    assert used | outcomes == set(EVENTS)


def test_the_page_lists_every_event_as_the_code_explains_it() -> None:
    page = (ROOT / "docs" / "logs.md").read_text()
    assert re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE) == list(EVENTS)
    for name, explanation in EVENTS.items():
        assert f"| `{name}` | {explanation} |" in page


def test_a_line_is_printed_while_another_thread_imports_the_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that is being imported stands in sys.modules before it has its names."""
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    say("one line")
    assert capsys.readouterr().err == "one line\n"
