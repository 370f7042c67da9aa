"""`batchinfer collect`: what a marker vouches for, in input order, as columns, and nothing else."""

import base64
import csv
import io
import json
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from pyarrow import parquet

from batchinfer.collect import answers, collecting, table_files
from batchinfer.collect.table import Collection
from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import open_store
from collecting import collect, table_of
from fakes import meanwhile
from finished_run import chat, finish_run
from making import change_marker, make_job, output_key, overwrite, python, run_worker_here, split
from samples import SCHEMAS

ROWS = 25
TOO_LONG = Failure(code=Code.PROMPT_TOO_LONG, message="too long")


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=ROWS, per_chunk=10)
    return tmp_path / "job"


@pytest.fixture
def run(job):
    finish_run(job, job / "runs/a", lambda row: TOO_LONG if row == 7 else chat(f"answer {row}"))
    return job / "runs/a"


def table(job: Path, given: list[Any], prompt: Any = None, **options: Any) -> Any:
    """The table of a run whose rows have these answers in turn."""
    finish_run(job, job / "runs/a", lambda row: given[row % len(given)], prompt=prompt)
    return table_of(job / "runs/a", job.parent, **options)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------- columns


def test_rows_come_in_input_order_with_the_values_of_their_answers(run, tmp_path):
    found = table_of(run, tmp_path)
    rows = found.to_pylist()
    assert [(row["_row"], row["_id"]) for row in rows] == [(n, f"id-{n}") for n in range(ROWS)]
    answered = {"status": 200, "text": "answer 3", "finish_reason": "stop", "model": "tiny"}
    answered |= {"prompt_tokens": 5, "completion_tokens": 3, "error_code": None}
    assert rows[3] == {"_row": 3, "_id": "id-3", "error_message": None} | answered
    wrong = {"status": 400, "text": None, "error_code": "prompt_too_long"}
    assert rows[7] | wrong | {"error_message": "too long"} == rows[7]
    assert found.schema.field("_row").type == pa.int64()


CALL = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SPOKEN = {"type": "function_call", "name": "f"}
USAGE = {"input_tokens": 7, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}}
SAID = [
    {"type": "reasoning", "id": "rs_1", "content": [{"text": "hm"}]},
    {"type": "message", "id": "msg_1", "content": [{"text": "he"}, {"text": "llo"}]},
]
SCORES = [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (
        chat(None, reasoning="thinking", tool_calls=[CALL]),
        {"text": None, "reasoning": "thinking"},
    ),
    (
        {"choices": [{"text": "plain", "finish_reason": "length", "logprobs": {"tokens": ["a"]}}]},
        {"text": "plain", "finish_reason": "length", "logprobs": {"tokens": ["a"]}},
    ),
    (
        {"output": SAID, "status": "completed", "usage": USAGE},
        {"text": "hello", "reasoning": "hm", "finish_reason": "stop", "prompt_tokens": 7}
        | {"reasoning_tokens": 1},
    ),
    (
        {"output": [SPOKEN], "incomplete_details": {"reason": "max_output_tokens"}},
        {"tool_calls": [SPOKEN], "text": None, "finish_reason": "length"},
    ),
    ({"text": "spoken", "usage": {"type": "duration", "seconds": 1}}, {"text": "spoken"}),
    (
        {"results": SCORES},
        {"results": [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}], "status": 200},
    ),
    ({"choices": 7, "usage": [], "text": {"odd": 1}}, {"prompt_tokens": None}),
]


def test_what_servers_answer_becomes_columns(job):
    found = table(job, [body for body, _ in BODIES]).to_pylist()
    for row, (_, wanted) in zip(found, BODIES, strict=False):
        for name in ("tool_calls", "logprobs"):
            row[name] = json.loads(row[name] or "null")
        assert row | wanted == row
    assert found[0]["tool_calls"][0]["function"] == CALL["function"]


