"""Limits on the requests and tokens that an endpoint gets in a minute."""

from __future__ import annotations

import re
from typing import Any

from batchinfer.core.records import Call
from batchinfer.engines.engine_config import EngineConfig

_BYTES_PER_TOKEN = 4
_NUMBERS = re.compile(rb'"(max_completion_tokens|max_tokens|n)": ?(\d{1,9})[,}]')
# Shares of a minute's requests and tokens that may be sent at once. The rest follows evenly.
_REQUEST_BURST = 1 / 60
_TOKEN_BURST = 1 / 6


class Pace:
    """Lets calls pass as fast as --requests-per-minute and --tokens-per-minute allow. Belongs to one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._requests = _limiter(config.requests_per_minute, _REQUEST_BURST)
        self._tokens = _limiter(config.tokens_per_minute, _TOKEN_BURST)

    async def wait(self, call: Call) -> None:
        """Wait until a call may be sent."""
        if self._requests is not None:
            await self._requests.acquire()
        if self._tokens is not None:
            await self._tokens.acquire(min(estimate_tokens(call), self._tokens.max_rate))


def _limiter(per_minute: int | None, burst: float) -> Any:
    if per_minute is None:
        return None
    from aiolimiter import AsyncLimiter

    most = max(1.0, per_minute * burst)
    return AsyncLimiter(most, 60 * most / per_minute)


def estimate_tokens(call: Call) -> int:
    """Return about how many tokens a call takes: a quarter of its bytes, and the longest answers that it asks for."""
    numbers = {name: int(number) for name, number in _NUMBERS.findall(call.body)}
    answer = numbers.get(b"max_completion_tokens") or numbers.get(b"max_tokens", 0)
    return len(call.body) // _BYTES_PER_TOKEN + answer * numbers.get(b"n", 1)
