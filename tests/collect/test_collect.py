"""`batchinfer collect`: what a marker vouches for, in input order, as columns, and nothing else."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from pyarrow import parquet

from batchinfer.collect import answers
from batchinfer.collect.columns import _group
from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.storage.opening import open_store
from collecting import collect, table_of
from crashing import crash_everywhere
from finished_run import chat, finish_run
from making import change_marker, make_job, output_key, overwrite
from samples import SCHEMAS

ROWS = 25
MODULES = [
    "batchinfer.collect.collecting",
    "batchinfer.collect.table",
    "duckdb",
    "pyarrow.parquet",
]
TOO_LONG = Failure(code=Code.PROMPT_TOO_LONG, message="too long")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", rows=ROWS, per_chunk=10)
    return tmp_path / "job"


@pytest.fixture
def run(job: Path) -> Path:
    finish_run(job, job / "runs/a", lambda row: TOO_LONG if row == 7 else chat(f"answer {row}"))
    return job / "runs/a"


# --------------------------------------------------------------------------- columns


def test_rows_come_in_input_order_with_their_types(run: Path, tmp_path: Path) -> None:
    table = table_of(run, tmp_path)
    rows = table.to_pylist()
    assert [(row["_row"], row["_id"]) for row in rows] == [(n, f"id-{n}") for n in range(ROWS)]
    assert rows[3] == {
        "_row": 3,
        "_id": "id-3",
        "status": 200,
        "text": "answer 3",
        "finish_reason": "stop",
        "model": "tiny",
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "error_code": None,
        "error_message": None,
    }
    wrong = rows[7]
    assert (wrong["status"], wrong["error_code"]) == (400, "prompt_too_long")
    assert (wrong["text"], wrong["error_message"]) == (None, "too long")
    assert table.schema.field("_row").type == pa.int64()


@pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_runs_in_buckets(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = (
        f"memory://{tmp_path}"
        if place == "memory"
        else request.getfixturevalue("s3_url")("collect")
    )
    make_job(f"{url}/job", rows=4, per_chunk=2)
    finish_run(f"{url}/job", f"{url}/job/runs/a")
    collect(f"{url}/job/runs/a", f"{url}/out")
    names = [info.key for info in open_store(f"{url}/out").list("")]
    assert names == ["_COLLECTED", "part-00000.parquet"]


def test_what_servers_answer_becomes_columns(job: Path, tmp_path: Path) -> None:
    call = {
        "id": "chatcmpl-tool-1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    thought = {"type": "reasoning", "id": "rs_1", "content": [{"text": "hm"}]}
    said = {"type": "message", "id": "msg_1", "content": [{"text": "he"}, {"text": "llo"}]}
    details = {"reasoning_tokens": 1}
    usage = {"input_tokens": 7, "output_tokens": 2, "output_tokens_details": details}
    answers: list[Any] = [
        chat(None, reasoning="thinking", tool_calls=[call]),
        {"choices": [{"text": "plain", "finish_reason": "length", "logprobs": {"tokens": ["a"]}}]},
        {"output": [thought, said], "status": "completed", "usage": usage},
        {
            "output": [{"type": "function_call", "name": "f"}],
            "incomplete_details": {"reason": "max_output_tokens"},
        },
        {"text": "spoken", "usage": {"type": "duration", "seconds": 1}},
        {"results": [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]},
        {"choices": 7, "usage": [], "text": {"odd": 1}},
        b'"only text"',
    ]
    finish_run(job, job / "runs/a", lambda row: answers[row % len(answers)])
    rows = table_of(job / "runs/a", tmp_path).to_pylist()
    assert rows[0]["text"] is None
    assert rows[0]["reasoning"] == "thinking"
    assert json.loads(rows[0]["tool_calls"])[0]["function"] == call["function"]
    assert (rows[1]["text"], rows[1]["finish_reason"]) == ("plain", "length")
    assert json.loads(rows[1]["logprobs"]) == {"tokens": ["a"]}
    assert (rows[2]["text"], rows[2]["reasoning"], rows[2]["finish_reason"]) == (
        "hello",
        "hm",
        "stop",
    )
    assert (rows[2]["prompt_tokens"], rows[2]["reasoning_tokens"]) == (7, 1)
    assert json.loads(rows[3]["tool_calls"]) == [{"type": "function_call", "name": "f"}]
    assert (rows[3]["text"], rows[3]["finish_reason"]) == ("", "length")
    assert rows[4]["text"] == "spoken"
    assert rows[5]["results"] == [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}]
    assert {row["status"] for row in rows} == {200}
    assert rows[7]["text"] is None


def test_several_answers_are_lists(job: Path, tmp_path: Path) -> None:
    def answer(row: int) -> dict[str, Any]:
        choices = [{"text": f"{row}.{n}", "finish_reason": "stop"} for n in range(1 + row % 2)]
        return {"choices": choices}

    finish_run(job, job / "runs/a", answer)
    rows = table_of(job / "runs/a", tmp_path).to_pylist()
    assert [row["texts"] for row in rows[:2]] == [["0.0"], ["1.0", "1.1"]]
    assert rows[1]["finish_reasons"] == ["stop", "stop"]
    assert "text" not in rows[0]


def test_a_run_of_which_every_row_failed_has_the_columns(job: Path, tmp_path: Path) -> None:
    finish_run(job, job / "runs/a", lambda _row: TOO_LONG)
    assert table_of(job / "runs/a", tmp_path)["text"].to_pylist() == [None] * ROWS


def test_other_forms_have_the_values_of_parquet(run: Path, tmp_path: Path) -> None:
    rows = table_of(run, tmp_path).to_pylist()
    collect(run, tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == rows
    collect(run, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        found = list(csv.DictReader(file))
    assert found[3] == {
        name: "" if value is None else str(value) for name, value in rows[3].items()
    }


def test_json_lines_hold_json_and_csv_its_text(job: Path, tmp_path: Path) -> None:
    finish_run(job, job / "runs/a", lambda _row: chat('a,"b"\n', tool_calls=[{"type": "function"}]))
    collect(job / "runs/a", tmp_path / "a.jsonl")
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert first["tool_calls"][0]["type"] == "function"
    collect(job / "runs/a", tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        found = next(csv.DictReader(file))
    assert (found["text"], json.loads(found["tool_calls"])) == ('a,"b"\n', first["tool_calls"])


def test_an_empty_answer_is_not_a_missing_one_in_csv(job: Path, tmp_path: Path) -> None:
    finish_run(job, job / "runs/a", lambda row: TOO_LONG if row else chat(""))
    collect(job / "runs/a", tmp_path / "a.csv")
    first, second, *_ = (tmp_path / "a.csv").read_text().splitlines()[1:]
    assert first.split(",")[3] == '""'
    assert second.split(",")[3] == ""


# --------------------------------------------------------------------------- vectors


def vector(row: int) -> list[float]:
    return [row, 0.5, -1.0, 2.0]


def as_base64(values: list[float]) -> str:
    import base64
    import struct

    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


@pytest.mark.parametrize("form", [as_base64, list])
def test_embeddings_are_fixed_size_lists(form: Any, job: Path, tmp_path: Path) -> None:
    finish_run(
        job,
        job / "runs/a",
        lambda row: TOO_LONG if row == 7 else {"data": [{"embedding": form(vector(row))}]},
        prompt={"task": "embed"},
    )
    table = table_of(job / "runs/a", tmp_path)
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 4)
    assert table["embedding"][3].as_py() == vector(3)
    assert table["embedding"][7].as_py() is None
    assert "text" not in table.column_names


@pytest.mark.parametrize(
    ("task", "data", "name", "kind"),
    [
        (
            "embed",
            [{"embedding": [1]}, {"embedding": [1, 2]}],
            "embeddings",
            pa.list_(pa.list_(pa.float32())),
        ),
        (
            "token-embed",
            [{"data": [[1, 2], [3, 4]]}],
            "token_embeddings",
            pa.list_(pa.list_(pa.float32())),
        ),
        ("reward", [{"data": [0.5]}], "reward", pa.float32()),
        ("reward", [{"data": [[0.5], [1.0]]}], "rewards", pa.list_(pa.list_(pa.float32()))),
        ("classify", [{"label": "good", "probs": [0.75, 0.25]}], "probs", pa.list_(pa.float64())),
        ("score", [{"score": 0.5}], "score", pa.float64()),
        ("score", [{"score": 0.5}, {"score": 1.0}], "scores", pa.list_(pa.float64())),
    ],
)
def test_what_pooling_models_answer(
    task: str, data: Any, name: str, kind: pa.DataType, job: Path, tmp_path: Path
) -> None:
    finish_run(job, job / "runs/a", lambda _row: {"data": data}, prompt={"task": task})
    table = table_of(job / "runs/a", tmp_path)
    assert table.schema.field(name).type == kind
    wanted = [list(each.values())[-1] for each in data]
    assert table[name][0].as_py() in (
        wanted,
        wanted[0],
        wanted[0][0] if isinstance(wanted[0], list) else None,
    )


# --------------------------------------------------------------------------- JSON answers

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0},
        "rate": {"type": "number"},
        "tags": {"type": "array"},
    },
    "required": ["age"],
}
BODY = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}


def test_json_answers_are_columns_with_the_types_of_the_schema(job: Path, tmp_path: Path) -> None:
    texts = ['{"age": 3, "rate": 2, "tags": ["a"]}', "", "no JSON", '{"ag']
    run = job / "runs/a"
    finish_run(job, run, lambda row: chat(texts[row % 4]), prompt={"body": BODY})
    table = table_of(run, tmp_path)
    first, *others = table.to_pylist()
    assert [first[f"answer_{name}"] for name in ("age", "rate", "tags")] == [3, 2.0, ["a"]]
    assert table.schema.field("answer_rate").type == pa.float64()
    assert [row["answer_age"] for row in others[:3]] == [None] * 3
    assert "answer_age" not in table_of(run, tmp_path, answer_json=False).column_names


def test_finished_answers_that_break_the_schema_are_marked_and_counted(
    job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of schemas like this one, xgrammar does not enforce `not`."""
    schema = {"type": "object", "not": {"properties": {"age": {"const": 0}}}}
    texts = ['{"age": 3}', '{"age": 0}', "no JSON", '{"age": 0', '{"valid": 1}']

    def answer(row: int) -> dict[str, Any]:
        found = chat(texts[row % 5])
        if row % 5 == 3:
            found["choices"][0]["finish_reason"] = "length"
        return found

    run = job / "runs/a"
    finish_run(job, run, answer, prompt={"body": {"structured_outputs": {"json": schema}}})
    rows = table_of(run, tmp_path).to_pylist()
    assert [row["_answer_valid"] for row in rows[:5]] == [True, False, False, None, False]
    result = collect(run, tmp_path / "one.jsonl")
    assert result["broken_answers"] == sum(row["_answer_valid"] is False for row in rows)
    assert "answer_valid is false there" in caplog.text
    fine = collect(run, tmp_path / "two.jsonl", where="_answer_valid")
    assert (fine["file_rows"], fine["broken_answers"]) == (ROWS // 5, 0)


def test_several_answers_of_a_row_are_marked_each(job: Path, tmp_path: Path) -> None:
    def answer(_row: int) -> dict[str, Any]:
        one, other = chat('{"age": 3}'), chat('{"age": -1}')
        return {**one, "choices": [*one["choices"], *other["choices"]]}

    finish_run(job, job / "runs/a", answer, prompt={"body": BODY})
    assert table_of(job / "runs/a", tmp_path)["answer_valid"].to_pylist()[0] == [True, False]
    assert collect(job / "runs/a", tmp_path / "a.parquet")["broken_answers"] == ROWS


def test_a_schema_that_points_elsewhere_is_not_fetched(job: Path, tmp_path: Path) -> None:
    body = {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}}}
    finish_run(job, job / "runs/a", lambda _row: chat('{"a": 1}'), prompt={"body": body})
    rows = table_of(job / "runs/a", tmp_path).to_pylist()
    assert {row["answer_valid"] for row in rows} == {None}
    assert rows[0]["answer_a"] == 1


