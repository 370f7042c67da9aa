"""Servers that somebody else runs: how they are reached, how fast they are asked, and when they count as down."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from batchinfer.core.errors import AccessDenied, ConfigError, EngineDied
from batchinfer.core.records import Call, Reply, RowKey
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.replies import DENIED, FORBIDDEN, asks_for, is_lost, problem_of
from batchinfer.engines.targets import Answer, Target

KEY_VARIABLE = "OPENAI_API_KEY"
"""Name of the environment variable with the endpoint's key."""
OPEN_SECONDS = 12.0
"""Seconds in which an endpoint must be reached when the engine opens."""
MOST_ATTEMPTS = 5
"""Attempts at a row whose failure the server's other answers do not share."""
FEW, FEWEST = 64, 3
"""Most rows that may be given up because they fail alone."""
_BYTES_PER_TOKEN = 4
_NUMBERS = re.compile(rb'"(max_completion_tokens|max_tokens|max_output_tokens|n)": ?(\d{1,9})[,}]')
_DATA, _DATA_TOKENS = re.compile(rb"[\w+/=-]{4000,}"), 1000
"""A picture or a sound in a body, and for how many tokens it counts."""
# Shares of a minute's requests and tokens that may be sent at once. The rest follows evenly.
_REQUEST_BURST = 1 / 60
_TOKEN_BURST = 1 / 6


class Endpoint(Target):
    """A server that somebody else runs.

    Args:
        url: URL up to and without /chat/completions; `/v1` is added to a URL without a path.
        config: Configuration of the engine.
    """

    def __init__(self, url: str, config: EngineConfig) -> None:
        parts, key = urlsplit(url), os.environ.get(KEY_VARIABLE, "").strip()
        base = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        super().__init__(f"endpoint {base}", base, config.max_concurrency, key=key)
        is_direct = proxy_bypass(parts.hostname or "")
        self.proxy = None if is_direct else getproxies().get(parts.scheme)
        self.timeout_seconds = config.request_timeout_seconds
        self._end = time.monotonic() + min(OPEN_SECONDS, config.stall_seconds)

    def url_of(self, path: str) -> str:
        """Return the URL of a path. Those that do not begin with /v1, such as /classify, lie beside the base URL."""
        if path.startswith("/v1/"):
            return self.url + path.removeprefix("/v1")
        return self.url.removesuffix("/v1") + path

    async def look(self, config: EngineConfig) -> str:
        """Ask whether there is an endpoint that knows the model and the key. Returns why it is given up, or "".

        Raises:
            AccessDenied: the endpoint refuses the key.
            ConfigError: there is no endpoint at this URL, or it does not have the model.
        """
        left = self._end - time.monotonic()
        found = await self.get("/v1/models", max(1.0, left))
        if found.status in (*DENIED, FORBIDDEN):
            raise self.denied(found)
        if found.status == 0 or found.status >= 500 or found.status == 429:
            said = problem_of(found.body).message[:200]
            said = f"{found.status}: {said}" if found.status else said
            return "" if left > 0 else f"is not reached ({said})"
        listed = found.field("data")
        if found.status < 400 and not isinstance(listed, list):
            hint = "is --base-url right? It usually ends with /v1"
            raise ConfigError(f"{self.name}: answers not as the OpenAI API does", hint=hint)
        names = [each.get("id") for each in listed or () if isinstance(each, dict)]
        base = config.model.partition(":")[0]  # as in model:nitro, a way to the model
        if names and not {config.model, base} & {*map(str, names)}:  # it need not list its models
            known, hint = ", ".join(map(str, names[:10])), "--model takes the endpoint's name of it"
            raise ConfigError(f"{self.name}: has no model {config.model!r}, but {known}", hint=hint)
        self.is_ready = True
        return ""

    def denied(self, found: Answer | Reply) -> AccessDenied:
        """Return the error for an endpoint that refuses the key or the account."""
        said = problem_of(found.body).message[:200]
        hint = f"look at {KEY_VARIABLE}, and at the account behind it; finished rows are kept"
        return AccessDenied(f"{self.name}: {found.status}: {said}", hint=hint)


