"""The bytes of a value of every Arrow type on its way through parquet into a line of a chunk.

Chunk files are compared by their sha256, so what is pinned here is the text itself, not what a JSON reader makes of it.
"""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_examples import EVERY_TYPE
from batchinfer.core.errors import InputError
from batchinfer.split.arrow_values import ColumnError, NullFloats, make_converter
from batchinfer.split.sources import ColumnChoice, Oddities, count_sources


def lines_of(path: Path) -> list[bytes]:
    """The lines that a parquet file becomes, without their newlines."""
    counted = count_sources([str(path)], choice=ColumnChoice())
    blocks = counted.read(range(counted.rows), Oddities())
    return b"".join(block.encode(0, block.num_rows) for block in blocks).split(b"\n")[:-1]


def texts_of(array: pa.Array, tmp_path: Path) -> list[str]:
    """The JSON text of each value of one column. Row groups of two rows cut the column into pieces."""
    path = tmp_path / "column.parquet"
    pq.write_table(pa.table({"c": array}), path, row_group_size=2)
    texts = []
    for row, line in enumerate(lines_of(path)):
        tail = f',"_row":{row},"_id":"{row}"}}'.encode()
        assert line.startswith(b'{"c":')
        assert line.endswith(tail)
        texts.append(line[len(b'{"c":') : -len(tail)].decode())
    return texts


@pytest.mark.parametrize(
    ("array", "texts"),
    [
        pytest.param(array, texts, id=f"{number}: {array.type}")
        for number, (array, texts) in enumerate(EVERY_TYPE)
    ],
)
def test_bytes_of_every_type(tmp_path, array, texts):
    assert texts_of(array, tmp_path) == texts


def test_bytes_of_a_whole_row_and_of_names_that_json_escapes(tmp_path):
    path = tmp_path / "row.parquet"
    table = {"a": [1], 'b "c"': ["\u2028"], "d.e": [None], "": [[]], "ü": [{"z": 1, "y": 2}]}
    pq.write_table(pa.table(table), path)
    assert [line.decode() for line in lines_of(path)] == [
        '{"a":1,"b \\"c\\"":"\u2028","d.e":null,"":[],"ü":{"z":1,"y":2},"_row":0,"_id":"0"}'
    ]


def test_bytes_do_not_depend_on_how_rows_fall_into_row_groups(tmp_path):
    arrays = {}
    for number, (array, _) in enumerate(EVERY_TYPE):
        rows = [row % len(array) for row in range(12)]
        arrays[f"c{number}"] = array.take(pa.array(rows)) if not _is_view(array) else None
    table = pa.table({name: array for name, array in arrays.items() if array is not None})
    found = []
    for size in (1, 5, 12):
        pq.write_table(table, tmp_path / f"{size}.parquet", row_group_size=size)
        found.append(lines_of(tmp_path / f"{size}.parquet"))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 12


def _is_view(array: pa.Array) -> bool:
    """Whether this version of pyarrow cannot pick rows of the array."""
    try:
        array.take(pa.array([0]))
    except pa.ArrowNotImplementedError:
        return True
    return False


def test_types_that_only_memory_holds_are_converted_too():
    def convert(array):
        return make_converter(array.type, NullFloats())(array)

    assert convert(pa.array([[1], None, [2, 3]], pa.list_view(pa.int8())).slice(1)) == [
        None,
        [2, 3],
    ]
    assert convert(pa.array([b"a", None], pa.binary_view())) == [b"a", None]
    assert convert(pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])) == ["a", "a", "b"]
    assert convert(pa.array([[1, 2], [3]]).slice(1)) == [[3]]
    assert convert(pa.array([1, 2, 3], pa.int16()).slice(1)) == [2, 3]
    value = uuid.uuid4()
    assert convert(pa.array([value.bytes, None], pa.uuid())) == [str(value), None]
    sliced = pa.array([[("a", 1)], None, [("b", 2)]], pa.map_(pa.string(), pa.int8())).slice(1)
    assert convert(sliced) == [None, {"b": 2}]
    assert convert(pa.array([{}, None], pa.struct([]))) == [{}, None]


