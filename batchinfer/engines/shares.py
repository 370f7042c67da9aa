"""How many of the next requests each replica gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def level(held: Sequence[int], rooms: Sequence[int], count: int) -> list[int]:
    """Share out `count` so that what each holds becomes as equal as the rooms allow.

    >>> level([4, 0, 0], [9, 9, 9], 5)
    [0, 3, 2]
    >>> level([0, 0], [2, 9], 6)
    [2, 4]
    """
    shares = [0] * len(held)
    while count > 0:
        open_ones = [index for index in range(len(held)) if shares[index] < rooms[index]]
        if not open_ones:
            break
        lowest = min(held[index] + shares[index] for index in open_ones)
        lowest_ones = [index for index in open_ones if held[index] + shares[index] == lowest]
        next_level = min(
            (
                held[index] + shares[index]
                for index in open_ones
                if held[index] + shares[index] > lowest
            ),
            default=lowest + count,
        )
        step = max(1, min(next_level - lowest, count // len(lowest_ones)))
        for index in lowest_ones:
            given = min(step, rooms[index] - shares[index], count)
            shares[index] += given
            count -= given
    return shares
