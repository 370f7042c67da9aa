"""Types of a parquet source: every column comes back from `collect` as it went into `split`."""

from __future__ import annotations

import csv
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arrow_examples import EVERY_TYPE
from batchinfer.collect.command import run_collect
from batchinfer.collect.source_types import build_array, read_schema
from batchinfer.collect.table import CollectConfig
from batchinfer.core import codec
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Job
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage.opening import open_store
from making import run_worker_here


def split(sources: list[Path], job: Path, **options: Any) -> Job:
    """Split files into chunks of two rows, and return the content of job.json."""
    config = SplitConfig(
        sources=[str(path) for path in sources], output=str(job), chunk_rows=2, **options
    )
    run_split(config, store=open_store(str(job)))
    return codec.decode((job / "job.json").read_bytes(), Job, name="job.json")


def answer_and_collect(job: Path, dest: Path, *worker: str, **options: Any) -> None:
    """Answer every row with the echo engine, and collect the answers with their source."""
    run_worker_here(job, job / "runs/a", *worker)
    collect(job, dest, **options)


def collect(job: Path, dest: Path, **options: Any) -> None:
    config = CollectConfig(run=str(job / "runs/a"), dest=str(dest), **options)
    run_collect(config, open_store=open_store, clock=SystemClock())


ROWS = 8


def write_every_type(path: Path) -> pa.Table:
    """Write a file with a column of every type, except those with NaN, which becomes null."""
    columns: dict[str, Any] = {"prompt": [f"hello {row}" for row in range(ROWS)]}
    for number, (array, texts) in enumerate(EVERY_TYPE):
        if texts.count("null") == array.null_count and "[null,1.0]" not in texts:
            pieces = [array, pa.nulls(ROWS - len(array), array.type)]
            columns[f"c{number}"] = pa.chunked_array(pieces)
    pq.write_table(pa.table(columns), path)
    return pq.read_table(path)


def source_columns(table: pa.Table, names: list[str]) -> pa.Table:
    """Return the columns of the source as they are in a collected table."""
    return table.select(names).combine_chunks()


@pytest.mark.parametrize("place", ["chunks", "outputs"])
def test_columns_of_every_type_come_back_in_their_own_types(place: str, tmp_path: Path) -> None:
    source = write_every_type(tmp_path / "s.parquet")
    assert source.num_columns > 45
    split([tmp_path / "s.parquet"], tmp_path / "job")
    names = source.column_names
    keep = ["--keep", ",".join(names)] if place == "outputs" else []
    options = {"with_source": True} if place == "chunks" else {}
    answer_and_collect(tmp_path / "job", tmp_path / "out", *keep, shard_rows=3, **options)
    parts = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [part.num_rows for part in parts] == [3, 3, 2]
    found = pa.concat_tables([source_columns(part, names) for part in parts])
    for name in names:
        assert found.schema.field(name).type == source.schema.field(name).type
        assert found[name].combine_chunks().equals(source[name].combine_chunks()), name