def test_json_answers_without_a_schema_have_the_types_that_they_share(
    job: Path, tmp_path: Path
) -> None:
    texts = [
        '{"a": 1, "b": [1]}',
        '{"a": 1.5, "b": {"x": 1}}',
        '{"big": 12345678901234567890123}',
        "[1]",
        '{"":1}, 2',
    ]
    finish_run(job, job / "runs/a", lambda row: chat(texts[row % 5]))
    rows = table_of(job / "runs/a", tmp_path, answer_json=True).to_pylist()
    assert [row["answer_a"] for row in rows[:5]] == [1.0, 1.5, None, None, None]
    assert [rows[0]["answer_b"], rows[1]["answer_b"]] == ["[1]", '{"x":1}']
    assert rows[2]["answer_big"] == "12345678901234567890123"
    assert [row["answer"] for row in rows[2:5]] == [None, [1], None]
    collect(job / "runs/a", tmp_path / "a.jsonl", answer_json=True)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["answer_b"] == {"x": 1}


def test_answers_that_are_nested_deep_are_one_column_of_text(job: Path, tmp_path: Path) -> None:
    deep = "[" * 3000 + "]" * 3000
    finish_run(job, job / "runs/a", lambda _row: chat(f'{{"a":{deep}}}'))
    rows = table_of(job / "runs/a", tmp_path, answer_json=True).to_pylist()
    assert rows[0]["answer"] == f'{{"a":{deep}}}'


