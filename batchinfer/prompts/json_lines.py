"""Decodes the lines of a chunk to Python values, and says of a line that cannot be decoded what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import near
from batchinfer.core.json_text import flatten_deep
from batchinfer.prompts.types import Code, Draft, RowProblem

ROW_FIELD = "_row"
ID_FIELD = "_id"

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.encode

_UNFIT_FIELD = re.compile('[\\x00-\\x1f"\\\\]')
"""Characters in a column's name that msgspec does not accept in the name of a struct's field."""

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a line that holds a JSON object. Members that are nested too deep are given as their JSON text.

    Raises:
        RowProblem: the line is not a JSON object; the message says what is wrong.
    """
    try:
        return _decode_object(flatten_deep(data))
    except DECODE_ERRORS as error:
        raise explain(data, error) from error


def projection(
    columns: Collection[str], *, lazy: Collection[str] = ()
) -> Callable[[bytes], tuple[Any, ...]]:
    """Return a function that decodes only these columns of a line.

    The function returns a tuple with the columns' values in the order of `columns`; an absent column is UNSET. If every
    column named in `lazy` holds a list, the items of these lists may stay undecoded (msgspec.Raw).

    This is a fast path for the bar "a third of bare msgspec" (docs/performance.md): rows are often much larger than the
    columns that a prompt needs.
    """
    if any(_UNFIT_FIELD.search(column) for column in columns):
        return lambda data: _select(decode_object(data), columns)
    decode = _struct_decoder(tuple(columns), frozenset())
    decode_lazily = _struct_decoder(tuple(columns), frozenset(lazy))
    astuple = msgspec.structs.astuple

    def read(data: bytes) -> tuple[Any, ...]:
        try:
            return astuple(decode_lazily(data))
        except DECODE_ERRORS:
            pass  # the line is damaged or deep, or a lazy column holds no list
        try:
            return astuple(decode(flatten_deep(data)))
        except DECODE_ERRORS as error:
            raise explain(data, error) from error

    return read


def _select(row: dict[str, Any], columns: Collection[str]) -> tuple[Any, ...]:
    return tuple(row.get(column, msgspec.UNSET) for column in columns)


@lru_cache(maxsize=8)
def _struct_decoder(columns: tuple[str, ...], lazy: frozenset[str]) -> Callable[[bytes], Any]:
    names = [f"c{index}" for index in range(len(columns))]
    kinds = [list[msgspec.Raw] if column in lazy else Any for column in columns]
    struct = msgspec.defstruct(
        "Row",
        [(name, kind, msgspec.UNSET) for name, kind in zip(names, kinds, strict=True)],
        rename=dict(zip(names, columns, strict=True)),
        gc=False,
    )
    decode = codec.json_decoder(struct).decode

    def decode_text(data: bytes) -> Any:
        data.decode()  # msgspec does not check texts that it passes over
        return decode(data)

    return decode_text


def decode_item(item: msgspec.Raw, line: bytes) -> Any:
    """Decode an item of a lazy column.

    Raises:
        RowProblem: the item is not JSON. The message is about its whole `line`.
    """
    try:
        return _decode(item)
    except DECODE_ERRORS as error:
        raise explain(line, error) from error


def explain(data: bytes, error: Exception) -> RowProblem:
    """Return the error for a line that could not be decoded. `error` is what the decoder raised."""
    stripped = data.strip()
    if not stripped:
        return RowProblem(Code.INVALID_JSON, "blank line, expected a JSON object")
    if isinstance(error, UnicodeDecodeError):
        return RowProblem(
            Code.INVALID_TEXT, f"byte {error.start} is not UTF-8, expected UTF-8 text"
        )
    if isinstance(error, RecursionError):
        return RowProblem(Code.INVALID_JSON, "JSON is nested too deep to be read")
    # msgspec refuses a lone surrogate as malformed JSON, but the standard library accepts it. A line that json.loads
    # reads here is therefore, as a rule, a line with a lone surrogate or a JSON value that is not an object.
    try:
        value = json.loads(stripped)
    except UnicodeDecodeError as undecodable:
        return RowProblem(
            Code.INVALID_TEXT, f"byte {undecodable.start} is not UTF-8, expected UTF-8 text"
        )
    except (ValueError, RecursionError) as malformed:
        return RowProblem(Code.INVALID_JSON, f"not JSON: {malformed}")
    if has_lone_surrogate(value):
        return RowProblem(
            Code.INVALID_TEXT,
            "a \\ud800 to \\udfff escape without its partner, expected Unicode text",
        )
    if not isinstance(value, dict):
        return RowProblem(
            Code.NOT_AN_OBJECT, f"a JSON {json_type(value)}, expected an object with the columns"
        )
    return RowProblem(Code.INVALID_JSON, f"not JSON: {error}")


def has_lone_surrogate(value: Any) -> bool:
    """Whether a decoded value has a surrogate without its partner, which UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def type_of(values: Mapping[str, Any], name: str) -> str:
    """Name the JSON type of an object's field for a message, or say that it is missing.

    >>> type_of({"a": [1]}, "a"), type_of({}, "a")
    ('a JSON array', 'missing')
    """
    return f"a JSON {json_type(values[name])}" if name in values else "missing"


def json_type(value: Any) -> str:
    """Name a decoded value's JSON type.

    >>> json_type([1]), json_type(None)
    ('array', 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def check_place(draft: Draft, row: Any) -> None:
    """Check the field `_row` of a line, if the line has it, against the row number computed from the line's place.

    Args:
        draft: The row; `draft.row` is the number computed from the line's place in the chunk.
        row: Value of the line's `_row`; UNSET or None if it has none.

    Raises:
        RowProblem: the numbers differ.
    """
    if row is not msgspec.UNSET and row is not None and row != draft.row:
        raise RowProblem(
            Code.ROW_MISMATCH,
            f"{ROW_FIELD} is {_short(row)}, expected {draft.row} from the line's place: lines were "
            "added, removed or moved since the chunk was written",
        )


def as_id(value: Any) -> str:
    """Return an id as text: a string as it is, any other value as JSON."""
    return value if isinstance(value, str) else _encode(value).decode()


def missing_column(name: str, data: bytes) -> RowProblem:
    """Return the error for a column that a row lacks. Its message lists up to 20 of the row's columns."""
    columns = [key for key in decode_object(data) if key not in {ROW_FIELD, ID_FIELD}]
    known = ", ".join(columns[:20]) or "none"
    return RowProblem(
        Code.MISSING_COLUMN,
        f"column {name!r} is not in the row (it has: {known}){near(name, columns)}",
    )


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
