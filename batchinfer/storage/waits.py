"""Logs that requests to storage have waited long for an answer: few lines, however many requests wait."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""Seconds without a byte of an answer after which the log reports a request."""
LINE_SECONDS = 10.0
"""Least number of seconds between two such lines. A line names one request and counts the others."""
_LOOK_SECONDS = 1.0


class Waits:
    """The requests that wait for an answer. A thread looks at them once a second. Safe for threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._numbers = itertools.count()
        self._requests: dict[int, tuple[str, float]] = {}
        """What each request is for, and when it began or its last bytes came, by the request's number."""
        self._named: set[int] = set()
        self._last_line = float("-inf")
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[], None]]:
        """Watch a request for `what` while the body runs. Yields a function to call whenever some bytes have come."""
        if self._thread is None or not self._thread.is_alive():  # a forked process has no thread
            self._thread = threading.Thread(target=self._loop, name="waits", daemon=True)
            self._thread.start()
        number = next(self._numbers)

        def restart() -> None:
            self._requests[number] = (what, self._now())

        restart()
        try:
            yield restart
        finally:
            del self._requests[number]

    def look(self) -> None:
        """Log a line if a request has waited long that no line covered yet. Lines are at least `LINE_SECONDS` apart."""
        now = self._now()
        waits = {
            number: (now - since, what)
            for number, (what, since) in list(self._requests.items())
            if now - since >= WAIT_SECONDS
        }
        new = waits.keys() - self._named
        if not new or now - self._last_line < LINE_SECONDS:
            return
        seconds, what = max(waits[number] for number in new)
        others = f", and to {len(waits) - 1} other requests" if len(waits) > 1 else ""
        logger.warning("waiting for storage: no answer for %.0f s to %s%s", seconds, what, others)
        self._named = (self._named | waits.keys()) & self._requests.keys()
        self._last_line = now

    def _loop(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            self.look()


_waits = Waits()
waiting = _waits.waiting
"""See `Waits.waiting`. All stores of this process share one object, so that they log one line together."""
