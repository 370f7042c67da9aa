"""Limits how deep JSON may be nested, and decodes rows with values that msgspec refuses. Pure.

Recursive functions, such as JSON decoders, fail at about 1000 levels. The exact number depends on their caller, so the
limit here is far lower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_DEPTH = 100
"""Largest number of arrays and objects that may be nested within each other."""

_decode = msgspec.json.Decoder().decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NOT_STRUCTURE = bytes(set(range(256)).difference(b'"[]{}'))
_SQUARE = bytes.maketrans(b"{}", b"[]")


def is_deep(data: bytes, limit: int = MAX_DEPTH) -> bool:
    """Return whether JSON is nested deeper than `limit`. Malformed JSON may count as deep.

    Whole lines of JSON Lines may follow each other in `data`.

    >>> is_deep(b"[[[]]]", 2), is_deep(b'[[], [], {"[[[": 1}]', 2)
    (True, False)
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    # Each step is one fast pass over all bytes. The first line removes escapes, and then all bytes but quotes and
    # brackets. The second line removes strings. Two adjacent quotes are a string without brackets, or the end of one
    # string and the start of the next; both can go.
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_SQUARE, _NOT_STRUCTURE)
    brackets = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"")  # removes the innermost level
        if not brackets:
            return False
    return bool(brackets)


def read_object(line: bytes) -> dict[str, Any] | None:
    r"""Decode a JSON object, such as a row of a source. Decimals are rounded to floats.

    A member stays JSON text (`msgspec.Raw`) if it makes the line deeper than MAX_DEPTH, or has a decimal beyond the
    range of floats, an integer of more than 4300 digits, NaN, an infinity, or a surrogate without a partner.

    Returns:
        The object; None if the line is not a JSON object in UTF-8.

    >>> read_object(b'{"a": 1}'), bytes(read_object(b'{"a": [1e400]}')["a"]), read_object(b"{a: 1}")
    ({'a': 1}, b'[1e400]', None)
    """
    if not is_deep(line):
        try:
            return _decode_object(line)
        except _DECODE_ERRORS:
            pass  # a member needs the slow way below, or the line is no object
    try:
        return {name: _value(text) for name, text in _members(line.decode())}
    except ValueError:
        return None


def raw_members(line: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the members of a JSON object as they are spelled, however deep they are; None for any other line."""
    try:
        line.decode()
        return _decode_members(line)
    except _DECODE_ERRORS:
        if not is_deep(line) or read_object(line) is None:
            return None
        return {name: msgspec.Raw(text.encode()) for name, text in _members(line.decode())}


def flatten_deep(line: bytes) -> bytes:
    """Replace each member that makes a JSON object deeper than MAX_DEPTH by its JSON text, a string.

    A line that is not deep, or not a JSON object, is returned unchanged.
    """
    if not is_deep(line):
        return line
    try:
        members = [(name, text.encode()) for name, text in _members(line.decode())]
    except ValueError:
        return line
    return msgspec.json.encode(
        {
            name: text.decode() if is_deep(text, MAX_DEPTH - 1) else msgspec.Raw(text)
            for name, text in members
        }
    )


def _value(text: str) -> Any:
    """Decode one member.

    Raises:
        ValueError: it is not JSON.
    """
    data = text.encode()
    if is_deep(data, MAX_DEPTH - 1):
        return msgspec.Raw(data)
    try:
        return _decode(data)
    except _DECODE_ERRORS:
        # Numbers stay text here, because Python refuses integers of more than 4300 digits.
        json.loads(text, parse_int=str, parse_float=str)
        return msgspec.Raw(data)


# --------------------------------------------------------------------------- the members of an object

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SPACE = re.compile(r"[ \t\r\n]*+")
_SCALAR = re.compile(rf"{_STRING}|[^\s\]\[,{{}}:\"]++", re.DOTALL)
_MARK = re.compile(rf"{_STRING}|[\[\]{{}}]", re.DOTALL)


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the JSON text of each member of an object. Whether the texts are JSON is not checked.

    Raises:
        ValueError: `text` is not an object.
    """
    place = _expect("{", text, 0)
    if text[place : place + 1] == "}":
        separator = "}"
        place += 1
    else:
        separator = ","
    while separator == ",":
        name = _SCALAR.match(text, place)
        if name is None or text[place] != '"':
            raise ValueError("expected the name of a member")
        start = _expect(":", text, name.end())
        end = _end_of_value(text, start)
        yield _name(name[0]), text[start:end]
        place = _space(text, end)
        separator = text[place : place + 1]
        place = _space(text, place + 1)
    if separator != "}" or _space(text, place) != len(text):
        raise ValueError("the object does not end where it should")


def _name(text: str) -> str:
    """Decode the name of a member. A surrogate without a partner becomes an escape."""
    name: str = json.loads(text)
    return name.encode("utf-8", "backslashreplace").decode()


def _space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _expect(mark: str, text: str, place: int) -> int:
    """Return the place after the mark and the spaces around it."""
    place = _space(text, place)
    if text[place : place + 1] != mark:
        raise ValueError(f"expected {mark}")
    return _space(text, place + 1)


def _end_of_value(text: str, start: int) -> int:
    if text[start : start + 1] not in ("[", "{"):
        scalar = _SCALAR.match(text, start)
        if scalar is None:
            raise ValueError("expected a value")
        return scalar.end()
    depth = 0
    for mark in _MARK.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    raise ValueError("a value does not end")