def test_answers_with_arbitrary_names_are_one_column(job: Path, tmp_path: Path) -> None:
    finish_run(
        job, job / "runs/a", lambda row: chat(json.dumps({f"{row}.{n}": n for n in range(9)}))
    )
    rows = table_of(job / "runs/a", tmp_path, answer_json=True).to_pylist()
    assert json.loads(rows[3]["answer"]) == {f"3.{n}": n for n in range(9)}


def test_several_json_answers_are_a_list(job: Path, tmp_path: Path) -> None:
    choices = [{"text": f'{{"age": {n}}}', "finish_reason": "stop"} for n in (1, -1)]
    finish_run(job, job / "runs/a", lambda _row: {"choices": choices}, prompt={"body": BODY})
    first = table_of(job / "runs/a", tmp_path).to_pylist()[0]
    assert [each["age"] for each in first["answer"]] == [1, -1]


# --------------------------------------------------------------------------- rows


def test_where_takes_rows_by_the_columns_of_the_table(run: Path, tmp_path: Path) -> None:
    found = table_of(run, tmp_path, where="error_code IS NOT NULL OR text LIKE '%2'")
    assert found["_row"].to_pylist() == [2, 7, 12, 22]
    joined = table_of(run, tmp_path, where="prompt LIKE '%row 4 %'", with_source=True)
    assert joined["_row"].to_pylist() == [4]
    assert table_of(run, tmp_path, where="false").num_rows == 0


