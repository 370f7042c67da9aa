"""Values of the sources are those of the rows, whatever their types and spellings."""

import datetime as dt
import decimal
import json
import math
import uuid
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import InputError
from batchinfer.prompts.json_lines import decode_object
from batchinfer.prompts.types import RowError
from batchinfer.split.parquet_rows import _form
from batchinfer.split.sources import count_sources


def lines_of(*sources: Any, **options: Any) -> list[bytes]:
    """The lines of the rows of some sources."""
    blocks = count_sources([str(source) for source in sources], **options).blocks()
    return b"".join(block.lines for block in blocks).split(b"\n")[:-1]


def rows_of(*sources: Any, **options: Any) -> list[dict[str, Any]]:
    return list(map(json.loads, lines_of(*sources, **options)))


D = decimal.Decimal
TEXTS = (D, bytes, uuid.UUID, dt.datetime, dt.date, dt.time, dt.timedelta)
UUIDS = pa.array([uuid.UUID(int=1).bytes, uuid.UUID(int=2**127).bytes], pa.uuid())
ZONES = {"us": "UTC", "ms": "Europe/Paris", "ns": "America/St_Johns", "s": "+05:30"}
PLAIN = [
    pa.array([True, None, False]),
    pa.array([None, None], pa.null()),
    pa.array([2**63 - 1, -(2**63), None, 2**53 + 1]),
    pa.array([2**64 - 1, None, 2**63], pa.uint64()),
    pa.array([0.1, 1.0, -0.0, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 123456789.125]),
    pa.array([0.1, 3.4028235e38, 1.5, None], pa.float32()),
    pa.array(np.array([1.5, 65504, -0.0], np.float16)),
    pa.array([math.nan, 1.0, math.inf, -math.inf]),
    pa.array([D("12345678901234567890.123456789"), D("0E-9"), None, D("-1E-9")]),
    pa.array([D(10) ** 60], pa.decimal256(76, 0)),
    pa.array(["", None, 'a"b\\c/d', "\u2028\u2029\x85", "\x00\x1f\x7f", "\b\t\n\f\r", "é😀<&>"]),
    *(pa.array(["é", None, "x" * 100_000], kind) for kind in (pa.large_string(), pa.string_view())),
    pa.array(["b", "a", None, "b", "\u2028"]).dictionary_encode(),
    pa.array([b"\x00\xff", b"", None, b"abc", b"\xfb\xff\xfe"]),
    *(
        pa.array([b"ab", None], each)
        for each in (pa.binary(2), pa.large_binary(), pa.binary_view())
    ),
    UUIDS,
    pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
    *(pa.array([0, None, 86399], pa.time32(unit)) for unit in ("s", "ms")),
    *(pa.array([0, None, 1000], pa.time64(unit)) for unit in ("us", "ns")),
    *(pa.array([-1000, None, 1_500_001_000], pa.timestamp(unit)) for unit in ZONES),
    *(pa.array([-1000, None, 1_500_001_000], pa.timestamp(*each)) for each in ZONES.items()),
    *(pa.array([-1000, None, 1_500_001_000], pa.duration(unit)) for unit in ZONES),
]
NESTED = [
    pa.array([[1, None], [], None, [2, 65535]], pa.list_(pa.uint16())),
    pa.array([[["a"], []], None, [None]]),
    pa.array([[1], None, [-(2**31), 3]], pa.large_list(pa.int32())),
    pa.array([[0.1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)),
    pa.array([[b"\xff", None], None]),
    pa.array([[math.nan, 1.0], [math.inf]]),
    pa.array(
        [{"x": -128, "d": dt.date(1, 2, 3)}, None], pa.struct({"x": pa.int8(), "d": pa.date32()})
    ),
    pa.array([{"bytes": b"\xff", "*": b"\xff"}, None, {"bytes": None, "*": None}]),
    pa.array([[{"a/b": [{"c": b"\xff", "text": "a\u2028"}, None]}, None], []]),
    pa.array([{'quote " and \\': 1, "line\nbreak": "x"}]),
    pa.array([[("k", 1), ("k", None)], None, []], pa.map_(pa.string(), pa.int64())),
    pa.array([[(dt.date(2024, 2, 29), b"\xff")]], pa.map_(pa.date32(), pa.binary())),
    pa.array(
        [[[("k", [D("1.50")])]]], pa.list_(pa.map_(pa.string(), pa.list_(pa.decimal128(5, 2))))
    ),
    pa.array([{"at": 1000}, None], pa.struct({"at": pa.timestamp("ns", "UTC")})),
    pa.ListArray.from_arrays([0, 2], UUIDS),
    pa.ListArray.from_arrays([0, 2, 2, 3], pa.array(["a", "b", "c"]).dictionary_encode()),
]


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
    kind = next((each for each in TEXTS if isinstance(like, each)), type(like))
    return msgspec.convert(text, kind)


@pytest.mark.parametrize(
    "array", [pytest.param(each, id=f"{i}: {each.type}") for i, each in enumerate(PLAIN + NESTED)]
)
def test_every_type_keeps_its_values(tmp_path, array):
    path = tmp_path / "column.parquet"
    pq.write_table(pa.table({"c": array}), path, row_group_size=2)
    expected = pq.read_table(path).column("c").to_pylist()
    rows = rows_of(path)
    assert [row["_row"] for row in rows] == list(range(len(expected)))
    found = [value_of(row["c"], like) for row, like in zip(rows, expected, strict=True)]
    assert repr(found) == repr(expected) if "nan" in repr(expected) else found == expected


def test_text_of_parquet_that_is_no_utf8_is_a_broken_line(tmp_path):
    values = [b"ok", b"\xff bad", "\ufffd".encode(), None]
    texts = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"c": texts}), tmp_path / "x.parquet")
    assert lines_of(tmp_path)[1] == b'{"c":"\xff bad","_row":1,"_id":"1"}'


