"""The Python interface: what it takes, what it gives, and that its names stay."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest

import batchinfer
from batchinfer import errors
from fake_endpoint import fake_endpoint

ROWS = [{"text": f"row {index}", "n": index} for index in range(5)]
TEXTS = [row["text"] for row in ROWS]


def test_the_names_and_signatures_are_those_that_programs_rely_on() -> None:
    assert set(batchinfer.__all__) == {
        "RunHandle",
        "__version__",
        "errors",
        "make_job",
        "open_run",
        "run",
    }
    assert set(batchinfer.__all__) <= set(dir(batchinfer))
    signatures = {
        "run": ["data", "model", "output", "work", "limit", "prompt_column"],
        "make_job": ["data", "output", "options"],
        "open_run": ["url"],
    }
    for name, wanted in signatures.items():
        function = getattr(batchinfer.api, name)
        assert list(inspect.signature(function).parameters)[: len(wanted)] == wanted
    public = {name for name in vars(batchinfer.RunHandle) if not name.startswith("_")}
    tables = {"to_arrow", "to_polars", "to_pandas", "to_dataset"}
    assert public == {"status", "verify", "rows"} | tables


def test_the_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, batchinfer; batchinfer.run, batchinfer.errors;"
        "heavy = {'torch', 'vllm', 'transformers', 'pyarrow', 'pandas', 'botocore', 'fsspec', 'msgspec'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def as_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: pa.Table.from_pylist(ROWS), id="arrow"),
        pytest.param(lambda: pa.Table.from_pylist(ROWS).to_reader(), id="reader"),
        pytest.param(lambda: pa.Table.from_pylist(ROWS).to_pandas(), id="pandas"),
        pytest.param(lambda: pl.DataFrame(ROWS), id="polars"),
        pytest.param(lambda: pl.LazyFrame(ROWS), id="lazy"),
        pytest.param(as_dataset, id="datasets"),
        pytest.param(lambda: ROWS, id="list"),
        pytest.param(lambda: (row for row in ROWS), id="generator"),
    ],
)
def test_a_source_in_memory_is_answered(make: Callable[[], Any]) -> None:
    found = batchinfer.run(make(), engine="echo", prompt_column="text")
    table = found.to_arrow(with_source=True)
    assert table.column("n").to_pylist() == list(range(5))
    assert table.column("text").to_pylist() == TEXTS


def test_answers_come_as_table_frame_data_set_and_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    found = batchinfer.run(
        tmp_path / "rows.parquet", output=tmp_path / "a.parquet", engine="echo", max_tokens=8
    )
    assert found.result["status"] == "SUCCESS"
    assert pq.read_table(tmp_path / "a.parquet").column("text").to_pylist() == TEXTS
    assert found.to_pandas()["text"].tolist() == TEXTS
    assert found.to_polars()["text"].to_list() == TEXTS
    assert repr(found).startswith(
        f"batchinfer.open_run('{tmp_path}/a.parquet.batchinfer/run')  # 5 rows, 0 failed"
    )
    assert repr(found).count('"text": "row ') == 3
    assert found.to_dataset()["text"][:] == TEXTS
    assert found.status()["state"] == "done"
    assert found.verify(deep=True)["status"] == "SOUND"
    again = batchinfer.open_run(tmp_path / "a.parquet.batchinfer/run")
    assert again.to_arrow().equals(found.to_arrow())


def test_first_some_then_all(tmp_path: Path) -> None:
    some = batchinfer.run(ROWS, output=tmp_path / "a.parquet", engine="echo", limit=2)
    assert [row["text"] for row in some.rows()] == TEXTS[:2]
    found = batchinfer.run(ROWS, output=tmp_path / "a.parquet", engine="echo")
    assert found.result["worker"]["request_count"] == 3
    assert [row["text"] for row in found.rows()] == TEXTS


def test_an_option_that_is_none_is_not_given(tmp_path: Path) -> None:
    names = (
        "lora",
        "stop",
        "system_prompt",
        "sampling",
        "id_column",
        "max_model_len",
        "max_tokens",
    )
    answered = batchinfer.run(ROWS, engine="echo", **dict.fromkeys(names))
    assert answered.to_arrow().column("text").to_pylist() == TEXTS


def test_an_error_has_all_lines_that_the_command_says() -> None:
    rows: list[dict[str, Any]] = [{"prompt": None}] * 3
    with pytest.raises(errors.PolicyStop, match=r"(?s)allows 0.*3 x \w+, e\.g\."):
        batchinfer.run([{"prompt": "one"}, *rows], engine="echo", max_error_rate=0, min_errors=1)


def test_some_rows_can_be_read_again(tmp_path: Path) -> None:
    for status in ("PARTIAL", "UNCHANGED"):
        some = batchinfer.run(ROWS, output=tmp_path / "a.parquet", engine="echo", limit=2)
        assert some.result["status"] == status
        assert [row["text"] for row in some.rows()] == TEXTS[:2]


def test_a_run_is_found_after_the_program_has_changed_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = batchinfer.run(ROWS, output="a.parquet", engine="echo")
    monkeypatch.chdir("/")
    assert [row["text"] for row in found.rows()] == TEXTS


def test_numbers_of_numpy_are_values_of_options() -> None:
    np = pytest.importorskip("numpy")
    found = batchinfer.run(ROWS, engine="echo", limit=np.int64(2))
    assert found.result["rows"] == 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (["What is 1 + 1?", "And [2] * 2?"], ["What is 1 + 1?", "And [2] * 2?"]),
        ([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], ["a", "b"]),
        ((text for text in ("one", "two")), ["one", "two"]),
    ],
)
def test_texts_and_conversations_are_data(data: Any, expected: list[str]) -> None:
    answered = batchinfer.run(data, engine="echo", quiet=True)
    assert [row["text"] for row in answered.rows()] == expected


def test_a_prompt_in_place_of_a_list_is_told_how_to_come() -> None:
    with pytest.raises(errors.InputError) as caught:
        batchinfer.run("What is 1 + 1?", engine="echo")
    assert "give prompts as a list" in caught.value.hint


def test_without_output_the_run_is_kept_in_a_folder_that_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = batchinfer.run(["a"], engine="echo")
    [folder] = re.findall(r"job and run are kept in (\S+);", capsys.readouterr().err)
    assert found.url == f"{folder}/run"
    del found
    assert batchinfer.open_run(f"{folder}/run").to_arrow()["text"].to_pylist() == ["a"]
    with pytest.raises(errors.UsageError):
        batchinfer.run(ROWS, engine="echo", prompt_column="text", work=folder)
    assert (Path(folder) / "run/run.json").exists(), "it survives an exception"


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema(), "FILE"])
def test_schemas_and_tools_reach_the_server(schema: Any, tmp_path: Path) -> None:
    wanted = Person.model_json_schema()
    if schema == "FILE":
        schema = tmp_path / "schema.json"
        schema.write_text(json.dumps(wanted))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with fake_endpoint() as endpoint:
        common = {"engine": "openai", "base_url": endpoint.url, "model": "echo-model"}
        batchinfer.run(["a"], json_schema=schema, tools=tools, stop=["."], quiet=True, **common)
        body = endpoint.bodies[-1]
    assert body["response_format"]["json_schema"]["schema"] == wanted
    assert (body["tools"], body["stop"]) == (tools, ["."])


def test_options_of_the_server_are_arguments() -> None:
    given = ["one two three", "a"]
    answered = batchinfer.run(given, engine="echo", max_model_len=2, quiet=True)
    assert answered.to_arrow()["error_code"].to_pylist() == ["prompt_too_long", None]


def test_a_missing_pandas_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    absent = lambda name: None if name == "pandas" else find(name)  # noqa: E731
    monkeypatch.setattr("batchinfer.api.importlib.util.find_spec", absent)
    batchinfer.run(["a"], engine="echo")
    assert "pandas is not installed: read the answers with" in capsys.readouterr().err


def test_an_error_is_raised_and_not_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.UsageError, match="has no column 'x'"):
        batchinfer.run(ROWS, engine="echo", prompt_column="x")
    assert "has no column" not in capsys.readouterr().err


def test_a_path_with_spaces_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "my rows").mkdir()
    (tmp_path / "my rows/a.jsonl").write_text('{"prompt": "one"}\n')
    for source in (tmp_path / "my rows", f"{tmp_path}/my rows/*.jsonl"):
        assert batchinfer.run(source, engine="echo").to_arrow()["text"].to_pylist() == ["one"]


def test_an_unsound_run_says_how_much_is_missing_and_what_to_do(tmp_path: Path) -> None:
    batchinfer.run(ROWS, output=tmp_path / "a.jsonl", engine="echo", limit=2)
    with pytest.raises(
        errors.RunUnsound, match=r"2 of 4 chunks are done and sound; 2 missing"
    ) as caught:
        batchinfer.open_run(tmp_path / "a.jsonl.batchinfer/run").verify()
    assert "batchinfer worker" in caught.value.hint


def test_a_folder_of_answers_is_one_table_for_pandas_and_datasets(tmp_path: Path) -> None:
    """`_COLLECTED` lies beside the files, and neither of them takes it for one."""
    datasets, pd = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    folder = tmp_path / "answers"
    batchinfer.run(ROWS, output=folder, engine="echo")
    assert (folder / "_COLLECTED").exists()
    assert pd.read_parquet(folder)["text"].to_list() == TEXTS
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded["text"][:] == TEXTS


def test_a_job_is_made_of_rows_in_memory(tmp_path: Path) -> None:
    result = batchinfer.make_job(ROWS, tmp_path / "job", num_chunks=2)
    assert (result["rows"], result["chunks"]) == (5, 2)
    assert (tmp_path / "job/job.json").exists()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"max_token": 3}, errors.ConfigError, "Did you mean --max-tokens"),
        ({"prompt_column": "txet"}, errors.UsageError, "data.jsonl: has no column 'txet'"),
        ({"max_tokens": -1}, errors.UsageError, "^Invalid value for '--max-tokens'"),
        ({"max_tokens": object()}, errors.ConfigError, "max_tokens: is a object"),
    ],
)
def test_a_mistake_is_an_error_of_ours(
    tmp_path: Path,
    options: dict[str, Any],
    kind: type[Exception],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(kind, match=said) as caught:
        batchinfer.run(ROWS, output=tmp_path / "a.parquet", engine="echo", **options)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(caught.value, errors.BatchinferError)
    assert "settings file" not in caught.value.hint + capfd.readouterr().err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *(
            (each, "is no file, table, or list of prompts")
            for each in (3, {"prompt": "a"}, b"x", "-")
        ),
        ([1, 2], "item 0, a int, cannot be a row"),
        ([{"text": "a"}, {"text": "b", "n": object()}], "item 1, a dict, cannot be a row"),
        (["nowhere.jsonl"], "nowhere.jsonl: no such file"),
        ([], "data.jsonl: holds no rows"),
    ],
)
def test_data_that_cannot_be_taken_are_named(data: Any, said: str) -> None:
    with pytest.raises(errors.UsageError, match=said):
        batchinfer.run(data, engine="echo")


def test_one_of_several_splits_is_asked_for() -> None:
    import datasets

    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(errors.InputError, match="has the splits train, expected one"):
        batchinfer.run(splits, engine="echo")


def test_standard_output_is_for_the_command_line() -> None:
    with pytest.raises(errors.ConfigError, match="command line"):
        batchinfer.run(ROWS, output="-", engine="echo")


def test_a_run_that_is_not_finished_is_not_read_as_if_it_were(tmp_path: Path) -> None:
    batchinfer.run(ROWS, output=tmp_path / "a.parquet", engine="echo", limit=2)
    unfinished = batchinfer.open_run(tmp_path / "a.parquet.batchinfer/run")
    with pytest.raises(errors.RunUnsound):
        unfinished.to_arrow()
    with pytest.raises(errors.RunUnsound):
        unfinished.verify()


def test_variables_of_the_command_do_not_reach_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHINFER_RUN_LIMIT", "1")
    found = batchinfer.run(ROWS, output=tmp_path / "a.parquet", engine="echo")
    assert found.result["rows"] == 5


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_bar_is_shown_where_a_person_sees_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_seen: bool
) -> None:
    monkeypatch.setattr("batchinfer.worker.progress.is_shown_to_people", lambda _: is_seen)
    batchinfer.run(ROWS, engine="echo")
    shown = capsys.readouterr().err
    assert ("5/5 rows" in shown) is ("100% |" in shown) is is_seen
    assert "taken from the data: --prompt-column text" in shown
    assert "\x1e" not in shown


def test_quiet_shows_nothing_and_still_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchinfer.worker.progress.is_shown_to_people", lambda _: True)
    batchinfer.run(ROWS, engine="echo", quiet=True)
    with pytest.raises(errors.UsageError, match="max-tokens"):
        batchinfer.run(ROWS, engine="echo", max_tokens=-1, quiet=True)
    assert capsys.readouterr() == ("", "")


def answer_in_a_fork(connection: Any) -> None:
    connection.send([row["text"] for row in batchinfer.run(ROWS, engine="echo", quiet=True).rows()])


def test_a_forked_process_and_a_thread_may_call_it() -> None:
    """As a program with threads and loaded libraries does, for example a data loader's workers."""
    batchinfer.run(ROWS, engine="echo", quiet=True)
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(batchinfer.run, ROWS, engine="echo", quiet=True)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=answer_in_a_fork, args=(theirs,))
        child.start()
        assert ours.poll(60)
        assert ours.recv() == TEXTS
        child.join()
        assert [row["text"] for row in inside.result().rows()] == TEXTS


def descendants(pid: int) -> list[int]:
    """The processes below a process, whichever of its threads started them."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    """Whether a process is alive and no zombie. An orphan may stay a zombie, as no parent waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_ends_with_the_program(tmp_path: Path) -> None:
    """A program killed by SIGKILL leaves no process that works on.

    tests/worker/test_worker_vllm.py shows that vLLM's processes end with the command.
    """
    code = (
        "import batchinfer; batchinfer.run([{'text': 'a'}], output='a.parquet', engine='echo', "
        "echo_latency_seconds=100_000)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        for line in program.stderr:
            if "first rows in the engine" in line:
                break
        below = descendants(program.pid)
        program.kill()
    assert below, "the command"
    end = time.monotonic() + 60
    while left := [pid for pid in below if is_running(pid)]:
        assert time.monotonic() < end, f"still alive: {left}"
        time.sleep(0.05)
