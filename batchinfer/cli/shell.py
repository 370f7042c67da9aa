"""Words of a command line, written so that bash reads them as they are."""

from __future__ import annotations

import shlex

from batchinfer.cli.values import FromFile


def quote(text: str) -> str:
    """Quote a text as one word for bash.

    Control characters are written as escapes, because they could move the cursor of a terminal.
    """
    if all(letter.isprintable() or letter == "\n" for letter in text):
        return shlex.quote(text)
    letters = (
        letter if letter.isprintable() and letter not in "\\'" else f"\\U{ord(letter):08x}"
        for letter in text
    )
    return f"$'{''.join(letters)}'"


def in_bash(word: str | FromFile) -> str:
    """Write a word of a command line for bash. A file's text becomes ``<(printf …)``, which bash turns into a file."""
    if isinstance(word, FromFile):
        return f"{word.prefix}<(printf %s {quote(word.text)})"
    return quote(word)
