"""Depth of JSON, and rows that are hard to decode."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchinfer.core.json_text import MAX_DEPTH, is_deep, read_object

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(value=JSON_VALUES, limit=st.integers(0, 6), is_escaped=st.booleans())
@example(value="{", limit=0, is_escaped=False)
def test_depth_is_that_of_the_decoded_value(value, limit, is_escaped):
    text = json.dumps(value, ensure_ascii=is_escaped)
    assert is_deep(text.encode(errors="replace"), limit) == (depth_of(value) > limit)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 1_000_000])
def test_brackets_within_texts_do_not_count(depth):
    assert not is_deep(json.dumps({"a": "[{" * depth + '\\"\\' + "]" * depth}).encode())
    assert is_deep(b"[" * depth + b"]" * depth) == (depth > MAX_DEPTH)


@given(row=st.dictionaries(st.text(), JSON_VALUES))
def test_plain_rows_are_decoded_as_json(row):
    assert read_object(msgspec.json.encode(row)) == msgspec.json.decode(msgspec.json.encode(row))


@pytest.mark.parametrize("text", ["1e400", "-1e400", "[1, 1e999]", "9" * 5000])
def test_a_number_that_python_cannot_hold_stays_text_and_costs_no_other(text):
    line = f' {{"a": "x{{\\"", "hard" :{text} ,"b":[1, "]"],"c":null}} \n'
    row = read_object(line.encode())
    assert bytes(row.pop("hard")).decode() == text
    assert row == {"a": 'x{"', "b": [1, "]"], "c": None}


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"1", b"{", b"{}}", b"{a: 1}", b'{"a" 1}', b'{"a": }', b'{"a": 1,}'),
        *(b'{"a": tru}', b'{"a": 01}', b'{"a": 1e400} x', b'{"a": 1e400 2}', b'{"a": "\\ud800}'),
        *(b'{"a": 1e400, 1: 2}', b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": {"\\udfff": 1}}'),
        *(b'{"a": ' + b"[" * 1000, b'{"deep": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"a": "\xff"}'),
    ],
    ids=lambda line: line[:18],
)
def test_a_line_that_is_no_object_is_none(line):
    assert read_object(line) is None
