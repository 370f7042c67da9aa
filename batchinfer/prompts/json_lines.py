"""Decodes the lines of a chunk to Python values, and says of a line that cannot be decoded what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.json_text import MAX_DEPTH, is_deep, read_object
from batchinfer.core.row_codes import Code
from batchinfer.prompts.types import RowError, Unfit

ROW_FIELD = "_row"
ID_FIELD = "_id"

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a line that holds a JSON object.

    Members with a number that is out of range are given as their JSON text.

    Raises:
        RowError: the line is not a JSON object, or is nested too deep; the message says what is wrong.
    """
    if is_deep(data):
        message = f"nested deeper than {MAX_DEPTH} levels, or cut short, expected a JSON object"
        raise RowError(Code.INVALID_JSON, message)
    try:
        return _decode_object(data)
    except (ValueError, RecursionError) as error:
        is_readable = isinstance(error, msgspec.ValidationError)  # no object, or such a number
        members = read_object(data) if is_readable else None
        if members is None:
            found = str(error) if data.strip() else "blank line"
            message = f"{found}, expected a JSON object in UTF-8"
            raise RowError(Code.INVALID_JSON, message) from error
    return {name: bytes(x).decode() if type(x) is msgspec.Raw else x for name, x in members.items()}


def decode_text(text: str) -> Any:
    """Return the value that a text of JSON holds.

    Raises:
        Unfit: the text is no JSON, or is nested too deep.
    """
    data = text.encode(errors="replace")
    if is_deep(data, MAX_DEPTH // 2):
        raise Unfit(f"JSON nested deeper than {MAX_DEPTH // 2} levels")
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"not JSON ({error})") from error


def shown(value: Any) -> str:
    """Return a value for a message, cut to about 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def as_id(value: Any) -> str:
    """Return an id as text: a string as it is, any other value as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def column(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row.

    Raises:
        RowError: the row lacks it. The message lists up to 20 of the row's columns.
    """
    if name not in columns:
        known = ", ".join(list(columns)[:20]) or "none"
        message = f"column {name!r} is not in the row (it has: {known}){near(name, columns)}"
        raise RowError(Code.MISSING_COLUMN, message)
    return columns[name]


@contextmanager
def reading(subject: str, code: Code | None = Code.INVALID_COLUMN) -> Iterator[None]:
    """Turn Unfit, which names no column, into the error of a bad row; or of an option if there is no code."""
    try:
        yield
    except Unfit as error:
        text = f"{subject}: {error}"
        raise (RowError(code, text) if code else ConfigError(text)) from error
