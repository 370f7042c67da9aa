"""The series by minute loses no row, and has a largest length."""

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
