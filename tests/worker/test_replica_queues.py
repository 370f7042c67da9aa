"""Queues of rows, one for each replica: what is next for whom, and that nobody waits while there are rows."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.worker.ordering import ReplicaQueues


def queues_of(rows: list[int], number: int) -> ReplicaQueues[int]:
    queues: ReplicaQueues[int] = ReplicaQueues()
    queues.set_number(number)
    queues.extend(rows)
    return queues


def drained(queues: ReplicaQueues[int], index: int, count: int) -> list[int]:
    return [queues.pop(index) for _ in range(count)]


def test_one_replica_has_a_plain_queue() -> None:
    queues = queues_of([1, 2, 3], 1)
    queues.put_back(0)
    assert drained(queues, 0, 4) == [0, 1, 2, 3]
    assert not queues


def test_each_replica_gets_a_run_of_neighbours() -> None:
    queues = queues_of(list(range(9)), 3)
    assert [drained(queues, index, 3) for index in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_who_has_no_rows_left_gets_the_last_ones_of_the_longest_queue() -> None:
    queues = queues_of(list(range(8)), 2)
    assert drained(queues, 0, 6) == [0, 1, 2, 3, 7, 6]
    assert drained(queues, 1, 2) == [4, 5]


def test_a_queue_that_is_behind_gets_less_of_the_next_window() -> None:
    queues = queues_of(list(range(8)), 2)
    drained(queues, 0, 4)
    queues.extend(list(range(10, 18)))
    assert list(queues) == [10, 11, 12, 13, 14, 15, 4, 5, 6, 7, 16, 17]


def test_with_a_replica_less_its_rows_go_to_the_others() -> None:
    queues = queues_of(list(range(12)), 3)
    queues.set_number(2)
    assert (drained(queues, 0, 6), drained(queues, 1, 6)) == (
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    )


def test_it_has_what_is_asked_for_only_where_every_queue_has() -> None:
    queues = queues_of(list(range(6)), 2)
    assert queues.has([3, 3])
    assert not queues.has([4, 2])


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_every_row_comes_out_once_whoever_asks(seed: int, number: int) -> None:
    rng = random.Random(seed)
    queues = queues_of([], number)
    given_in: list[int] = []
    out: list[int] = []
    for step in range(30):
        rows = list(range(100 * step, 100 * step + rng.randrange(20)))
        given_in += rows
        queues.extend(rows)
        if rng.random() < 0.1:
            number = rng.randint(1, 8)
            queues.set_number(number)
        count = min(len(queues), rng.randrange(20))
        out += [queues.pop(rng.randrange(number)) for _ in range(count)]
    assert Counter(out + list(queues)) == Counter(given_in)
