"""Tables of runs that embed, classify and score: their columns and types, read by numpy and datasets without a copy."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyarrow import parquet

from batchinfer.cli.main import main
from batchinfer.core.errors import InputError
from batchinfer.formats.columns import Shape, joined
from batchinfer.formats.vector_columns import vector_array, vector_lists
from batchinfer.storage.opening import open_store
from making import make_job, run_worker_here


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Row 3 is an error row."""

    def make_row(index: int) -> dict[str, Any]:
        return {"prompt": f"text {index}" if index != 3 else "", "n": index}

    make_job(tmp_path / "job", rows=25, per_chunk=10, make_row=make_row)
    return tmp_path / "job"


def collected(
    job: Path, *options: str, to: str = "out.parquet", flags: tuple[str, ...] = ()
) -> Any:
    """The table of a new run with these options."""
    run = job / "runs" / to
    run_worker_here(job, run, *options)
    assert main(["collect", str(run), str(job.parent / to), *flags]) == 0
    return (
        parquet.read_table(job.parent / to)
        if to.endswith("parquet")
        else (job.parent / to).read_text()
    )


def from_lines(job: Path, to: str = "out.parquet") -> list[dict[str, Any]]:
    store = open_store(str(job / "runs" / to))
    keys = sorted(each.key for each in store.list("outputs/") if each.key.endswith(".jsonl"))
    return [json.loads(line) for key in keys for line in store.get(key).data.splitlines()]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_fixed_size_lists_that_numpy_reads_without_a_copy(
    job: Path, form: str
) -> None:
    table = collected(job, "--task", "embed", "--dimensions", "6", "--embedding-format", form)
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[6]"
    assert {"text", "completion_tokens", "finish_reason"}.isdisjoint(table.column_names)
    assert table["embedding"][3].as_py() is None
    assert table["error_code"][3].as_py() == "empty_prompt"
    good = table.filter(table["error_code"].is_null())["embedding"].combine_chunks()
    matrix = good.flatten().to_numpy(zero_copy_only=True).reshape(-1, 6)
    assert (matrix.shape, matrix.dtype) == ((24, 6), np.float32)
    assert np.linalg.norm(matrix, axis=1) == pytest.approx(np.ones(24), abs=1e-6)
    if form == "float":
        lines = [line["embedding"] for line in from_lines(job) if "embedding" in line]
        assert (np.array(lines, np.float32) == matrix).all()


def test_both_forms_give_the_same_table_also_with_the_sources_columns(job: Path) -> None:
    tables = [
        collected(
            job, "--task", "embed", "--embedding-format", form, *more, to=f"{form}{len(more)}.parquet",
            flags=("--with-source",) if not more else (),
        ).drop_columns(["n"])
        for form in ("float", "base64")
        for more in ((), ("--keep", "n"))
    ]  # fmt: skip
    assert all(table["embedding"].equals(tables[0]["embedding"]) for table in tables)


def test_datasets_reads_the_vectors_as_a_matrix(job: Path, tmp_path: Path) -> None:
    import datasets

    collected(job, "--task", "embed", "--dimensions", "6", flags=("--where", "status=ok"))
    found = datasets.load_dataset(
        "parquet",
        data_files=str(job.parent / "out.parquet"),
        split="train",
        cache_dir=str(tmp_path / "hf"),
    ).with_format("numpy")
    assert found["embedding"][:].shape == (24, 6)
    assert found.features["embedding"].length == 6


def test_vectors_can_be_half_as_long(job: Path) -> None:
    table = collected(
        job, "--task", "embed", "--dimensions", "6", flags=("--embedding-dtype", "float16")
    )
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: halffloat>[6]"
    first = np.array(table["embedding"][0].as_py(), np.float16)
    assert first == pytest.approx(np.array(from_lines(job)[0]["embedding"]), abs=1e-3)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_token_embeddings_are_lists_of_vectors(job: Path, form: str) -> None:
    table = collected(job, "--task", "token-embed", "--dimensions", "4", "--embedding-format", form)
    kind = table.schema.field("token_embeddings").type
    assert str(kind) == "list<element: fixed_size_list<element: float>[4]>"
    assert [None if row is None else len(row) for row in table["token_embeddings"].to_pylist()][
        :5
    ] == [2, 2, 2, None, 2]


def test_classes_have_a_label_and_probabilities(job: Path) -> None:
    table = collected(job, "--task", "classify")
    assert str(table.schema.field("probs").type) == "list<element: float>"
    for row, line in zip(table.to_pylist(), from_lines(job), strict=True):
        assert row["label"] == line.get("label")
        assert row["probs"] == (line and pytest.approx(line["probs"]) if "probs" in line else None)


@pytest.mark.parametrize("task", ["score", "reward"])
def test_scores_and_rewards_are_numbers(job: Path, task: str) -> None:
    table = collected(job, "--task", task)
    assert str(table.schema.field(task).type) == "float"
    assert table[task].null_count == 1


def test_vectors_in_other_kinds_of_tables(job: Path) -> None:
    options = ("--task", "embed", "--dimensions", "2", "--embedding-format", "base64")
    rows = [json.loads(line) for line in collected(job, *options, to="a.jsonl").splitlines()]
    assert len(rows[0]["embedding"]) == 2
    assert rows[3]["embedding"] is None
    [head, first, *_] = csv.reader(collected(job, *options, to="a.csv").splitlines())
    assert json.loads(first[head.index("embedding")]) == pytest.approx(rows[0]["embedding"])


def test_runs_of_different_tasks_are_no_table(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("embed", "score"):
        run_worker_here(job, job / "runs" / task, "--task", task)
    places = [str(job / "runs" / task) for task in ("embed", "score")]
    assert main(["collect", *places, str(job.parent / "both.parquet")]) == 2
    assert "answers of different kinds (--task embed, --task score)" in capsys.readouterr().err
    for option in (("--embedding-dtype", "float16"), ("--answer-json",)):
        assert main(["collect", places[1], str(job.parent / "x.parquet"), *option]) == 2
        assert f"{option[0]}" in capsys.readouterr().err


def test_answers_to_requests_and_to_columns_are_no_table() -> None:
    of_columns = Shape(output_format="native", answers="single", task="embed")
    of_requests = msgspec.structs.replace(of_columns, is_of_requests=True)
    with pytest.raises(InputError, match=r"\(--task embed, --task embed of requests\)"):
        joined([of_columns, of_requests])


def test_vectors_of_different_lengths_are_no_column() -> None:
    with pytest.raises(InputError, match=r"different lengths \(1, 2\)"):
        vector_array([[1.0], None, [1.0, 2.0]])
    with pytest.raises(InputError, match="cannot be read"):
        vector_array(["AAA="])
    assert vector_lists([None, [], [[1.0], [2.0]]]).to_pylist() == [None, [], [[1.0], [2.0]]]