def test_several_answers_are_lists(job):
    choices = [{"text": f"{n}", "finish_reason": "stop"} for n in range(2)]
    rows = table(job, [{"choices": choices[:1]}, {"choices": choices}]).to_pylist()
    assert [row["texts"] for row in rows[:2]] == [["0"], ["0", "1"]]
    assert rows[1]["finish_reasons"] == ["stop", "stop"]
    assert "text" not in rows[0]


def test_transcripts_of_a_run_that_names_their_form_are_texts(job):
    prompt = {"task": "transcribe", "body": {"response_format": "verbose_json"}}
    assert table(job, [{"text": "hi"}], prompt)["text"].to_pylist() == ["hi"] * ROWS


def test_a_run_of_which_every_row_failed_has_the_columns(job):
    assert table(job, [TOO_LONG])["text"].to_pylist() == [None] * ROWS


def test_json_lines_hold_json_and_csv_its_text_and_empty_texts_are_not_missing(job, tmp_path):
    rows = table(job, [chat('a,"b"\r.\n', tool_calls=[CALL]), chat(""), TOO_LONG]).to_pylist()
    collect(job / "runs/a", tmp_path / "a.jsonl")
    for row in rows:
        row["tool_calls"] = json.loads(row["tool_calls"] or "null")
    assert lines_of(tmp_path / "a.jsonl") == rows
    assert rows[0]["tool_calls"][0]["function"] == CALL["function"]
    collect(job / "runs/a", tmp_path / "a.csv")
    text = (tmp_path / "a.csv").read_bytes().decode()
    first = next(csv.DictReader(io.StringIO(text, newline="")))
    assert first["text"] == rows[0]["text"] == 'a,"b"\r.\n'
    assert json.loads(first["tool_calls"]) == rows[0]["tool_calls"]
    empty, missing = text.split("\n")[3:5]
    assert (empty.split(",")[3], missing.split(",")[3]) == ('""', "")


# --------------------------------------------------------------------------- vectors


def as_base64(values: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


@pytest.mark.parametrize("form", [as_base64, list])
def test_embeddings_are_fixed_size_lists(form, job):
    given = [{"data": [{"embedding": form([row, 0.5, -1.0, 2.0])}]} for row in range(ROWS)]
    found = table(job, [*given[:7], TOO_LONG, *given[8:]], {"task": "embed"})
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), 4)
    assert found["embedding"][3].as_py() == [3, 0.5, -1.0, 2.0]
    assert found["embedding"][7].as_py() is None
    assert "text" not in found.column_names


def test_batch_requests_of_a_run_of_texts_may_ask_for_vectors(job):
    given = [{"data": [{"embedding": form([0.5, 2])}]} for form in (list, as_base64)]
    found = table(job, given, {"request_format": "openai-batch"})
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), 2)
    assert found["embedding"].to_pylist() == [[0.5, 2.0]] * ROWS


def test_texts_and_truth_values_are_no_vectors(job):
    given = [{"data": [{"embedding": odd}]} for odd in ([1, "7"], [1, True], [1, 2])]
    found = table(job, given, {"task": "embed"})["embedding"].to_pylist()
    assert found[:3] == [None, None, [1, 2]]


ODD = (["1.0", "2", "3", "4"], "not base64!", as_base64([1])[:-2], {"a": 1}, 5, [1], True)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_no_vector_costs_only_its_own_cell(odd, nested, job):
    good = [[1, 2], [3, 4]] if nested else [1, 2, 3, 4]
    given = [{"data": [{"embedding": odd if row == 1 else good}]} for row in range(ROWS)]
    found = table(job, given, {"task": "token-embed" if nested else "embed"})
    [column] = [name for name in found.column_names if "embedding" in name]
    values = found[column].to_pylist()
    assert [values[0], *values[2:]] == [good] * (ROWS - 1)
    assert values[1] is None or values[1] == odd != good[0]


