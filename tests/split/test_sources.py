"""Finding, counting and reading sources: order, odd lines, and each way a source can be unusable."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchinfer.core.errors import AccessDenied, ConfigError, InputError, StorageError
from batchinfer.split import source_files, sources
from batchinfer.split.sources import (
    ColumnChoice,
    CountedSources,
    Oddities,
    count_sources,
)
from batchinfer.storage.opening import open_store
from fake_hub import TOKEN, FakeHub
from making import run_process
from web_server import WebServer, plain


def read_lines(counted: CountedSources, rows: range | None = None) -> list[bytes]:
    nulls = Oddities()
    blocks = counted.read(rows if rows is not None else range(counted.rows), nulls)
    return b"".join(block.encode(0, block.num_rows) for block in blocks).split(b"\n")[:-1]


def read_rows(counted: CountedSources) -> list[dict]:
    return [json.loads(line) for line in read_lines(counted)]


def split_file(path: Path, **choice) -> list[dict]:
    return read_rows(count_sources([str(path)], choice=ColumnChoice(**choice)))


def write_parquet(path: Path, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


# --------------------------------------------------------------------------- exactness


def test_every_row_equals_what_pyarrow_reads(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "text": [f'row {i} \u2028 "quoted"\n' * int(rng.integers(0, 4)) for i in range(2500)],
            "chat": [
                [{"role": "user", "content": "é" * int(rng.integers(0, 9))}]
                * int(rng.integers(0, 4))
                for _ in range(2500)
            ],
            "score": rng.random(2500),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    rows = split_file(tmp_path / "t.parquet")
    for number, (row, expected) in enumerate(zip(rows, table.to_pylist(), strict=True)):
        assert row == {**expected, "_row": number, "_id": str(number)}


def test_a_ten_megabyte_string_survives(tmp_path):
    text = "ü\n" * 5_000_000
    path = write_parquet(tmp_path / "big.parquet", text=[text, "small"])
    assert [row["text"] for row in split_file(path)] == [text, "small"]
    lines = tmp_path / "big.jsonl"
    lines.write_text(json.dumps({"text": text}) + "\n")
    assert split_file(lines)[0]["text"] == text


# --------------------------------------------------------------------------- JSON Lines


def test_lines_pass_through_byte_for_byte_with_row_and_id_at_the_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"n": 1.10, "big":123456789012345678901234567890}\r\n{ }\n{"t":"\xe2\x80\xa8\\ud83d\\ude00"}'
    )
    assert read_lines(count_sources([str(path)], choice=ColumnChoice())) == [
        b'{"n": 1.10, "big":123456789012345678901234567890,"_row":0,"_id":"0"}',
        b'{"_row":1,"_id":"1"}',
        b'{"t":"\xe2\x80\xa8\\ud83d\\ude00","_row":2,"_id":"2"}',
    ]


@pytest.mark.parametrize(
    "broken",
    [
        b'{"a": 1',
        b"null",
        b"[1]",
        b'{"a": "\xff"}',
        b'{"a": NaN',
        b'{"a": nan}',
        b'{"a": +Infinity}',
        b"NaN",
        b'{"a": "\x00"}',
        b"[" * 5000,
    ],
)
def test_a_broken_line_is_kept_byte_for_byte(tmp_path, broken):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":0}\n' + broken + b'\n{"a":2}\n')
    lines = read_lines(count_sources([str(path)], choice=ColumnChoice(id_column="a")))
    assert lines == [b'{"a":0,"_row":0,"_id":"0"}', broken, b'{"a":2,"_row":2,"_id":"2"}']
    assert read_lines(count_sources([str(path)], choice=ColumnChoice(columns=["a"])))[1] == broken


def test_nan_and_infinite_values_are_null_and_counted_as_in_parquet(tmp_path):
    nan, inf = float("nan"), float("inf")
    rows = [
        {"x": nan, "y": [1.5, {"deep": inf}, -inf], "t": 'NaN, "-Infinity" \\'},
        {"x": 1.0, "y": [0.5], "t": "\\"},
        {"x": inf, "y": None, "t": None},
    ]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counted = count_sources([str(lines)], choice=ColumnChoice(id_column="x"))
    odd = Oddities()
    (block,) = counted.read(range(3), odd)
    assert block.encode(0, 3).splitlines() == [
        b'{"x": null, "y": [1.5, {"deep": null}, null], "t": "NaN, \\"-Infinity\\" \\\\","_row":0,"_id":"0"}',
        b'{"x": 1.0, "y": [0.5], "t": "\\\\","_row":1,"_id":"1.0"}',
        b'{"x": null, "y": null, "t": null,"_row":2,"_id":"2"}',
    ]
    assert (odd.nulls, odd.broken_lines) == ({"x": 2, "y": 2}, 0)
    floats = write_parquet(tmp_path / "a.parquet", x=[nan, 1.0, inf], y=[[1.5, inf, -inf], [], []])
    of_parquet = Oddities()
    list(count_sources([str(floats)], choice=ColumnChoice()).read(range(3), of_parquet))
    assert of_parquet.nulls == odd.nulls


def test_only_nulls_of_kept_columns_are_counted_and_other_digits_stay(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1.10,"b":NaN,"c":[-Infinity,1e400],"t":"\\ud800 Infinity","_id":NaN}\n')
    odd = Oddities()
    counted = count_sources([str(path)], choice=ColumnChoice(columns=["a", "c", "_id"]))
    (block,) = counted.read(range(1), odd)
    assert odd.nulls == {"c": 1, "_id": 1}
    (whole,) = count_sources([str(path)], choice=ColumnChoice()).read(range(1), Oddities())
    assert (
        block.encode(0, 1) == b'{"a":1.10,"c":[null,1e400],"_source_id":null,"_row":0,"_id":"0"}\n'
    )
    assert json.loads(whole.encode(0, 1))["t"] == "\ud800 Infinity"


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("block_bytes", [1, 20, 1 << 20])
def test_blank_lines_are_no_rows_and_are_counted(tmp_path, monkeypatch, ending, block_bytes):
    from batchinfer.split import json_lines

    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(json_lines, "_MARK_BYTES", 16)
    good = [b'{"a":%d}' % number for number in range(60)]
    lines = []
    for number, line in enumerate(good):
        lines += [b"", b" \t", b"\r"][: number % 4]
        lines.append(line + b"\r" * (number % 2))
    path = tmp_path / f"a.jsonl{ending}"
    data = b"\xef\xbb\xbf\n" + b"\n".join([*lines, b"  ", b"", b"   "])
    path.write_bytes(gzip.compress(data) if ending else data)
    counted = count_sources([str(path)], choice=ColumnChoice())
    assert (counted.rows, counted.blank_lines) == (60, 1 + 90 + 3)
    for rows in (range(60), range(1), range(57, 60), range(20, 41)):
        assert [json.loads(line)["a"] for line in read_lines(counted, rows)] == list(rows)


def test_the_place_of_a_broken_line_says_that_blank_lines_do_not_count(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a":1}\n\n{broken\n')
    odd = Oddities()
    list(count_sources([str(path)], choice=ColumnChoice()).read(range(2), odd))
    assert odd.first_broken == f"{path}, line 2 (blank lines not counted)"


@pytest.mark.parametrize(
    ("encoding", "text", "name"),
    [("latin-1", "caf\u00e9", "LATIN1"), ("cp1252", "\u201ccaf\u00e9\u201d", "WINDOWS-1252")],
)
def test_another_encoding_is_named_with_the_way_to_convert_it(tmp_path, encoding, text, name):
    path = tmp_path / "a.jsonl"
    line = f'{{"t": "{text}"}}\n'.encode(encoding)
    path.write_bytes(b'{"t":1}\n\xff\n' + line * 2)
    odd = Oddities()
    lines = b"".join(
        block.encode(0, block.num_rows)
        for block in count_sources([str(path)], choice=ColumnChoice()).read(range(4), odd)
    )
    assert lines.split(b"\n")[2] + b"\n" == line  # P7: the line stays, and becomes an error row
    assert (odd.broken_lines, odd.encodings) == (3, {name: 2})
    assert odd.first_encoded == f"{path}, line 3"
    path.write_bytes(line * 3)
    with pytest.raises(
        InputError, match=f"no line is a JSON object, but would be one in {name}"
    ) as no:
        split_file(path)
    assert f"iconv -f {name} -t UTF-8" in no.value.hint


def test_a_lone_surrogate_stays_an_escape(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t":"\\ud800","k":1}\n')
    assert read_lines(count_sources([str(path)], choice=ColumnChoice())) == [
        b'{"t":"\\ud800","k":1,"_row":0,"_id":"0"}'
    ]
    assert read_lines(count_sources([str(path)], choice=ColumnChoice(id_column="t"))) == [
        b'{"t":"\\ud800","k":1,"_row":0,"_id":"\\ud800"}'
    ]
    path.write_bytes(rb' { "a:" : [1.10, {"b": "}"}] ,"t": "\ud800", "\udfff":{ } } ' + b"\r\n{}\n")
    for columns, line in (
        (["t"], rb'{"t":"\ud800","_row":0,"_id":"0"}'),
        (["\udfff", "a:"], rb'{"\udfff":{ },"a:":[1.10, {"b": "}"}],"_row":0,"_id":"0"}'),
    ):
        choice = ColumnChoice(columns=columns)
        assert read_lines(count_sources([str(path)], choice=choice))[0] == line


def test_own_row_and_id_of_a_source_are_kept_under_another_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"_row":7,"x":1.50,"_id":"seven"}\n{"x":1}\n')
    kept = count_sources([str(path)], choice=ColumnChoice())
    assert read_lines(kept) == [
        b'{"_source_row":7,"x":1.50,"_source_id":"seven","_row":0,"_id":"0"}',
        b'{"x":1,"_row":1,"_id":"1"}',
    ]
    assert kept.columns == ["_source_row", "x", "_source_id"]
    named = count_sources([str(path)], choice=ColumnChoice(id_column="_id", columns=["_id"]))
    assert read_lines(named)[0] == b'{"_source_id":"seven","_row":0,"_id":"seven"}'
    assert named.columns == ["_source_id"]
    assert split_file(path, columns=["x"])[0] == {"x": 1.5, "_row": 0, "_id": "0"}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_own_columns_of_a_table_are_kept_under_a_name_that_is_free(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, _row=["9"], _source_row=["1"], _id=["nine"])
    else:
        path.write_text("_row,_source_row,_id\n9,1,nine\n")
    row = {"_source_source_row": "9", "_source_row": "1", "_source_id": "nine", "_row": 0}
    assert split_file(path) == [row | {"_id": "0"}]
    assert split_file(path, id_column="_id") == [row | {"_id": "nine"}]
    odd = Oddities()
    list(count_sources([str(path)], choice=ColumnChoice(columns=["_id"])).read(range(1), odd))
    assert odd.renamed == {"_id"}


def test_a_late_line_that_uses_the_other_name_itself_is_refused_with_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"_id":1}\n' * 150 + '{"_id":2,"_source_id":3}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 151: has both '_id' and '_source_id'"):
        split_file(path)
    assert split_file(path, columns=["_id"])[150]["_source_id"] == 2


def test_columns_are_chosen_with_their_values_untouched(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1.10,"b":2,"c":{"d":1e2}}\n{"b":3}\n')
    assert read_lines(count_sources([str(path)], choice=ColumnChoice(columns=["c", "a"]))) == [
        b'{"c":{"d":1e2},"a":1.10,"_row":0,"_id":"0"}',
        b'{"_row":1,"_id":"1"}',
    ]


def test_a_batch_request_is_named_by_its_custom_id(tmp_path):
    path = tmp_path / "a.jsonl"
    request = {"custom_id": "r-1", "method": "POST", "url": "/v1/completions", "body": {}}
    path.write_text(json.dumps(request) + '\n{"custom_id": "alone"}\n')
    assert [row["_id"] for row in split_file(path)] == ["r-1", "1"]
    table = write_parquet(
        tmp_path / "a.parquet", **{name: [str(value)] for name, value in request.items()}
    )
    assert split_file(table)[0]["_id"] == "r-1"


def test_ids_are_text_and_a_missing_one_is_the_row_number(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", key=[10, None, 12], x=[1, 2, 3])
    assert [row["_id"] for row in split_file(path, id_column="key")] == ["10", "1", "12"]
    assert split_file(path, columns=["x"], id_column="key")[0] == {"x": 1, "_row": 0, "_id": "10"}
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"key":[1]}\n{"x":1}\n')
    assert [row["_id"] for row in split_file(lines, id_column="key")] == ["[1]", "1"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n')
    assert split_file(path) == [{"a": 1, "_row": 0, "_id": "0"}]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_lines_are_read(tmp_path, ending):
    data = b"".join(b'{"a":%d}\n' % number for number in range(5000))
    pack = gzip.compress if ending == "gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(pack(data[:30000]) + pack(data[30000:]))
    counted = count_sources([str(path)], choice=ColumnChoice())
    assert counted.rows == 5000
    assert [row["a"] for row in map(json.loads, read_lines(counted, range(4000, 4003)))] == [
        4000,
        4001,
        4002,
    ]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=rf"a\.jsonl\.{ending}: corrupt or truncated"):
        split_file(path)


def test_any_range_of_a_large_file_is_found(tmp_path, monkeypatch):
    from batchinfer.split import json_lines

    monkeypatch.setattr(json_lines, "_MARK_BYTES", 100)
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a":{number}}}\n' for number in range(300)))
    counted = count_sources([str(path), str(path)], choice=ColumnChoice())
    assert len(counted.files[0].marks) > 10
    for rows in (range(1), range(57, 99), range(299, 301), range(590, 600)):
        assert [json.loads(line)["a"] for line in read_lines(counted, rows)] == [
            row % 300 for row in rows
        ]


@pytest.mark.parametrize("mark", ["\ufeff", ""])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf16_is_refused_with_the_way_to_convert_it(tmp_path, encoding, mark):
    (tmp_path / "a.jsonl").write_bytes(f'{mark}{{"prompt": "x"}}\n'.encode(encoding))
    name = (encoding[:6] if mark else encoding).upper()
    with pytest.raises(InputError, match=f"starts as {name} text does") as caught:
        count_sources([str(tmp_path / "a.jsonl")], choice=ColumnChoice())
    assert f"iconv -f {name} -t UTF-8 a.jsonl" in caught.value.hint


def test_files_without_any_object_are_refused_before_anything_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('"one"\n' * 200)
    (tmp_path / "b.jsonl").write_text("{broken\n\n")
    with pytest.raises(InputError, match="no line is a JSON object") as caught:
        count_sources([str(tmp_path)], choice=ColumnChoice())
    assert "jq -c '{prompt: .}'" in caught.value.hint
    (tmp_path / "c.jsonl").write_text(json.dumps([{"a": 1}], indent=1)[1:])
    with pytest.raises(InputError, match="no line is a JSON object") as caught:
        count_sources([str(tmp_path / "c.jsonl")], choice=ColumnChoice())
    assert "jq -c ." in caught.value.hint
    (tmp_path / "c.jsonl").unlink()
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{}\n")
    assert count_sources([str(tmp_path)], choice=ColumnChoice()).rows == 202


def test_columns_of_bytes_are_named_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(sources.logger, "warning", lambda text, *values: said.append(text % values))
    images = pa.array([{"bytes": b"x", "path": "p"}])
    ids = pa.array([b"0" * 16], pa.binary(16)).cast(pa.uuid())
    kept = {"text": ["t"], "id": ids, "image": images, "raw": [b"x"], "all": [[b"x"]]}
    for name in ("1", "2"):
        write_parquet(tmp_path / f"{name}.parquet", **kept)
    count_sources([str(tmp_path)], choice=ColumnChoice())
    assert said == [
        "all, image, raw: these columns hold bytes, not text; in the rows they are base64"
    ]
    count_sources([str(tmp_path)], choice=ColumnChoice(columns=["text", "id"]))
    assert len(said) == 1


def test_a_json_array_is_refused_with_the_way_to_convert_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}]')
    with pytest.raises(InputError, match="is a JSON array") as caught:
        split_file(path)
    assert "jq" in caught.value.hint


# --------------------------------------------------------------------------- CSV


def test_csv_fields_stay_text_with_quotes_and_newlines(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffid,text\r\n007,"a ""b"",\nc\u2028"\r\n\r\n1.10,\r\n'.encode())
    assert split_file(path, id_column="id") == [
        {"id": "007", "text": 'a "b",\nc\u2028', "_row": 0, "_id": "007"},
        {"id": "1.10", "text": "", "_row": 1, "_id": "1.10"},
    ]
    tabs = tmp_path / "a.tsv"
    tabs.write_text("a\tb\n1,2\t3\n")
    assert split_file(tabs, columns=["a"]) == [{"a": "1,2", "_row": 0, "_id": "0"}]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"a,b\n1,2\n3\n", "record 2 has 1 field, expected the header's 2, with ',' between"),
        (b"a;b\n1;2\n\n3\n", "record 2 has 1 field, expected the header's 2, with ';' between"),
        (b"a\n1,2\n", "record 1 has 2 fields, expected the header's 1"),
        (b"a,b;c\n1,2;3\n", "',' and ';' each divide every record"),
        (b"a|b\tc\n1|2\t3\n", "tab and '|' each divide every record"),
        (b"a:b\n1:2\n3:4\n", "looks divided by ':'"),
        (b"a\x01b\n1\x012\n", "looks divided by '.x01'"),
        (b"sep=;\na;b\n", "first line names a delimiter"),
        ("a;b".encode("utf-16"), "starts as UTF-16 text does"),
        (b"a,b\n\x93\xe9\x94,1\n", "not UTF-8, but perhaps WINDOWS-1252"),
        (b"a,a\n1,2\n", "column 'a' is there twice"),
        (b"a\n\xff\n", "not UTF-8, but perhaps LATIN1"),
        (b'a\n"open\n', "corrupt or truncated"),
    ],
)
def test_a_csv_that_is_none_is_refused(tmp_path, data, what):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.csv: .*{what}"):
        split_file(path)


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a;b\n1,5;x\n2;y\n", ";"),
        ("a\tb\n1;5\tx,\n", "\t"),
        ("a|b\n1|x\n", "|"),
        ('"a;b",c\n"x;y",z\n', ","),
        ('a,"b;c"\n1,"2\n;;"\n', ","),
        ("a;b,c\n1;2,x\n1;2\n", ";"),  # the only one that fits every record
        ("a;b\n" + "x" * (1 << 18) + ";1\n", ";"),
        ("a;b\n" + "xyz;1\n" * (1 << 16), ";"),
        ("\ufeffa;b\r\n\r\n1;2\r\n", ";"),
    ],
)
def test_the_delimiter_of_a_csv_is_found(tmp_path, text, delimiter):
    path = tmp_path / "a.csv"
    path.write_text(text, newline="")
    (item,) = count_sources([str(path)], choice=ColumnChoice()).files
    assert (item.delimiter, len(item.columns)) == (delimiter, 2)


def test_a_csv_of_one_column_stays_one(tmp_path):
    path = tmp_path / "a.csv"
    for text in ('prompt\n"a, b"\nc; d\n', "is it: so?\nit: is\nno\n", "a-b c.d\n1-2 3.4\n"):
        path.write_text(text)
        assert len(count_sources([str(path)], choice=ColumnChoice()).columns) == 1


def test_a_delimiter_that_is_named_is_taken(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b;c\n1,2;3\n")
    for delimiter, row in ((",", {"a": "1", "b;c": "2;3"}), (";", {"a,b": "1,2", "c": "3"})):
        counted = count_sources([str(path)], choice=ColumnChoice(), delimiter=delimiter)
        assert read_rows(counted) == [row | {"_row": 0, "_id": "0"}]
    (tmp_path / "a.tsv").write_text("a,b\tc\n1,2\t3\n")  # its name tells
    assert split_file(tmp_path / "a.tsv")[0]["a,b"] == "1,2"
    (tmp_path / "x.tsv").mkdir()
    (tmp_path / "x.tsv" / "a.csv").write_text("a,b\tc\n1,2\t3\n")  # a folder's name does not
    with pytest.raises(InputError, match="each divide every record"):
        split_file(tmp_path / "x.tsv" / "a.csv")
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="--delimiter: no source is CSV"):
        count_sources([str(tmp_path / "b.jsonl")], choice=ColumnChoice(), delimiter=";")


def test_empty_lines_of_a_csv_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\na,b\n\n1,2\n\r\n3,4\n\n")
    counted = count_sources([str(path)], choice=ColumnChoice())
    assert (counted.rows, counted.blank_lines) == (2, 4)
    assert [row["b"] for row in read_rows(counted)] == ["2", "4"]


# --------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("a.jsonl", "parquet"),
        ("a.csv", "parquet"),
        ("a.parquet", "jsonl"),
        ("a.csv", "jsonl"),
        ("a.csv.gz", "jsonl"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_read_by_its_first_bytes(
    tmp_path, monkeypatch, name, holds
):
    said = []
    monkeypatch.setattr(sources.logger, "warning", lambda text, *values: said.append(text % values))
    if holds == "parquet":
        write_parquet(tmp_path / "made", n=[1, 2])
        data = (tmp_path / "made").read_bytes()
    else:
        data = b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n'
    folder = tmp_path / "data"
    folder.mkdir()
    for path in (folder / name, folder / f"b{name}"):
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    counted = count_sources([str(folder)], choice=ColumnChoice())
    assert [row["n"] for row in read_rows(counted)] == [1, 2, 1, 2]
    assert [source.format for source in counted.sources] == [holds]
    kind = name.split(".")[1]
    assert said == [
        f"{folder}/{name} and 1 more files: named as {kind}, but holds {holds}, and is read as that"
    ]


def test_a_source_with_one_file_of_lines_does_not_promise_its_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=[1])
    (tmp_path / "b.parquet").write_text('{"m": 2}\n')
    counted = count_sources([str(tmp_path)], choice=ColumnChoice())
    assert counted.sources[0].format == "jsonl"
    assert [item.format for item in counted.files] == ["parquet", "jsonl"]
    assert [row["_row"] for row in read_rows(counted)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "data", "what", "hint"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "holds gzip data, expected jsonl", "a.jsonl.gz"),
        ("a.csv", zstandard.compress(b"a,b"), "holds zstd data, expected csv", "a.csv.zst"),
        (
            "a.parquet",
            gzip.compress(b"{}", mtime=0),
            "holds gzip data, expected parquet",
            "unpack it",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b"PAR1", mtime=0),
            "holds parquet data, expected jsonl",
            "unpack it",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0),
            "holds gzip data",
            "unpack it",
        ),
        ("a.parquet", b"a,b\n1,2\n" * 9, "corrupt or truncated", ""),
        ("a.jsonl.gz", b"{}", "corrupt or truncated", ""),
    ],
)
def test_a_file_packed_otherwise_than_its_name_says_is_refused(tmp_path, name, data, what, hint):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=what) as caught:
        split_file(tmp_path / name)
    assert hint in caught.value.hint


def test_a_folder_gives_its_parquet_files_by_name_and_nothing_hidden(tmp_path):
    for name in ("b/2.parquet", "a/1.parquet", ".cache/x.parquet", "_temporary/y.parquet"):
        write_parquet(tmp_path / name, n=[name])
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "_SUCCESS").write_text("")
    counted = count_sources([str(tmp_path)], choice=ColumnChoice())
    assert [row["n"] for row in read_rows(counted)] == ["a/1.parquet", "b/2.parquet"]
    assert [file.url for file in counted.sources[0].files] == [
        f"{tmp_path}/a/1.parquet",
        f"{tmp_path}/b/2.parquet",
    ]


def test_files_that_are_links_are_files_as_in_the_cache_of_the_hub(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1f2e").write_text('{"n":1}\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").symlink_to("../blobs/1f2e")
    for argument in ("data", "data/a.jsonl", "data/*.jsonl", "**/*.jsonl"):
        assert split_file(tmp_path / argument)[0]["n"] == 1


def test_relative_paths_and_globs_stay_relative(tmp_path, monkeypatch):
    write_parquet(tmp_path / "data/x-1.parquet", n=[1])
    write_parquet(tmp_path / "data/x-2.parquet", n=[2])
    write_parquet(tmp_path / "data/y.parquet", n=[3])
    monkeypatch.chdir(tmp_path)
    for argument in ("data/x-*.parquet", "d*/x-?.parquet", "**/x-*.parquet"):
        counted = count_sources([argument], choice=ColumnChoice())
        assert [file.url for file in counted.sources[0].files] == [
            "data/x-1.parquet",
            "data/x-2.parquet",
        ]
    assert (
        count_sources(["data"], choice=ColumnChoice()).sources[0].files[0].url == "data/x-1.parquet"
    )
    with pytest.raises(InputError, match=r"z-\*: matches no file") as caught:
        count_sources(["data/z-*"], choice=ColumnChoice())
    assert "check the spelling" in caught.value.hint


def test_text_is_refused_with_the_command_that_takes_it_and_the_way_to_convert_it(tmp_path):
    (tmp_path / "questions.txt").write_text("What is it?\n")
    with pytest.raises(InputError, match="neither its name nor") as caught:
        count_sources([str(tmp_path / "questions.txt")], choice=ColumnChoice())
    assert "`batchinfer run` takes text" in caught.value.hint
    assert "jq -Rc '{prompt: .}'" in caught.value.hint


def test_a_pattern_over_several_formats_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=[1])
    (tmp_path / "a.csv").write_text("n\n1\n")
    with pytest.raises(InputError, match="expected files of one format"):
        count_sources([f"{tmp_path}/a.*"], choice=ColumnChoice())


def test_a_folder_of_several_formats_is_refused_but_for_what_is_no_data(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    write_parquet(tmp_path / "a.parquet", n=[1])
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "notes.json").write_text("{}")
    for _ in range(2):
        caplog.clear()
        with click.Context(click.Command("run")):  # what a second command finds is said again
            for _ in range(2):  # as `run` does, which says it once all the same
                assert count_sources([str(tmp_path)], choice=ColumnChoice()).rows == 1
        assert [(record.levelname, record.message) for record in caplog.records] == [
            ("WARNING", f"{tmp_path}: left out 1 .json file, {tmp_path}/notes.json first"),
            ("INFO", f"{tmp_path}: left out 1 other file, {tmp_path}/README.md first"),
        ]
    for name in ("b.jsonl", "b.csv.gz"):
        (tmp_path / name).write_text('{"n": 2}\n')
        with pytest.raises(InputError, match="expected files of one format") as caught:
            count_sources([str(tmp_path)], choice=ColumnChoice())
        assert name in caught.value.message
        assert f"{tmp_path}/**/*.parquet" in caught.value.hint
        assert count_sources([f"{tmp_path}/**/*.parquet"], choice=ColumnChoice()).rows == 1
        (tmp_path / name).unlink()


def test_a_url_that_lacks_a_slash_is_no_folder_here():
    for source in ("s3:/bucket/x.jsonl", "hf:datasets/org/name"):
        with pytest.raises(ConfigError, match="lacks a slash"):
            count_sources([source], choice=ColumnChoice())


def test_a_name_with_glob_characters_is_a_file_first(tmp_path):
    path = write_parquet(tmp_path / "a[1].parquet", n=[1])
    assert len(split_file(path)) == 1


def test_format_is_sniffed_where_the_name_does_not_tell(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=[1]).rename(tmp_path / "blob")
    assert split_file(tmp_path / "blob")[0]["n"] == 1
    (tmp_path / "lines").write_text('{"n": 2}\n')
    assert split_file(tmp_path / "lines")[0]["n"] == 2
    (tmp_path / "other").write_text("hello")
    with pytest.raises(InputError, match="neither its name nor its first bytes"):
        split_file(tmp_path / "other")


def test_rows_are_numbered_over_several_sources_of_several_formats(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=[0, 1])
    (tmp_path / "b.jsonl").write_text('{"n":2}\n{"m":3}')
    (tmp_path / "c.csv").write_text("n\n4\n")
    counted = count_sources(
        [str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.csv")], choice=ColumnChoice()
    )
    assert [row["_row"] for row in read_rows(counted)] == [0, 1, 2, 3, 4]
    assert counted.columns == ["n", "m"]
    assert [source.format for source in counted.sources] == ["parquet", "jsonl", "csv"]


def test_a_limit_leaves_later_files_uncounted(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=list(range(10)))
    (tmp_path / "b.parquet").write_bytes(b"never opened")
    counted = count_sources([str(tmp_path)], choice=ColumnChoice(), limit=7)
    assert counted.rows == 7
    assert [row["n"] for row in read_rows(counted)] == list(range(7))


def test_only_the_asked_columns_of_dotted_names_are_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", **{"a": [1], "a.b": [2], "c": [{"b": 3}]})
    assert split_file(path, columns=["a"]) == [{"a": 1, "_row": 0, "_id": "0"}]
    assert split_file(path, columns=["c", "a.b"]) == [
        {"c": {"b": 3}, "a.b": 2, "_row": 0, "_id": "0"}
    ]


def test_memory_urls_are_read():
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/lines/a.jsonl", b'{"a":1}\n')
    counted = count_sources(["memory://lines"], choice=ColumnChoice())
    assert read_rows(counted) == [{"a": 1, "_row": 0, "_id": "0"}]
    assert not counted.is_shared
    with pytest.raises(InputError, match="no such file, folder or bucket"):
        count_sources(["memory://other"], choice=ColumnChoice())


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["missing.parquet"], "no such file, folder or bucket"),
        (["empty"], "holds no file"),
        (["empty.jsonl"], "holds no rows"),
        (["none.parquet"], "holds no rows"),
        (["odd"], "holds no parquet, JSON Lines or CSV file"),
    ],
)
def test_nothing_to_split_is_refused(tmp_path, names, what):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/readme.txt").write_text("x")
    write_parquet(tmp_path / "none.parquet", n=pa.array([], pa.int64()))
    with pytest.raises(InputError, match=what) as caught:
        count_sources([str(tmp_path / name) for name in names], choice=ColumnChoice())
    assert names[0] in caught.value.message


@pytest.mark.parametrize("cut", ["tail", "head", "middle", "short", "footer"])
def test_a_damaged_parquet_is_named(tmp_path, cut):
    rng = np.random.default_rng(1)
    path = write_parquet(tmp_path / "bad.parquet", n=[rng.bytes(200).hex() for _ in range(2000)])
    data = bytearray(path.read_bytes())
    if cut == "tail":
        del data[-100:]
    elif cut == "head":
        data[:4] = b"XXXX"
    elif cut == "middle":
        data[1000:60000] = b"\xff" * 59000
    elif cut == "short":
        del data[3:]
    else:
        data[-8:-4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"bad\.parquet: corrupt or truncated"):
        split_file(path)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_missing_column_is_named_with_near_matches(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, conversation=["x"], model=["m"])
    else:
        path.write_text(
            '{"conversation":"x","model":"m"}\n' if kind == "jsonl" else "conversation,model\nx,m\n"
        )
    with pytest.raises(InputError, match=r"no column 'conversations'.*--columns") as caught:
        count_sources([str(path)], choice=ColumnChoice(columns=["model", "conversations"]))
    assert "did you mean conversation?" in caught.value.hint
    with pytest.raises(InputError, match=r"no column 'key'.*--id-column"):
        count_sources([str(path)], choice=ColumnChoice(id_column="key"))


def test_a_column_that_only_a_late_line_has_is_found(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n' * 500 + '{"late":2}\n')
    assert count_sources([str(path)], choice=ColumnChoice(columns=["late"])).columns == ["late"]


def test_a_column_that_one_of_the_files_lacks_is_refused_with_that_file(tmp_path):
    write_parquet(tmp_path / "1.parquet", a=[1], b=[1])
    write_parquet(tmp_path / "2.parquet", a=[1])
    assert count_sources([str(tmp_path)], choice=ColumnChoice()).columns == ["a", "b"]
    with pytest.raises(InputError, match=r"2\.parquet: has no column 'b'"):
        count_sources([str(tmp_path)], choice=ColumnChoice(columns=["b"]))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'a' is there twice"):
        split_file(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_file_that_changes_after_its_count_is_noticed(tmp_path, kind):
    path = tmp_path / f"a.{kind}"

    def write(count: int) -> None:
        if kind == "parquet":
            write_parquet(path, n=list(range(count)))
        else:
            path.write_text(
                "".join('{"n":1}\n' if kind == "jsonl" else "n\n" for _ in range(count + 1))
            )

    write(50)
    counted = count_sources([str(path)], choice=ColumnChoice())
    write(40)
    with pytest.raises(InputError, match="changed while it was being split"):
        read_lines(counted)


def test_an_unreadable_file_is_refused_as_such(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", n=[1])

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AccessDenied, match=r"a\.parquet: access refused"):
        count_sources([str(path)], choice=ColumnChoice())


@pytest.mark.parametrize(("url", "what"), [("gs://b/x.parquet", "network"), ("x.parquet", "disk")])
def test_a_source_that_cannot_be_read_now_says_what_to_look_at(url, what):
    with pytest.raises(StorageError, match="cannot be read") as caught, source_files.reading(url):
        raise OSError(5, "Input/output error")
    assert caught.value.hint == f"check the {what}, then run the same command again"


def test_a_web_server_that_fails_is_not_taken_for_a_wrong_name():
    server = WebServer()
    server.answers["/down.jsonl"] = plain(503)
    server.answers["/locked.jsonl"] = plain(403)
    try:
        for name, kind, what in (
            ("down", StorageError, "the server answered 503"),
            ("locked", AccessDenied, "refused access"),
            ("gone", InputError, "no such file"),
        ):
            with pytest.raises(kind, match=what):
                count_sources([f"{server.url}/{name}.jsonl"], choice=ColumnChoice())
    finally:
        server.close()
    with pytest.raises(StorageError, match="cannot be reached"):
        count_sources([f"{server.url}/down.jsonl"], choice=ColumnChoice())


def test_a_scheme_that_wants_more_than_a_name_is_refused():
    with pytest.raises(InputError, match="ftp://: no filesystem"):
        count_sources(["ftp://host/x"], choice=ColumnChoice())


def test_unknown_schemes_are_refused():
    with pytest.raises(InputError, match="nope://: no filesystem"):
        count_sources(["nope://x/y"], choice=ColumnChoice())
    with pytest.raises(InputError, match="not an address of a data set"):
        count_sources(["hf://models/org/name"], choice=ColumnChoice())


# --------------------------------------------------------------------------- other places


@pytest.mark.s3
def test_s3_files_folders_and_globs_are_read(s3_url, tmp_path):
    import boto3

    bucket = s3_url()
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for name in ("1", "2"):
        path = write_parquet(tmp_path / f"{name}.parquet", n=[int(name)] * 5, m=["x"] * 5)
        client.upload_file(str(path), bucket.removeprefix("s3://"), f"data/{name}.parquet")
    client.put_object(Bucket=bucket.removeprefix("s3://"), Key="a.jsonl", Body=b'{"n":3}\n')
    client.close()
    for argument in (f"{bucket}/data", f"{bucket}/data/", f"{bucket}/data/*.parquet"):
        counted = count_sources([argument], choice=ColumnChoice(columns=["n"]))
        assert [row["n"] for row in read_rows(counted)] == [1] * 5 + [2] * 5
        assert counted.sources[0].files[0].url == f"{bucket}/data/1.parquet"
    assert split_file_url(f"{bucket}/a.jsonl") == [{"n": 3, "_row": 0, "_id": "0"}]
    with pytest.raises(InputError, match="no such file, folder or bucket"):
        count_sources([f"{bucket}/nothing"], choice=ColumnChoice())
    with pytest.raises(InputError, match="no such file, folder or bucket"):
        count_sources(["s3://no-such-bucket-here/x.parquet"], choice=ColumnChoice())


@pytest.mark.s3
def test_r2_is_s3_that_refuses_to_go_to_aws(s3_url, monkeypatch):
    bucket = s3_url()
    store = open_store(bucket)
    for name, line in (("a", b'{"n":1}\n'), ("b", b'{"n":2}\n')):
        store.create(f"data/{name}.jsonl", line)
    url = f"{bucket}/data".replace("s3://", "r2://")
    for argument in (url, f"{url}/*.jsonl"):
        counted = count_sources([argument], choice=ColumnChoice())
        assert [row["n"] for row in read_rows(counted)] == [1, 2]
        assert counted.sources[0].files[0].url == f"{url}/a.jsonl"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(ConfigError, match="requests would go to AWS"):
        count_sources(["r2://another/b.jsonl"], choice=ColumnChoice())


def split_file_url(url: str) -> list[dict]:
    return read_rows(count_sources([url], choice=ColumnChoice()))


# It leaves as the command line does: pyarrow's threads now and then abort an orderly exit on a busy machine.
READ_HUB = """
import json, os, sys
from batchinfer.core.errors import BatchinferError
from batchinfer.split.sources import Oddities, ColumnChoice, count_sources
for url in sys.argv[1:]:
    try:
        counted = count_sources([url], choice=ColumnChoice())
        lines = b"".join(b.encode(0, b.num_rows) for b in counted.read(range(counted.rows), Oddities()))
        source = counted.sources[0]
        files = [file.url for file in source.files]
        print(json.dumps({"lines": lines.decode(), "revision": source.revision, "files": files}))
    except BatchinferError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def hub(tmp_path):
    """A Hub with one data set of each kind; `read(*urls, token="")` reads them one by one in a fresh process."""
    fake = FakeHub()
    write_parquet(tmp_path / "native/data/train-0.parquet", n=[1, 2])
    write_parquet(tmp_path / "native/data/train-1.parquet", n=[3])
    (tmp_path / "native/README.md").write_text("# data")
    write_parquet(tmp_path / "old/data/train-0.parquet", n=[0])
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text('{"n":8}\n')
    write_parquet(tmp_path / "converted/default/train/0000.parquet", n=[9])
    write_parquet(tmp_path / "several/one/train/0000.parquet", n=[1])
    write_parquet(tmp_path / "several/two/train/0000.parquet", n=[2])
    fake.add("org/native", "main", tmp_path / "native")
    fake.add("org/native", "v1", tmp_path / "old")
    fake.add("org/raw", "main", tmp_path / "raw")
    fake.add("org/raw", "refs/convert/parquet", tmp_path / "converted")
    fake.add("org/lines", "main", tmp_path / "raw")
    fake.add("org/several", "main", tmp_path / "raw")
    fake.add("org/several", "refs/convert/parquet", tmp_path / "several")
    fake.add("org/gated", "main", tmp_path / "native")
    fake.gated.add("org/gated")
    with fake.serving() as endpoint:

        def read(*urls: str, token: str = "") -> list[dict]:
            environment = {
                **os.environ,
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(tmp_path / "hf-home"),
                "HF_HUB_OFFLINE": "0",
                **({"HF_TOKEN": token} if token else {}),
            }
            done = subprocess.run(
                [sys.executable, "-c", READ_HUB, *urls],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            return list(map(json.loads, done.stdout.splitlines()[-len(urls) :]))

        fake.read = read
        yield fake


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_that_does_not_answer_is_said_with_a_way_round(tmp_path, offline):
    done = run_process(
        [
            "split",
            "hf://datasets/org/name@v1/data",
            "--output",
            f"{tmp_path}/job",
            "--num-chunks=1",
        ],
        environment={
            "HF_ENDPOINT": "http://127.0.0.1:1",
            "HF_HOME": str(tmp_path / "hf-home"),
            "HF_HUB_OFFLINE": offline,
        },
    )
    assert "hf download --repo-type dataset org/name --local-dir data" in done.stderr
    if offline == "1":
        assert done.status == 2
        assert "may not be asked, as HF_HUB_OFFLINE is set" in done.stderr
    else:
        assert done.status == 34
        assert "cannot be reached" in done.stderr
        assert "HTTPS_PROXY" in done.stderr
    assert not (tmp_path / "job").exists()


def numbers(result: dict) -> list[int]:
    assert "lines" in result, result
    return [json.loads(line)["n"] for line in result["lines"].splitlines()]


def test_hub_revision_is_resolved_once_and_recorded(hub):
    from fake_hub import commit_of

    [result] = hub.read("hf://datasets/org/native")
    commit = commit_of("org/native", "main")
    assert numbers(result) == [1, 2, 3]
    assert result["revision"] == commit
    assert result["files"][0] == f"hf://datasets/org/native@{commit}/data/train-0.parquet"
    after = [path for path, _ in hub.requests if "/revision/" not in path][1:]
    assert all("main" not in path for path in after), "something still followed the branch"
    others = hub.read(
        "hf://datasets/org/native@v1",
        f"hf://datasets/org/native@{commit}/data/train-1.parquet",
        "hf://datasets/org/native/data/train-*.parquet",
    )
    assert list(map(numbers, others)) == [[0], [3], [1, 2, 3]]


def test_hub_conversion_stands_in_for_missing_parquet(hub):
    from fake_hub import commit_of

    converted, *others, refused = hub.read(
        "hf://datasets/org/raw",
        "hf://datasets/org/raw/a.jsonl",
        "hf://datasets/org/lines",
        "hf://datasets/org/several@refs/convert/parquet/two",
        "hf://datasets/org/several",
    )
    assert numbers(converted) == [9]
    assert converted["revision"] == commit_of("org/raw", "refs/convert/parquet")
    assert list(map(numbers, others)) == [[8], [8], [2]]
    assert refused["error"] == "InputError"
    assert "2 configurations (one, two)" in refused["message"]


def test_hub_refusals_say_what_to_do(hub):
    repository, revision, file, refused = hub.read(
        "hf://datasets/org/nothing",
        "hf://datasets/org/native@nothing",
        "hf://datasets/org/native/nothing.parquet",
        "hf://datasets/org/gated",
    )
    assert "no such repository" in repository["message"]
    assert "no such revision" in revision["message"]
    assert "no such file" in file["message"]
    assert refused["error"] == "AccessDenied"
    assert "HF_TOKEN" in refused["hint"]
    [allowed] = hub.read("hf://datasets/org/gated", token=TOKEN)
    assert numbers(allowed) == [1, 2, 3]


def test_ids_that_are_not_ascii_stay_text(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", key=["é\n", "b"], map=[[("ü", "ä")], []])
    assert [row["_id"] for row in split_file(path, columns=["key"], id_column="key")] == [
        "é\n",
        "b",
    ]


# --------------------------------------------------------------------------- addresses


def test_file_urls_of_sources_are_percent_decoded(tmp_path):
    folder = tmp_path / "a b"
    write_parquet(folder / "z.parquet", a=[1])
    (folder / "x%20y.jsonl").write_text('{"a": 2}\n')
    base = f"file://{tmp_path}/a%20b"
    for url, rows in {
        f"{base}/z.parquet": [1],
        f"{base}/x%2520y.jsonl": [2],
        f"{base}/*.jsonl": [2],
        f"FILE://{tmp_path}/a%20b/z.parquet": [1],
    }.items():
        counted = count_sources([url], choice=ColumnChoice())
        assert [row["a"] for row in read_rows(counted)] == rows
    with pytest.raises(InputError, match="no such file"):
        count_sources([f"{base}/x%20y.jsonl"], choice=ColumnChoice())
    with pytest.raises(ConfigError, match="absolute path"):
        count_sources(["file://a/x.jsonl"], choice=ColumnChoice())


def test_a_glob_leaves_out_a_link_to_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "c.jsonl")
    counted = count_sources([f"{tmp_path}/*.jsonl"], choice=ColumnChoice())
    assert [file.found.url for file in counted.files] == [f"{tmp_path}/a.jsonl"]
    with pytest.raises(InputError, match="no such file"):
        count_sources([f"{tmp_path}/b.jsonl"], choice=ColumnChoice())


def test_a_secret_in_a_buckets_url_is_refused_and_not_repeated():
    for url in ("s3://AKIA1:SECRET@bucket/x.jsonl", "s3:/AKIA1:SECRET@bucket/*.parquet"):
        with pytest.raises(ConfigError) as caught:
            count_sources([url], choice=ColumnChoice())
        assert "SECRET" not in f"{caught.value.message} {caught.value.hint}"


def test_a_column_whose_name_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"café": ["a"], "text": ["x"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace("café".encode(), b"caf\xff\xfe"))
    with pytest.raises(InputError, match="the name of a column is not UTF-8"):
        count_sources([str(path)], choice=ColumnChoice(columns=None, id_column=""))
