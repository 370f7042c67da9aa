"""The order in which rows go to the engine: sorted by the beginnings of their prompts, one queue for each replica.

An engine keeps the computed beginnings of prompts in a prefix cache, and each replica has a cache of its own. Rows
whose prompts begin alike are therefore sorted next to each other (`PrefixWindow`), and the sorted rows are cut into as
many runs as there are replicas (`ReplicaQueues`). If rows were dealt out one by one, every replica would compute every
prefix. The order of the outputs, and the answers themselves, do not depend on any of this.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from batchinfer.core.records import Request
from batchinfer.engines import share_out

T = TypeVar("T")


class ReplicaQueues(Generic[T]):
    """Rows that are ready for the engine, in one queue for each replica. Starts with one queue.

    No replica waits for rows of its own: when its queue is empty, it gets the last row of the longest queue.
    """

    def __init__(self) -> None:
        self._queues: list[deque[T]] = [deque()]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[T]:
        for queue in self._queues:
            yield from queue

    def set_number(self, number: int) -> None:
        """Change the number of queues; the rows are shared out again, in their order."""
        if number != len(self._queues):
            rows = list(self)
            self._queues = [deque() for _ in range(number)]
            self.extend(rows)

    def extend(self, rows: Sequence[T]) -> None:
        """Append consecutive rows to each queue, so that all queues become about equally long."""
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
        """Whether each queue alone can fill the free slots of its replica."""
        return all(
            len(queue) >= num_free for queue, num_free in zip(self._queues, free_slots, strict=True)
        )

    def head(self, index: int) -> T:
        """Return the row that `pop` would take. At least one queue must hold a row."""
        queue, place = self._next(index)
        return queue[place]

    def pop(self, index: int) -> T:
        """Take the next row for the replica of this index."""
        queue, place = self._next(index)
        return queue.popleft() if place == 0 else queue.pop()

    def _next(self, index: int) -> tuple[deque[T], int]:
        queue = self._queues[index]
        return (queue, 0) if queue else (max(self._queues, key=len), -1)

    def keep(self, is_wanted: Callable[[T], bool]) -> None:
        """Drop every row that `is_wanted` is false for."""
        self._queues = [deque(filter(is_wanted, queue)) for queue in self._queues]


def prefix_key(request: Request) -> bytes:
    """Return bytes that sort requests with a common prefix next to each other.

    Any order of the tokens will do, so a token counts as its four bytes in memory: comparing bytes is fast. A request
    that cannot be written as bytes gets the empty key: it is sorted badly, but does not end the worker.
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
    """Collects up to `size` rows and releases them sorted by their prefixes. Size 0 keeps their order."""

    def __init__(self, size: int, request_of: Callable[[T], Request]) -> None:
        self.size = size
        self._request_of = request_of
        self._rows: list[T] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether the window holds `size` rows."""
        return len(self._rows) >= self.size

    def extend(self, rows: Iterable[T]) -> None:
        """Add rows."""
        self._rows.extend(rows)

    def release(self) -> list[T]:
        """Take all rows out, sorted."""
        rows, self._rows = self._rows, []
        if self.size:
            rows.sort(key=lambda row: prefix_key(self._request_of(row)))
        return rows

    def keep(self, is_wanted: Callable[[T], bool]) -> None:
        """Drop every row that `is_wanted` is false for."""
        self._rows = [row for row in self._rows if is_wanted(row)]
