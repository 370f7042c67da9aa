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

MOST_ATTEMPTS = 5
"""Attempts at a row whose failure the server's other answers do not share."""
FEW, FEWEST = 64, 3
"""Most rows that may be given up because they fail alone."""


class Outage:
    """What endpoints answered last. Without any answer for `seconds` they are down."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._has_answered = False
        self.since: float | None = None
        """Time of the first failed attempt since an endpoint last answered."""
        self.last_replies: dict[RowKey, Reply] = {}
        """Replies of the last attempts at rows in flight that have failed `MOST_ATTEMPTS` times."""

    def note_answer(self) -> None:
        """Take note that a row was answered."""
        self._has_answered, self.since = True, None

    def note_failure(self, reply: Reply, num_failed: int) -> None:
        """Take note of an attempt that failed. `num_failed` counts those at this row that may be the row's fault."""
        self.since = self.since or time.monotonic()
        if num_failed >= MOST_ATTEMPTS:
            self.last_replies[reply.key] = reply

    def given_up(self, left: Sequence[RowKey], name: str, *, is_idle: bool) -> list[Reply]:
        """Return the replies to all rows in flight if they are given up; none if they are tried again.

        Args:
            left: The rows in flight.
            name: Name of the endpoints for the message.
            is_idle: Whether the source had no further row when it was last asked.

        Raises:
            EngineDied: the endpoints are down.
        """
        if self.since is None or not left:
            return []
        is_late = time.monotonic() - self.since >= self._seconds
        replies = [self.last_replies[key] for key in left if key in self.last_replies]
        is_own = is_idle and self._has_answered and len(left) <= FEW
        is_own = is_own and all(reply.status == 500 for reply in replies)
        if len(replies) == len(left) and (is_own or (is_late and len(left) <= FEWEST)):
            self.since = None
            return replies
        if is_late:
            raise EngineDied(
                f"{name}: answered nothing for {self._seconds:g} s",
                hint="no row is lost; start the same command again when it answers",
            )
        return []