def test_dates_out_of_range_are_refused(tmp_path):
    pq.write_table(pa.table({"c": pa.array([0, 2**31 - 1], pa.date32())}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="rows 0 to 1 hold dates or times out of range"):
        lines_of(tmp_path)


def test_times_outside_of_a_day_and_too_long_durations_are_no_other_values(tmp_path):
    times = pa.array([[86_400_000, -1, 1]], pa.list_(pa.time32("ms")))
    pq.write_table(pa.table({"c": times}), tmp_path / "x.parquet")
    found = rows_of(tmp_path)[0]["c"]
    assert found == ["86400000000000 ns", "-1000000 ns", "00:00:00.001"]
    pq.write_table(pa.table({"c": pa.array([2**62], pa.duration("s"))}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="out of bounds"):
        rows_of(tmp_path)


TWICE = pa.struct([("a", pa.int8()), ("a", pa.int8())])


@pytest.mark.parametrize(
    "kind", [pa.month_day_nano_interval(), pa.dense_union([pa.field("a", pa.int8())]), TWICE]
)
def test_a_type_without_a_form_is_refused_with_its_column(kind):
    with pytest.raises(InputError, match=r"a\.parquet: column 'odd' holds") as caught:
        _form(pa.struct([("in", pa.list_(kind))]), "a.parquet: column 'odd'")
    assert "--columns" in caught.value.hint


def test_columns_are_taken_by_name_even_with_dots_and_quotes(tmp_path):
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
    ("{", None),
    ("[1]", None),
    ('{"a":1} x', None),
    ('{"a":"\udcff"}', None),
    ("\udcff", None),
]


def test_json_lines_keep_their_bytes_and_what_is_broken_is_copied(tmp_path):
    texts = [text.encode(errors="surrogateescape") for text, _ in ODD]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(texts))
    found = zip(lines_of(tmp_path), texts, [expected for _, expected in ODD], strict=True)
    for row, (line, text, expected) in enumerate(found):
        if expected is None:
            assert line == text
            with pytest.raises(RowError):
                decode_object(line)
            continue
        body = text.strip(b"\r")[:-1]
        assert line.startswith(body)
        assert line.removeprefix(body).lstrip(b",") == b'"_row":%d,"_id":"%d"}' % (row, row)
        assert decode_object(line) == expected | {"_row": row, "_id": str(row)}


