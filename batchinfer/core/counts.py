"""What is counted of finished rows: one record of sums, from rows to chunks, markers, workers, status and report.

A further count is a field here, and what a finished row has of it (`ledger.checkpoints.count_rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Self

import msgspec

MAX_CODES = 50
OTHER = "other"
"""Name under which everything after the first MAX_CODES error codes, or finish reasons, is counted.

The limit is needed because an engine or a server may invent any number of codes.
"""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A number of rows, bytes or the like. Records that hold another number are refused on reading. The upper bound keeps
the sum of three such numbers within 64 bits."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over finished rows."""

    rows_ok: Count = 0
    rows_error: Count = 0
    rows_resumed: Count = 0
    """Number of these rows that were taken over from storage: from checkpoints, or from the output that is repaired."""
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """Number of those tokens of `prompt_tokens` that came from the prefix cache."""
    completion_tokens: Count = 0
    reasoning_tokens: Count = 0
    """Number of those tokens of `completion_tokens` that are reasoning."""
    errors: dict[str, Count] = {}
    """Number of error rows for each error code."""
    finish_reasons: dict[str, Count] = {}
    """Number of ok rows for each finish reason. Rows of a pooling model have no text, and so no reason for its end."""

    @property
    def rows_done(self) -> int:
        """Number of finished rows."""
        return self.rows_ok + self.rows_error

    def plus(self, other: Counts) -> Self:
        """Return this record with the sums of both."""
        sums = {}
        for name in Counts.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            sums[name] = _merged(mine, more) if isinstance(mine, dict) else mine + more
        return msgspec.structs.replace(self, **sums)


def most_common(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return codes with their counts, the commonest first."""
    return Counter(counts).most_common()


def _merged(before: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    total = Counter(before)
    for code, count in more.items():
        total[code if code in total or len(total) < MAX_CODES else OTHER] += count
    return dict(total)
