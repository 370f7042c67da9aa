"""What tests of `split --rank` share."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli import main

MISTAKES = [
    (["--rank", "1"], "--rank, --of: one is given"),
    (["--rank", "2", "--of", "2"], "ranks are 0 to 1"),
    (["--rank", "0", "--of", "2", "--overwrite"], "--overwrite: not together with --rank"),
]
"""Options that ranks of either command cannot have, and a part of the message."""


class Killed(BaseException):
    """Stands for a SIGKILL: nothing catches it."""


def shuffled_ranks(of: int, chance: random.Random) -> list[int]:
    """All ranks in any order, and two of them a second time."""
    order = [*range(of), *chance.choices(range(of), k=2)]
    chance.shuffle(order)
    return order


def statuses_at_once(work: Callable[[int], dict[str, Any]]) -> set[str]:
    """Run four ranks at once, each twice, and return their statuses."""
    with ThreadPoolExecutor(8) as pool:
        return {result["status"] for result in pool.map(work, [*range(4), *range(4)])}


def assert_refused(
    words: list[str], message: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Assert that a command line is refused with a message, before anything is made at `place`."""
    assert main.main(words) == 2
    assert message in capfd.readouterr().err
    assert not place.exists()
