"""What `status`, `report`, `verify` and the next start say right after a worker was killed: the same as the bucket."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchinfer.core import layout, units
from batchinfer.core.clock import SystemClock
from batchinfer.ledger.inventory import RunReader
from batchinfer.runs.answers import Piece, pieces_of, read_answers
from batchinfer.runs.overview import Overview
from batchinfer.runs.report import ReportConfig, run_report
from batchinfer.runs.status import StatusConfig, run_status
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage.opening import open_store
from making import Finished, make_job, run_worker_process, start_process, worker_arguments

ROWS = 400
OPTIONS = ("--worker-id", "w0", "--checkpoint-seconds", "0.2", "--max-num-seqs", "16")


class Killed(NamedTuple):
    """A run right after its worker was killed, and what the next start of the worker did with it."""

    url: str
    checkpointed: int
    """Different rows in the segments of chunks without a marker."""
    num_markers: int
    status: Overview
    verified: dict[str, Any]
    pieces: list[Piece]
    again: Finished


def rows_in_segments(run: str) -> int:
    store = open_store(run)
    found = set()
    for info in store.list(layout.CHECKPOINTS):
        name = info.key.split("/")[1]
        lines = store.get(info.key).data.splitlines()[1:]
        found |= {(name, json.loads(line)["line"]) for line in lines}
    done = {layout.parse_marker(info.key) for info in store.list(layout.OUTPUTS)}
    return len({row for row in found if (row[0], 0) not in done})


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A worker that is killed long after its last heartbeat, with chunks done and rows checkpointed since."""
    job = tmp_path_factory.mktemp("killed") / "job"
    make_job(job, rows=ROWS, per_chunk=50)
    run = str(job / "runs" / "a")
    slow = ("--echo-latency-seconds", "0.2", "--lease-seconds", "120")
    process = start_process(worker_arguments(job, run, *OPTIONS, *slow))
    try:
        outputs, deadline = job / "runs" / "a" / "outputs", time.monotonic() + 60
        while len(list(outputs.glob("*.succeed"))) < 2 or not rows_in_segments(run):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    checkpointed, num_markers = rows_in_segments(run), len(list(outputs.glob("*.succeed")))
    status = look(run)
    verified = run_verify(VerifyConfig(run=run), open_store=open_store, clock=SystemClock()).result
    pieces = pieces_in(run)
    again = run_worker_process(job, run, *OPTIONS, "--log-format", "json")
    return Killed(run, checkpointed, num_markers, status, verified, pieces, again)


def pieces_in(run: str) -> list[Piece]:
    snapshot = RunReader(open_store(run), open_store, SystemClock()).read()
    return pieces_of(read_answers(open_store(run), snapshot), snapshot, gone=[])


def look(run: str) -> Overview:
    return run_status(StatusConfig(run=run), open_store=open_store, clock=SystemClock())


def events(log: str, name: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [entry["fields"] for entry in entries if entry.get("event") == name]


def test_status_counts_what_lies_in_the_bucket(killed: Killed) -> None:
    rows = killed.status.rows
    assert rows.done == killed.verified["rows_ok"] == 50 * killed.num_markers
    assert rows.in_progress == killed.checkpointed
    assert rows.waiting == ROWS - rows.done - killed.checkpointed


def test_the_next_start_goes_on_from_the_same_numbers(killed: Killed) -> None:
    assert killed.again.status == 0
    (read,) = events(killed.again.stderr, "manifests_read")
    assert read == {
        "chunks": ROWS // 50,
        "done_before": killed.num_markers,
        "rows_checkpointed": killed.checkpointed,
    }
    opened = events(killed.again.stderr, "chunk_open")
    assert sum(chunk["resumed"] for chunk in opened) == killed.checkpointed
    assert killed.again.result["rows_resumed"] == killed.checkpointed
    assert killed.again.result["request_count"] == killed.status.rows.waiting
    (view,) = look(killed.url).workers
    assert view.rows_resumed == killed.checkpointed


def test_the_chart_of_progress_ends_at_the_rows_that_are_safe(killed: Killed) -> None:
    safe = killed.status.rows.done + killed.status.rows.in_progress
    assert sum(piece.rows for piece in killed.pieces) == safe
    assert sum(piece.rows for piece in pieces_in(killed.url)) == ROWS


def test_what_the_killed_start_never_reported_is_drawn_as_such(killed: Killed) -> None:
    """All its rows came after its first heartbeat; the next one was due after 30 seconds."""
    unreported = [piece for piece in pieces_in(killed.url) if not piece.worker]
    assert sum(piece.rows for piece in unreported) == killed.checkpointed
    (view,) = look(killed.url).workers
    assert view.rows_done < ROWS, "its record lacks them"


def test_the_page_says_what_verify_says(killed: Killed, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    config = ReportConfig(run=killed.url, output=str(path))
    run_report(config, open_store=open_store, clock=SystemClock())
    page = re.sub(r"<style>.*?</style>", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    found = run_verify(VerifyConfig(run=killed.url), open_store=open_store, clock=SystemClock())
    prompt = units.short(found.result["prompt_tokens"])
    completion = units.short(found.result["completion_tokens"])
    assert f"rows done 100 % {ROWS} of {ROWS} chunks done 8 of 8" in text
    assert f"tokens in / out {prompt} / {completion}" in text
    assert f"Finish reasons stop {ROWS} 100 %" in text
    assert f"{killed.checkpointed} rows more are in no worker's record" in text
    assert text.lower().count("output tokens/s") == 1, "one output rate on the page"
    lengths = re.findall(r"<title>\d+k?: (\d+)</title>", page)
    assert sum(map(int, lengths)) == 2 * ROWS, "prompts and answers"


def test_cards_without_content_are_left_out(killed: Killed, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    config = ReportConfig(run=killed.url, output=str(path), num_samples=0)
    run_report(config, open_store=open_store, clock=SystemClock())
    ids = set(re.findall(r'<section id="([a-z-]+)"', path.read_text()))
    assert ids.isdisjoint({"errors", "samples", "notes"})
    assert {"finish", "prompt-lengths", "answer-lengths", "throughput", "workers"} <= ids
    assert "price not known" not in path.read_text()