@pytest.mark.parametrize(
    "where", ["status=error", "texts = 'a'", "select", "_row", "1; drop table answers"]
)
def test_other_conditions_are_refused_before_anything_is_written(
    where: str, run: Path, tmp_path: Path
) -> None:
    if where == "_row":
        assert (
            table_of(run, tmp_path, where=where).num_rows == ROWS - 1
        )  # SQL takes numbers as truth
        return
    with pytest.raises(ConfigError, match="--where"):
        collect(run, tmp_path / "out", where=where)
    assert not (tmp_path / "out").exists()


def test_a_sample_has_its_size_its_order_and_repeats(run: Path, tmp_path: Path) -> None:
    drawn = [table_of(run, tmp_path, sample=9, seed=seed)["_row"].to_pylist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] == sorted(drawn[0])
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == len(drawn[2]) == 9
    fitting = table_of(run, tmp_path, sample=4, where="_row % 2 = 0")["_row"].to_pylist()
    assert len(fitting) == 4
    assert not any(row % 2 for row in fitting)
    assert table_of(run, tmp_path, sample=100).num_rows == ROWS


# --------------------------------------------------------------------------- lines


def outputs_of(run: Path) -> list[bytes]:
    data = b"".join(path.read_bytes() for path in sorted(run.glob("outputs/*.jsonl")))
    return data.splitlines(keepends=True)