FLOATS, DOUBLES = pa.list_(pa.float32()), pa.list_(pa.float64())


@pytest.mark.parametrize(
    ("task", "data", "name", "kind", "value"),
    [
        ("embed", [{"embedding": [1]}, {"embedding": [1, 2]}], "embeddings", pa.list_(FLOATS), ...),
        ("token-embed", [{"data": [[1, 2], [3, 4]]}], "token_embeddings", pa.list_(FLOATS), 0),
        ("reward", [{"data": [0.5]}], "reward", pa.float32(), 0.5),
        ("classify", [{"label": "good", "probs": [0.75, 0.25]}], "probs", DOUBLES, 0),
        ("score", [{"score": 0.5}], "score", pa.float64(), 0),
    ],
)
def test_what_pooling_models_answer(task, data, name, kind, value, job):
    found = table(job, [{"data": data}], {"task": task})
    assert found.schema.field(name).type == kind
    every = [list(each.values())[-1] for each in data]
    wanted = every if value is ... else value or every[0]
    assert found[name][0].as_py() == wanted


# --------------------------------------------------------------------------- JSON answers

MEMBERS = {"age": {"type": "integer", "minimum": 0}, "rate": {"type": "number"}}
SCHEMA = {"type": "object", "properties": MEMBERS | {"tags": {"type": "array"}}}
SCHEMA |= {"required": ["age"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASKED = {"body": {"response_format": FORMAT}}


def test_a_schema_may_have_more_names_than_answers_may(job):
    properties = {f"p{n}": {"type": "string"} for n in range(120)}
    schema = {"type": "object", "properties": properties}
    prompt = {"body": {"structured_outputs": {"json": schema}}}
    assert table(job, [chat('{"p1": "x"}')], prompt)["answer_p1"].to_pylist() == ["x"] * ROWS


def test_json_answers_are_columns_with_the_types_of_the_schema(job, tmp_path):
    texts = ['{"age": 3, "rate": 2, "tags": ["a"]}', "", "no JSON", '{"ag']
    found = table(job, list(map(chat, texts)), ASKED)
    first, *others = found.to_pylist()
    assert [first[f"answer_{name}"] for name in ("age", "rate", "tags")] == [3, 2.0, ["a"]]
    assert found.schema.field("answer_rate").type == pa.float64()
    assert [row["answer_age"] for row in others[:3]] == [None] * 3
    assert "answer_age" not in table_of(job / "runs/a", tmp_path, answer_json=False).column_names


def test_numbers_of_a_schema_keep_integers_that_floats_would_round(job):
    found = table(job, [chat('{"age": 1, "rate": 9007199254740993}'), chat('{"age": 2}')], ASKED)
    assert found["answer_rate"].to_pylist()[:2] == ["9007199254740993", None]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": "x"}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": {"$schema": 5}}},
        {"structured_outputs": {"json": {"$schema": ["a"]}}},
    ],
)
def test_what_is_no_schema_keeps_no_answer_from_being_collected(job, body):
    """An endpoint may take such a field, and every collection ended with a traceback."""
    found = table(job, [chat('{"a": 1}')], {"body": body})
    assert found["text"].to_pylist() == ['{"a": 1}'] * ROWS


MIXED = ('{"a": 1, "b": [1]}', '{"a": 1.5, "b": {"x": 1}}', '{"big": 12345678901234567890123}')
DEEP = '{"a":' + "[" * 3000 + "]" * 3000 + "}"


def test_json_answers_without_a_schema_have_the_types_that_they_share(job, tmp_path):
    given = [chat(text) for text in (*MIXED, "[1]", '{"":1}, 2')]
    rows = table(job, given, answer_json=True).to_pylist()
    assert [row["answer_a"] for row in rows[:5]] == [1.0, 1.5, None, None, None]
    assert [rows[0]["answer_b"], rows[1]["answer_b"]] == ["[1]", '{"x":1}']
    assert rows[2]["answer_big"] == "12345678901234567890123"
    assert "answer" not in rows[0]
    collect(job / "runs/a", tmp_path / "a.jsonl", answer_json=True)
    assert lines_of(tmp_path / "a.jsonl")[1]["answer_b"] == {"x": 1}


