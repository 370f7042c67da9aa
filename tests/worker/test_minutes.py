"""The series by minute loses no row, has a largest length, and keeps the newest minutes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.counts import Counts
from batchinfer.worker.minutes import MAX_MINUTES, Minutes

ROW = Counts(rows_ok=1, prompt_tokens=2, completion_tokens=3)


@given(st.lists(st.integers(0, 6_000), max_size=4000), st.integers(0, 4000))
def test_whatever_the_clock_says_no_row_is_lost(numbers, restart):
    counted = Minutes()
    for index, minute in enumerate(numbers):
        if index == restart:
            counted = Minutes(counted.series())
        counted.add(ROW, minute)
    series = counted.series()
    assert len(series) <= MAX_MINUTES
    assert sum(point.rows for point in series) == len(numbers)
    assert sum(point.completion_tokens for point in series) == 3 * len(numbers)
    assert all(one.minute + one.length <= two.minute for one, two in itertools.pairwise(series))


def test_a_start_of_a_week_keeps_the_newest_minutes_and_joins_the_older_ones():
    counted = Minutes()
    last = 7 * MAX_MINUTES
    for minute in range(last + 1):
        counted.add(ROW, minute)
    series = counted.series()
    newest = [(point.minute, point.length) for point in series[-100:]]
    assert newest == [(minute, 1) for minute in range(last - 99, last + 1)]
    assert sum(point.rows for point in series) == last + 1
    assert series[0].length > 2
