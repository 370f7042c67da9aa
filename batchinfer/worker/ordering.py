"""Rows that are ready for the engine: one queue, or a lane for each of its replicas.

A replica's prefix cache serves what ran in that replica. Sorted rows are therefore cut into as many runs as there are
replicas, so that neighbours meet in one of them; dealt out as places become free, all would compute every prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from batchinfer.engines import share_out

T = TypeVar("T")


class Lanes(Generic[T]):
    """A queue with several heads. Starts with one lane, which makes it a plain queue.

    No replica waits for its own lane: when that is empty, it gets the last rows of the longest one.
    """

    def __init__(self) -> None:
        self._lanes: list[deque[T]] = [deque()]

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __iter__(self) -> Iterator[T]:
        for lane in self._lanes:
            yield from lane

    def set_number(self, number: int) -> None:
        """Have so many lanes; where that is new, rows are cut anew, in their order."""
        if number != len(self._lanes):
            rows = list(self)
            self._lanes = [deque() for _ in range(number)]
            self.extend(rows)

    def extend(self, rows: Sequence[T]) -> None:
        """Append a run of the rows to each lane, so that all become about equally long."""
        held = [len(lane) for lane in self._lanes]
        shares = share_out(held, [len(rows)] * len(held), len(rows))
        begin = 0
        for lane, share in zip(self._lanes, shares, strict=True):
            lane.extend(rows[begin : begin + share])
            begin += share

    def put_back(self, row: T) -> None:
        """Make a row the very first."""
        self._lanes[0].appendleft(row)

    def has(self, rooms: Sequence[int]) -> bool:
        """Whether every lane holds so many rows of its own."""
        return all(len(lane) >= room for lane, room in zip(self._lanes, rooms, strict=True))

    def head(self, index: int) -> T:
        """The row that `pop` would return. There must be one, in whatever lane."""
        lane, place = self._next(index)
        return lane[place]

    def pop(self, index: int) -> T:
        """Take the next row for a replica."""
        lane, place = self._next(index)
        return lane.popleft() if place == 0 else lane.pop()

    def _next(self, index: int) -> tuple[deque[T], int]:
        lane = self._lanes[index]
        return (lane, 0) if lane else (max(self._lanes, key=len), -1)

    def keep(self, is_wanted: Callable[[T], bool]) -> None:
        """Drop the rows that are not wanted any more."""
        self._lanes = [deque(filter(is_wanted, lane)) for lane in self._lanes]
