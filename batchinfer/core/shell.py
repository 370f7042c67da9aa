"""Words of a command line, written so that bash reads them as they are."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class FromFile(NamedTuple):
    """A word of a command line that stands for a file with this text."""

    text: str
    prefix: str = ""
    """Characters before the file's name, such as "@"."""


def quote(text: str) -> str:
    r"""Quote a text as one word for bash.

    Control characters are written as escapes, because they could move the cursor of a terminal. An escape names a byte
    of UTF-8, because bash turns one that names a character into that character only if its locale is UTF-8.

    >>> print(quote("it's"), quote("a\u3000b"))
    'it'"'"'s' $'a\xe3\x80\x80b'
    """
    if all(letter.isprintable() or letter == "\n" for letter in text):
        return shlex.quote(text)
    letters = (
        letter if letter.isprintable() and letter not in "\\'" else _escaped(letter)
        for letter in text
    )
    return f"$'{''.join(letters)}'"


def _escaped(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))


def in_bash(word: str | FromFile) -> str:
    """Write a word of a command line for bash. A file's text becomes ``<(printf …)``, which bash turns into a file."""
    if isinstance(word, FromFile):
        return f"{word.prefix}<(printf %s {quote(word.text)})"
    return quote(word)
