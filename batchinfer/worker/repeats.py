"""Lets the engine answer rows with equal requests once (--dedupe). `Repeats` is used on the main thread only.

Of rows with equal requests the first is the leader, which the engine answers. A row that comes while the leader waits
or is in the engine follows it, and gets a copy of its answer. A row that comes later gets a copy of the kept answer. If
none is kept, it is the next leader.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Completion, RowKey
from batchinfer.prompts import Prepared

T = TypeVar("T")

_NO_ROW: RowKey = ("", 0)
_decoder = codec.msgpack_decoder(Completion)
_ENTRY_BYTES = 300
"""Bytes of memory that a kept answer takes beside its text: its key, its place, and the objects around it."""


def repeat_key(prepared: Prepared) -> bytes | None:
    """Return a digest of all that decides a row's answer: prompt, images, sampling parameters, adapter.

    None if an equal request of another row may have another answer, or if the row has no request that can be encoded.
    """
    if prepared.request is None or not prepared.is_repeatable:
        return None
    try:
        plain = msgspec.structs.replace(prepared.request, key=_NO_ROW, priority=0)
        data = msgspec.msgpack.encode((plain, prepared.media) if prepared.media else plain)
    except (OverflowError, RecursionError, TypeError, ValueError):
        return None
    return hashlib.blake2b(data, digest_size=16).digest()


class Repeats(Generic[T]):
    """The followers of all leaders, and kept answers.

    Args:
        max_bytes: Bytes of memory that kept answers take at most, about. The answer that was unused for longest is
            dropped first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._followers: dict[bytes, list[T]] = {}
        """Rows that follow a leader, by the key of its request. Every leader has an entry."""
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        """Encoded answers by the keys of their requests, in the order in which they were used last."""

    def __len__(self) -> int:
        return sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[T]:
        """Yield all followers."""
        for rows in self._followers.values():
            yield from rows

    def find(self, key: bytes) -> Completion | None:
        """Return the answer that is kept for a request, without the key of a row; None if none is kept."""
        data = self._answers.get(key)
        if data is None:
            return None
        self._answers.move_to_end(key)
        return _decoder.decode(data)

    def follow(self, key: bytes, row: T) -> bool:
        """Let a row follow the leader with this request. Returns False if there is none; then the row is the leader."""
        followers = self._followers.get(key)
        if followers is None:
            self._followers[key] = []
            return False
        followers.append(row)
        return True

    def answer(self, key: bytes, completion: Completion) -> tuple[Completion, list[T]]:
        """Keep the answer that a leader got, and forget the leader.

        Returns the answer for copies, whose seconds are 0, and the rows that followed the leader.
        """
        copied = msgspec.structs.replace(
            completion, key=_NO_ROW, queue_seconds=0.0, generation_seconds=0.0
        )
        data = msgspec.msgpack.encode(copied)
        if (before := self._answers.pop(key, None)) is not None:
            self._num_bytes -= len(before) + _ENTRY_BYTES
        if len(data) + _ENTRY_BYTES <= self._max_bytes:
            self._answers[key] = data
            self._num_bytes += len(data) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest) + _ENTRY_BYTES
        return copied, self.give_up(key)

    def followers(self, key: bytes) -> list[T]:
        """Return the rows that follow the leader with this request."""
        return self._followers.get(key, [])

    def give_up(self, key: bytes) -> list[T]:
        """Forget the leader with this request. Returns the rows that followed it."""
        return self._followers.pop(key, [])

    def keep(self, is_wanted: Callable[[T], bool]) -> None:
        """Drop every follower that `is_wanted` is false for."""
        self._followers = {
            key: [row for row in rows if is_wanted(row)] for key, rows in self._followers.items()
        }
