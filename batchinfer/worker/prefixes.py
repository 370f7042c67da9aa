"""An order of rows in which those whose prompts begin alike run side by side, so that a prefix cache helps.

Rows wait until there are so many of them, and leave sorted by their tokens: neighbours then share the longest prefix
that they can, and of a prefix and its extension the shorter comes first. Outputs keep their own order, and answers
do not depend on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from batchinfer.core.records import Request

T = TypeVar("T")


def prefix_key(request: Request) -> bytes:
    """Bytes whose order puts requests with a common prefix next to each other.

    Any order of the tokens does, so each counts as its four bytes, and comparing is comparing memory. A request that
    cannot be put so has the empty key: for a better order no worker ends.
    """
    try:
        if request.token_ids is not None:
            return array("I", request.token_ids).tobytes()
        if request.text is not None:
            return request.text.encode("utf-8", "surrogatepass")
        return msgspec.json.encode(request.messages)
    except (OverflowError, RecursionError, TypeError, ValueError):
        return b""


class PrefixWindow(Generic[T]):
    """Collects up to `size` rows and gives them back in order of their prefixes. Size 0 keeps the order."""

    def __init__(self, size: int, request_of: Callable[[T], Request]) -> None:
        self.size = size
        self._request_of = request_of
        self._rows: list[T] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether it has all the rows that it wants."""
        return len(self._rows) >= self.size

    def extend(self, rows: Iterable[T]) -> None:
        """Put rows in."""
        self._rows.extend(rows)

    def release(self) -> list[T]:
        """Take all rows out, in order."""
        rows, self._rows = self._rows, []
        if self.size:
            rows.sort(key=lambda row: prefix_key(self._request_of(row)))
        return rows

    def keep(self, is_wanted: Callable[[T], bool]) -> None:
        """Drop the rows that are not wanted any more."""
        self._rows = [row for row in self._rows if is_wanted(row)]
