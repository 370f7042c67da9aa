"""The sums over a start's rows are exact, and cost no more on its hundredth day than on its second."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from batchinfer.core.records import Minute
from batchinfer.ledger.checkpoints import FinishedRow
from batchinfer.worker import tally
from batchinfer.worker.chunk import RowCounts
from batchinfer.worker.tally import MAX_MINUTES, Tally
from fakes import worker_record

ROW = FinishedRow(line=0, ok=True, output=msgspec.Raw(b"{}"), prompt_tokens=2, completion_tokens=3)
DAY = 1440


def minutes_of(days: int, base_minutes: list[Minute]) -> tuple[Tally, list[Minute]]:
    """A start of so many days, with a row in each minute, on top of an earlier start's series."""
    counted = Tally()
    first = base_minutes[-1].minute if base_minutes else 0
    for minute in range(days * DAY):
        counted.add([ROW], first + minute)
    return counted, counted.on_top_of(worker_record(minutes=base_minutes)).minutes


def test_a_long_start_is_not_merged_from_its_first_minute_at_each_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot is made every two seconds, between two rounds of the engine."""
    counted, _ = minutes_of(30, [])
    joined: list[int] = []
    join = tally._join
    monkeypatch.setattr(tally, "_join", lambda *pair: joined.append(1) or join(*pair))
    counted.on_top_of(worker_record())
    assert len(joined) <= MAX_MINUTES


def test_a_long_start_on_top_of_another_loses_no_row_and_keeps_the_newest_minutes() -> None:
    _, before = minutes_of(2, [])
    _, merged = minutes_of(5, before)
    assert len(merged) <= MAX_MINUTES
    assert sum(point.rows for point in merged) == 7 * DAY
    assert sum(point.prompt_tokens for point in merged) == 2 * 7 * DAY
    for left, right in itertools.pairwise(merged):
        assert left.minute + left.length <= right.minute
    # The second start's first minute was the first one's last.
    last = 7 * DAY - 2
    assert [point.minute for point in merged[-100:]] == list(range(last - 99, last + 1))
    assert all(point.length == 1 for point in merged[-100:])


def test_a_clock_that_was_set_back_costs_the_order_of_no_minute() -> None:
    counted = Tally()
    for minute in [*range(100, 300), *range(90, 110)]:
        counted.add([ROW], minute)
    merged = counted.on_top_of(worker_record()).minutes
    assert [point.minute for point in merged] == list(range(90, 300))
    assert sum(point.rows for point in merged) == 220


def test_tokens_of_reasoning_add_up_over_starts() -> None:
    counted = Tally()
    counted.add([ROW, msgspec.structs.replace(ROW, reasoning_tokens=2)], 0)
    assert counted.on_top_of(worker_record(reasoning_tokens=5)).reasoning_tokens == 7
    assert counted.on_top_of(worker_record()).reasoning_tokens == 2
    assert Tally().on_top_of(worker_record()).reasoning_tokens is msgspec.UNSET


def test_a_chunk_counts_its_rows() -> None:
    replace = msgspec.structs.replace
    counts = RowCounts()
    counts.add([replace(ROW, prompt_tokens=5, completion_tokens=2, finish_reason="stop")])
    counts.add(
        [
            replace(ROW, prompt_tokens=10**30, completion_tokens=3, finish_reason="length"),
            replace(ROW, ok=False, code="bad", prompt_tokens=7),
        ]
    )
    assert counts.finish_reasons == {"stop": 1, "length": 1}
    assert (counts.ok, counts.errors, counts.prompt_tokens) == (2, {"bad": 1}, 10**30 + 12)
