"""Values of the sources are those of the rows, whatever their types and spellings."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arrow_examples import EVERY_TYPE
from batchinfer.core.errors import InputError
from batchinfer.prompts.json_lines import decode_object
from batchinfer.prompts.types import RowProblem
from batchinfer.split.parquet_rows import _form
from batchinfer.split.sources import count_sources


def lines_of(*sources: Any, **options: Any) -> list[bytes]:
    """The lines of the rows of some sources."""
    blocks = count_sources([str(source) for source in sources], **options).blocks()
    return b"".join(block.lines for block in blocks).split(b"\n")[:-1]


TEXTS = (
    *(decimal.Decimal, bytes, uuid.UUID),
    *(dt.datetime, dt.date, dt.time, dt.timedelta),
)


def value_of(text: Any, like: Any) -> Any:
    """What a value in a row means, if the source's value is of the type of `like`; see docs/format.md."""
    match like:
        case float() if not math.isfinite(like):
            return like if text is None else text
        case dict():
            return {name: value_of(text[name], like[name]) for name in like} if text else text
        case tuple():
            return value_of(text["key"], like[0]), value_of(text["value"], like[1])
        case list():
            return [value_of(*pair) for pair in zip(text, like, strict=True)]
    kind = next((each for each in TEXTS if isinstance(like, each)), None)
    return text if kind is None else msgspec.convert(text, kind)


@pytest.mark.parametrize(
    "array", [pytest.param(each, id=f"{i}: {each.type}") for i, each in enumerate(EVERY_TYPE)]
)
def test_every_type_keeps_its_values(tmp_path: Path, array: pa.Array) -> None:
    path = tmp_path / "column.parquet"
    pq.write_table(pa.table({"c": array}), path, row_group_size=2)
    expected = pq.read_table(path).column("c").to_pylist()
    rows = [json.loads(line) for line in lines_of(path)]
    assert [row["_row"] for row in rows] == list(range(len(expected)))
    found = [value_of(row["c"], like) for row, like in zip(rows, expected, strict=True)]
    assert repr(found) == repr(expected) if "nan" in repr(expected) else found == expected


def test_text_of_parquet_that_is_no_utf8_is_a_broken_line(tmp_path: Path) -> None:
    values = [b"ok", b"\xff bad", "\ufffd".encode(), None]
    texts = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"c": texts}), tmp_path / "x.parquet")
    assert lines_of(tmp_path)[1] == b'{"c":"\xff bad","_row":1,"_id":"1"}'
    assert sum(block.num_broken for block in count_sources([str(tmp_path)]).blocks()) == 1


