"""LoRA adapters of a run, and the names by which requests ask for the model."""

from typing import Any

import pytest

from batchinfer.core.errors import RunMismatch
from making import make_job, output_lines, run_worker_here
from models import write_adapter


def request(index: int, name: Any) -> dict[str, Any]:
    body = {"model": name, "messages": [{"role": "user", "content": f"hello {index}"}]}
    return {"custom_id": f"r{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def column(_index: int, name: Any) -> dict[str, Any]:
    return {"prompt": "hi", "c": name}


BATCH = ("--request-format", "openai-batch", "--prompt-column", "")
SERVED = ("--served-model-name", "gpt-4", "gpt-5")
LORA = ("--lora", "sql={adapter}")
UNKNOWN = "model_not_found"


@pytest.mark.parametrize(
    ("make_row", "options", "names", "answered"),
    [
        (request, BATCH, ["gpt-4", "gpt-5", None, "echo"], [UNKNOWN, UNKNOWN, "echo", "echo"]),
        (
            request,
            (*BATCH, *SERVED),
            ["gpt-4", "gpt-5", None, "echo"],
            ["gpt-4", "gpt-5", "gpt-4", UNKNOWN],
        ),
        (request, (*BATCH, *LORA), ["sql", "sq1", None], ["sql", UNKNOWN, "echo"]),
        # One adapter alone answers every row of columns.
        (column, LORA, ["other", None], ["sql", "sql"]),
        (
            column,
            (*LORA, "--column", "lora=c"),
            ["sql", "", "other", None],
            ["sql", "echo", UNKNOWN, "echo"],
        ),
    ],
)
def test_rows_ask_for_the_model_and_for_adapters_by_their_names(
    tmp_path, make_row, options, names, answered
):
    adapter, job = write_adapter(tmp_path / "sql"), tmp_path / "job"
    make_job(job, rows=len(names), per_chunk=4, make_row=lambda i: make_row(i, names[i]))
    given = [option.format(adapter=adapter) for option in options]
    run_worker_here(job, tmp_path / "run", *given, "--max-error-rate", "1")
    lines = output_lines(tmp_path / "run")
    assert [
        line["error"]["code"] if "error" in line else line["body"]["model"] for line in lines
    ] == answered


def test_adapters_are_part_of_the_run_by_their_content(tmp_path):
    first = write_adapter(tmp_path / "first", seed=1)
    job, run = tmp_path / "job", tmp_path / "run"
    make_job(job, rows=4, per_chunk=4)
    column = ("--column", "lora=c")
    run_worker_here(job, run, *column, "--lora", f"sql={first}")
    moved = first.rename(tmp_path / "moved")
    assert run_worker_here(job, run, *column, "--lora", f"sql={moved}")["status"] == "SUCCESS"
    other = write_adapter(tmp_path / "other", seed=2)
    for options in ((*column, "--lora", f"sql={other}"), (*column, "--lora", f"poems={moved}"), ()):
        with pytest.raises(RunMismatch, match="adapters"):
            run_worker_here(job, run, *options)
