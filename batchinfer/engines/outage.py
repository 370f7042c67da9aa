"""When endpoints count as down, and which rows are given up because they fail alone.

A few rows that fail again and again are given up instead of ending the worker: at once if they are the last ones,
others were answered, and each time the endpoint said that it failed itself (500). Otherwise such rows would end every
start of the run's last worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from batchinfer.core.errors import EngineDied
from batchinfer.core.records import Reply, RowKey
from batchinfer.engines.targets import Endpoint, Target

MOST_ATTEMPTS = 5
"""Attempts at a row whose failure the server's other answers do not share."""
FEW, FEWEST = 64, 3
"""Most rows that may be given up because they fail alone."""


class Outage:
    """What endpoints answered last. Without any answer for `seconds` they are down."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._has_answered = False
        self.since = 0.0
        """Time of the first failed attempt since an endpoint last answered; 0 if there was none."""
        self.last_replies: dict[RowKey, Reply] = {}
        """Replies of the last attempts at rows in flight that have failed `MOST_ATTEMPTS` times."""

    def note_answer(self) -> None:
        """Take note that a row was answered."""
        self._has_answered, self.since = True, 0.0

    def note_failure(self, reply: Reply, num_failed: int) -> None:
        """Take note of an attempt that failed. `num_failed` counts those at this row that may be the row's fault."""
        self.since = self.since or time.monotonic()
        if num_failed >= MOST_ATTEMPTS:
            self.last_replies[reply.key] = reply

    def given_up(self, targets: Sequence[Target], *, is_idle: bool) -> list[tuple[Target, Reply]]:
        """Return the replies to all rows in flight, each with its target, if they are given up; else none.

        Args:
            targets: The endpoints.
            is_idle: Whether the source had no further row when it was last asked.

        Raises:
            EngineDied: the endpoints are down.
        """
        left = [(each, key) for each in targets for key in each.in_flight] if self.since else []
        if not left or not isinstance(targets[0], Endpoint):
            return []
        is_late = time.monotonic() - self.since >= self._seconds
        found = [(each, self.last_replies[key]) for each, key in left if key in self.last_replies]
        is_own = is_idle and self._has_answered and len(left) <= FEW
        is_own = is_own and all(reply.status == 500 for _, reply in found)
        if len(found) == len(left) and (is_own or (is_late and len(left) <= FEWEST)):
            self.since = 0.0
            return found
        if is_late:
            raise EngineDied(
                f"{targets[0].name}: answered nothing for {self._seconds:g} s",
                hint="no row is lost; start the same command again when it answers",
            )
        return []
