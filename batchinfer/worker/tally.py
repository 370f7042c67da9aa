"""Sums over the rows that one start of a worker finished, and their addition to the sums of its earlier starts.

The number of codes, examples and minutes is limited, so a tally cannot grow without end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import msgspec

from batchinfer.core.records import ErrorExample, Failure, Minute, Worker
from batchinfer.ledger.checkpoints import FinishedRow

MAX_MINUTES = 1440
RECENT_MINUTES = 60
"""Number of minutes that are counted apart from the series before all of them are merged into it."""
MAX_CODES = 50
MAX_MESSAGE = 500
OTHER = "other"
"""Name under which everything after the first MAX_CODES error codes, or finish reasons, is counted."""


def num_reasoning_tokens(rows: Iterable[FinishedRow]) -> int:
    """Return the number of tokens of reasoning in the rows' answers."""
    return sum([row.reasoning_tokens for row in rows if row.reasoning_tokens])


class Tally:
    """Sums over finished rows: tokens, error codes, finish reasons, and counts by minute."""

    def __init__(self) -> None:
        self.rows = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.errors: Counter[str] = Counter()
        """Number of failed rows for each error code."""
        self.examples: dict[str, ErrorExample] = {}
        """First failed row of each error code."""
        self._finish_reasons: Counter[str] = Counter()
        self._series: list[Minute] = []
        self._recent: dict[int, list[int]] = {}

    @property
    def num_errors(self) -> int:
        """Number of failed rows."""
        return self.errors.total()

    def add(self, rows: list[FinishedRow], minute: int) -> None:
        """Count finished rows.

        Args:
            rows: The rows.
            minute: The time at which they finished, in whole minutes since 1970.
        """
        prompt_tokens = sum([row.prompt_tokens for row in rows])
        completion_tokens = sum([row.completion_tokens for row in rows])
        self.cached_tokens += sum([row.cached_tokens for row in rows])
        self.reasoning_tokens += num_reasoning_tokens(rows)
        self.rows += len(rows)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        failed = [row.code for row in rows if not row.ok]
        ok = [row for row in rows if row.ok] if failed else rows
        if len(self._recent) >= RECENT_MINUTES and minute not in self._recent:
            self._series = merge_minutes(self._series, self._recent)
            self._recent = {}
        point = self._recent.setdefault(minute, [0, 0, 0, 0])
        for place, number in enumerate((len(rows), prompt_tokens, completion_tokens, len(failed))):
            point[place] += number
        # Rows of a pooling model have no text, and so no reason for its end.
        _count(self._finish_reasons, [row.finish_reason for row in ok if row.finish_reason])
        _count(self.errors, failed)

    def note(self, chunk: str, line: int, failure: Failure) -> ErrorExample | None:
        """Keep a failed row as an example if it is the first with its error code.

        Returns the example; None if the row was not kept, also because there are MAX_CODES examples already.
        """
        if failure.code in self.examples or len(self.examples) >= MAX_CODES:
            return None
        message = failure.message[:MAX_MESSAGE]
        example = ErrorExample(chunk=chunk, line=line, message=message)
        self.examples[failure.code] = example
        return example

    def on_top_of(self, base: Worker) -> Worker:
        """Return a copy of `base`, the record of the earlier starts, with the sums of this tally added."""
        return msgspec.structs.replace(
            base,
            rows_done=base.rows_done + self.rows,
            rows_ok=base.rows_ok + self.rows - self.num_errors,
            rows_error=base.rows_error + self.num_errors,
            prompt_tokens=base.prompt_tokens + self.prompt_tokens,
            cached_tokens=base.cached_tokens + self.cached_tokens,
            completion_tokens=base.completion_tokens + self.completion_tokens,
            reasoning_tokens=(base.reasoning_tokens or 0) + self.reasoning_tokens or msgspec.UNSET,
            errors=_sum(base.errors, self.errors),
            examples=_first_examples(base.examples, self.examples),
            finish_reasons=_sum(base.finish_reasons, self._finish_reasons),
            minutes=merge_minutes(chain(base.minutes, self._series), self._recent),
        )


def merge_minutes(before: Iterable[Minute], now: dict[int, list[int]]) -> list[Minute]:
    """Merge the numbers of latest minutes (`now`) into a series of minutes (`before`).

    If the series gets longer than MAX_MINUTES, neighbouring points of its older half are joined in pairs. Pure.
    """
    recent = (
        Minute(
            minute=number,
            rows=rows,
            prompt_tokens=prompt,
            completion_tokens=completion,
            errors=errors,
        )
        for number, (rows, prompt, completion, errors) in now.items()
    )
    points: dict[int, Minute] = {}
    for point in chain(before, recent):
        old = points.get(point.minute)
        points[point.minute] = point if old is None else _join(old, point)
    series = [points[number] for number in sorted(points)]
    while len(series) > MAX_MINUTES:
        half = len(series) // 2
        series = [_join(*series[i : i + 2]) for i in range(0, half - 1, 2)] + series[
            half - half % 2 :
        ]
    return series


def _join(first: Minute, second: Minute) -> Minute:
    return Minute(
        minute=first.minute,
        rows=first.rows + second.rows,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        errors=first.errors + second.errors,
        length=max(first.length, second.minute + second.length - first.minute),
    )


def _first_examples(
    before: dict[str, ErrorExample], now: dict[str, ErrorExample]
) -> dict[str, ErrorExample]:
    new = {code: example for code, example in now.items() if code not in before}
    return dict(list((before | new).items())[:MAX_CODES])


def _count(counter: Counter[str], codes: list[str]) -> None:
    """Add the codes to the counter. After MAX_CODES different codes, every new code counts as OTHER.

    The limit is needed because an engine or a server may invent any number of codes.
    """
    for code, count in Counter(codes).items():
        counter[code if code in counter or len(counter) < MAX_CODES else OTHER] += count


def _sum(before: dict[str, int], now: Counter[str]) -> dict[str, int]:
    total = Counter(before)
    for code, count in now.items():
        total[code if code in total or len(total) < MAX_CODES else OTHER] += count
    return dict(total)