def test_json_lines_hold_an_answer_in_one_line_and_what_is_no_json_as_text(job, tmp_path):
    """DuckDB takes more for JSON than readers of JSON Lines do."""
    texts = ["[1,\n 2]\r\n", '"x"', "[NaN]", "[1,]"]
    finish_run(job, job / "runs/a", lambda row: chat(f'{{"v": {texts[row % 4]}}}'))
    collect(job / "runs/a", tmp_path / "a.jsonl", answer_json=True)
    found = [row["answer_v"] for row in lines_of(tmp_path / "a.jsonl")[:4]]
    assert found == [[1, 2], "x", "[NaN]", [1]]


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ([DEEP, json.dumps({str(n): n for n in range(101)}), "[1]"], {}),
        ([DEEP, '{"b": 1}'], {"answer_a": DEEP[5:-1], "answer_b": None}),
        (["no JSON"], {}),
    ],
)
def test_what_no_columns_fit_is_text(job, given, columns):
    found = table(job, list(map(chat, given)), answer_json=True)
    assert found["text"].to_pylist()[: len(given)] == given
    first = found.to_pylist()[0].items()
    assert {name: value for name, value in first if name.startswith("answer")} == columns


# --------------------------------------------------------------------------- rows


def test_where_takes_rows_by_the_columns_of_the_table(run, tmp_path):
    found = table_of(run, tmp_path, where="error_code IS NOT NULL OR text LIKE '%2'")
    assert found["_row"].to_pylist() == [2, 7, 12, 22]
    joined = table_of(run, tmp_path, where="prompt LIKE '%row 4 %'", with_source=True)
    assert joined["_row"].to_pylist() == [4]
    assert table_of(run, tmp_path, where="false").num_rows == 0
    assert table_of(run, tmp_path, where="_row").num_rows == ROWS - 1  # SQL takes numbers as truth
    of_several = ("row_number() OVER () = 1", "_row = max(_row)")
    for where in ("status=error", "texts = 'a'", "select", "1; drop table answers", *of_several):
        with pytest.raises(ConfigError, match="--where"):
            collect(run, tmp_path / "out", where=where)
    assert not (tmp_path / "out").exists()


