"""How fast requests go to an endpoint: by the user's limits, by what the endpoint's headers say, and by its refusals.

All methods are called in one event loop.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

# Seconds for which an unused limit adds up. So a request that follows a pause need not wait.
BURST_SECONDS = 5.0
# Seconds to wait after an endpoint has refused requests without saying for how long: the first wait and the longest.
FIRST_HOLD_SECONDS = 0.5
LONGEST_HOLD_SECONDS = 60.0
# Waits that are shorter than this are left out.
SHORTEST_WAIT_SECONDS = 0.001
# Most seconds to wait because the endpoint asks for it, even if it asks for more.
LONGEST_ASKED_SECONDS = 3600.0

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Bucket:
    """A limit of so many units a minute, which adds up for `BURST_SECONDS` while it is not used.

    Args:
        per_minute: The limit; None for no limit.
        now: Time on the monotonic clock.
    """

    def __init__(self, per_minute: int | None, now: float) -> None:
        self._rate = math.inf if per_minute is None else per_minute / 60.0
        self._most = max(1.0, self._rate * BURST_SECONDS)
        self._level = self._most
        self._at = now

    def seconds_until(self, units: float, now: float) -> float:
        """Return how long to wait until so many units are free.

        More units than the bucket can hold are free once it is full.
        """
        if self._rate == math.inf:
            return 0.0
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (min(units, self._most) - self._level) / self._rate)

    def take(self, units: float) -> None:
        """Use units. A negative number gives units back."""
        self._level -= units


class Pace:
    """Decides when the next request may be sent.

    Args:
        max_concurrency: Most requests that may run at once.
        requests_per_minute: Most requests sent in a minute; None for no limit.
        tokens_per_minute: Most tokens of prompts and answers together in a minute; None for no limit.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        now = time.monotonic()
        self._most_running = max_concurrency
        self._may_run = float(max_concurrency)
        """Number of requests that may run at once now. It is halved when the endpoint refuses requests, and grows
        again with every answer."""
        self._num_running = 0
        self._requests = Bucket(requests_per_minute, now)
        self._tokens = Bucket(tokens_per_minute, now)
        self._held_until = now
        self._slowed_at = -math.inf
        """Time of the latest slowing down."""
        self._num_refusals = 0
        """Number of times that requests were slowed down since the latest answer."""
        self._door = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait until a request of about so many tokens may be sent, and count it as running until the block ends."""
        async with self._door:
            while (seconds := self._seconds_until_turn(num_tokens)) > SHORTEST_WAIT_SECONDS:
                self._freed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), min(seconds, 1.0))
            self._requests.take(1)
            self._tokens.take(num_tokens)
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._freed.set()

    def _seconds_until_turn(self, num_tokens: int) -> float:
        if self._num_running >= max(1, int(self._may_run)):
            return math.inf
        now = time.monotonic()
        return max(
            self._held_until - now,
            self._requests.seconds_until(1, now),
            self._tokens.seconds_until(num_tokens, now),
        )

    def note_answer(self, num_tokens: int, num_asked: int) -> None:
        """Count a request as answered, and correct the estimate of its tokens if the endpoint counts them."""
        self._num_refusals = 0
        self._may_run = min(self._most_running, self._may_run + 1.0 / self._may_run)
        if num_tokens:
            self._tokens.take(num_tokens - num_asked)

    def note_refusal(self, sent: float, asked_seconds: float | None) -> None:
        """Slow down, because the endpoint has refused a request: it is overloaded, down, or a limit is reached.

        Args:
            sent: Time on the monotonic clock at which the request was sent. Requests that were sent before the latest
                slowing down slow nothing down further.
            asked_seconds: Seconds for which the endpoint asks to wait; None if it does not say.
        """
        now = time.monotonic()
        if sent > self._slowed_at:
            self._slowed_at = now
            self._num_refusals += 1
            self._may_run = max(1.0, self._may_run / 2)
            doubled = FIRST_HOLD_SECONDS * 2.0 ** min(self._num_refusals - 1, 20)
            self._hold(min(doubled, LONGEST_HOLD_SECONDS) if asked_seconds is None else 0.0)
        if asked_seconds is not None:
            self._hold(min(asked_seconds, LONGEST_ASKED_SECONDS))

    def _hold(self, seconds: float) -> None:
        self._held_until = max(self._held_until, time.monotonic() + seconds)

    def note_headers(self, headers: Mapping[str, str], num_tokens: int) -> None:
        """Hold requests back if the headers show too little room in a limit.

        The room must do for the requests under way and one more. Each counts as having `num_tokens`.
        """
        for name, units in (("requests", 1), ("tokens", num_tokens)):
            limit = number_of(headers.get(f"x-ratelimit-limit-{name}"))
            left = number_of(headers.get(f"x-ratelimit-remaining-{name}"))
            reset = seconds_of(headers.get(f"x-ratelimit-reset-{name}"))
            if limit is None or left is None or reset is None or left >= limit:
                continue
            if left < units * (1 + self._num_running):
                # After `reset` seconds, all that is used now will be free again.
                self._hold(min(reset * min(1.0, units / (limit - left)), LONGEST_HOLD_SECONDS))


def number_of(text: str | None) -> float | None:
    """Return the number that a header holds; None if it holds none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def seconds_of(text: str | None) -> float | None:
    """Return a duration as the API writes it in headers, in seconds; None if it is none.

    >>> seconds_of("6m0.5s"), seconds_of("20ms"), seconds_of("7"), seconds_of("soon")
    (360.5, 0.02, 7.0, None)
    """
    if text is None:
        return None
    number = number_of(text)
    if number is not None:
        return number if 0 <= number < math.inf else None
    parts = _DURATION.findall(text)
    if not parts or "".join(value + unit for value, unit in parts) != text:
        return None
    return sum(float(value) * _UNITS[unit] for value, unit in parts)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return for how many seconds an answer's headers ask to wait; None if they do not say.

    Args:
        headers: The answer's headers.
        now: Unix time.
    """
    milliseconds = number_of(headers.get("retry-after-ms"))
    if milliseconds is not None and milliseconds >= 0:
        return milliseconds / 1000.0
    text = headers.get("retry-after")
    seconds = seconds_of(text)
    if seconds is not None or text is None:
        return seconds
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - now)
