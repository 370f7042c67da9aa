"""`collect --with-source`: the source's columns with their own values and types, whatever they hold."""

import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from batchinfer.collect import columns
from batchinfer.collect.columns import ParquetSource
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.storage.opening import open_store
from collecting import collect, table_of
from finished_run import finish_run
from making import put_job, split

ROWS = 25


def write_source(folder: Path, *tables: pa.Table) -> None:
    """Two parquet files with row groups of a few rows: two tables, or the halves of one."""
    folder.mkdir(exist_ok=True)
    half = -(-len(tables[0]) // 2)
    parts = tables if len(tables) == 2 else (tables[0].slice(0, half), tables[0].slice(half))
    for index, part in enumerate(parts):
        parquet.write_table(part, folder / f"{index}.parquet", row_group_size=4)


def finished(tmp_path: Path, *tables: pa.Table, **options: Any) -> Path:
    """A finished run over parquet files."""
    write_source(tmp_path / "source", *tables)
    split(tmp_path / "source", tmp_path / "job", **{"num_chunks": 3, **options})
    finish_run(tmp_path / "job", tmp_path / "job/runs/a")
    return tmp_path / "job/runs/a"


def finished_lines(tmp_path: Path, lines: list[bytes], *, per_chunk: int = 10) -> Path:
    """A finished run over a job whose chunks have these lines. Lines that are objects get their `_row` and `_id`."""
    ended = [
        line[:-1] + b',"_row":%d,"_id":"%d"}\n' % (row, row)
        if line.startswith(b"{") and line.endswith(b"}")
        else line + b"\n"
        for row, line in enumerate(lines)
    ]
    chunks = [b"".join(ended[at : at + per_chunk]) for at in range(0, len(ended), per_chunk)]
    put_job(open_store(str(tmp_path / "job")).create, chunks)
    finish_run(tmp_path / "job", tmp_path / "job/runs/a")
    return tmp_path / "job/runs/a"


# --------------------------------------------------------------------------- parquet

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, datetime.UTC)
COLUMNS: dict[str, Any] = {
    "id": pa.array(range(100, 100 + ROWS)),
    "text": pa.array([f"own {row}" for row in range(ROWS)], pa.large_string()),
    "when": pa.array([NOW] * ROWS, pa.timestamp("us", "UTC")),
    "nanos": pa.array([1] * ROWS, pa.timestamp("ns")),
    "price": pa.array([Decimal("1.10")] * ROWS, pa.decimal128(10, 2)),
    "huge": pa.array([Decimal(10**60)] * ROWS, pa.decimal256(70, 0)),
    "bytes": pa.array([b"\xff\x00"] * ROWS),
    "half": pa.array([0.5] * ROWS, pa.float16()),
    "nan": pa.array([float("nan"), None] * 12 + [1.0]),
    "words": pa.array([["a", None], None] * 12 + [[]], pa.list_(pa.string())),
    "vector": pa.array([[1.0, 2.0]] * ROWS, pa.list_(pa.float32(), 2)),
    "map": pa.array([[("k", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())),
    "deep": pa.array([{"a": {"B": [row]}, "b": None} for row in range(ROWS)]),
    "kind": pa.array(["x", "y"] * 12 + ["x"]).dictionary_encode(),
    "long": pa.array([2**63 + row for row in range(ROWS)], pa.uint64()),
    "time": pa.array([datetime.time(1, 2, 3)] * ROWS, pa.time64("us")),
    "took": pa.array([datetime.timedelta(seconds=1)] * ROWS, pa.duration("us")),
}


@pytest.mark.full
def test_parquet_columns_keep_their_types_and_values(tmp_path):
    found = table_of(finished(tmp_path, pa.table(COLUMNS)), tmp_path, with_source=True)
    wanted = parquet.read_table(tmp_path / "source")
    row = found.slice(3, 1).to_pylist()[0]
    assert (row["_row"], row["_id"], row["id"], row["text"]) == (3, "id-3", 103, "own 3")
    assert row["_text"] == "answer 3", "a name that both have"
    found = found.select(list(COLUMNS))
    assert found.schema.types == wanted.schema.types
    assert str(found.to_pylist()) == str(wanted.to_pylist())  # NaN is not equal to itself


def test_chosen_rows_and_columns(tmp_path):
    run = finished(tmp_path, pa.table(COLUMNS))
    options: dict[str, Any] = {"with_source": True, "columns": ["kind", "id"]}
    found = table_of(run, tmp_path, where="_row IN (2, 3, 14, 24) AND id < 120", **options)
    assert found["id"].to_pylist() == [102, 103, 114]
    assert found.column_names[-2:] == ["kind", "id"]
    twice = table_of(run, tmp_path, with_source=True, columns=["id", "id"], where="id < 101")
    assert twice["id"].to_pylist() == [100]
    drawn = table_of(run, tmp_path, sample=5, **options)
    assert drawn["id"].to_pylist() == [row + 100 for row in drawn["_row"].to_pylist()]


def test_where_takes_no_column_for_another_and_names_those_that_it_knows(tmp_path):
    """Of two names that differ in case alone, SQL read the first for both."""
    columns = {"A": ["x"] * ROWS, "a": ["y"] * ROWS, "half": COLUMNS["half"], "Status": [1] * ROWS}
    run = finished(tmp_path, pa.table(columns))
    for where in ("\"a\" = 'y'", "half = 0.5"):
        with pytest.raises(ConfigError, match="not found") as refused:
            collect(run, tmp_path / "out", with_source=True, where=where)
        assert "error_message, Status;" in refused.value.hint
    assert table_of(run, tmp_path, with_source=True, where="_status = 200").num_rows == ROWS


def test_windows_hold_limited_bytes_of_the_columns_that_are_taken(tmp_path, monkeypatch):
    sizes = []
    tables = ParquetSource.tables

    def counting(source: ParquetSource) -> Iterator[Any]:
        for first, table in tables(source):
            sizes.append(len(table))
            yield first, table

    monkeypatch.setattr(ParquetSource, "tables", counting)
    monkeypatch.setattr(columns, "_BLOCK_BYTES", 8_000)
    large = [f"{row}" + "x" * 1000 for row in range(ROWS)]
    table = pa.table({"large": large, "large.not": range(ROWS)})
    run = finished(tmp_path, table)
    assert table_of(run, tmp_path, with_source=True)["large"].to_pylist() == large
    drawn = table_of(run, tmp_path, with_source=True, sample=5)
    assert drawn["large"].to_pylist() == [large[row] for row in drawn["_row"].to_pylist()]
    assert max(sizes) < 6
    sizes.clear()
    table_of(run, tmp_path, with_source=True, columns=["large.not"])
    assert max(sizes) == ROWS


def test_the_source_is_not_replaced(tmp_path):
    run = finished(tmp_path, pa.table({"n": range(ROWS)}))
    for dest in (tmp_path / "source", tmp_path / "source/0.parquet"):
        with pytest.raises(ConfigError, match="lies inside"):
            collect(run, dest, overwrite=True)


def test_files_of_different_columns_and_limits(tmp_path):
    first = pa.table({"a": pa.array([1, 2, 3], pa.int32()), "b": ["x", "y", "z"]})
    second = pa.table({"b": ["v", "w"], "a": pa.array([2**40, 5])})
    found = table_of(finished(tmp_path, first, second, limit=4), tmp_path, with_source=True)
    assert found["a"].to_pylist() == [1, 2, 3, 2**40]
    assert found["b"].to_pylist() == ["x", "y", "z", "v"]
    assert found.schema.field("a").type == pa.int64()


@pytest.mark.parametrize("number", [7, None, 2**53 + 1])
def test_integers_beside_floats_keep_their_values(number, tmp_path):
    """Pandas writes integers as floats where one is missing: such columns come from the chunks."""
    day = [datetime.date(2026, 1, 1)]
    tables = [
        pa.table({"n": column, "day": day})
        for column in (pa.array([number], pa.int64()), pa.array([0.5]))
    ]
    found = table_of(finished(tmp_path, *tables, num_chunks=None), tmp_path, with_source=True)
    assert list(map(str, found["n"].to_pylist())) == ["7.0" if number == 7 else str(number), "0.5"]
    assert found["day"].to_pylist() == ["2026-01-01"] * 2


@pytest.mark.parametrize("what", ["changed", "gone", "damaged"])
def test_a_source_that_is_not_the_same_any_more_is_not_read(what, tmp_path):
    table = pa.table({"prompt": [f"row {row}" for row in range(ROWS)], "number": range(ROWS)})
    run = finished(tmp_path, table)
    path = tmp_path / "source/1.parquet"
    if what == "changed":
        write_source(tmp_path / "source", table.slice(1))
    elif what == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = table_of(run, tmp_path, with_source=True)
    assert found["prompt"].to_pylist() == table["prompt"].to_pylist()
    assert found["number"].to_pylist() == list(range(ROWS))


def test_a_source_that_loses_rows_meanwhile_loses_no_answers(tmp_path, monkeypatch):
    tables = ParquetSource.tables
    run = finished(tmp_path, pa.table(COLUMNS))
    monkeypatch.setattr(ParquetSource, "tables", lambda source: list(tables(source))[:-1])
    with pytest.raises(InputError, match="not all rows"):
        collect(run, tmp_path / "out.parquet", with_source=True)
    assert not (tmp_path / "out.parquet").exists()


def test_values_in_json_lines_and_csv_are_those_of_chunks(tmp_path):
    more = {
        "late": pa.array([2932897] * ROWS, pa.date32()),
        "parts": pa.array([[{"at": 1}]] * ROWS, pa.list_(pa.struct({"at": pa.time64("ns")}))),
        "broken": pa.array([b"\xff"] * ROWS, pa.binary()).view(pa.string()),
    }
    run = finished(tmp_path, pa.table(COLUMNS | more))
    collect(run, tmp_path / "a.jsonl", with_source=True)
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    wanted = {
        "bytes": "/wA=",
        "nan": None,
        "late": "+10000-01-01",
        "parts": [{"at": "00:00:00.000000001"}],
        "broken": "\ufffd",
        "deep": {"a": {"B": [0]}, "b": None},
    }
    assert {name: first[name] for name in wanted} == wanted
    assert collect(run, tmp_path / "b.csv", with_source=True, where="_row < 5")["file_rows"] == 5
    collect(run, tmp_path / "a.csv", with_source=True)
    header, line, *_ = (tmp_path / "a.csv").read_text().splitlines()
    assert len(header.split(",")) == len(first)
    assert '"[""a"",null]"' in line
    assert line.endswith('"+10000-01-01","[{""at"":""00:00:00.000000001""}]","\ufffd"')


# --------------------------------------------------------------------------- chunks

LONG = 2**53 + 1
NOTED = pa.struct({"x": pa.float64(), "y": pa.string()})


def is_same(value: Any, text: str) -> bool:
    """Whether a value of a table is the JSON value of a text, or its text."""
    wanted = json.loads(text)
    if isinstance(value, str) and value != wanted:
        return value.replace(" ", "") == text.replace(" ", "")
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    return isinstance(value, bool) == isinstance(wanted, bool) and (
        value == wanted or str(value) == str(wanted)  # NaN is not equal to itself
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", "0.13436424411240122"], pa.float64()),
        (["1", "2.5", f"{LONG}"], pa.string()),
        (["-1", f"{LONG}", "1"], pa.int64()),
        ([f"{LONG}", "1", "0.5"], pa.string()),
        ([f"{2**63}", "1", "1"], pa.string()),
        (["1.5", "true", "null"], pa.string()),
        (['{"x": 0.5}', '{"x": true}', '{"x": 1.0}'], pa.string()),
        (['{"x": 0.5}', '{"y": true}', "{}"], pa.struct({"x": pa.float64(), "y": pa.bool_()})),
        (["[1]", "[]", "[0.5, null]"], pa.list_(pa.float64())),
        ([f"[{LONG}]", "[]", "[0.5]"], pa.string()),
        (['{"x": [{"y": 1}]}', '{"x": []}', '{"x": "text"}'], pa.string()),
        (['{"x": 1, "X": 2}', "null", "null"], pa.string()),
        (["{}", "null", "null"], pa.string()),
        (["NaN", "1", "-Infinity"], pa.float64()),
        (["1e400", "1", "null"], pa.string()),
        ([f"{'9' * 309}e5", f"1{'0' * 400}.5", "1.5"], pa.string()),
        (['{"x": 0.5, "y": "no 1234567890123456, "}'] * 3, NOTED),
        (['{"x": NaN}', '{"x": 1.0}', "null"], pa.struct({"x": pa.float64()})),
        (['"a"', '"2026-01-01"', '"\\u0000b"'], pa.string()),
        (['"a"', "1", "null"], pa.string()),
        (["[" * 50 + "]" * 50, "null", "null"], pa.string()),
    ],
)
def test_no_value_becomes_another(values, kind, tmp_path):
    """Also where each chunk, read apart, would give another type."""
    run = finished_lines(tmp_path, [b'{"v": %b}' % value.encode() for value in values], per_chunk=2)
    column = table_of(run, tmp_path, with_source=True)["v"]
    assert column.type == kind
    for text, value in zip(values, column.to_pylist(), strict=True):
        assert is_same(value, text), (value, text)


def test_columns_come_in_the_order_in_which_rows_bring_them(tmp_path):
    lines = [b'{"id":"u","prompt":"x","note":null,"tag":"z"}', b'{"tag":"1"}', b'{"prompt":"k"}']
    found = table_of(finished_lines(tmp_path, lines), tmp_path, with_source=True)
    assert found.column_names[-4:] == ["id", "prompt", "note", "tag"]


def test_large_rows_with_many_numbers_fit_into_memory(tmp_path):
    """DuckDB takes 2048 rows at once, and held their texts for each of the numbers."""
    texts = [
        json.dumps({"text": "x" * 10**4} | {f"n{n}": row for n in range(10)}) for row in range(3000)
    ]
    run = finished_lines(tmp_path, list(map(str.encode, texts)), per_chunk=1500)
    assert table_of(run, tmp_path, with_source=True)["n9"].to_pylist() == list(range(3000))


def test_lines_of_any_kind_cost_no_other_row(tmp_path, caplog):
    lines = [
        '{"b": "é\u2028😀", "name with \'quotes\' and / ~ \\"": true, "": 1}'.encode(),
        b'{"b": "x", "meta": {"y": "\xff"}}',
        b"",
        b"no JSON",
        b"[1, 2]",
        b'{"b": "\\ud800"}',
        b'{"B": 1, "c": "y", "C": "z"}',
    ]
    found = table_of(finished_lines(tmp_path, lines, per_chunk=2), tmp_path, with_source=True)
    rows = found.to_pylist()
    # DuckDB takes a surrogate without a partner for no JSON
    assert found["b"].to_pylist() == ['"é\u2028😀"', '"x"', *[None] * 5]
    assert (rows[0]["name with 'quotes' and / ~ \""], rows[0][""]) == (True, "1")
    assert (rows[1]["meta"], rows[6]["B"], rows[6]["C"]) == ({"y": "\ufffd"}, "1", '"z"')
    assert "4 lines of the source are no JSON objects" in caplog.text
    assert "share no type" in caplog.text


def test_parts_and_samples_take_their_own_rows_of_the_chunks(tmp_path):
    lines = [b'{"n": %d}' % row for row in range(ROWS)]
    run = finished_lines(tmp_path, lines)
    found = table_of(run, tmp_path, with_source=True, sample=6, where="n % 2 = 0")
    assert found["n"].to_pylist() == found["_row"].to_pylist()
    (run / "outputs/part-00001.succeed").unlink()
    found = table_of(run, tmp_path, with_source=True, partial=True)
    assert found["n"].to_pylist() == found["_row"].to_pylist() == [*range(10), *range(20, ROWS)]