def test_chosen_columns_of_json_lines_keep_their_spelling(tmp_path):
    lines = ['{"a": 1.50, "b": 2, "_id": 3}', '{"b": 1e999, "a": [[1e-5]]}', '{"b":1}', "{"]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert lines_of(tmp_path, columns=["a", "b"]) == [
        b'{"a":1.50,"b":2,"_row":0,"_id":"0"}',
        b'{"a":[[1e-5]],"b":1e999,"_row":1,"_id":"1"}',
        b'{"b":1,"_row":2,"_id":"2"}',
        b"{",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_the_id_column_names_rows_as_text(tmp_path, kind):
    rows, more = [{"id": "a\u2028", "n": 7}, {"id": "😀", "n": 8}], ["2"]
    if kind == "jsonl":
        lines = [json.dumps(row) for row in rows] + ['{"id": null}', '{"id": {"x": 1.50}}']
        (tmp_path / "x.jsonl").write_text("\n".join(lines))
        more.append('{"x": 1.50}')
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([*rows, {"n": 9}]), tmp_path / "x.parquet")
    else:
        (tmp_path / "x.csv").write_text("id,n\na\u2028,7\n😀,8\n,9\n")
        more = [""]
    ids = ["a\u2028", "😀", *more]
    for options, expected in (
        ({}, ids),
        ({"id_column": "n"}, ["7", "8"]),
        ({"id_column": "_row"}, ["0", "1"]),
        ({"columns": ["n"]}, ids),
    ):
        found = rows_of(tmp_path, **options)
        assert [row["_id"] for row in found][: len(expected)] == expected
    assert set(found[0]) == {"n", "_row", "_id"}


def test_times_and_nested_values_name_rows_by_the_texts_that_they_have_in_rows(tmp_path):
    now = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    columns = [now, now.replace(tzinfo=None), now.time(), now.date(), dt.timedelta(seconds=1.5)]
    columns += [{"x": 1.5, "é": 'a"\u2028'}, [[now]]]
    table = pa.table({str(number): [each, None] for number, each in enumerate(columns)})
    pq.write_table(table, tmp_path / "x.parquet")
    for name in table.column_names:
        first, last = rows_of(tmp_path, id_column=name)
        texts = (first[name], json.dumps(first[name], ensure_ascii=False, separators=(",", ":")))
        assert (first["_id"] in texts, last["_id"]) == (True, "1")


def test_csv_values_are_text_with_quotes_newlines_and_other_delimiters(tmp_path):
    (tmp_path / "x.csv").write_text('\ufeffa,"b ""c"""\n007,"x,\ny"\n\n,"\u2028"\n')
    assert rows_of(tmp_path) == [
        {"a": "007", 'b "c"': "x,\ny", "_row": 0, "_id": "0"},
        {"a": "", 'b "c"': "\u2028", "_row": 1, "_id": "1"},
    ]
    for text, options in (("a\tb\n1,2\t3\n", {}), ("a|b\n1,2|3\n", {"delimiter": "|"})):
        (tmp_path / "y.tsv").write_text(text)
        [row] = rows_of(tmp_path / "y.tsv", **options)
        assert (row["a"], row["b"]) == ("1,2", "3")


def test_each_line_of_a_text_is_a_row_but_for_blank_ones(tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffé\u2028\r\n\n last".encode())
    assert [row["prompt"] for row in rows_of(tmp_path)] == ["é\u2028", " last"]
