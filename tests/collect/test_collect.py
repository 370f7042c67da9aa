"""`batchinfer collect`: what a marker vouches for, in input order, typed, and nothing else."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchinfer.collect import reader
from batchinfer.collect.command import run_collect
from batchinfer.collect.table import CollectConfig
from batchinfer.core import codec, layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.core.records import Run
from batchinfer.formats.arrow_lines import ArrowBlock
from batchinfer.formats.columns import OutputBlock, Shape
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from making import (
    change_marker,
    make_job,
    overwrite,
    put_raw,
    read_marker,
    run_process,
    run_worker_here,
)

ROWS = 25


def collect(run: str | Path, dest: str | Path, **options: Any) -> dict[str, Any]:
    config = CollectConfig(run=str(run), dest=str(dest), **options)
    return run_collect(config, open_store=open_store, clock=SystemClock())


def read_table(folder: str | Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    schemas = set()
    for path in sorted(Path(folder).rglob("*.parquet")):
        table = parquet.read_table(path)
        schemas.add(str(table.schema))
        rows += table.to_pylist()
    assert len(schemas) == 1
    return rows


def texts_of(number: int) -> str:
    return f"hello row {number} " + "x " * (number % 17)


def row_with_trouble(index: int) -> dict[str, Any]:
    """Columns that collide, are of mixed types, nested, missing or null."""
    row: dict[str, Any] = {
        "prompt": texts_of(index),
        "text": f"own text {index}",
        "score": index if index % 2 else index + 0.5,
        "mixed": index if index % 3 else str(index),
        "turns": [{"role": "user", "content": "é\u2028"}] * (index % 3),
        "nothing": None,
        "when": "2024-01-01",
    }
    if index == 7:
        del row["prompt"]  # becomes an error row
    return row


@pytest.fixture
def job(tmp_path: Path) -> str:
    url = str(tmp_path / "job")
    make_job(url, rows=ROWS, per_chunk=10, workers=2)
    return url


@pytest.fixture
def run(job: str) -> str:
    run_worker_here(job, f"{job}/runs/a")
    return f"{job}/runs/a"


@pytest.fixture
def store(run: str) -> Store:
    return open_store(run)


# --------------------------------------------------------------------------- the table


@pytest.mark.parametrize("place", ["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def test_rows_come_out_in_input_order_with_their_types(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from pyarrow import parquet

    url = {"memory": f"memory://{request.node.name}", "local": str(tmp_path / "in")}.get(place)
    url = url or request.getfixturevalue("s3_url")("in")
    make_job(f"{url}/job", rows=ROWS, per_chunk=10, workers=2)
    run_worker_here(f"{url}/job", f"{url}/run")
    result = collect(f"{url}/run", f"{url}/out")
    assert (result["status"], result["rows"], result["rows_error"]) == ("SUCCESS", ROWS, 0)
    open_store(f"{url}/out").download("part-00000.parquet", tmp_path / "got.parquet")
    table = parquet.read_table(tmp_path / "got.parquet")
    assert [str(field.type) for field in table.schema] == [
        *("int64", "string", "string", "string", "string"),
        *("int32", "int32", "int32", "string", "string"),
    ]
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == list(range(ROWS))
    assert [row["text"] for row in rows] == [texts_of(number) for number in range(ROWS)]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["prompt_tokens"] == row["completion_tokens"] > 0 for row in rows)


def test_datasets_reads_a_collected_folder(run: str, tmp_path: Path) -> None:
    import datasets

    for kind in ("parquet", "jsonl", "csv"):
        collect(run, tmp_path / kind, format=kind, shard_rows=7)
        found = datasets.load_dataset(
            str(tmp_path / kind), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert found["row"] == list(range(ROWS))
        assert found["text"][3] == texts_of(3)
        assert found["error_code"][3] is None


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_equal_input_gives_equal_bytes_in_files_of_the_chosen_size(
    kind: str, run: str, tmp_path: Path
) -> None:
    results = [
        collect(run, tmp_path / name, format=kind, shard_rows=8, with_source=True) for name in "ab"
    ]
    assert results[0]["files"] == 4
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert first == second
    record = json.loads(first["_COLLECTED"])
    assert [file["rows"] for file in record["files"]] == [8, 8, 8, 1]
    assert all(codec.sha256(first[file["name"]]) == file["sha256"] for file in record["files"])


def test_errors_are_rows_without_text(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=ROWS, per_chunk=10, make_row=row_with_trouble)
    run_worker_here(job, f"{job}/runs/a")
    result = collect(f"{job}/runs/a", tmp_path / "out")
    assert result["rows_error"] == 1
    bad = read_table(tmp_path / "out")[7]
    assert (bad["status"], bad["text"], bad["error_code"]) == ("error", None, "missing_column")
    assert bad["error_message"]


def test_source_columns_are_joined_and_typed_over_all_rows(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=ROWS, per_chunk=10, make_row=row_with_trouble, compression="zstd")
    run_worker_here(job, f"{job}/runs/a")
    collect(f"{job}/runs/a", tmp_path / "out", with_source=True, shard_rows=9)
    rows = read_table(tmp_path / "out")
    assert [row["source_text"] for row in rows] == [f"own text {n}" for n in range(ROWS)]
    assert rows[1]["score"] == 1.0
    assert rows[2]["score"] == 2.5
    assert (rows[1]["mixed"], rows[3]["mixed"]) == ("1", '"3"')
    assert rows[2]["turns"] == [{"role": "user", "content": "é\u2028"}] * 2
    assert rows[3]["turns"] == []
    assert rows[2]["nothing"] is None
    assert rows[2]["when"] == "2024-01-01"
    assert rows[7]["prompt"] is None
    collect(f"{job}/runs/a", tmp_path / "few", with_source=True, columns=["mixed"])
    assert list(read_table(tmp_path / "few")[0])[-2:] == ["error_message", "mixed"]
    with pytest.raises(InputError, match="'turn'"):
        collect(f"{job}/runs/a", tmp_path / "none", with_source=True, columns=["turn"])


def test_kept_columns_come_without_the_chunks(job: str, tmp_path: Path) -> None:
    run_worker_here(job, f"{job}/runs/a", "--keep", "prompt", "--keep-prompt")
    for info in list(open_store(job).list(layout.CHUNKS)):
        open_store(job).delete([info.key])
    collect(f"{job}/runs/a", tmp_path / "out")
    row = read_table(tmp_path / "out")[3]
    assert row["prompt"] == row["source_prompt"] == texts_of(3)


def test_several_answers_are_lists_or_rows_of_their_own(job: str, tmp_path: Path) -> None:
    run_worker_here(job, f"{job}/runs/a", "--n", "3")
    collect(f"{job}/runs/a", tmp_path / "lists")
    row = read_table(tmp_path / "lists")[2]
    assert len(row["texts"]) == len(row["finish_reasons"]) == 3
    result = collect(f"{job}/runs/a", tmp_path / "rows", explode=True, with_source=True)
    assert (result["rows"], result["file_rows"]) == (ROWS, 3 * ROWS)
    rows = read_table(tmp_path / "rows")
    assert [(row["row"], row["choice_index"]) for row in rows[:4]] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]
    assert rows[3]["prompt"] == texts_of(1)


def test_a_renamed_column_of_parquet_gets_its_type_back_too(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    source = pa.table({"prompt": ["a", "b"], "_id": pa.array([5, None], pa.int32())})
    parquet.write_table(source, tmp_path / "a.parquet")
    job = tmp_path / "job"
    run_split(
        SplitConfig(sources=[str(tmp_path / "a.parquet")], output=str(job), num_chunks=1),
        store=open_store(str(job)),
    )
    run_worker_here(str(job), f"{job}/runs/a")
    collect(f"{job}/runs/a", tmp_path / "out.parquet", with_source=True)
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.select(source.column_names).cast(source.schema) == source
    assert found.schema.field("_id").type == pa.int32()


def test_columns_that_split_renamed_get_their_names_back(tmp_path: Path) -> None:
    rows = [{"_id": f"own {row}", "prompt": "hi", "_row": row * 10, "id": row} for row in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = tmp_path / "job"
    run_split(
        SplitConfig(sources=[str(tmp_path / "a.jsonl")], output=str(job), num_chunks=2),
        store=open_store(str(job)),
    )
    run_worker_here(str(job), f"{job}/runs/a", "--keep", "_source_id")
    collect(f"{job}/runs/a", tmp_path / "all", with_source=True)
    found = read_table(tmp_path / "all")
    assert [(row["_id"], row["_row"], row["source_id"]) for row in found] == [
        (row["_id"], row["_row"], row["id"]) for row in rows
    ]
    assert [(row["row"], row["id"]) for row in found] == [(row, str(row)) for row in range(5)]
    collect(f"{job}/runs/a", tmp_path / "one", with_source=True, columns=["_id"])
    assert [row["_id"] for row in read_table(tmp_path / "one")] == [row["_id"] for row in rows]
    collect(f"{job}/runs/a", tmp_path / "kept")
    assert [row["_id"] for row in read_table(tmp_path / "kept")] == [row["_id"] for row in rows]
    with pytest.raises(InputError, match="no row has a column '_ids'") as caught:
        collect(f"{job}/runs/a", tmp_path / "none", with_source=True, columns=["_ids"])
    assert caught.value.hint == "did you mean _id?"


def test_csv_tells_an_empty_answer_from_none_and_holds_lists_as_json(
    job: str, tmp_path: Path
) -> None:
    run_worker_here(job, f"{job}/runs/a", "--n", "2")
    collect(f"{job}/runs/a", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert json.loads(rows[4]["texts"]) == [texts_of(4)] * 2
    assert b",," in (tmp_path / "out.csv").read_bytes()


@pytest.mark.parametrize("output_format", ["openai-batch", "completions"])
def test_other_output_formats_give_the_same_columns(output_format: str, tmp_path: Path) -> None:
    def request(index: int) -> dict[str, Any]:
        body = {"prompt": texts_of(index), "n": 1 + index % 2, "max_tokens": 50}
        if index == 5:
            body["tools"] = [{}]
        if output_format == "completions":
            return body
        return {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body,
        }

    job = str(tmp_path / "job")
    make_job(job, rows=12, per_chunk=5, make_row=request)
    options = ("--prompt-column", "", "--request-format", output_format)
    run_worker_here(job, f"{job}/runs/a", *options, "--output-format", output_format)
    collect(f"{job}/runs/a", tmp_path / "out", explode=True)
    rows = read_table(tmp_path / "out")
    assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
    assert [row["choice_index"] for row in rows if row["row"] == 1] == [0, 1]
    bad = next(row for row in rows if row["row"] == 5)
    good_tokens = {row["prompt_tokens"] for row in rows if row["status"] == "ok"}
    assert (None in good_tokens) == (output_format == "completions"), "unknown is not 0"
    assert good_tokens != {None} or output_format == "completions"
    assert bad["prompt_tokens"] is None
    assert (bad["status"], bad["error_code"], bad["text"]) == (
        "error",
        "unsupported_parameter",
        None,
    )
    good = next(row for row in rows if row["row"] == 2)
    assert good["text"] == texts_of(2)
    assert good["id"] == ("r2" if output_format == "openai-batch" else "2")


@pytest.mark.parametrize("output_format", ["openai-batch", "completions", "native"])
def test_log_probabilities_that_only_a_request_asks_for_have_a_column(
    output_format: str, tmp_path: Path
) -> None:
    job = str(tmp_path / "job")
    rows = [{"prompt": "a b", "max_tokens": 5, "logprobs": 1}, {"prompt": "a b", "max_tokens": 5}]
    make_job(job, rows=2, per_chunk=2, make_row=lambda row: rows[row])
    options = ("--prompt-column", "", "--request-format", "completions")
    run_worker_here(job, f"{job}/runs/a", *options, "--output-format", output_format)
    collect(f"{job}/runs/a", tmp_path / "out", explode=True)
    with_them, without = (row["logprobs"] for row in read_table(tmp_path / "out"))
    assert "logprob" in with_them
    assert without is None


def test_log_probabilities_of_prompts_are_said_to_be_left_out(
    job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_worker_here(job, f"{job}/runs/a", "--sampling", "prompt_logprobs=1")
    collect(f"{job}/runs/a", tmp_path / "out")
    assert "log-probabilities of prompts are left out" in caplog.text


def test_embeddings_are_float32_lists_of_one_length(run: str, store: Store, tmp_path: Path) -> None:
    from pyarrow import parquet

    made = read_run(store)
    config = {**made.config, "prompt": {**made.config["prompt"], "task": "embed"}}
    fingerprint = codec.fingerprint(config)
    replace_run(store, msgspec.structs.replace(made, config=config, fingerprint=fingerprint))
    for index, rows in enumerate((10, 10, 5)):
        lines = [
            {
                "_row": 10 * index + row,
                "_id": str(10 * index + row),
                "status": "ok" if row else "error",
                "choices": [],
                "usage": {"prompt_tokens": 3, "completion_tokens": 0, "cached_tokens": 0},
                "error": None if row else {"code": "engine_rejected", "message": ""},
                **({"embedding": [0.1, row, -2]} if row else {}),
            }
            for row in range(rows)
        ]
        replace_output(store, f"part-{index:05d}", lines)
    for index, rows in enumerate((10, 10, 5)):
        change_marker(
            store,
            f"part-{index:05d}",
            fingerprint=fingerprint,
            rows_ok=rows - 1,
            rows_error=1,
            errors={"engine_rejected": 1},
        )
    collect(run, tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "part-00000.parquet")
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[3]"
    assert "text" not in table.column_names
    assert table["embedding"][0].as_py() is None
    assert table["embedding"][4].as_py() == pytest.approx([0.1, 4.0, -2.0])


def test_reasoning_has_a_column_where_the_run_speaks_of_it() -> None:
    line = {
        "_row": 0,
        "_id": "0",
        "status": "ok",
        "choices": [{"index": 0, "text": "4", "finish_reason": "stop", "reasoning": "2+2"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0},
        "error": None,
    }
    data = json.dumps(line).encode() + b"\n"
    shape = Shape(output_format="native", answers="single", has_reasoning=True)
    plain = msgspec.structs.replace(shape, has_reasoning=False)
    for kind in (OutputBlock, ArrowBlock):
        assert list(map(str, kind(data, shape, 0).columns()[0]["reasoning"])) == ["2+2"]
        assert kind(data, plain, 0).num_unshown() == 1


@pytest.mark.parametrize("answers", ["single", "lists", "exploded"])
def test_both_ways_to_read_native_lines_agree(answers: str) -> None:
    def line(row: int, texts: list[str], **more: Any) -> bytes:
        choices = [
            {"index": index, "text": text, "finish_reason": "stop"}
            for index, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": row, "completion_tokens": 2, "cached_tokens": 1}
        entry = {"_row": row, "_id": f"r{row}", "status": "ok" if texts else "error"}
        entry |= {"choices": choices, "usage": usage, "error": None, **more}
        return json.dumps(entry, ensure_ascii=False).encode() + b"\n"

    several = [] if answers == "single" else ["2024-01-01"]
    failed = {"code": "invalid_json", "message": "no"}
    data = b"".join(
        [
            line(5, ["a\u2028\n", *several]),
            line(6, [], error=failed, timing={"queue_seconds": 0.1}),
            line(7, ["", *several]),
            line(8, ["😀"]),
            line(9, ["x"], usage={"prompt_tokens": 3}),
        ]
    )
    shape = Shape(output_format="native", answers=answers)
    left, right = OutputBlock(data, shape, 5), ArrowBlock(data, shape, 5)
    for one, other in ((left, right), (left.part(1, 3), right.part(1, 3))):
        assert one.counts() == other.counts()
        assert one.num_rows == other.num_rows
        columns, lines = one.columns()
        arrays, other_lines = other.columns()
        assert lines == other_lines
        assert list(columns) == list(arrays) == shape.names
        assert columns == {name: values.to_pylist() for name, values in arrays.items()}
    assert left.columns()[0]["prompt_tokens"][-2:] == [8, 3]
    assert left.columns()[0]["cached_tokens"][-2:] == [1, None]


# --------------------------------------------------------------------------- the lines as they are


def lines_of(store: Store, *chunks: str) -> bytes:
    return b"".join(store.get(f"outputs/{chunk}.jsonl").data for chunk in chunks)


ALL = ("part-00000", "part-00001", "part-00002")


def test_lines_are_those_of_the_outputs_byte_for_byte(
    run: str, store: Store, tmp_path: Path
) -> None:
    result = collect(run, tmp_path / "out.jsonl", format="lines")
    assert (result["status"], result["rows"], result["files"]) == ("SUCCESS", ROWS, 1)
    assert (tmp_path / "out.jsonl").read_bytes() == lines_of(store, *ALL)
    assert result["bytes"] == (tmp_path / "out.jsonl").stat().st_size
    with pytest.raises(InputError, match="there already"):
        collect(run, tmp_path / "out.jsonl", format="lines")


def test_lines_in_files_of_the_chosen_size_cross_the_borders_of_chunks(
    run: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MEMORY_BYTES", 100)  # over the disk
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 1000)  # and not in step with the files
    collect(run, tmp_path / "out", format="lines", shard_rows=7)
    files = sorted((tmp_path / "out").glob("part-*.jsonl"))
    assert [len(file.read_bytes().splitlines()) for file in files] == [7, 7, 7, 4]
    assert b"".join(file.read_bytes() for file in files) == lines_of(store, *ALL)
    again = collect(run, tmp_path / "out", format="lines", shard_rows=7)
    assert again["status"] == "UNCHANGED"
    with pytest.raises(InputError, match="another collection"):
        collect(run, tmp_path / "out", format="jsonl", shard_rows=7)


def test_lines_of_an_unsound_run_are_refused_and_a_part_leaves_them_out(
    run: str, store: Store, tmp_path: Path
) -> None:
    store.create("outputs/part-00002.orphan.jsonl", b"a line of nobody\n")
    key = "outputs/part-00001.jsonl"
    overwrite(store, key, store.get(key).data.replace(b"hello row 13", b"HELLO ROW 13"))
    out = tmp_path / "out.jsonl"
    with pytest.raises(RunUnsound, match="sha256"):
        collect(run, out, format="lines")
    assert not out.exists()
    result = collect(run, out, format="lines", partial=True)
    assert (result["status"], result["missing"], result["rows"]) == ("PARTIAL", ["part-00001"], 15)
    assert out.read_bytes() == lines_of(store, "part-00000", "part-00002")
    store.delete([layout.marker_key("part-00000")])
    with pytest.raises(RunUnsound, match="1 of 3 chunks"):
        collect(run, tmp_path / "other.jsonl", format="lines")


@pytest.mark.parametrize(
    ("cut", "message"), [(-1, "is cut off"), (-2, "is cut off"), (None, "the marker counts")]
)
def test_lines_that_are_not_as_many_as_the_rows_are_refused(
    run: str, store: Store, tmp_path: Path, cut: int | None, message: str
) -> None:
    data = lines_of(store, "part-00001")
    data = data[:cut] if cut else data + data.splitlines(keepends=True)[-1]
    overwrite(store, "outputs/part-00001.jsonl", data)
    change_marker(store, "part-00001", output_sha256=codec.sha256(data), output_bytes=len(data))
    with pytest.raises(InputError, match=message):
        collect(run, tmp_path / "out.jsonl", format="lines")
    assert not (tmp_path / "out.jsonl").exists()


def test_lines_of_a_batch_run_are_a_file_that_openai_clients_read(tmp_path: Path) -> None:
    from openai.types.chat import ChatCompletion

    def request(index: int) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": texts_of(index)}], "max_tokens": 50}
        if index == 5:
            body["temperature"] = -1
        url = "/v1/chat/completions"
        return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": body}

    job = str(tmp_path / "job")
    make_job(job, rows=12, per_chunk=5, make_row=request)
    options = ("--prompt-column", "", "--request-format", "openai-batch")
    run_worker_here(job, f"{job}/runs/a", *options, "--output-format", "openai-batch")
    command = ["collect", f"{job}/runs/a", str(tmp_path / "batch.jsonl"), "--format", "lines"]
    done = run_process(command)
    assert (done.status, done.result["rows"], done.result["rows_error"]) == (0, 12, 1)
    lines = [json.loads(line) for line in (tmp_path / "batch.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{index}" for index in range(12)]
    assert [line["response"]["status_code"] for line in lines] == [200] * 5 + [400] + [200] * 6
    answer = ChatCompletion.model_validate(lines[3]["response"]["body"])
    assert texts_of(3).strip() in str(answer.choices[0].message.content)


# --------------------------------------------------------------------------- what counts


def read_run(store: Store) -> Run:
    return codec.decode(store.get(layout.RUN_KEY).data, Run, name=layout.RUN_KEY)


def replace_run(store: Store, run: Run) -> None:
    overwrite(store, layout.RUN_KEY, codec.encode(run))


def replace_output(store: Store, chunk: str, lines: list[dict[str, Any]]) -> None:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    overwrite(store, layout.output_key(layout.output_file(chunk)), data)
    change_marker(store, chunk, output_sha256=codec.sha256(data), output_bytes=len(data))


def test_the_newest_generation_counts_and_orphans_do_not(
    run: str, store: Store, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in store.get("outputs/part-00001.jsonl").data.splitlines()]
    lines[0]["choices"][0]["text"] = "repaired"
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    store.create("outputs/part-00001.repair.jsonl", data)
    marker = msgspec.structs.replace(
        read_marker(store, "part-00001"),
        generation=1,
        output="part-00001.repair.jsonl",
        output_sha256=codec.sha256(data),
        output_bytes=len(data),
    )
    store.create(layout.marker_key("part-00001", 1), codec.encode(marker))
    store.create("outputs/part-00002.orphan.jsonl", data)
    store.create("notes.txt", b"mine")
    result = collect(run, tmp_path / "out")
    assert result["foreign_objects"] == 1
    rows = read_table(tmp_path / "out")
    assert len(rows) == ROWS
    assert rows[10]["text"] == "repaired"


def test_unfinished_run_is_refused_and_a_part_says_what_is_missing(
    run: str, store: Store, tmp_path: Path
) -> None:
    store.delete([layout.marker_key("part-00001")])
    with pytest.raises(RunUnsound, match=r"1 of 3 chunks .*part-00001") as caught:
        collect(run, tmp_path / "out")
    assert "--partial" in caught.value.hint
    assert not (tmp_path / "out").exists()
    result = collect(run, tmp_path / "out", partial=True)
    assert (result["status"], result["missing"]) == ("PARTIAL", ["part-00001"])
    assert [row["row"] for row in read_table(tmp_path / "out")] == [*range(10), *range(20, 25)]


def test_changed_output_is_noticed_before_a_row_of_it_is_used(
    run: str, store: Store, tmp_path: Path
) -> None:
    key = "outputs/part-00001.jsonl"
    overwrite(store, key, store.get(key).data.replace(b"hello row 13", b"HELLO ROW 13"))
    with pytest.raises(RunUnsound, match="sha256"):
        collect(run, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    result = collect(run, tmp_path / "out", partial=True)
    assert (result["status"], result["missing"]) == ("PARTIAL", ["part-00001"])


def test_output_that_vanishes_while_it_is_read_is_an_answer_not_a_crash(
    run: str, store: Store, tmp_path: Path
) -> None:
    class Vanishing:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> Any:
            if key.startswith("outputs/") and key.endswith(".jsonl"):
                store.delete(["outputs/part-00002.jsonl"])
            return store.get(key)

    def opener(url: str) -> Any:
        return Vanishing() if url == run else open_store(url)

    config = CollectConfig(run=run, dest=str(tmp_path / "out.jsonl"))
    with pytest.raises(RunUnsound, match="vanished"):
        run_collect(config, open_store=opener, clock=SystemClock())


def test_large_outputs_go_over_the_disk(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MEMORY_BYTES", 100)
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 1000)
    collect(run, tmp_path / "out", with_source=True)
    rows = read_table(tmp_path / "out")
    assert [row["text"] for row in rows] == [row["prompt"] for row in rows]
    assert len(rows) == ROWS


def test_lines_of_other_rows_are_refused(run: str, store: Store, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in store.get("outputs/part-00001.jsonl").data.splitlines()]
    replace_output(store, "part-00001", lines[::-1])
    with pytest.raises(InputError, match="out of order"):
        collect(run, tmp_path / "out")


def test_no_run_and_newer_run_and_run_without_answers_are_told_apart(
    job: str, run: str, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no run there"):
        collect(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(InputError, match="is a job, expected one of its runs"):
        collect(job, tmp_path / "out")
    open_store(f"{job}/runs/new").create(layout.RUN_KEY, store.get(layout.RUN_KEY).data)
    with pytest.raises(RunUnsound, match="no chunk is done"):
        collect(f"{job}/runs/new", tmp_path / "out", partial=True)
    replace_run(store, msgspec.structs.replace(read_run(store), format_version=99))
    with pytest.raises(InputError, match="format version 99"):
        collect(run, tmp_path / "out")


@pytest.mark.parametrize("name", ["answers.json", "answers.jsonl.gz", "Answers.TXT"])
def test_a_name_of_a_file_that_is_not_written_makes_no_folder(
    run: str, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"expected a name in \.parquet, \.jsonl, \.csv, or"):
        collect(run, tmp_path / name)
    assert not (tmp_path / name).exists()
    collect(run, tmp_path / "answers-v1.2")


def test_a_column_that_no_row_has_is_answered_with_those_they_have(
    run: str, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"no row has a column 'promt', expected some of: .*prompt"
    ) as caught:
        collect(run, tmp_path / "out", with_source=True, columns=["promt"])
    assert caught.value.hint == "did you mean prompt?"


def test_job_of_another_run_is_refused(run: str, tmp_path: Path) -> None:
    make_job(tmp_path / "other", rows=3, per_chunk=3)
    with pytest.raises(InputError, match=r"another job\.json"):
        collect(run, tmp_path / "out", job=str(tmp_path / "other"))


def test_run_over_a_list_of_files_needs_the_list(tmp_path: Path) -> None:
    folder = tmp_path / "lists"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (folder / "list.txt").write_text("b.jsonl\na.jsonl\n")
    arguments = ["--manifest", f"{folder}/list.txt", "--output", f"{tmp_path}/run"]
    done = run_process(["worker", *arguments, "--engine", "echo", "--prompt-column", "prompt"])
    assert done.status == 0, done.stderr
    with pytest.raises(InputError, match="list of chunks") as caught:
        collect(tmp_path / "run", tmp_path / "out")
    assert "--manifest" in caught.value.hint
    collect(tmp_path / "run", tmp_path / "out", manifests=[f"{folder}/list.txt"])
    rows = read_table(tmp_path / "out")
    assert [(row["chunk"], row["row"]) for row in rows] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]


# --------------------------------------------------------------------------- the destination


def test_finished_collection_is_left_alone_and_another_is_not_overwritten(
    run: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    collect(run, out, shard_rows=10)
    assert collect(run, out, shard_rows=10)["status"] == "UNCHANGED"
    with pytest.raises(InputError, match="another collection"):
        collect(run, out, shard_rows=11)
    assert collect(run, out, shard_rows=20, overwrite=True)["files"] == 2
    assert len(read_table(out)) == ROWS


def test_files_of_a_killed_collect_are_replaced_and_strangers_are_not(
    run: str, tmp_path: Path
) -> None:
    out = open_store(str(tmp_path / "out"))
    put_raw(out, "part-00000.parquet", b"half of something")
    put_raw(out, "part-00007.parquet", b"more than there will be")
    collect(run, tmp_path / "out")
    assert len(read_table(tmp_path / "out")) == ROWS
    put_raw(open_store(str(tmp_path / "mine")), "train.parquet", b"precious")
    with pytest.raises(InputError, match=r"train\.parquet"):
        collect(run, tmp_path / "mine", overwrite=True)
    collect(run, tmp_path / "one.jsonl")
    with pytest.raises(InputError, match="there already"):
        collect(run, tmp_path / "one.jsonl")
    collect(run, tmp_path / "one.jsonl", overwrite=True)


@pytest.mark.parametrize(
    ("dest", "options", "message"),
    [
        ("x.csv", {"format": "parquet"}, "--format"),
        ("x.csv", {"shard_rows": 3}, "--shard-rows"),
        ("x", {"columns": ["a"]}, "--with-source"),
        ("x.csv", {"format": "lines"}, "--format lines"),
        ("x", {"format": "lines", "with_source": True}, "--with-source"),
        ("x", {"format": "lines", "explode": True}, "--explode"),
        ("hf://datasets/a/b", {"format": "lines"}, "takes a table"),
        ("job/runs/a/out", {}, "lies inside"),
        ("job/out", {}, "lies inside"),
        ("hf://models/a/b", {}, "hf://datasets/org/name"),
        ("hf://datasets/a", {}, "hf://datasets/org/name"),
    ],
)
def test_wrong_destination_is_refused_before_anything_is_written(
    run: str, tmp_path: Path, dest: str, options: dict[str, Any], message: str
) -> None:
    place = dest if "://" in dest else str(tmp_path / dest)
    with pytest.raises(ConfigError, match=message):
        collect(run, place, **options)
    assert not (tmp_path / dest.partition("/")[0]).exists() or dest.startswith("job")
