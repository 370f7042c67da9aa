"""`batchinfer compare`: each row counts once, whatever the two runs have done of it."""

from pathlib import Path
from typing import Any

import pytest

from batchinfer.collect.compare import CompareConfig, run_compare
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.storage.opening import open_store
from finished_run import chat, finish_run
from making import make_job

FAILED = Failure(code=Code.PROMPT_TOO_LONG, message="too long")


def answers_a(row: int) -> Any:
    return FAILED if row in (5, 7) else chat(f"the answer {row}" if row < 20 else "yes")


def answers_b(row: int) -> Any:
    told = f"the answer {row}" if row % 2 else f"the reply {row}"
    told = "all other words, " * 9 if row == 3 else told
    return FAILED if row in (6, 7) else chat(told if row < 20 else "no")


@pytest.fixture
def runs(tmp_path):
    """A has done rows 0 to 29, B rows 0 to 9 and 20 to 39."""
    job = tmp_path / "job"
    make_job(job, rows=50, per_chunk=10)
    finish_run(job, job / "runs/a", answers_a, leave_out=(3, 4), prompt={"task": "generate"})
    prompt = {"system_prompt": "\x1b[31m"}
    finish_run(job, job / "runs/b", answers_b, leave_out=(1, 4), prompt=prompt)
    return str(job / "runs/a"), str(job / "runs/b")


def compare(*runs: str, **options: Any) -> dict[str, Any]:
    config = CompareConfig(run_a=runs[0], run_b=runs[1], **options)
    return run_compare(config, open_store=open_store, clock=Clock())


def test_damaged_chunks_that_count_as_missing_are_told(runs, caplog):
    Path(runs[1], "outputs/part-00001.succeed").write_text("damaged")
    assert compare(*runs)["B"]["missing here only"] == 10
    assert (
        f"{runs[1]}: corrupt: part-00001: outputs/part-00001.succeed: not a readable" in caplog.text
    )


def test_runs_of_other_jobs_are_refused(runs, tmp_path):
    make_job(tmp_path / "other", rows=3, per_chunk=10)
    finish_run(tmp_path / "other", tmp_path / "other/runs/a")
    with pytest.raises(InputError, match="not runs over one job"):
        compare(runs[0], str(tmp_path / "other/runs/a"))


def test_a_text_and_none_have_no_word_in_common(tmp_path):
    make_job(tmp_path / "job", rows=2, per_chunk=2)
    runs = [tmp_path / "job/runs" / name for name in "ab"]
    for run, first in zip(runs, (chat(None), chat("so it is")), strict=True):
        answers = {0: first, 1: chat(f"so it {run.name}")}
        finish_run(tmp_path / "job", run, answers.__getitem__)
    differing = compare(*map(str, runs))["differing"]
    assert [(each["row"], each["words_in_common"]) for each in differing] == [(0, 0.0), (1, 0.5)]
