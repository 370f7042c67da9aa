"""Runs whose task is not to generate text, with the echo engine: bodies, options, kills."""

from pathlib import Path
from typing import Any

import pytest

from batchinfer.storage.opening import open_store
from making import make_job, output_lines, read_marker, run_worker_here


@pytest.fixture
def job(tmp_path):
    def make_row(index: int) -> dict[str, Any]:
        pair = {"query": "which?", "document": f"number {index}"}
        return {"prompt": f"text {index}", **pair, "all": [f"number {index}", "another"]}

    make_job(tmp_path / "job", rows=30, per_chunk=10, make_row=make_row)
    return tmp_path / "job"


def bodies(run: Path) -> list[dict[str, Any]]:
    found = output_lines(run)
    assert [line["_row"] for line in found] == list(range(30))
    return [line["body"] for line in found]


PAIR = ("--prompt-column", "", "--pair-columns", "query,document")
LIST = ("--prompt-column", "", "--pair-columns", "query,all")


@pytest.mark.parametrize(
    ("task", "options", "field"),
    [
        ("embed", (), "embedding"),
        ("token-embed", (), "data"),
        ("classify", (), "probs"),
        ("score", PAIR, "score"),
        ("reward", (), "data"),
        ("rerank", LIST, "relevance_score"),
    ],
)
def test_each_task_has_its_body_and_counts_no_text(job, task, options, field):
    result = run_worker_here(job, job / "run", "--task", task, *options)
    found = bodies(job / "run")
    answers = [body.get("data") or body["results"] for body in found]
    assert all(field in answer[0] for answer in answers)
    assert len({str(answer) for answer in answers}) == 30
    assert (result["status"], result["total_tokens_generated"]) == ("SUCCESS", 0)
    marker = read_marker(open_store(str(job / "run")), "part-00000")
    assert (marker.rows_ok, marker.finish_reasons) == (10, {})
    assert marker.prompt_tokens > 0