def test_a_struct_with_two_fields_of_one_name_loses_none(tmp_path: Path) -> None:
    ones, threes = pa.array([1]), pa.array([3])
    pairs = pa.StructArray.from_arrays([ones, threes], names=["a", "a"])
    pq.write_table(pa.table({"pair": pairs}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"column 'pair' holds struct.* there twice") as caught:
        lines_of(tmp_path)
    assert "--columns" in caught.value.hint


def test_a_date_that_cannot_be_written_is_refused_with_its_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": pa.array([0, 2**31 - 1], pa.date32())}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="rows 0 to 1 hold dates or times out of range") as caught:
        lines_of(tmp_path)
    assert "--columns" in caught.value.hint


def test_a_type_without_a_form_is_refused_with_its_column() -> None:
    for kind in (pa.month_day_nano_interval(), pa.dense_union([pa.field("a", pa.int8())])):
        with pytest.raises(InputError, match=r"a\.parquet: column 'odd' holds") as caught:
            _form(pa.struct([("in", pa.list_(kind))]), "a.parquet: column 'odd'")
        assert "--columns" in caught.value.hint


def test_columns_are_taken_by_name_even_with_dots_and_quotes(tmp_path: Path) -> None:
    columns = {"a": [{"b": 1}], "a.b": [2], 'c "d"': [[]], "": ["e"], "*": [3], "^a$": [4]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert lines_of(tmp_path) == [
        b'{"a":{"b":1},"a.b":2,"c \\"d\\"":[],"":"e","*":3,"^a$":4,"_row":0,"_id":"0"}'
    ]
    assert lines_of(tmp_path, columns=["", "a.b"]) == [b'{"":"e","a.b":2,"_row":0,"_id":"0"}']


ODD = [
    ('{"a": 1.50, "b": "\\u00e9"}', {"a": 1.5, "b": "é"}),
    ('{"a":"\u2028\x85"}', {"a": "\u2028\x85"}),
    ("{ }", {}),
    ('{"a":123456789012345678901234567890}\r', {"a": 123456789012345678901234567890}),
    ('{"a":1e999}', {"a": "1e999"}),
    ('{"a":' + "[" * 100 + "]" * 100 + "}", None),
    ('{"a":' + "[" * 3000 + "]" * 3000 + "}", None),
    ('{"a":1,"a":2}', {"a": 2}),
    ('{"a":NaN,"b":-Infinity}', None),
    ('{"a":"\\ud800"}', None),
    ("", None),
    ("  ", None),
    ("{", None),
    ("[1]", None),
    ('"text"', None),
    ('{"a":1} x', None),
]


def test_json_lines_keep_their_bytes_and_what_is_broken_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(line.encode() for line, _ in ODD) + b'\n{"a":"\xff"}\n\xff')
    lines = lines_of(path)
    assert len(lines) == len(ODD) + 2
    for row, (line, (text, expected)) in enumerate(zip(lines, ODD, strict=False)):
        if expected is None:
            assert line == text.encode()
            continue
        body = text.strip("\r")[:-1].encode()
        assert line.startswith(body)
        assert line.removeprefix(body).lstrip(b",") == b'"_row":%d,"_id":"%d"}' % (row, row)
        assert decode_object(line) == expected | {"_row": row, "_id": str(row)}
    for line in (
        *lines[-2:],
        *(line for line, (_, value) in zip(lines, ODD, strict=False) if value is None),
    ):
        with pytest.raises(RowProblem):
            decode_object(line)


def test_chosen_columns_of_json_lines_keep_their_spelling(tmp_path: Path) -> None:
    lines = ['{"a": 1.50, "b": 2, "_id": 3}', '{"b": 1e999, "a": [[1e-5]]}', '{"b":1}', "{"]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert lines_of(tmp_path, columns=["a", "b"]) == [
        b'{"a":1.50,"b":2,"_row":0,"_id":"0"}',
        b'{"a":[[1e-5]],"b":1e999,"_row":1,"_id":"1"}',
        b'{"b":1,"_row":2,"_id":"2"}',
        b"{",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_the_id_column_names_rows_as_text(tmp_path: Path, kind: str) -> None:
    rows = [{"id": "a\u2028", "n": 7}, {"id": "😀", "n": 8}]
    if kind == "jsonl":
        lines = [json.dumps(row) for row in rows] + ['{"id": null}', '{"id": {"x": 1.50}}']
        (tmp_path / "x.jsonl").write_text("\n".join(lines))
        more = ["2", '{"x": 1.50}']
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([*rows, {"n": 9}]), tmp_path / "x.parquet")
        more = ["2"]
    else:
        (tmp_path / "x.csv").write_text("id,n\na\u2028,7\n😀,8\n")
        more = []
    assert [json.loads(line)["_id"] for line in lines_of(tmp_path)] == ["a\u2028", "😀", *more]
    named = [json.loads(line)["_id"] for line in lines_of(tmp_path, id_column="n")]
    assert named[:2] == ["7", "8"]
    assert json.loads(lines_of(tmp_path, id_column="_row")[1])["_id"] == "1"
    kept = [json.loads(line) for line in lines_of(tmp_path, columns=["n"])]
    assert set(kept[0]) == {"n", "_row", "_id"}
    assert kept[1]["_id"] == "😀"


def test_times_name_rows_by_the_texts_that_they_have_in_rows(tmp_path: Path) -> None:
    now = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    columns = [now, now.replace(tzinfo=None), now.time(), now.date(), dt.timedelta(seconds=1.5)]
    table = pa.table({str(number): [each, None] for number, each in enumerate(columns)})
    pq.write_table(table, tmp_path / "x.parquet")
    for name in table.column_names:
        first, last = map(json.loads, lines_of(tmp_path, id_column=name))
        assert (first["_id"], last["_id"]) == (first[name], "1")


def test_the_custom_id_names_a_batch_request(tmp_path: Path) -> None:
    request = {"custom_id": "r1", "method": "POST", "url": "/v1/completions", "body": {}, "id": 5}
    (tmp_path / "x.jsonl").write_text(json.dumps(request))
    assert json.loads(lines_of(tmp_path)[0])["_id"] == "r1"


def test_csv_values_are_text_with_quotes_newlines_and_other_delimiters(tmp_path: Path) -> None:
    text = '\ufeffa,"b ""c"""\n007,"x,\ny"\n\n,"\u2028"\n'
    (tmp_path / "x.csv").write_text(text)
    expected = [{"a": "007", 'b "c"': "x,\ny"}, {"a": "", 'b "c"': "\u2028"}]
    own = [{"_row": row, "_id": str(row)} for row in range(2)]
    assert [json.loads(line) for line in lines_of(tmp_path)] == [
        a | b for a, b in zip(expected, own, strict=True)
    ]
    (tmp_path / "x.csv").rename(tmp_path / "y.tsv")
    (tmp_path / "y.tsv").write_text("a\tb\n1,2\t3\n")
    assert json.loads(lines_of(tmp_path)[0])["a"] == "1,2"
    (tmp_path / "y.tsv").write_text("a|b\n1,2|3\n")
    assert json.loads(lines_of(tmp_path, delimiter="|")[0])["b"] == "3"


def test_each_line_of_a_text_is_a_row_but_for_blank_ones(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffé\u2028\r\n\n last".encode())
    assert [json.loads(line)["prompt"] for line in lines_of(tmp_path)] == ["é\u2028", " last"]
