"""Limits how deep JSON may be nested, and decodes rows with numbers that msgspec refuses. Pure.

Recursive functions, such as JSON decoders, fail at about 1000 levels. The exact number depends on their caller, so the
limit here is far lower.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_DEPTH = 100
"""Largest number of arrays and objects that may be nested within each other."""

_decode = msgspec.json.Decoder().decode
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


def raw_members(line: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the members of a JSON object as they are spelled; None for any other line, or one that is deep."""
    try:
        line.decode()
        return None if is_deep(line) else _decode_members(line)
    except _DECODE_ERRORS:
        return None


def read_object(line: bytes) -> dict[str, Any] | None:
    r"""Decode a JSON object, such as a row of a source. Decimals are rounded to floats.

    A member stays JSON text (`msgspec.Raw`) if it has a decimal beyond the range of floats, or an integer of more than
    4300 digits.

    Returns:
        The object; None if the line is not a JSON object in UTF-8, or is nested deeper than MAX_DEPTH.

    >>> read_object(b'{"a": 1}'), bytes(read_object(b'{"a": [1e400]}')["a"]), read_object(b"{a: 1}")
    ({'a': 1}, b'[1e400]', None)
    """
    members = raw_members(line)
    return None if members is None else {name: _value(text) for name, text in members.items()}


def _value(text: msgspec.Raw) -> Any:
    try:
        return _decode(text)
    except _DECODE_ERRORS:
        return text