def test_lines_are_those_of_the_outputs_byte_for_byte(run: Path, tmp_path: Path) -> None:
    collect(run, tmp_path / "a.jsonl", format="lines")
    assert (tmp_path / "a.jsonl").read_bytes() == b"".join(outputs_of(run))
    collect(run, tmp_path / "b", format="lines", where="_row IN (3, 20)", shard_rows=1)
    found = [path.read_bytes() for path in sorted((tmp_path / "b").glob("*.jsonl"))]
    assert found == [outputs_of(run)[3], outputs_of(run)[20]]


def test_batch_results_are_those_that_openai_clients_read(job: Path, tmp_path: Path) -> None:
    crash = Failure(code=Code.ENGINE_CRASH, message="died", status=500)
    finish_run(job, job / "runs/a", lambda row: [chat("yes"), TOO_LONG, crash][row % 3])
    collect(job / "runs/a", tmp_path / "a.jsonl", format="openai-batch")
    found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in found}) == len(found) == ROWS
    assert [line["custom_id"] for line in found[:3]] == ["id-0", "id-1", "id-2"]
    assert found[0]["error"] is None
    assert found[0]["response"]["status_code"] == 200
    assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == "yes"
    assert found[1]["response"]["status_code"] == 400
    assert found[1]["response"]["body"]["error"]["code"] == "prompt_too_long"
    assert found[2]["response"] is None
    assert found[2]["error"] == {"code": "engine_crash", "message": "died"}
    for line in found:
        jsonschema.validate(line, SCHEMAS["openai-batch"])


def test_completions_hold_the_request_beside_its_result(job: Path, tmp_path: Path) -> None:
    answer = {"choices": [{"text": "x", "index": 0, "logprobs": None, "finish_reason": "stop"}]}
    finish_run(job, job / "runs/a", lambda row: answer if row else TOO_LONG, leave_out=[1])
    collect(job / "runs/a", tmp_path / "a.jsonl", format="completions", partial=True)
    found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(found) == 15
    assert found[1] == {"request": {"prompt": "hello row 1 x "}, "result": answer}
    assert found[10]["request"]["prompt"].startswith("hello row 20")
    assert (found[0]["result"], found[0]["error"]["code"]) == (None, "prompt_too_long")
    for line in found:
        jsonschema.validate(line, SCHEMAS["completions"])


# --------------------------------------------------------------------------- which outputs


def test_the_newest_generation_counts_and_orphans_do_not(
    run: Path, job: Path, tmp_path: Path
) -> None:
    finish_run(job, run, lambda row: chat(f"again {row}"), leave_out=[0, 2], generation=1)
    (run / "outputs/part-00000.stray.jsonl").write_bytes(b"not read")
    texts = table_of(run, tmp_path)["text"].to_pylist()
    assert (texts[3], texts[13], texts[23]) == ("answer 3", "again 13", "answer 23")


def test_an_unfinished_run_is_refused_and_a_part_says_what_is_missing(
    job: Path, tmp_path: Path
) -> None:
    finish_run(job, job / "runs/a", leave_out=[1])
    with pytest.raises(RunUnsound, match="1 of 3 chunks"):
        collect(job / "runs/a", tmp_path / "out")
    result = collect(job / "runs/a", tmp_path / "out", partial=True, with_source=True)
    assert (result["status"], result["missing"], result["rows"]) == ("PARTIAL", ["part-00001"], 15)
    rows = parquet.read_table(tmp_path / "out/part-00000.parquet").to_pylist()
    assert rows[10]["prompt"].startswith("hello row 20")


def test_a_part_of_which_every_output_is_damaged_is_an_empty_table(
    job: Path, tmp_path: Path
) -> None:
    finish_run(job, job / "runs/a", leave_out=[1, 2])
    store = open_store(str(job / "runs/a"))
    key = output_key(store, "part-00000")
    overwrite(store, key, store.get(key).data.replace(b"answer", b"damage"))
    assert collect(job / "runs/a", tmp_path / "out", partial=True)["rows"] == 0


