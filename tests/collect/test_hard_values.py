"""Values of JSON Lines that no column can hold: they are kept as text, counted and named, and cost no other value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.collect import reader
from batchinfer.collect.command import run_collect
from batchinfer.collect.table import CollectConfig
from batchinfer.core.clock import SystemClock
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage.opening import open_store
from making import make_job, run_worker_here


def collect(job: Path, dest: Path, **options: Any) -> dict[str, Any]:
    """Collect the run of a job, with its source unless an option says otherwise."""
    config = CollectConfig(
        run=str(job / "runs/a"), dest=str(dest), **{"with_source": True, **options}
    )
    return run_collect(config, open_store=open_store, clock=SystemClock())


def answer(lines: list[str], folder: Path, *options: str) -> Path:
    """Split lines into a job, and answer it with the echo engine."""
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    job = folder / "job"
    config = SplitConfig(sources=[str(folder / "a.jsonl")], output=str(job), chunk_rows=2)
    run_split(config, store=open_store(str(job)))
    run_worker_here(job, job / "runs/a", "--max-error-rate", "1", *options)
    return job


def rows_of(dest: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(dest).to_pylist()
    return rows


DEEP = 900
HARD = {
    "float": "1e400",
    "list": "[1, -1e999]",
    "integer": "1" + "0" * 30,
    "surrogate": '"\\ud800"',
    "deep": "[" * DEEP + "1" + "]" * DEEP,
    "very deep": "[" * 100_000 + "]" * 100_000,
    "levels": "[" * 33 + "]" * 33,
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_a_value_that_no_type_holds_is_text_and_its_row_keeps_the_others(
    kind: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ['{"prompt": "a", "x": 1.50, "y": 1}', f'{{"prompt": "b", "x": {HARD[kind]}, "y": 2}}']
    job = answer([*lines, '{"prompt": "c", "x": null, "y": 3}'], tmp_path)
    result = collect(job, tmp_path / "out", format=form)
    path = tmp_path / f"out/part-00000.{form}"
    if form == "parquet":
        rows = rows_of(path)
    elif form == "jsonl":
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    else:
        import pyarrow.csv

        options = pyarrow.csv.ParseOptions(newlines_in_values=True)
        read = pyarrow.csv.ReadOptions(block_size=1 << 22)
        strings = pyarrow.csv.ConvertOptions(column_types={"x": "string"}, strings_can_be_null=True)
        rows = pyarrow.csv.read_csv(path, read, options, strings).to_pylist()
    assert [row["x"] for row in rows] == ["1.50", HARD[kind], None]
    assert [(row["prompt"], row["y"]) for row in rows] == [("a", 1), ("b", 2), ("c", 3)]
    assert result["kept_as_text"] == {"x": 1}
    assert "column 'x': 1 values have numbers too large" in caplog.text


def test_half_a_surrogate_pair_is_an_escape_and_the_column_keeps_its_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One such text among many made texts and conversations of a whole column JSON."""
    rows = [
        {"prompt": "a", "x": "plain", "turns": [{"role": "user", "content": "hi", "n": 1}]},
        {
            "prompt": "b",
            "x": "half \ud83d!",
            "turns": [{"role": "user", "content": "\udc00", "n": 1}],
        },
    ]
    job = answer(list(map(json.dumps, rows)), tmp_path)
    result = collect(job, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert [row["x"] for row in rows] == ["plain", "half \\ud83d!"]
    assert rows[1]["turns"] == [{"role": "user", "content": "\\udc00", "n": 1}]
    assert result["kept_as_text"] == {"x": 1, "turns": 1}
    assert "column 'x': 1 values have half a surrogate pair, which is now an escape" in caplog.text


def test_integers_that_a_float_cannot_hold_are_not_rounded(tmp_path: Path) -> None:
    whole = 2**53 + 1
    job = answer(
        [f'{{"prompt": "a", "x": {whole}, "y": {whole}, "z": 1}}',
         '{"prompt": "b", "x": 0.5, "y": 2, "z": 0.5}'], tmp_path
    )  # fmt: skip
    result = collect(job, tmp_path / "out")
    assert [(row["x"], row["y"], row["z"]) for row in rows_of(tmp_path / "out")] == [
        (str(whole), whole, 1.0),
        ("0.5", 2, 0.5),
    ]
    assert result["kept_as_text"] == {}


def test_lines_that_are_no_objects_are_kept_as_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = answer(['{"prompt": "a", "x": 1}', '{"x": 2, oops}', "[3]"], tmp_path)
    result = collect(job, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert [row["source_line"] for row in rows] == [None, '{"x": 2, oops}', "[3]"]
    assert [row["x"] for row in rows] == [1, None, None]
    assert result["kept_as_text"] == {"source_line": 2}
    assert "2 lines of the source are no JSON objects; their text is in" in caplog.text
    caplog.clear()
    collect(job, tmp_path / "few", columns=["x"])
    assert "source_line" not in rows_of(tmp_path / "few")[0]
    assert "2 lines of the source are no JSON objects; their columns are null" in caplog.text


def test_columns_whose_names_are_taken_stay_apart(tmp_path: Path) -> None:
    """A source with `text` and `source_text` has both in the table."""
    job = answer(['{"prompt": "a", "text": "own", "source_text": "other"}'], tmp_path)
    collect(job, tmp_path / "out")
    row = rows_of(tmp_path / "out")[0]
    assert (row["text"], row["source_text"], row["source_source_text"]) == ("a", "other", "own")


def test_names_that_json_must_escape_are_columns_like_others(tmp_path: Path) -> None:
    job = answer(['{"prompt": "a", "q\\"": 1, "m": [1]}', '{"prompt": "b", "m": "x"}'], tmp_path)
    collect(job, tmp_path / "out")
    assert [(row['q"'], row["m"]) for row in rows_of(tmp_path / "out")] == [
        (1, "[1]"),
        (None, '"x"'),
    ]


def test_blocks_end_where_the_source_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows in memory are bounded by the source's bytes too: answers may be much shorter than rows."""
    monkeypatch.setattr(reader, "_SOURCE_BYTES", 300)
    parts = []
    part_of = reader.Block.part
    monkeypatch.setattr(
        reader.Block, "part", lambda *args: parts.append(args[1:]) or part_of(*args)
    )
    job = tmp_path / "job"
    make_job(job, rows=25, per_chunk=25, make_row=lambda row: {"prompt": f"p{row}", "x": "y" * 60})
    run_worker_here(job, job / "runs/a")
    collect(job, tmp_path / "out", shard_rows=7)
    assert (0, 3) in parts
    assert [row["prompt"] for row in rows_of(tmp_path / "out")] == [f"p{row}" for row in range(25)]
