"""Adapters and names of models in whole runs of the echo engine: who answers, what is recorded, and who may go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchinfer.cli.main import main
from batchinfer.core import codec, layout
from batchinfer.core.records import Run
from batchinfer.prompts import constraint_process
from batchinfer.runs.resume_command import worker_command
from batchinfer.storage.opening import open_store
from making import Finished, make_job, read_marker, worker_arguments
from peft_adapter import write_adapter

Call = Callable[[list[str]], Finished]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command in this process. No constraint is compiled, which takes seconds."""
    monkeypatch.setattr(constraint_process, "BACKEND", "no_such_package_here")

    def called(arguments: list[str]) -> Finished:
        status = main(arguments)
        out, err = capsys.readouterr()
        return Finished(status, json.loads(out.splitlines()[-1]) if out.strip() else {}, err)

    return called


def request(index: int, name: Any) -> dict[str, Any]:
    body = {"model": name, "messages": [{"role": "user", "content": f"hello {index}"}]}
    return {
        "custom_id": f"r{index}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def arguments(folder: Path, *options: str, run: str = "run") -> list[str]:
    given = worker_arguments(folder / "job", folder / run, "--no-timing", *options)
    if "--request-format" in options:
        place = given.index("--prompt-column")
        del given[place : place + 2]
    return given


def lines_of(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    store = open_store(str(folder / run))
    data = store.get(layout.output_key(read_marker(store, "part-00000").output)).data
    return [json.loads(line) for line in data.splitlines()]


def codes(lines: list[dict[str, Any]]) -> list[str]:
    bodies = [line["response"]["body"] for line in lines]
    return [body["error"]["code"] if "error" in body else body["model"] for body in bodies]


BATCH = ("--request-format", "openai-batch", "--output-format", "openai-batch")


def test_a_file_whose_requests_all_name_one_model_means_the_runs(
    call: Call, tmp_path: Path
) -> None:
    names = ["gpt-4"] * 150 + ["gpt-5"]
    make_job(tmp_path / "job", rows=151, per_chunk=151, make_row=lambda i: request(i, names[i]))
    done = call(arguments(tmp_path, *BATCH))
    assert done.status == 0, done.stderr
    assert "the requests name the model 'gpt-4', which is taken to mean echo" in done.stderr
    assert codes(lines_of(tmp_path)) == ["echo"] * 150 + ["model_not_found"]


def test_a_file_of_several_names_needs_to_be_told_which_mean_the_model(
    call: Call, tmp_path: Path
) -> None:
    make_job(
        tmp_path / "job",
        rows=4,
        per_chunk=4,
        make_row=lambda i: request(i, ["gpt-4", "gpt-5"][i % 2]),
    )
    every = ("--max-error-rate", "1")
    done = call(arguments(tmp_path, *BATCH, *every))
    assert done.status == 0, done.stderr
    assert codes(lines_of(tmp_path)) == ["model_not_found"] * 4
    done = call(arguments(tmp_path, *BATCH, "--served-model-name", "gpt-5", *every, run="one"))
    assert codes(lines_of(tmp_path, "one")) == ["model_not_found", "gpt-5"] * 2
    done = call(arguments(tmp_path, *BATCH, "--served-model-name", "*", run="any"))
    assert done.status == 0, done.stderr
    assert codes(lines_of(tmp_path, "any")) == ["echo"] * 4


def test_with_adapters_no_name_is_taken_to_mean_the_model(call: Call, tmp_path: Path) -> None:
    """A misspelled adapter would be answered by the model, without a word."""
    adapter = write_adapter(tmp_path / "sql")
    names = ["sql", "sq1", None, "sql"]
    make_job(tmp_path / "job", rows=4, per_chunk=4, make_row=lambda i: request(i, names[i]))
    done = call(arguments(tmp_path, *BATCH, "--lora", f"sql={adapter}", "--max-error-rate", "1"))
    assert done.status == 0, done.stderr
    assert codes(lines_of(tmp_path)) == ["sql", "model_not_found", "echo", "sql"]


def test_one_adapter_alone_answers_every_row(call: Call, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    make_job(tmp_path / "job", rows=3, per_chunk=3)
    done = call(arguments(tmp_path, "--lora", f"sql={adapter}"))
    assert done.status == 0, done.stderr
    assert [line["model"] for line in lines_of(tmp_path)] == ["sql"] * 3
    # The model itself answered the rows of such a run of an earlier version, so it is another configuration.
    recorded = tmp_path / "run" / "run.json"
    run = json.loads(recorded.read_text())
    assert run["config"].pop("adapter_of_all") == "sql"
    run["fingerprint"] = codec.fingerprint(run["config"])
    recorded.write_text(json.dumps(run))
    again = call(arguments(tmp_path, "--lora", f"sql={adapter}"))
    assert again.status == 2
    assert "adapter_of_all" in again.stderr


@pytest.mark.parametrize("form", ["native", "completions", "openai-batch"])
def test_tables_say_which_adapter_answered(call: Call, tmp_path: Path, form: str) -> None:
    from pyarrow import parquet

    adapter = write_adapter(tmp_path / "sql")
    names = ["sql", "", "other", None]
    make_job(
        tmp_path / "job", rows=4, per_chunk=4, make_row=lambda i: {"prompt": "hi", "c": names[i]}
    )
    given = ("--lora", f"sql={adapter}", "--lora-column", "c", "--max-error-rate", "1")
    done = call(arguments(tmp_path, *given, "--output-format", form))
    assert done.status == 0, done.stderr
    done = call(["collect", str(tmp_path / "run"), str(tmp_path / "table.parquet")])
    assert done.status == 0, done.stderr
    rows = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    assert [row["model"] for row in rows] == ["sql", "echo", None, "echo"]
    assert rows[2]["error_code"] == "model_not_found"


def test_adapters_are_part_of_the_run_by_their_content(call: Call, tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", seed=1)
    make_job(tmp_path / "job", rows=4, per_chunk=4)
    column = ("--lora-column", "c")
    done = call(arguments(tmp_path, *column, "--lora", f"sql={first}"))
    assert done.status == 0, done.stderr
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [one["name"] for one in recorded["config"]["adapters"]] == ["sql"]
    assert recorded["recorded"]["lora"] == {"sql": str(first)}
    moved = first.rename(tmp_path / "moved")
    again = call(arguments(tmp_path, *column, "--lora", f"sql={moved}"))
    assert again.status == 0, again.stderr
    other = write_adapter(tmp_path / "other", seed=2)
    for given in ([f"sql={other}"], [f"poems={moved}"], []):
        words = [word for each in given for word in ("--lora", each)]
        done = call(arguments(tmp_path, *(column if words else ()), *words))
        assert done.status == 2, done.stderr
        assert "adapters" in done.stderr
    command = worker_command(msgspec.convert(recorded, Run), str(tmp_path / "run"), "job")
    assert f"--lora sql={first}" in command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--lora", "a=ADAPTER", "--lora", "b=ADAPTER"],
            "nothing says which adapter answers a row",
        ),
        (["--lora", "sql"], "--lora 'sql': expected NAME=PATH"),
        (["--lora", "a=x", "--lora", "a=y"], "--lora a: is given twice"),
        (["--lora", "a=./nothing"], "--lora a: ./nothing is no folder"),
        (["--lora", 'a="nothing'], '--lora a: "nothing'),
        (["--lora-column", "c"], "--lora-column: the run has no adapter"),
    ],
)
def test_options_that_cannot_work_are_refused(
    call: Call, tmp_path: Path, words: list[str], said: str
) -> None:
    make_job(tmp_path / "job", rows=4, per_chunk=4)
    adapter = str(write_adapter(tmp_path / "sql"))
    done = call(arguments(tmp_path, *(word.replace("ADAPTER", adapter) for word in words)))
    assert done.status == 2
    assert said in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_preview_shows_adapter_and_constraint(call: Call, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    rows = [{"prompt": "hi", "c": "sql"}, {"prompt": "ho", "c": ""}]
    make_job(tmp_path / "job", rows=2, per_chunk=2, make_row=rows.__getitem__)
    given = ("--lora", f"sql={adapter}", "--lora-column", "c", "--choices", "yes,no")
    done = call(arguments(tmp_path, *given, "--preview", "2"))
    assert done.status == 0, done.stderr
    shown = done.result["preview"]
    assert [row.get("adapter") for row in shown] == ["sql", None]
    assert [row["constraint"] for row in shown] == [{"choice": ["yes", "no"]}] * 2
    assert "adapter: sql" in done.stderr
    assert 'constraint: {"choice":["yes","no"]}' in done.stderr