def test_rows_of_many_blocks_are_all_there(run, tmp_path, monkeypatch):
    whole = table_of(run, tmp_path, with_source=True)
    assert whole["_row"].to_pylist() == list(range(ROWS))
    monkeypatch.setattr("batchinfer.collect.table_files._GROUP_ROWS", 1)
    for size in (1, 1500, 3000, 5000):
        monkeypatch.setattr(answers, "_BLOCK_BYTES", size)
        assert table_of(run, tmp_path, with_source=True) == whole
        files = tmp_path / f"lines-{size}"
        collect(run, files, format="lines", shard_rows=5)
        counts = [path.read_bytes().count(b"\n") for path in files.glob("part-*")]
        assert counts == [5] * (ROWS // 5), "whatever is read at a time"


def test_tables_have_the_rows_of_small_chunks_together_and_limited_bytes(tmp_path, monkeypatch):
    make_job(tmp_path / "job", rows=40, per_chunk=1)
    run, counts = tmp_path / "job/runs/a", list[int]()
    finish_run(tmp_path / "job", run, leave_out=(0, 7, 8, 39))
    window = Collection._window

    def counted(self: Any, *borders: Any) -> Any:
        found = window(self, *borders)
        counts.append(len(found))
        return found

    monkeypatch.setattr(Collection, "_window", counted)
    rows = [row for row in range(40) if row not in (0, 7, 8, 39)]
    found = table_of(run, tmp_path, partial=True, with_source=True)
    assert found["text"].to_pylist() == [f"answer {row}" for row in rows]
    assert [text.split()[2] for text in found["prompt"].to_pylist()] == list(map(str, rows))
    assert counts == [0, 36]
    monkeypatch.setattr(answers, "_BLOCK_BYTES", 5 * 700)
    assert table_of(run, tmp_path, partial=True)["_row"].to_pylist() == rows
    assert 1 < max(counts[2:]) < 6
    counts.clear()
    note = lambda _, rows: counts.append(len(rows))  # noqa: E731
    monkeypatch.setattr(table_files.LinesWriter, "write_table", note)
    collect(run, tmp_path / "a.jsonl", partial=True)
    assert max(counts) < 6


@pytest.mark.parametrize("form", [{"with_source": True}, {"format": "completions"}])
def test_a_run_whose_limit_ends_within_a_chunk(job, tmp_path, form):
    run_worker_here(job, job / "runs/limited", "--limit", "7")
    collect(job / "runs/limited", tmp_path / "out.jsonl", **form)
    assert len(lines_of(tmp_path / "out.jsonl")) == 7


def test_a_sample_has_its_size_its_order_and_repeats(run, tmp_path):
    drawn = [table_of(run, tmp_path, sample=9, seed=seed)["_row"].to_pylist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] == sorted(drawn[0])
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == len(drawn[2]) == 9
    fitting = table_of(run, tmp_path, sample=4, where="_row % 2 = 0")["_row"].to_pylist()
    assert [row % 2 for row in fitting] == [0] * 4
    assert table_of(run, tmp_path, sample=100).num_rows == ROWS


# --------------------------------------------------------------------------- lines


def test_lines_are_those_of_the_outputs_byte_for_byte(run, tmp_path):
    outputs = b"".join(path.read_bytes() for path in sorted(run.glob("outputs/*.jsonl")))
    collect(run, tmp_path / "a.jsonl", format="lines")
    assert (tmp_path / "a.jsonl").read_bytes() == outputs
    collect(run, tmp_path / "b", format="lines", where="_row IN (3, 20)", shard_rows=1)
    found = [path.read_bytes() for path in sorted((tmp_path / "b").glob("*.jsonl"))]
    assert found == [outputs.splitlines(keepends=True)[row] for row in (3, 20)]


def test_batch_results_are_those_that_openai_clients_read(job, tmp_path):
    died = Failure(code=Code.ENGINE_CRASH, message="died", status=500)
    table(job, [chat("yes"), TOO_LONG, died])
    collect(job / "runs/a", tmp_path / "a.jsonl", format="openai-batch")
    found = lines_of(tmp_path / "a.jsonl")
    assert len({line["id"] for line in found}) == len(found) == ROWS
    fine, refused, failed = found[:3]
    assert (fine["custom_id"], fine["error"], failed["response"]) == ("id-0", None, None)
    assert fine["response"]["body"]["choices"][0]["message"]["content"] == "yes"
    assert refused["response"]["body"]["error"]["code"] == "prompt_too_long"
    assert failed["error"] == {"code": "engine_crash", "message": "died"}
    for line in found:
        jsonschema.validate(line, SCHEMAS["openai-batch"])


def test_completions_hold_the_request_beside_its_result(job, tmp_path):
    answer = {"choices": [{"text": "x", "index": 0, "logprobs": None, "finish_reason": "stop"}]}
    finish_run(job, job / "runs/a", lambda row: answer if row else TOO_LONG, leave_out=[1])
    collect(job / "runs/a", tmp_path / "a.jsonl", format="completions", partial=True)
    found = lines_of(tmp_path / "a.jsonl")
    assert len(found) == 15
    assert found[1] == {"request": {"prompt": "hello row 1 x "}, "result": answer}
    assert found[10]["request"]["prompt"].startswith("hello row 20")
    assert (found[0]["result"], found[0]["error"]["code"]) == (None, "prompt_too_long")
    for line in found:
        jsonschema.validate(line, SCHEMAS["completions"])


# --------------------------------------------------------------------------- which outputs


def test_the_newest_generation_counts_and_orphans_do_not(run, job, tmp_path):
    finish_run(job, run, lambda row: chat(f"again {row}"), leave_out=[0, 2], generation=1)
    (run / "outputs/part-00000.stray.jsonl").write_bytes(b"not read")
    texts = table_of(run, tmp_path)["text"].to_pylist()
    assert (texts[3], texts[13], texts[23]) == ("answer 3", "again 13", "answer 23")


def test_an_unfinished_run_is_refused_and_a_part_says_what_is_missing(job, tmp_path):
    run = job / "runs/a"
    finish_run(job, run, leave_out=[1])
    with pytest.raises(RunUnsound, match="1 of 3 chunks"):
        collect(run, tmp_path / "out")
    result = collect(run, tmp_path / "out", partial=True, with_source=True)
    assert (result["status"], result["missing"], result["rows"]) == ("PARTIAL", ["part-00001"], 15)
    rows = parquet.read_table(tmp_path / "out/part-00000.parquet").to_pylist()
    assert rows[10]["prompt"].startswith("hello row 20")


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_damage_is_noticed_before_a_row_is_written(how, run, tmp_path, monkeypatch):
    path = run / output_key(open_store(str(run)), "part-00001")
    sound = path.read_bytes()
    changed = sound.replace(b"answer 13", b"answer 31")
    damage = path.unlink if how == "gone" else lambda: path.write_bytes(changed)
    meanwhile(monkeypatch, collecting, "StoreDestination", damage)
    for partial in (False,) if how == "gone" else (False, True):
        with pytest.raises(RunUnsound, match="part-00001"):
            collect(run, tmp_path / "out", partial=partial)
    assert not (tmp_path / "out").exists()
    path.write_bytes(sound)
    result = collect(run, tmp_path / "out")
    assert (result["status"], result["missing_chunks"], result["rows"]) == ("SUCCESS", 0, ROWS)
    assert collect(run, tmp_path / "out", partial=True)["status"] == "UNCHANGED"


def test_chunks_that_a_job_gets_later_are_missing_in_what_is_there(tmp_path):
    (tmp_path / "src").mkdir()
    run = tmp_path / "job/runs/a"
    for name in "ab":
        (tmp_path / f"src/{name}.jsonl").write_text(f'{{"prompt":"{name}"}}\n')
        split(tmp_path / "src", tmp_path / "job", append=name == "b")
        if name == "a":
            finish_run(tmp_path / "job", run)
            collect(run, tmp_path / "out")
    result = collect(run, tmp_path / "out", partial=True)
    assert (result["status"], result["missing_chunks"]) == ("UNCHANGED", 1)
    assert result["missing"][0].startswith("part-00001")


def test_lines_of_other_rows_are_refused(run, tmp_path):
    store = open_store(str(run))
    key = output_key(store, "part-00001")
    lines = store.get(key).data.splitlines(keepends=True)
    swapped, fewer = [lines[1], lines[0], *lines[2:]], lines[:-1]
    for changed in (swapped, fewer, [*fewer, b"\n"], [*fewer, b"{\n"], [*fewer, lines[-1][:-1]]):
        data = b"".join(changed)
        overwrite(store, key, data)
        change_marker(store, "part-00001", output_sha256=codec.sha256(data), output_bytes=len(data))
        with pytest.raises(InputError):
            collect(run, tmp_path / "out")
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("batchinfer-read")], "left to chance"
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_job_is_refused(run, tmp_path):
    make_job(tmp_path / "other", rows=3, per_chunk=10)
    with pytest.raises(InputError, match="another job"):
        collect(run, tmp_path / "out", job=str(tmp_path / "other"))


