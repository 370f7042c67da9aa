"""Decodes the lines of a chunk to Python values, and says of a line that cannot be decoded what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from batchinfer.core.errors import near
from batchinfer.core.json_text import MAX_DEPTH, flatten_deep, is_deep, read_object
from batchinfer.core.row_codes import Code
from batchinfer.prompts.types import RowProblem

ROW_FIELD = "_row"
ID_FIELD = "_id"

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode

_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a line that holds a JSON object.

    Members that are nested too deep are given as their JSON text; so are all with numbers that no reader takes, if the
    line has one.

    Raises:
        RowProblem: the line is not a JSON object; the message says what is wrong.
    """
    try:
        return _decode_object(flatten_deep(data))
    except msgspec.ValidationError as error:  # no object, or a number out of range
        members = read_object(data)
        if members is None:
            raise _explain(data, error) from error
        return {
            name: bytes(value).decode() if type(value) is msgspec.Raw else value
            for name, value in members.items()
        }
    except _DECODE_ERRORS as error:
        raise _explain(data, error) from error


def _explain(data: bytes, error: Exception) -> RowProblem:
    """Return the error for a line that could not be decoded. `error` is what the decoder raised."""
    return RowProblem(Code.INVALID_JSON, _complaint(data.strip(), error))


def _complaint(line: bytes, error: Exception) -> str:
    if not line:
        return "blank line, expected a JSON object"
    if isinstance(error, RecursionError):
        return "JSON is nested too deep to be read"
    # msgspec refuses a lone surrogate as malformed JSON, but the standard library accepts it. A line that json.loads
    # reads here is therefore, as a rule, a line with a lone surrogate or a JSON value that is not an object.
    try:
        value = json.loads(line)
    except UnicodeDecodeError as undecodable:
        return f"byte {undecodable.start} is not UTF-8, expected UTF-8 text"
    except (ValueError, RecursionError) as malformed:
        return f"not JSON: {malformed}"
    if not isinstance(value, dict):
        return f"a JSON {json_type(value)}, expected an object with the columns"
    if has_lone_surrogate(value):
        return "a \\ud800 to \\udfff escape without its partner, expected Unicode text"
    return f"not JSON: {error}"


def has_lone_surrogate(value: Any) -> bool:
    """Whether a decoded value has a surrogate without its partner, which UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def decode_text(text: str) -> Any:
    """Return the value that a text of JSON holds.

    Raises:
        ValueError: the text is no JSON, is nested too deep, or holds what is no Unicode text.
    """
    if is_deep(text.encode(errors="replace"), MAX_DEPTH // 2):
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH // 2} levels")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if has_lone_surrogate(value):
        raise ValueError("a \\ud800 to \\udfff escape without its partner, expected Unicode text")
    return value


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
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def shown(value: Any, limit: int = 60) -> str:
    """Return a value for a message, cut to about `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def check_place(row: Any, expected: int) -> None:
    """Check the field `_row` of a line, if the line has it, against the row number computed from the line's place.

    Raises:
        RowProblem: the numbers differ.
    """
    if row is not None and row != expected:
        raise RowProblem(
            Code.ROW_MISMATCH,
            f"{ROW_FIELD} is {shown(row)}, expected {expected} from the line's place: lines were "
            "added, removed or moved since the chunk was written",
        )


def as_id(value: Any) -> str:
    """Return an id as text: a string as it is, any other value as JSON."""
    return value if isinstance(value, str) else _encode(value).decode()


def column(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row.

    Raises:
        RowProblem: the row lacks it. The message lists up to 20 of the row's columns.
    """
    try:
        return columns[name]
    except KeyError:
        known = ", ".join(list(columns)[:20]) or "none"
        raise RowProblem(
            Code.MISSING_COLUMN,
            f"column {name!r} is not in the row (it has: {known}){near(name, columns)}",
        ) from None


def invalid_column(name: str, problem: object) -> RowProblem:
    """Return the error for a column whose value cannot become what an option asks for."""
    return RowProblem(Code.INVALID_COLUMN, f"column {name!r}: {problem}")