def test_parquet_of_one_pass_has_no_look_at_the_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Types that job.json holds save the pass over the chunks that finds types."""
    caplog.set_level("INFO")
    write_every_type(tmp_path / "s.parquet")
    split([tmp_path / "s.parquet"], tmp_path / "job")
    answer_and_collect(tmp_path / "job", tmp_path / "out", with_source=True)
    assert "looking at the types" not in caplog.text


def test_other_formats_hold_the_values_of_the_chunks(tmp_path: Path) -> None:
    write_every_type(tmp_path / "s.parquet")
    job = split([tmp_path / "s.parquet"], tmp_path / "job")
    chunk_rows = [
        json.loads(line)
        for chunk in job.chunks
        for line in (tmp_path / f"job/chunks/{chunk.name}.jsonl").read_bytes().splitlines()
    ]
    answer_and_collect(tmp_path / "job", tmp_path / "out.jsonl", with_source=True)
    lines = (tmp_path / "out.jsonl").read_bytes().split(b"\n")[:-1]
    found = [json.loads(line) for line in lines]
    for name in job.columns:
        assert [row[name] for row in found] == [row[name] for row in chunk_rows], name
    collect(tmp_path / "job", tmp_path / "out.csv", with_source=True)
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    for row, chunk_row in zip(cells, chunk_rows, strict=True):
        for name in job.columns:
            assert cell_means(row[name], chunk_row[name]), (name, row[name], chunk_row[name])


def cell_means(cell: str, value: Any) -> bool:
    """Whether a CSV cell holds a JSON value: a text as it is, null as nothing, everything else as JSON."""
    if value is None or isinstance(value, str):
        return cell == (value or "")
    return bool(json.loads(cell) == value)


def test_files_with_different_types_leave_the_type_to_the_values(tmp_path: Path) -> None:
    """A type counts if all files have it, or have only nulls; values of the others decide."""
    money = pa.array([decimal.Decimal("1.10")])
    first = {"prompt": ["a"], "n": pa.array([1], pa.int32()), "m": money, "only": pa.nulls(1)}
    second = {"prompt": ["b"], "n": pa.array([2.5]), "m": money, "only": pa.array([7], pa.int8())}
    pq.write_table(pa.table(first), tmp_path / "1.parquet")
    pq.write_table(pa.table({**second, "late": [b"x"]}), tmp_path / "2.parquet")
    job = split([tmp_path / "1.parquet", tmp_path / "2.parquet"], tmp_path / "job")
    assert isinstance(job.schema, str)
    assert list(map(str, read_schema(job.schema))) == ["prompt", "m", "only", "late"]
    answer_and_collect(tmp_path / "job", tmp_path / "out", with_source=True)
    found = pq.read_table(tmp_path / "out")
    assert found.column_names[-5:] == ["prompt", "n", "m", "only", "late"]
    assert [str(found.schema.field(name).type) for name in ("n", "m", "only", "late")] == [
        *("double", "decimal128(3, 2)", "int8", "binary"),
    ]
    assert found.select(["n", "only", "late"]).to_pylist() == [
        {"n": 1.0, "only": None, "late": None},
        {"n": 2.5, "only": 7, "late": b"x"},
    ]


def test_columns_chosen_at_either_end_keep_their_types(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": ["a"], "n": pa.array([1], pa.int8()), "b": [b"\xff"]}),
        tmp_path / "s.parquet",
    )
    split([tmp_path / "s.parquet"], tmp_path / "job", columns=["b", "prompt", "n"])
    answer_and_collect(tmp_path / "job", tmp_path / "out", with_source=True, columns=["n", "b"])
    found = pq.read_table(tmp_path / "out")
    assert [(field.name, str(field.type)) for field in found.schema][-2:] == [
        ("n", "int8"),
        ("b", "binary"),
    ]
    assert found["b"].to_pylist() == [b"\xff"]
    with pytest.raises(InputError, match="'m'"):
        collect(tmp_path / "job", tmp_path / "none", with_source=True, columns=["m"])


def test_only_parquet_sources_have_a_schema(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"prompt": "a", "n": 1}\n')
    pq.write_table(
        pa.table({"prompt": ["b"], "n": pa.array([2], pa.int8())}), tmp_path / "2.parquet"
    )
    split([tmp_path / "1.jsonl", tmp_path / "2.parquet"], tmp_path / "job")
    assert "schema" not in json.loads((tmp_path / "job/job.json").read_bytes())
    answer_and_collect(tmp_path / "job", tmp_path / "out", with_source=True)
    assert str(pq.read_schema(tmp_path / "out/part-00000.parquet").field("n").type) == "int64"


def test_a_schema_that_cannot_be_read_leaves_the_types_to_the_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(
        pa.table({"prompt": ["a"], "n": pa.array([1], pa.int8())}), tmp_path / "s.parquet"
    )
    split([tmp_path / "s.parquet"], tmp_path / "job")
    path = tmp_path / "job/job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": "bm90IEFycm93"}))
    answer_and_collect(tmp_path / "job", tmp_path / "out", with_source=True)
    assert "field schema" in caplog.text
    assert str(pq.read_schema(tmp_path / "out/part-00000.parquet").field("n").type) == "int64"


def test_offsets_of_former_times_had_seconds(tmp_path: Path) -> None:
    """Berlin was 53 minutes and 28 seconds ahead of UTC until 1893, and ISO 8601 has no place for the seconds."""
    kind = pa.timestamp("s", "Europe/Berlin")
    found = build_array(["1874-12-07T19:33:28+00:53", None], kind)
    assert found.cast(pa.int64()).to_pylist() == [-3_000_000_000, None]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), 1.5),
        (pa.int8(), 300),
        (pa.int64(), True),
        (pa.float64(), "1.5"),
        (pa.string(), 1),
        (pa.binary(), "no base64"),
        (pa.decimal128(5, 1), "1.25"),
        (pa.duration("s"), "PT0.5S"),
        (pa.duration("s"), "1"),
        (pa.struct([("a", pa.int8())]), {"a": 1, "b": 2}),
        (pa.list_(pa.int8(), 2), [1]),
        (pa.time32("s"), "25:00:00"),
    ],
)
def test_a_value_that_is_none_of_the_type_is_not_bent(kind: pa.DataType, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        build_array([value], kind)
