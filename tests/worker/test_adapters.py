"""LoRA adapters of a run, and the names by which requests ask for the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from batchinfer.core.records import Run
from batchinfer.runs.verify import worker_command
from making import Call, make_job, output_lines, worker_arguments
from models import write_adapter


def request(index: int, name: Any) -> dict[str, Any]:
    body = {"model": name, "messages": [{"role": "user", "content": f"hello {index}"}]}
    return {
        "custom_id": f"r{index}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def arguments(folder: Path, *options: str, run: str = "run") -> list[str]:
    given = worker_arguments(folder / "job", folder / run, *options)
    if "--request-format" in options:
        place = given.index("--prompt-column")
        del given[place : place + 2]
    return given


def codes(lines: list[dict[str, Any]]) -> list[str]:
    return [line["error"]["code"] if "error" in line else line["body"]["model"] for line in lines]


BATCH = ("--request-format", "openai-batch")


def test_requests_name_the_model_as_the_server_does(call: Call, tmp_path: Path) -> None:
    names = ["gpt-4", "gpt-5", None, "echo"]
    make_job(tmp_path / "job", rows=4, per_chunk=4, make_row=lambda i: request(i, names[i]))
    every = ("--max-error-rate", "1")
    done = call(*arguments(tmp_path, *BATCH, *every))
    assert done.status == 0, done.err
    assert codes(output_lines(tmp_path / "run")) == [
        "model_not_found",
        "model_not_found",
        "echo",
        "echo",
    ]
    make_job(tmp_path / "old" / "job", rows=2, per_chunk=2, make_row=lambda i: request(i, "gpt-4"))
    done = call(*arguments(tmp_path / "old", *BATCH))
    assert done.status == 3
    assert "hint: --served-model-name NAME gives the model the name by which" in done.err
    served = ("--served-model-name", "gpt-4", "gpt-5")
    done = call(*arguments(tmp_path, *BATCH, *every, *served, run="named"))
    assert done.status == 0, done.err
    assert codes(output_lines(tmp_path / "named")) == ["gpt-4", "gpt-5", "gpt-4", "model_not_found"]


def test_requests_ask_for_adapters_by_their_names(call: Call, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    names = ["sql", "sq1", None, "sql"]
    make_job(tmp_path / "job", rows=4, per_chunk=4, make_row=lambda i: request(i, names[i]))
    done = call(*arguments(tmp_path, *BATCH, "--lora", f"sql={adapter}", "--max-error-rate", "1"))
    assert done.status == 0, done.err
    assert codes(output_lines(tmp_path / "run")) == ["sql", "model_not_found", "echo", "sql"]


def test_one_adapter_alone_answers_every_row_of_columns(call: Call, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    make_job(tmp_path / "job", rows=3, per_chunk=3)
    done = call(*arguments(tmp_path, "--lora", f"sql={adapter}"))
    assert done.status == 0, done.err
    assert codes(output_lines(tmp_path / "run")) == ["sql"] * 3


def test_a_column_names_each_rows_adapter(call: Call, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    names = ["sql", "", "other", None]
    make_job(
        tmp_path / "job", rows=4, per_chunk=4, make_row=lambda i: {"prompt": "hi", "c": names[i]}
    )
    given = ("--lora", f"sql={adapter}", "--column", "lora=c", "--max-error-rate", "1")
    done = call(*arguments(tmp_path, *given))
    assert done.status == 0, done.err
    assert codes(output_lines(tmp_path / "run")) == ["sql", "echo", "model_not_found", "echo"]


def test_adapters_are_part_of_the_run_by_their_content(call: Call, tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", seed=1)
    make_job(tmp_path / "job", rows=4, per_chunk=4)
    column = ("--column", "lora=c")
    done = call(*arguments(tmp_path, *column, "--lora", f"sql={first}"))
    assert done.status == 0, done.err
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [one["name"] for one in recorded["config"]["adapters"]] == ["sql"]
    assert recorded["recorded"]["options"]["loras"] == {"sql": str(first)}
    moved = first.rename(tmp_path / "moved")
    again = call(*arguments(tmp_path, *column, "--lora", f"sql={moved}"))
    assert again.status == 0, again.err
    other = write_adapter(tmp_path / "other", seed=2)
    for given in ([f"sql={other}"], [f"poems={moved}"], []):
        words = [word for each in given for word in ("--lora", each)]
        done = call(*arguments(tmp_path, *(column if words else ()), *words))
        assert done.status == 2, done.err
        assert "adapters" in done.err
    command = worker_command(msgspec.convert(recorded, Run), str(tmp_path / "run"), "job")
    assert f"--lora sql={first}" in command