# --------------------------------------------------------------------------- places


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_finished_collection_is_left_alone_and_another_is_not_replaced(
    run, tmp_path, monkeypatch
):
    assert collect(run, tmp_path / "out", shard_rows=5)["status"] == "SUCCESS"
    before = contents(tmp_path / "out")
    assert collect(run, tmp_path / "out", shard_rows=5)["status"] == "UNCHANGED"
    with pytest.raises(InputError, match="other data"):
        collect(run, tmp_path / "out", where="status = 200")
    assert contents(tmp_path / "out") == before
    is_whole: list[bool] = []
    look = lambda: is_whole.append((tmp_path / "out/_COLLECTED").exists())  # noqa: E731
    meanwhile(monkeypatch, LocalStore, "put_file", look)
    another: dict[str, Any] = {"where": "status = 200", "overwrite": True}
    collect(run, tmp_path / "out", **another)
    assert is_whole == [False]
    assert sorted(contents(tmp_path / "out")) == ["_COLLECTED", "part-00000.parquet"]
    before = contents(tmp_path / "out")
    for wrong in ({"where": "nonsense = 1"}, {"with_source": True, "columns": ["none"]}):
        with pytest.raises(ConfigError):
            collect(run, tmp_path / "out", **wrong, overwrite=True)
    assert contents(tmp_path / "out") == before
    record = tmp_path / "out/_COLLECTED"
    record.write_bytes(record.read_bytes().replace(b'"files"', b'"sizes"'))
    assert collect(run, tmp_path / "out", **another)["status"] == "SUCCESS"
    for name in ("data.parquet", "data/part-00000.parquet"):
        mine = tmp_path / name.replace(".", "-") / name
        mine.parent.mkdir(parents=True)
        mine.write_bytes(b"mine")
        with pytest.raises(InputError, match="something else"):
            collect(run, tmp_path / name.replace(".", "-"), overwrite=True)