@given(st.lists(st.floats(width=32), min_size=1))
@settings(max_examples=60, deadline=None)
def test_float32_reads_back_as_the_same_float32(values):
    nulls = NullFloats()
    array = pa.array(values, pa.float32())
    done = json.loads(json.dumps(make_converter(array.type, nulls)(array)))
    for value, text in zip(values, done, strict=True):
        assert text is None if not math.isfinite(value) else np.float32(text) == np.float32(value)
    assert nulls.count == sum(not math.isfinite(value) for value in values)


def test_floats_round_trip_and_what_is_no_number_becomes_a_counted_null(tmp_path):
    values = [0.1, 1e-300, 5e-324, 1.7976931348623157e308, -0.0, 123456789.123456789, 1e22]
    path = tmp_path / "f.parquet"
    columns = {
        "x": pa.array([*values, math.nan, math.inf, None]),
        "half": pa.array(np.array([1.5] * 9 + [np.inf], np.float16)),
        "inner": pa.array([{"y": [math.nan, 1.0]}] * 9 + [None]),
    }
    pq.write_table(pa.table(columns), path, row_group_size=3)
    counted = count_sources([str(path)], choice=ColumnChoice())
    nulls = Oddities()
    rows = []
    for block in counted.read(range(counted.rows), nulls):
        rows += [json.loads(line) for line in block.encode(0, block.num_rows).splitlines()]
    assert [row["x"] for row in rows] == [*values, None, None, None]
    assert math.copysign(1, rows[4]["x"]) == -1
    assert rows[0]["inner"] == {"y": [None, 1.0]}
    assert nulls.nulls == {"x": 2, "half": 1, "inner": 9}


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (pa.array([20_000_000], pa.date32()), "years 1 to 9999"),
        (pa.array([2**62], pa.timestamp("us")), "years 1 to 9999"),
        (pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int8())), "same key twice"),
    ],
    ids=["date", "timestamp", "map"],
)
def test_a_value_without_exact_form_is_refused_with_its_column(tmp_path, array, what):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"odd": array}), path)
    with pytest.raises(InputError, match=rf"x\.parquet: column 'odd': .*{what}") as caught:
        lines_of(path)
    assert "--columns" in caught.value.hint


def test_a_type_without_exact_form_is_refused_with_its_column():
    with pytest.raises(ColumnError, match="month_day_nano_interval"):
        make_converter(pa.month_day_nano_interval(), NullFloats())


def test_text_that_is_not_utf8_is_refused_with_its_column(tmp_path):
    array = pa.StringArray.from_buffers(
        1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")
    )
    path = tmp_path / "latin.parquet"
    pq.write_table(pa.table({"text": array}), path)
    with pytest.raises(InputError, match="column 'text': text that is not UTF-8"):
        lines_of(path)


@given(st.lists(st.none() | st.text(max_size=30), min_size=1))
@settings(max_examples=200, deadline=None)
def test_text_is_written_as_msgspec_writes_it_whatever_stands_beside_it(values):
    """The bytes of a row must not depend on how rows fall into batches."""
    for kind in (pa.string(), pa.large_string()):
        convert = make_converter(kind, NullFloats())
        array = pa.array([*values, "é", '"\\\n\t\r\u2028\x7f'], kind)
        for part in (array, array.slice(1), array.slice(0, 1)):
            assert msgspec.json.encode(convert(part)) == msgspec.json.encode(part.to_pylist())


def test_structs_of_flags_keep_their_values_nulls_and_slices():
    rows = [{"a": bool(n & 1), "b/c": bool(n & 2), 'd"': bool(n & 4)} for n in range(8)] * 3
    for extra in ([], [None], [{"a": None, "b/c": True, 'd"': False}]):
        array = pa.array([*rows, *extra])
        convert = make_converter(array.type, NullFloats())
        for part in (array, array.slice(3), array.slice(5, 7), array.slice(0, 0)):
            done = msgspec.json.decode(msgspec.json.encode(convert(part)))
            assert done == part.to_pylist()


def test_floats_whose_sum_overflows_are_no_infinities():
    nulls = NullFloats()
    array = pa.array([1.7e308, 1.7e308, None, -0.0])
    assert make_converter(array.type, nulls)(array) == array.to_pylist()
    assert make_converter(array.type, nulls)(array.slice(0, 2)) == [1.7e308, 1.7e308]
    assert nulls.count == 0
