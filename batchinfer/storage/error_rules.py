"""How a table says what becomes of other packages' errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from batchinfer.core.errors import BatchinferError


class Rule(NamedTuple):
    """Our error for some of theirs. Words in braces in text and hint are replaced."""

    names: str
    """What an error must have one of, with spaces in between: classes of errors, statuses, codes of a server."""
    kind: type[BatchinferError]
    text: str
    hint: str = ""


def by_rules(
    rules: Iterable[Rule], facts: set[str], subject: str, **words: Any
) -> BatchinferError | None:
    """Return the error that the first rule for one of the facts makes, whose message begins with the subject."""
    for names, kind, text, hint in rules:
        if not facts.isdisjoint(names.split()):
            return kind(f"{subject}: {text.format(**words)}", hint=hint.format(**words))
    return None
