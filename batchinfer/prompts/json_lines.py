"""Chunk lines are decoded to Python values; a line that is no row gets an error that says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from batchinfer.core.errors import near
from batchinfer.prompts.types import Code, Draft, RowProblem

ROW_FIELD = "_row"
ID_FIELD = "_id"

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.encode

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode one line.

    Raises:
        RowProblem: the line is not a JSON object; the message says what it is.
    """
    try:
        return _decode_object(data)
    except DECODE_ERRORS as error:
        raise explain(data, error) from error


def projection(
    columns: Collection[str], *, lazy: Collection[str] = ()
) -> Callable[[bytes], tuple[Any, ...]]:
    """Return a decoder that reads only these columns. It gives a tuple in their order, with UNSET for absent ones.

    Fast path for the bar "a third of bare msgspec" (docs/performance.md): rows are often much larger than the columns
    that a prompt needs, and the decoder skips the other columns. If a column named in `lazy` holds a list, its items
    stay undecoded (msgspec.Raw).
    """
    decode = _struct_decoder(columns, ())
    decode_lazily = _struct_decoder(columns, lazy)
    astuple = msgspec.structs.astuple

    def read(data: bytes) -> tuple[Any, ...]:
        try:
            return astuple(decode_lazily(data))
        except DECODE_ERRORS:
            pass  # the line is damaged, or a lazy column holds no list
        try:
            return astuple(decode(data))
        except DECODE_ERRORS as error:
            raise explain(data, error) from error

    return read


def _struct_decoder(columns: Collection[str], lazy: Collection[str]) -> Callable[[bytes], Any]:
    names = [f"c{index}" for index in range(len(columns))]
    kinds = [list[msgspec.Raw] if column in lazy else Any for column in columns]
    struct = msgspec.defstruct(
        "Row",
        [(name, kind, msgspec.UNSET) for name, kind in zip(names, kinds, strict=True)],
        rename=dict(zip(names, columns, strict=True)),
        gc=False,
    )
    return msgspec.json.Decoder(struct).decode


def decode_item(item: msgspec.Raw, line: bytes) -> Any:
    """Decode an item of a lazy column.

    Raises:
        RowProblem: the item, and so the line, is not JSON.
    """
    try:
        return _decode(item)
    except DECODE_ERRORS as error:
        raise explain(line, error) from error


def explain(data: bytes, error: Exception) -> RowProblem:
    """Say why a line could not be decoded."""
    stripped = data.strip()
    if not stripped:
        return RowProblem(Code.INVALID_JSON, "blank line, expected a JSON object")
    if isinstance(error, UnicodeDecodeError):
        return RowProblem(
            Code.INVALID_TEXT, f"byte {error.start} is not UTF-8, expected UTF-8 text"
        )
    if isinstance(error, RecursionError):
        return RowProblem(Code.INVALID_JSON, "JSON is nested too deep to be read")
    # msgspec reports a lone surrogate as malformed JSON. The standard library reads it, so a line that
    # json.loads accepts here has either a lone surrogate or the wrong type.
    try:
        value = json.loads(stripped)
    except UnicodeDecodeError as undecodable:
        return RowProblem(
            Code.INVALID_TEXT, f"byte {undecodable.start} is not UTF-8, expected UTF-8 text"
        )
    except (ValueError, RecursionError) as malformed:
        return RowProblem(Code.INVALID_JSON, f"not JSON: {malformed}")
    if _has_lone_surrogate(value):
        return RowProblem(
            Code.INVALID_TEXT,
            "a \\ud800 to \\udfff escape without its partner, expected Unicode text",
        )
    if not isinstance(value, dict):
        return RowProblem(
            Code.NOT_AN_OBJECT, f"a JSON {json_type(value)}, expected an object with the columns"
        )
    return RowProblem(Code.INVALID_JSON, f"not JSON: {error}")


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


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
    """Check that a line's own `_row`, if it has one, equals the row number that follows from its place.

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
    """Make the error of an absent column. The message names the columns of the row, and the nearest one."""
    columns = [key for key in decode_object(data) if key not in {ROW_FIELD, ID_FIELD}]
    known = ", ".join(columns[:20]) or "none"
    return RowProblem(
        Code.MISSING_COLUMN,
        f"column {name!r} is not in the row (it has: {known}){near(name, columns)}",
    )


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
