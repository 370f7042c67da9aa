"""Which replicas of a pool are started again after their processes ended, and when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

# If the processes of a replica end more often than this, one after the other without having finished a request, then
# the replica is not started again. So a machine that is broken does not load the model for ever.
MAX_RESTARTS = 3
# Seconds between the second such end and the next start. This time doubles after every further end. The memory of a GPU
# may be free again only some seconds after the process that held it.
PAUSE_SECONDS = 5.0


class Restarts:
    """The replicas of a pool that have ended and are to be started again."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._waiting: list[tuple[float, str, Mapping[str, str]]] = []

    @property
    def num_waiting(self) -> int:
        """Number of replicas that wait for their start."""
        return len(self._waiting)

    def ended(self, name: str, environment: Mapping[str, str], *, num_finished: int) -> bool:
        """Note that a replica's process ended after it had finished `num_finished` requests.

        Returns:
            Whether the replica will be started again.
        """
        if num_finished:
            self._failures[name] = 0
        self._failures[name] += 1
        failures = self._failures[name]
        if failures > MAX_RESTARTS:
            return False
        pause = PAUSE_SECONDS * 2 ** (failures - 2) if failures > 1 else 0.0
        self._waiting.append((time.monotonic() + pause, name, environment))
        return True

    def take_due(self) -> list[tuple[str, Mapping[str, str]]]:
        """Return name and environment of the replicas that are to be started now. They wait no longer."""
        now = time.monotonic()
        found = [(name, environment) for due, name, environment in self._waiting if due <= now]
        self._waiting = [each for each in self._waiting if each[0] > now]
        return found

    def clear(self) -> None:
        """Forget all replicas that wait."""
        self._waiting = []
