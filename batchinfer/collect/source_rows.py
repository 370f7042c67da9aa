"""Decodes lines of the source to rows.

Numbers beyond the range of floats, very deep values, and texts with half a surrogate pair stay JSON text. Other numbers
with a fraction or an exponent become floats, which may round them. Of a repeated key, the last value counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.json_text import is_deep, read_object
from batchinfer.prompts.json_lines import ID_FIELD, ROW_FIELD

LINE = "\udc00"
"""Key of the text of a line that is no JSON object. No column has this name, because it is not valid Unicode."""

SourceRow = dict[str, Any]
"""Values of a row by column. A `msgspec.Raw` is JSON text. A line that is no JSON object becomes {LINE: its text}."""

_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def make_row_reader(
    columns: Sequence[str] | None, as_text: Container[str] = ()
) -> Callable[[bytes], SourceRow]:
    """Return a function that decodes one line.

    Args:
        columns: Columns to read; None reads all but `_row` and `_id`. Columns that a row lacks are absent.
        as_text: Columns whose values may be given as `msgspec.Raw`. Ignored if `columns` is None.
    """
    decode = _decode_all if columns is None else _make_decoder(columns, as_text)

    def read(line: bytes) -> SourceRow:
        try:
            line.decode()  # the decoder passes over texts that it need not read
            return decode(line)
        except _DECODE_ERRORS:
            pass  # a value needs `read_object`, or the line is no object
        row = read_object(line)
        if row is None:
            text = line.strip().decode("utf-8", "backslashreplace")
            return {LINE: text} if text else {}
        return _pick(row, columns)

    return read


def escape_surrogates(value: Any) -> Any:
    r"""Return a value with every surrogate that has no partner as an escape such as \ud800 in its text.

    In rows, only a `msgspec.Raw` has such a surrogate. A Raw that is nested too deep, or has
    a number beyond the range of floats, is returned unchanged.

    >>> escape_surrogates(msgspec.Raw(b'["half: \\ud800", 1]'))
    ['half: \\ud800', 1]
    """
    if not isinstance(value, msgspec.Raw) or is_deep(bytes(value)):
        return value
    try:
        return _escaped(json.loads(bytes(value)))
    except ValueError:
        return value


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(name): _escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the number is no float")
    return value


def _pick(row: SourceRow, columns: Sequence[str] | None) -> SourceRow:
    if columns is not None:
        return {name: row[name] for name in columns if name in row}
    row.pop(ROW_FIELD, None)
    row.pop(ID_FIELD, None)
    return row


def _decode_all(line: bytes) -> SourceRow:
    return _pick(_decode_object(line), None)


def _make_decoder(columns: Sequence[str], as_text: Container[str]) -> Callable[[bytes], SourceRow]:
    names = [f"c{index}" for index in range(len(columns))]
    kinds = [msgspec.Raw if column in as_text else Any for column in columns]
    try:
        struct = msgspec.defstruct(
            "Row",
            [(name, kind, msgspec.UNSET) for name, kind in zip(names, kinds, strict=True)],
            rename=dict(zip(names, columns, strict=True)),
            gc=False,
        )
    except ValueError:  # msgspec refuses names that JSON must escape, such as one with a quote
        return lambda line: _pick(_decode_object(line), columns)
    decode, values_of = codec.json_decoder(struct).decode, msgspec.structs.astuple

    def read(line: bytes) -> SourceRow:
        values = zip(columns, values_of(decode(line)), strict=True)
        return {name: value for name, value in values if value is not msgspec.UNSET}

    return read