@pytest.mark.parametrize(
    ("place", "name", "where", "error"),
    [
        (LocalStore, "put_file", "", "writes there, too"),
        (collecting, "write_files", "", "writes there, too"),
        (collecting, "write_files", "_row < 3", "other data"),
    ],
)
def test_of_two_collections_into_one_folder_the_first_gives_way(
    run, tmp_path, monkeypatch, place, name, where, error
):
    out = tmp_path / "out"
    meanwhile(monkeypatch, place, name, lambda: collect(run, out, shard_rows=5, where=where))
    with pytest.raises(InputError, match=error):
        collect(run, out, shard_rows=5)
    assert collect(run, out, shard_rows=5, where=where)["status"] == "UNCHANGED"


def test_files_that_are_only_named_like_those_of_a_collection_stay(run, tmp_path):
    shutil.copytree(run.parent.parent / "chunks", tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match="other data"):
        collect(run, tmp_path / "out", format="jsonl")
    assert contents(tmp_path / "out") == before


def test_one_file_is_replaced_only_if_asked(run, tmp_path):
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(InputError, match="other data"):
        collect(run, tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == "mine"
    (tmp_path / "b.jsonl.bak").write_text("mine")
    collect(run, tmp_path / "b.jsonl")  # a name that another begins with
    collect(run, tmp_path / "a.jsonl", overwrite=True)
    assert (tmp_path / "a.jsonl").read_text().count("\n") == ROWS
    collect(run, tmp_path / "a.jsonl")  # what it would write is there


def test_no_progress_of_duckdb_stands_before_the_result():
    """DuckDB draws a bar on stdout for long queries of a program that is no file, as the command's here is none."""
    code = (
        "from pathlib import Path; from batchinfer.collect.answers import connect;"
        "found = connect(Path()).execute('SELECT current_setting($$enable_progress_bar$$)').fetchall();"
        "assert found == [(False,)], found"
    )
    python(code)
