"""Where calls are sent: one HTTP server, ours or somebody else's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import time
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from batchinfer.core.errors import AccessDenied, BatchinferError, ConfigError, EngineLoadError
from batchinfer.core.records import Call, RowKey
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.replies import DENIED, problem_of

KEY_VARIABLE = "OPENAI_API_KEY"
"""Name of the environment variable with the endpoint's key."""
OPEN_SECONDS = 12.0
"""Seconds in which an endpoint must be reached when the engine opens."""
_ASK_SECONDS = 10.0
# Seconds after which an idle connection is not used again: many servers close it after five.
_KEEP_SECONDS = 4.0
# Calls that a server holds, as a multiple of those that it runs at once. The others wait inside it, so that it
# never waits for the worker.
_IN_FLIGHT_FACTOR = 1.5
_LONGEST_PAUSE_SECONDS = 60.0
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""What the client raises if no whole answer comes."""


class Answer(NamedTuple):
    """What a server answered. Status 0: no whole answer came, and the body is the reason."""

    status: int
    body: bytes
    wait_seconds: float | None = None
    """What its Retry-After asks for."""

    def field(self, name: str) -> Any:
        """Return a field of an object; None if there is none."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return msgspec.json.decode(self.body)[name] if self.status == 200 else None
        return None


class Target:
    """One server.

    Args:
        name: Name for messages.
        url: URL to which paths are appended.
        slots: Number of calls that it holds at once.
        socket: Path of its unix socket; empty if the URL says where it is.
        key: Key for the header Authorization; empty for none.
    """

    uses_proxy: ClassVar[bool] = False
    """Whether the variables HTTPS_PROXY and the like count."""

    def __init__(self, name: str, url: str, slots: int, *, socket: str = "", key: str = "") -> None:
        self.name, self.url, self.slots = name, url, slots
        self.is_ready = False
        self.in_flight: dict[RowKey, asyncio.Task[None]] = {}
        self.num_answered = 0
        self.paused_until = 0.0
        self.num_pauses = 0
        """Pauses since the last answer."""
        self.timeout_seconds: float | None = None
        """Longest time that one attempt at a call may take."""
        self._socket, self._key = socket, key
        self._http: aiohttp.ClientSession | None = None

    @property
    def free_slots(self) -> int:
        """Number of calls that it can take now."""
        is_open = self.is_ready and not self.pause_seconds
        return max(0, self.slots - len(self.in_flight)) if is_open else 0

    @property
    def pause_seconds(self) -> float:
        """Seconds in which it gets no call."""
        return max(0.0, self.paused_until - time.monotonic())

    def pause(self, wait_seconds: float | None = None) -> None:
        """Give it no call for as long as it asks for, or for a growing pause."""
        self.num_pauses += not self.pause_seconds  # calls that fail together make one pause
        pause = pause_seconds(self.num_pauses) if wait_seconds is None else wait_seconds
        self.paused_until = max(self.paused_until, time.monotonic() + pause)

    def url_of(self, path: str) -> str:
        """Return the URL of a path such as /v1/completions."""
        return self.url + path

    def _request(self, method: str, path: str, **more: Any) -> Any:
        if self._http is None:
            options: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEEP_SECONDS}
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._socket, **options)
                if self._socket
                else aiohttp.TCPConnector(**options),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_SECONDS),
                trust_env=self.uses_proxy,
                read_bufsize=1 << 20,
            )
        return self._http.request(method, self.url_of(path), allow_redirects=False, **more)

    def _post(self, call: Call) -> Any:
        headers = {"Content-Type": call.content_type}
        return self._request("POST", call.path, data=call.body, headers=headers)

    async def post(self, call: Call) -> Answer:
        """Send a call once."""
        return await self._read(self._post(call), self.timeout_seconds)

    async def get(self, path: str, most_seconds: float = _ASK_SECONDS) -> Answer:
        """Ask for something small."""
        return await self._read(self._request("GET", path), min(most_seconds, _ASK_SECONDS))

    async def _read(self, request: Any, seconds: float | None) -> Answer:
        try:
            async with asyncio.timeout(seconds), request as found:
                wait, body = found.headers.get("retry-after", ""), await found.read()
                if self._key:  # some endpoints repeat it in their refusals
                    body = body.replace(self._key.encode(), "…".encode())
                wait_seconds = float(wait) if wait.replace(".", "", 1).isdecimal() else None
                return Answer(found.status, body, wait_seconds)
        except _BROKEN as error:
            return Answer(0, f"no answer: {type(error).__name__}: {error}".encode())

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Send a call and yield the data of each server-sent event; a refusal is yielded as it is.

        Raises:
            ConnectionError: the connection broke.
        """
        try:
            async with self._post(call) as found:
                if found.status != 200:
                    yield await found.read()
                    return
                async for line in found.content:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield data
        except _BROKEN as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    async def look(self, config: EngineConfig) -> str:
        """Look once whether it is ready, or still well. Returns why it is given up; "" if it is not."""
        raise NotImplementedError

    def load_error(self, reason: str) -> BatchinferError:
        """Return the error for a target that did not get ready, for that reason."""
        return EngineLoadError(f"{self.name}: {reason}", hint="is --base-url right?")

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


class Endpoint(Target):
    """A server that somebody else runs.

    Args:
        url: URL up to and without /chat/completions; `/v1` is added to a URL without a path.
        config: Configuration of the engine.

    Raises:
        ConfigError: the URL is none, or the key cannot be sent.
    """

    uses_proxy = True

    def __init__(self, url: str, config: EngineConfig) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(
                "--base-url: is no URL of an endpoint",
                hint="give it up to and without /chat/completions, as in http://127.0.0.1:8000/v1; "
                f"a key belongs into {KEY_VARIABLE}",
            )
        key = os.environ.get(KEY_VARIABLE, "").strip()
        base = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        super().__init__(f"endpoint {base}", base, config.max_concurrency, key=key)
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
        if found.status in DENIED:
            raise self.denied(found)
        if found.status == 0 or found.status >= 500 or found.status == 429:
            said = problem_of(found.body).message[:200]
            return "" if left > 0 else f"is not reached ({found.status or 'no answer'}: {said})"
        listed = found.field("data")
        if found.status < 400 and not isinstance(listed, list):
            raise ConfigError(
                f"{self.name}: answers, but not as an endpoint of the OpenAI API",
                hint="is --base-url right? It usually ends with /v1",
            )
        names = [each.get("id") for each in listed or () if isinstance(each, dict)]
        if names and config.model not in names:  # an endpoint need not list its models
            raise ConfigError(
                f"{self.name}: has no model {config.model!r}, but {', '.join(map(str, names[:10]))}",
                hint="--model takes the name that the endpoint gives it",
            )
        self.is_ready = True
        return ""

    def denied(self, found: Answer) -> AccessDenied:
        """Return the error for an endpoint that refuses the key or the account."""
        said = problem_of(found.body).message[:200]
        return AccessDenied(
            f"{self.name}: {found.status}: {said}",
            hint=f"look at the key in the environment variable {KEY_VARIABLE}, and at the account behind it; "
            "finished rows are kept",
        )


def slots_for(num_seqs: int) -> int:
    """Return the number of calls that a server should hold which runs so many at once."""
    return math.ceil(num_seqs * _IN_FLIGHT_FACTOR)


def pause_seconds(num_failed: int) -> float:
    """Return the seconds before the next attempt: half a second, and twice as long after each further failure."""
    return min(_LONGEST_PAUSE_SECONDS, 2.0 ** (num_failed - 2)) * random.uniform(0.8, 1.2)


@functools.lru_cache(64)
def read_parameters(description: bytes, path: str) -> frozenset[str]:
    """Return the fields that an /openapi.json names for the body of a POST to a path; empty if it does not. Pure."""
    names: set[str] = set()
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        found = msgspec.json.decode(description)
        content = found["paths"][path]["post"]["requestBody"]["content"]
        schemas = found.get("components", {}).get("schemas", {})
        left = [part.get("schema", {}) for part in content.values()]
        while left:
            schema = left.pop()
            reference = str(schema.get("$ref", "")).rpartition("/")[2]
            left += [schemas[reference]] if reference in schemas else []
            left += [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
            names.update(schema.get("properties", {}))
    return frozenset(names)
