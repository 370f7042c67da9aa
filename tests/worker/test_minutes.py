"""The series by minute is exact, and costs no more on a start's hundredth day than on its second."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.counts import Counts
from batchinfer.core.records import Minute
from batchinfer.worker import minutes
from batchinfer.worker.minutes import MAX_MINUTES, Minutes, merge_minutes

ROW = Counts(rows_ok=1, prompt_tokens=2, completion_tokens=3)
DAY = 1440


def minutes_of(days: int, base_minutes: list[Minute]) -> tuple[Minutes, list[Minute]]:
    """A start of so many days, with a row in each minute, on top of an earlier start's series."""
    counted = Minutes()
    first = base_minutes[-1].minute if base_minutes else 0
    for minute in range(days * DAY):
        counted.add(ROW, first + minute)
    return counted, counted.on_top_of(base_minutes)


def test_a_long_start_is_not_merged_from_its_first_minute_at_each_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot is made every two seconds, between two rounds of the engine."""
    counted, _ = minutes_of(30, [])
    joined: list[int] = []
    join = minutes._join
    monkeypatch.setattr(minutes, "_join", lambda *pair: joined.append(1) or join(*pair))
    counted.on_top_of([])
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
    counted = Minutes()
    for minute in [*range(100, 300), *range(90, 110)]:
        counted.add(ROW, minute)
    merged = counted.on_top_of([])
    assert [point.minute for point in merged] == list(range(90, 300))
    assert sum(point.rows for point in merged) == 220


def minute(number: int, rows: int = 1) -> Minute:
    return Minute(
        minute=number, rows=rows, prompt_tokens=2 * rows, completion_tokens=3 * rows, errors=0
    )


def test_the_same_minute_of_two_epochs_is_one_point() -> None:
    assert merge_minutes([minute(7, 3)], {7: [2, 4, 6, 1]}) == [
        Minute(minute=7, rows=5, prompt_tokens=10, completion_tokens=15, errors=1)
    ]


def test_minutes_come_out_in_order() -> None:
    merged = merge_minutes([minute(9)], {3: [1, 1, 1, 0], 5: [1, 1, 1, 0]})
    assert [point.minute for point in merged] == [3, 5, 9]


@given(st.lists(st.integers(0, 20_000), max_size=4000, unique=True), st.integers(0, 3))
def test_thinning_keeps_sums_bounds_and_order(numbers: list[int], rounds: int) -> None:
    merged = merge_minutes([], {number: [1, 2, 3, 1] for number in numbers})
    for _ in range(rounds):  # a record that was thinned before is thinned again
        merged = merge_minutes(merged, {})
    assert len(merged) <= MAX_MINUTES
    assert sum(point.rows for point in merged) == len(numbers)
    assert sum(point.completion_tokens for point in merged) == 3 * len(numbers)
    assert sum(point.errors for point in merged) == len(numbers)
    for before, after in itertools.pairwise(merged):
        assert before.minute + before.length <= after.minute


def test_a_joined_point_says_how_many_minutes_it_stands_for() -> None:
    merged = merge_minutes([], {number: [1, 0, 0, 0] for number in range(MAX_MINUTES + 10)})
    assert merged[0].length == 2
    assert merged[0].rows == 2
    assert merged[-1].length == 1


def test_the_newest_minutes_are_not_joined() -> None:
    merged = merge_minutes([], {number: [1, 0, 0, 0] for number in range(3 * MAX_MINUTES)})
    assert [point.minute for point in merged[-100:]] == list(
        range(3 * MAX_MINUTES - 100, 3 * MAX_MINUTES)
    )
