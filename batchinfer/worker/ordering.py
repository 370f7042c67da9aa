"""The order in which rows go to the engine: sorted by the beginnings of their prompts, one queue for each replica.

An engine keeps the computed beginnings of prompts in a prefix cache, and each replica has a cache of its own. Therefore
`PrefixWindow` sorts rows so that prompts that begin alike are neighbours, and `ReplicaQueues` gives each replica one
piece of neighbouring rows. If rows were dealt out one by one, every replica would compute every prefix. The order of
the output lines does not depend on the order in which rows go to the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from batchinfer.core.records import Call
from batchinfer.engines import share_out

T = TypeVar("T")


class ReplicaQueues(Generic[T]):
    """Rows that are ready for the engine, in one queue for each replica. Starts with one queue.

    When a replica's queue is empty, the replica gets the last row of the longest queue.
    """

    def __init__(self) -> None:
        self._queues: list[deque[T]] = [deque()]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[T]:
        for queue in self._queues:
            yield from queue

    def set_number(self, number: int) -> None:
        """Change the number of queues. The rows are shared out to the new queues in their present order."""
        if number != len(self._queues):
            rows = list(self)
            self._queues = [deque() for _ in range(number)]
            self.extend(rows)

    def extend(self, rows: Sequence[T]) -> None:
        """Append a piece of consecutive rows to each queue, so that their lengths become as equal as possible."""
        held = [len(queue) for queue in self._queues]
        shares = share_out(held, [len(rows)] * len(held), len(rows))
        begin = 0
        for queue, share in zip(self._queues, shares, strict=True):
            queue.extend(rows[begin : begin + share])
            begin += share

    def put_back(self, row: T) -> None:
        """Put a row at the head of the first queue."""
        self._queues[0].appendleft(row)

    def has(self, free_slots: Sequence[int]) -> bool:
        """Whether each queue holds at least as many rows as its replica has free slots."""
        return all(
            len(queue) >= num_free for queue, num_free in zip(self._queues, free_slots, strict=True)
        )

    def pop(self, index: int) -> T:
        """Take the next row for the replica of this index. At least one queue must hold a row."""
        queue = self._queues[index]
        return queue.popleft() if queue else max(self._queues, key=len).pop()


class PrefixWindow(Generic[T]):
    """Collects rows, and releases all of them at once, sorted by their bodies. It is full with `size` rows.

    With size 0, rows are released in the order in which they were added.
    """

    def __init__(self, size: int, call_of: Callable[[T], Call]) -> None:
        self.size = size
        self._call_of = call_of
        self._rows: list[T] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether the window holds `size` rows or more."""
        return len(self._rows) >= self.size

    def extend(self, rows: Iterable[T]) -> None:
        """Add rows."""
        self._rows.extend(rows)

    def release(self) -> list[T]:
        """Take all rows out and return them: sorted, or in the order of adding if the size is 0."""
        rows, self._rows = self._rows, []
        if self.size:
            rows.sort(key=lambda row: self._call_of(row).body)
        return rows
