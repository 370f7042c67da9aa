"""Rows and records that are nested too deep for Python: every command reads them, or refuses them in a sentence."""

import json

import pytest

from batchinfer.storage.opening import open_store
from making import overwrite

DEPTHS = [50, 99, 100, 500, *range(850, 1000, 4), 100_000]
"""Python's decoders and encoders fail at some 950 levels; the exact number depends on who calls them."""


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [f'{{"prompt": "row {depth}", "x": {nested(depth)}}}\n' for depth in DEPTHS]
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("place", ["job", "job of chosen columns", "list"])
def test_deep_rows_are_error_rows_and_every_command_reads_their_run(place, source, tmp_path, call):
    job, run = tmp_path / "job", tmp_path / "run"
    num_broken = len(DEPTHS) - 2  # a row itself is one level more
    (tmp_path / "list.txt").write_text("a.jsonl\n")
    words = {
        "job": [source, "--num-chunks", "1"],
        "job of chosen columns": [source, "--num-chunks", "1", "--columns", "x,prompt"],
        "list": ["--by-reference", tmp_path / "list.txt"],
    }[place]
    split = call("split", *words, "--output", job)
    assert split.status == 0
    assert place == "list" or split.result["broken_lines"] == num_broken
    ends = ["--job", str(job)]
    echo = ["--engine", "echo", "--prompt-column", "prompt", "--max-error-rate", "1"]
    worker = call("worker", *ends, "--output", run, "--worker-id", "w0", *echo)
    assert (worker.status, worker.result["error_count"]) == (0, num_broken)
    assert worker.result["response_count"] == 2
    store = open_store(str(run))
    deep = b'"host":{"x":' + nested(100_000).encode() + b","
    record = store.get("workers/w0.stats.json").data.replace(b'"host":{', deep)
    overwrite(store, "workers/w0.stats.json", record)
    assert deep in record
    assert call("status", run, *ends).status == 0, "a worker's record is passed over"
    page = tmp_path / "report.html"
    assert call("report", run, "--output", page, *ends).status == 0
    assert "row 50" in page.read_text()
    assert call("verify", run, "--deep", *ends).status == 0
    assert call("collect", run, tmp_path / "table.jsonl", *ends, "--with-source").status == 0
    rows = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows[:2]] == ["row 50", "row 99"]
    assert [row["x"] for row in rows[:2]] == [nested(50), nested(99)], "the column is JSON text"
    assert {row["error_code"] for row in rows[2:]} == {"invalid_json"}
    assert {row["x"] for row in rows[2:]} == {None}
