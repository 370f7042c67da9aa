"""Where calls are sent: one HTTP server, ours or somebody else's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from batchinfer.core.errors import BatchinferError, EngineLoadError
from batchinfer.core.records import Call, RowKey
from batchinfer.engines.engine_config import EngineConfig

if TYPE_CHECKING:  # a fifth of the start of a command without a server
    import aiohttp

_ASK_SECONDS = 10.0
# Seconds after which an idle connection is not used again: many servers close it after five.
_KEEP_SECONDS = 4.0
# Calls that a server holds, as a multiple of those that it runs at once. The others wait inside it, so that it
# never waits for the worker.
_IN_FLIGHT_FACTOR = 1.5
_LEAST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 60.0
_LARGEST_BYTES, _LARGEST_REFUSAL_BYTES = 512 << 20, 1 << 20
"""Most bytes of an answer, and of another reply, that are read: one may never end."""


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """Return what the client raises if no whole answer comes."""
    import aiohttp

    return aiohttp.ClientError, OSError, TimeoutError, ValueError


class Answer(NamedTuple):
    """What a server answered. Status 0: no whole answer came, and the body is the reason."""

    status: int
    body: bytes
    wait_seconds: float | None = None
    """What its Retry-After asks for."""

    def field(self, name: str) -> Any:
        """Return a field of an object; None if there is none. Some write the list `data` without the object."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found: Any = msgspec.json.decode(self.body) if self.status == 200 else None
            return found if name == "data" and isinstance(found, list) else found[name]
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
        self.proxy: str | None = None
        """URL of the proxy that leads to it."""
        self._socket, self._key = socket, key
        self._gate = asyncio.Semaphore(slots)
        """Lets `slots` calls through at once, those included that another server failed on."""
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
        """Give it no call for as long as it asks for, or for a growing pause if it asks for (nearly) none."""
        self.num_pauses += not self.pause_seconds  # calls that fail together make one pause
        pause = wait_seconds or 0.0
        if pause < _LEAST_PAUSE_SECONDS:
            pause = pause_seconds(self.num_pauses)
        self.paused_until = max(self.paused_until, time.monotonic() + pause)

    def url_of(self, path: str) -> str:
        """Return the URL of a path such as /v1/completions."""
        return self.url + path

    def _request(self, method: str, path: str, **more: Any) -> Any:
        if self._http is None:
            import aiohttp

            options: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEEP_SECONDS}
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._socket, **options)
                if self._socket
                else aiohttp.TCPConnector(**options),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_SECONDS),
                proxy=self.proxy,  # by trust_env a password in ~/.netrc would count, too
                read_bufsize=1 << 20,
            )
        # Headers of the session itself would go to the proxy, too.
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers |= more.pop("headers", {})
        url = self.url_of(path)
        return self._http.request(method, url, headers=headers, allow_redirects=False, **more)

    def _post(self, call: Call) -> Any:
        headers = {"Content-Type": call.content_type}
        return self._request("POST", call.path, data=call.body, headers=headers)

    async def post(self, call: Call) -> Answer:
        """Send a call once."""
        async with self._gate:
            return await self._read(self._post(call), self.timeout_seconds)

    async def get(self, path: str, most_seconds: float = _ASK_SECONDS) -> Answer:
        """Ask for something small."""
        return await self._read(self._request("GET", path), min(most_seconds, _ASK_SECONDS))

    async def _read(self, request: Any, seconds: float | None) -> Answer:
        limit = asyncio.timeout(seconds)
        try:
            async with limit, request as found:
                wait, body = found.headers.get("retry-after", ""), await _body_of(found)
                body = body if found.status == 200 else self.masked(body)
                wait_seconds = float(wait) if wait.replace(".", "", 1).isdecimal() else None
                return Answer(found.status, body, wait_seconds)
        except _broken() as error:
            is_late = limit.expired()
            why = f" within {seconds:g} s" if is_late else f": {type(error).__name__}: {error}"
            return Answer(0, f"no answer{why}".encode())

    def masked(self, body: bytes) -> bytes:
        """Return a body without the key, which some endpoints repeat in their refusals. Answers stay as they are."""
        return body.replace(self._key.encode(), "…".encode()) if self._key else body

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Send a call and yield the data of each server-sent event; a refusal, or a whole answer, as it is.

        Raises:
            ConnectionError: the connection broke.
        """
        try:
            async with self._post(call) as found:
                if found.status != 200 or found.content_type == "application/json":
                    body = await _body_of(found)
                    yield body if found.status == 200 else self.masked(body)
                    return
                async for line in found.content:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield data
        except _broken() as error:
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


async def _body_of(found: aiohttp.ClientResponse) -> bytes:
    """Return a body, or the beginning of a very large one: no whole answer."""
    most = _LARGEST_BYTES if found.status == 200 else _LARGEST_REFUSAL_BYTES
    pieces, size = [], 0
    async for piece in found.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            break
    return b"".join(pieces)[:most]


def slots_for(num_seqs: int) -> int:
    """Return the number of calls that a server should hold which runs so many at once."""
    return math.ceil(num_seqs * _IN_FLIGHT_FACTOR)


def pause_seconds(num_failed: int) -> float:
    """Return the seconds before the next attempt: half a second, and twice as long after each further failure."""
    return min(_LONGEST_PAUSE_SECONDS, 2.0 ** (num_failed - 2)) * random.uniform(0.8, 1.2)


def length_of(listed: Answer, model: str) -> int | None:
    """Return the length that a list of models states of one, or of the first if it does not name that one. Pure."""
    data = listed.field("data")
    models = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    models.sort(key=lambda each: each.get("id") != model)
    length = models[0].get("max_model_len") if models else None
    return length if isinstance(length, int) else None


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
            left += [schemas.pop(reference)] if reference in schemas else []  # each once
            left += [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
            names.update(schema.get("properties", {}))
    return frozenset(names)
