"""Makes texts safe to show, because anybody with access to a bucket may have written what is read from it. Pure.

A terminal obeys control characters: they move the cursor, change the window's title, or reorder what is on a line. And
a URL may hold a password. `batchinfer.cli` passes messages, log lines, and the JSON on stdout through this module.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from batchinfer.core.redaction import redact

T = TypeVar("T")

_UNSAFE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # ASCII controls except tab and newline, then the C1 controls
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069"  # bidirectional controls
    "\\u2028\\u2029\\ud800-\\udfff]"  # line separators; surrogates, which UTF-8 cannot encode
)
_NEXT_LINE = re.compile(r"\n(?=[^ \n])")


def printable(text: str) -> str:
    r"""Mask secrets in URLs, and write control and similar characters as escapes, such as \x1b. Tabs and newlines stay.

    >>> printable("name\x1b[2J\u202etxt of http://me:secret@host\n")
    'name\\x1b[2J\\u202etxt of http://…@host\n'
    """
    return without_controls(redact(text))


def without_controls(text: str) -> str:
    r"""Write control and similar characters as escapes. Parts of a text can be passed one after the other.

    >>> without_controls("a\x1b[2Jb\n")
    'a\\x1b[2Jb\n'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""Make a text printable, and replace its newlines by their escapes, too.

    >>> one_line("w0\nw1 is done")
    'w0\\nw1 is done'
    """
    return printable(text).replace("\n", "\\n")


def one_entry(text: str) -> str:
    r"""Make a text printable, and indent its lines after the first, so that none looks like an entry of its own.

    >>> one_entry("row 3 failed: no\n12:00:00 INFO all is well")
    'row 3 failed: no\n  12:00:00 INFO all is well'
    """
    return _NEXT_LINE.sub("\n  ", printable(text))


def printable_values(value: Any) -> Any:
    """Convert a result to plain dicts, lists and values in which every text is printable, for JSON on stdout."""
    import msgspec  # not at the top, so that `batchinfer --help` answers at once

    return _clean(msgspec.to_builtins(value))


def printable_record(record: T) -> T:
    """Return a copy of a record in which every text is printable and on one line, for a table."""
    import msgspec

    from batchinfer.core import codec

    return codec.convert(_clean(msgspec.to_builtins(record), one_line), type(record))


def _clean(value: Any, show: Any = printable) -> Any:
    if isinstance(value, str):
        return show(value)
    if isinstance(value, dict):
        return {_clean(key, show): _clean(part, show) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part, show) for part in value]
    return value