class Pace:
    """Lets calls pass as fast as --requests-per-minute and --tokens-per-minute allow. Belongs to one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._requests = _limiter(config.requests_per_minute, _REQUEST_BURST)
        self._tokens = _limiter(config.tokens_per_minute, _TOKEN_BURST)
        self._most_tokens, self._lock = config.tokens_per_minute or 0, asyncio.Lock()

    async def wait(self, call: Call) -> None:
        """Wait until a call may be sent."""
        if self._requests is not None:
            await self._requests.acquire()
        left = min(estimate_tokens(call), self._most_tokens) if self._tokens is not None else 0
        async with self._lock:  # calls that took pieces in turn would all be sent at once
            while left > 0:
                await self._tokens.acquire(min(left, self._tokens.max_rate))
                left -= self._tokens.max_rate


def _limiter(per_minute: int | None, burst: float) -> Any:
    if per_minute is None:
        return None
    from aiolimiter import AsyncLimiter

    most = max(1.0, per_minute * burst)
    return AsyncLimiter(most, 60 * most / per_minute)


def estimate_tokens(call: Call) -> int:
    """Return about how many tokens a call takes: a quarter of its bytes, and the longest answers that it asks for."""
    numbers = {name: int(number) for name, number in _NUMBERS.findall(call.body)}
    num_answers = numbers.pop(b"n", 1)
    prompt = _DATA.sub(bytes(_BYTES_PER_TOKEN * _DATA_TOKENS), call.body)
    return len(prompt) // _BYTES_PER_TOKEN + max(numbers.values(), default=0) * num_answers


class Outage:
    """What endpoints answered last. Without any answer for `seconds` they are down.

    A few rows that fail again and again are given up instead: at once if they are the last ones, others were answered,
    and each time the endpoint said that it failed itself (500), or forbade the row (403). Otherwise such rows would end
    every start of the run's last worker.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._seconds, self._model = config.stall_seconds, config.model
        self._has_answered = False
        self._served: set[str] = set()
        """Paths of which rows that ask for the run's own model were answered, and not refused."""
        self._last: tuple[Target, int, Reply] | None = None
        """The last attempt that failed; see `note_failure`."""
        self.since = 0.0
        """Time of the first failed attempt since an endpoint last answered; 0 if there was none."""
        self.last_replies: dict[RowKey, Reply] = {}
        """Replies of the last attempts at rows in flight that have failed `MOST_ATTEMPTS` times."""

    def note_answer(self, call: Call, reply: Reply) -> None:
        """Take note that a row was answered."""
        self._has_answered, self.since = True, 0.0
        is_new = reply.status == 200 and call.path not in self._served
        if is_new and asks_for(call, self._model):
            self._served.add(call.path)

    def has_lost(self, call: Call, reply: Reply) -> bool:
        """Whether a refusal is no row's fault: an endpoint has lost its model, or a proxy its endpoint."""
        return call.path in self._served and is_lost(reply) and asks_for(call, self._model)

    def note_failure(self, target: Target, status: int, reply: Reply, num_failed: int) -> None:
        """Take note of an attempt that failed.

        Args:
            target: The endpoint.
            status: Its status; 0 if no whole answer came.
            reply: The reply that is made of it.
            num_failed: Number of attempts at this row that have failed and may be the row's fault.
        """
        has_others = self.since and self._last and self._last[1] != FORBIDDEN
        self.since = self.since or time.monotonic()
        if not (has_others and status == FORBIDDEN):  # of both, the others are what to tell
            self._last = target, status, reply
        if num_failed >= MOST_ATTEMPTS:
            self.last_replies[reply.key] = reply

    def given_up(self, targets: Sequence[Target], *, is_idle: bool) -> list[tuple[Target, Reply]]:
        """Return the replies to all rows in flight, each with its target, if they are given up; else none.

        Args:
            targets: The endpoints.
            is_idle: Whether the source had no further row when it was last asked.

        Raises:
            EngineDied: the endpoints are down.
            AccessDenied: they forbid every row.
        """
        left = [(each, key) for each in targets for key in each.in_flight] if self.since else []
        if not left or not isinstance(targets[0], Endpoint):
            return []
        is_late = time.monotonic() - self.since >= self._seconds
        found = [(each, self.last_replies[key]) for each, key in left if key in self.last_replies]
        is_own = is_idle and self._has_answered and len(left) <= FEW
        is_own = is_own and all(reply.status in (500, FORBIDDEN) for _, reply in found)
        forbidden = [(each, reply) for each, reply in found if reply.status == FORBIDDEN]
        is_all = len(forbidden) == len(left)
        if is_all and (len(left) > FEW or not self._has_answered):
            target, reply = forbidden[0]
            assert isinstance(target, Endpoint)
            raise target.denied(reply)
        if len(found) == len(left) and (is_own or (is_late and len(left) <= FEWEST)):
            self.since = 0.0
            return found
        if is_late:
            assert self._last is not None
            target, status, reply = self._last
            if status == FORBIDDEN and isinstance(target, Endpoint):
                raise target.denied(reply)
            said = f"{status or ''}: {problem_of(reply.body).message[:200]}".removeprefix(": ")
            message = f"{target.name}: answered nothing for {self._seconds:g} s; last: {said}"
            hint = "no row is lost; start the same command again when it answers"
            if not status:
                hint += ", or with longer --request-timeout-seconds if it needs more"
            raise EngineDied(message, hint=hint)
        return []