def test_the_shape_of_many_answers_is_found_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_MEMORY", "100MB")
    sql = answers.connect(tmp_path)
    texts = "SELECT '{\"a\":\"' || repeat('x', 2000) || '\"}' AS v FROM range(100000)"
    sql.execute(
        f"CREATE TABLE t AS SELECT v::JSON AS v FROM ({texts} UNION ALL SELECT '{{\"b\":1}}')"
    )
    assert _group(sql, "t", "v") == {"a": "VARCHAR", "b": "UBIGINT"}


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_damage_is_noticed_before_a_row_is_written(
    how: str, run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from batchinfer.collect import collecting

    select = collecting.select

    def damaging(*arguments: Any, **options: Any) -> Any:
        found = select(*arguments, **options)
        path = run / output_key(open_store(str(run)), "part-00001")
        if how == "gone":
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(path.read_bytes().replace(b"answer 13", b"answer 31"))
        return found

    monkeypatch.setattr(collecting, "select", damaging)
    with pytest.raises(RunUnsound, match="part-00001"):
        collect(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert collect(run, tmp_path / "out", partial=True)["missing"] == ["part-00001"]


def test_lines_of_other_rows_are_refused(run: Path, tmp_path: Path) -> None:
    store = open_store(str(run))
    key = output_key(store, "part-00001")
    data = store.get(key).data
    lines = data.splitlines(keepends=True)
    for changed in ([lines[1], lines[0], *lines[2:]], [*lines[:-1], b"\n"], [*lines[:-1], b"{\n"]):
        other = b"".join(changed)
        overwrite(store, key, other)
        change_marker(
            store, "part-00001", output_sha256=codec.sha256(other), output_bytes=len(other)
        )
        with pytest.raises(InputError):
            collect(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_run_and_wrong_job_and_a_list_are_told_apart(
    run: Path, job: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError):
        collect(job / "runs/none", tmp_path / "out")
    make_job(tmp_path / "other", rows=3, per_chunk=10)
    with pytest.raises(InputError, match="another job"):
        collect(run, tmp_path / "out", job=str(tmp_path / "other"))


# --------------------------------------------------------------------------- places


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_finished_collection_is_left_alone_and_another_is_not_replaced(
    run: Path, tmp_path: Path
) -> None:
    assert collect(run, tmp_path / "out")["status"] == "SUCCESS"
    before = contents(tmp_path / "out")
    assert collect(run, tmp_path / "out")["status"] == "UNCHANGED"
    with pytest.raises(InputError, match="other data"):
        collect(run, tmp_path / "out", where="status = 200")
    assert contents(tmp_path / "out") == before
    collect(run, tmp_path / "out", where="status = 200", overwrite=True, shard_rows=100)
    assert sorted(contents(tmp_path / "out")) == ["_COLLECTED", "part-00000.parquet"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data.parquet").write_bytes(b"mine")
    with pytest.raises(InputError, match="something else"):
        collect(run, tmp_path / "mine", overwrite=True)


def test_one_file_is_replaced_only_if_asked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(InputError, match="other data"):
        collect(run, tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == "mine"
    (tmp_path / "b.jsonl.bak").write_text("mine")
    collect(run, tmp_path / "b.jsonl")  # a name that another begins with
    collect(run, tmp_path / "a.jsonl", overwrite=True)
    assert (tmp_path / "a.jsonl").read_text().count("\n") == ROWS
    collect(run, tmp_path / "a.jsonl")  # what it would write is there


@pytest.mark.parametrize("dest", ["out", "out.parquet"])
def test_killed_at_any_change_the_same_command_ends_with_the_same_bytes(
    dest: str, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    make_job(start / "job", rows=ROWS, per_chunk=10)
    finish_run(start / "job", start / "job/runs/a")
    command = ["collect", "job/runs/a", dest, "--shard-rows", "10", "--job", "job"]
    killed = crash_everywhere(command, [dest, "out/[!.]*"], start, modules=MODULES)
    assert any(dest in each for each in killed)


@pytest.mark.parametrize(
    ("dest", "options"),
    [
        ("out.json", {}),
        ("out.parquet", {"format": "csv"}),
        ("hf://datasets/a/b", {"format": "lines"}),
        ("out", {"columns": ["prompt"]}),
        ("out", {"format": "completions", "with_source": True}),
        ("job/runs/a/out", {}),
        ("job/out.jsonl", {}),
    ],
)
def test_wrong_places_and_options_are_refused(
    dest: str, options: Any, run: Path, tmp_path: Path
) -> None:
    place = dest if "://" in dest else str(tmp_path / dest)
    with pytest.raises(ConfigError):
        collect(run, place, **options)
