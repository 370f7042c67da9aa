"""The Python interface: what it takes, what it gives, and that its names stay."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest

import batchinfer
from batchinfer import errors
from batchinfer.api import process
from batchinfer.api.data import sources_of
from making import python, wait_for

ROWS = [{"text": f"row {index}", "n": index} for index in range(5)]
TEXTS = [row["text"] for row in ROWS]
TABLE = pa.Table.from_pylist(ROWS)


def run(data: Any = ROWS, **options: Any) -> batchinfer.RunHandle:
    return batchinfer.run(data, **{"engine": "echo"} | options)


def data_set() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


def texts(answered: batchinfer.RunHandle) -> list[Any]:
    return [row["text"] for row in answered.rows()]


def test_the_names_are_those_that_programs_rely_on_and_importing_them_loads_nothing_heavy():
    names = {"RunHandle", "__version__", "errors", "make_job", "open_run", "run"}
    assert set(batchinfer.__all__) == names <= set(dir(batchinfer))
    code = (
        "import sys, batchinfer; batchinfer.run, batchinfer.errors;"
        "heavy = {'torch', 'vllm', 'transformers', 'pyarrow', 'pandas', 'botocore', 'fsspec', 'msgspec'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    python(code)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: TABLE, id="arrow"),
        pytest.param(lambda: TABLE.to_pandas().rename(str), id="pandas", marks=pytest.mark.full),
        pytest.param(lambda: pl.DataFrame(ROWS), id="polars"),
        pytest.param(data_set, id="datasets", marks=pytest.mark.full),
        pytest.param(lambda: ROWS, id="list"),
        pytest.param(lambda: (row for row in ROWS), id="generator"),
    ],
)
def test_a_source_in_memory_is_answered(make):
    table = run(make(), prompt_column="text").to_arrow(with_source=True)
    assert table.column_names[-2:] == ["text", "n"], "no index of pandas"
    assert table.column("n").to_pylist() == list(range(5))
    assert table.column("text").to_pylist() == TEXTS


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: pl.Series(TEXTS), id="polars"),
        pytest.param(lambda: data_set()["text"], id="datasets", marks=pytest.mark.full),
        pytest.param(lambda: np.array(TEXTS), id="numpy"),
        pytest.param(lambda: pl.Series([[{"content": text}] for text in TEXTS]), id="nested"),
    ],
)
def test_a_column_is_a_list_of_its_values(make):
    with sources_of(make()) as ([path], _):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [row.get("prompt") or row["messages"][0]["content"] for row in rows] == TEXTS


@pytest.mark.parametrize("text", ["~5 apples cost how much?", "~\0", "And [2] * 2?"])
def test_a_text_that_names_nothing_here_is_a_prompt(text):
    with sources_of([text]) as ([path], _):
        assert json.loads(Path(path).read_text()) == {"prompt": text}


@pytest.mark.full
def test_answers_come_as_table_frame_data_set_and_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(TABLE, "rows.parquet")
    absent = dict.fromkeys(["lora", "stop", "system_prompt", "sampling", "max_model_len"])
    found = run("rows.parquet", output="a.parquet", limit=np.int64(9), **absent)
    assert found.result["status"] == "SUCCESS"
    monkeypatch.chdir("/")
    assert pq.read_table(tmp_path / "a.parquet").column("text").to_pylist() == TEXTS
    assert found.to_pandas()["text"].tolist() == found.to_polars()["text"].to_list() == TEXTS
    assert found.to_dataset()["text"][:] == texts(found) == TEXTS
    url = f"{tmp_path}/a.parquet.batchinfer/run"
    assert repr(found) == f"batchinfer.open_run('{url}')  # 5 rows, 0 failed"
    assert found.status()["state"] == "done"
    assert found.verify(deep=True)["status"] == "SOUND"
    assert batchinfer.open_run(url).to_arrow().equals(found.to_arrow())


@pytest.mark.parametrize("data", [ROWS, TABLE], ids=["rows", "table"])
def test_first_some_rows_which_are_read_as_such_then_all(data, tmp_path):
    for status in ("PARTIAL", "UNCHANGED"):
        some = run(data, output=tmp_path / "a.parquet", limit=2)
        assert (some.result["status"], texts(some)) == (status, TEXTS[:2])
    unfinished = batchinfer.open_run(tmp_path / "a.parquet.batchinfer/run")
    with pytest.raises(errors.RunUnsound):
        unfinished.to_arrow()
    with pytest.raises(errors.RunUnsound):
        unfinished.verify()
    found = run(data, output=tmp_path / "a.parquet")
    assert found.result["worker"]["request_count"] == 3
    assert texts(found) == TEXTS


def test_without_output_the_run_is_kept_in_a_folder_that_is_named(capsys):
    found = run(["a"])
    [folder] = re.findall(r"job and run are kept in (\S+);", capsys.readouterr().err)
    assert found.url == f"{folder}/run"
    shown = repr(batchinfer.RunHandle("/nowhere", found.result))
    assert shown.endswith("# 1 rows, 0 failed"), "it collected the run, and could raise"
    with pytest.raises(errors.UsageError):
        run(work=folder)
    del found
    assert texts(batchinfer.open_run(f"{folder}/run")) == ["a"], "it survives an exception"


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema(), "FILE"])
def test_schemas_and_tools_reach_the_server(schema, tmp_path, endpoint):
    wanted = Person.model_json_schema()
    if schema == "FILE":
        schema = tmp_path / "schema.json"
        schema.write_text(json.dumps(wanted))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    common = {"engine": "openai", "base_url": endpoint.url, "model": "echo-model"}
    run(["a"], json_schema=schema, tools=tools, stop=["."], quiet=True, **common)
    body = endpoint.bodies[-1]
    assert body["response_format"]["json_schema"]["schema"] == wanted
    assert (body["tools"], body["stop"]) == (tools, ["."])


def test_options_of_the_server_are_arguments_and_variables_of_the_command_are_none(monkeypatch):
    monkeypatch.setenv("BATCHINFER_RUN_LIMIT", "1")
    for given in ({"max_model_len": 2}, {"vllm": {"max_model_len": 2}}):
        answered = run(["one two three", "a"], **given, quiet=True)
        assert answered.to_arrow()["error_code"].to_pylist() == ["prompt_too_long", None]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"prompt_column": "txet"}, errors.UsageError, "data.jsonl: has no column 'txet'"),
        ({"max_tokens": -1}, errors.UsageError, "^Invalid value for '--max-tokens'"),
        ({"output": "-"}, errors.ConfigError, "is for the command line"),
        *(
            ({"data": each}, errors.InputError, "is no file, table, or list of prompts")
            for each in (3, {"prompt": "a"}, b"x", "What is 1 + 1?")
        ),
        ({"data": [{"n": object()}]}, errors.UsageError, "item 0, a dict, cannot be a row"),
        ({"data": []}, errors.UsageError, "data.jsonl: holds no rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("quiet", [False, True])
def test_a_mistake_is_an_error_of_ours_which_is_not_printed_too(
    options, kind, said, quiet, capfd, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(kind, match=said) as caught:
        run(**options, quiet=quiet)
    assert not list(tmp_path.iterdir()), "an empty folder was left"
    shown = capfd.readouterr().err
    assert not (kind is errors.InputError and "kept in" in shown), "there is nothing to keep"
    assert isinstance(caught.value, errors.BatchinferError)
    hint = caught.value.hint
    assert "settings file" not in hint + shown
    notes = getattr(caught.value, "__notes__", [])
    assert notes == ([f"hint: {hint}"] if hint else []), "a traceback shows the hint"
    assert not re.search(said, shown)
    assert not (quiet and shown)


def started(folder: Path, code: str) -> subprocess.Popen[str]:
    """Start a program that calls `run`, and wait until it has opened its first chunk."""
    command = [sys.executable, "-c", f"import batchinfer; batchinfer.run({code})"]
    program = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    next(line for line in program.stderr if ": open, " in line)
    return program


def test_an_interrupt_saves_finished_rows_and_the_same_call_goes_on(tmp_path):
    rows = [{"text": f"row {index}"} for index in range(20)]
    slow = {"echo_latency_seconds": 9.0, "checkpoint_seconds": 0.2, "grace_seconds": 1.0}
    code = f"{rows}, output='a.parquet', engine='echo', max_num_seqs=2, **{slow}"
    with started(tmp_path, code) as program:
        wait_for(lambda: any(tmp_path.glob("a.parquet.batchinfer/run/checkpoints/*/*")))
        program.send_signal(signal.SIGINT)
        _, shown = program.communicate(timeout=120)
    assert "KeyboardInterrupt" in shown
    found = batchinfer.run(rows, output=tmp_path / "a.parquet", engine="echo")
    assert found.result["rows"] == 20
    assert 0 < found.result["worker"]["request_count"] < 20


def test_the_command_ends_with_the_program(tmp_path):
    """A program killed by SIGKILL leaves no process that works on.

    tests/worker/test_worker_vllm.py shows that vLLM's processes end with the command.
    """
    code = "['a'], output='a.parquet', engine='echo', echo_latency_seconds=100_000"
    with started(tmp_path, code) as program:
        child = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text())
        group = os.getpgid(child)
        program.kill()
    assert group == child, "a terminal's Ctrl-C reached it beside the program's own"
    with (tmp_path / "a.parquet.batchinfer/running.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the command's until it ends


@pytest.mark.parametrize(("parent", "status"), [(1, 0), (2, -signal.SIGKILL)])
def test_a_program_that_is_the_first_process_of_a_container_is_no_parent_that_has_ended(
    parent, status
):
    code = f"import os; os.getppid = lambda: 1; {process._CHILD.format(parent)}"
    python(code, "--version", status=status)


def test_rows_and_columns_of_a_run_are_chosen_by_name(tmp_path):
    rows = [{"prompt": text, "title": text.upper()} for text in ("one", "two", "six")]
    answered = run(rows, output=tmp_path / "a.parquet", engine="echo", quiet=True)
    where = "text <> 'two'"
    wanted = [{"title": "ONE", "text": "one"}, {"title": "SIX", "text": "six"}]
    columns = ["title", "text"]
    assert list(answered.rows(with_source=True, where=where, columns=columns)) == wanted
    renamed = answered.to_arrow(with_source=True, columns={"head": "title", "again": "title"})
    assert renamed.to_pylist()[0] == {"head": "ONE", "again": "ONE"}
    for given in (["titel"], "titel"):
        with pytest.raises(errors.UsageError, match="columns: no titel") as refused:
            answered.to_arrow(columns=given)
        assert "there are _row, " in refused.value.hint
