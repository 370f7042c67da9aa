"""Where calls are sent: one HTTP server, ours or somebody else's. Everything here belongs to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from batchinfer.core.errors import AccessDenied, BatchinferError, ConfigError, EngineLoadError
from batchinfer.core.printable import printable
from batchinfer.core.records import Call, RowKey
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.replies import DENIED, problem_of
from batchinfer.engines.server import ServerProcess

KEY_VARIABLE = "OPENAI_API_KEY"
"""Name of the environment variable with the endpoint's key."""
OPEN_SECONDS = 12.0
"""Seconds in which an endpoint must be reached when the engine opens."""
_ASK_SECONDS = 10.0
_NAMES = {
    b"iteration_tokens_total": "steps",
    b"num_preemptions": "preemptions",
    b"prompt_tokens": "prompt_tokens",
    b"prefix_cache_hits": "cached_tokens",
    b"generation_tokens": "completion_tokens",
}
"""vLLM's counters behind the fields of `EngineStats`."""
_COUNTER = re.compile(rb"^vllm:(\w+?)(?:_total|_count)\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)
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
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
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
        uses_proxy: Whether the variables HTTPS_PROXY and the like count.
    """

    def __init__(
        self,
        name: str,
        url: str,
        slots: int,
        *,
        socket: str = "",
        key: str = "",
        uses_proxy: bool = False,
    ) -> None:
        self.name, self.url, self.slots = name, url, slots
        self.is_ready = False
        self.held = 0
        """Calls given to this target whose replies were not collected. Belongs to the thread that calls `generate`."""
        self.in_flight: dict[RowKey, asyncio.Task[None]] = {}
        self.num_answered = 0
        self.paused_until = 0.0
        self.num_pauses = 0
        """Pauses since the last answer."""
        self.timeout_seconds: float | None = None
        """Longest time that one attempt at a call may take."""
        self._socket, self._key, self._uses_proxy = socket, key, uses_proxy
        self._http: aiohttp.ClientSession | None = None

    @property
    def free_slots(self) -> int:
        """Number of calls that it can take now."""
        return max(0, self.slots - self.held) if self.is_ready and not self.pause_seconds else 0

    @property
    def pause_seconds(self) -> float:
        """Seconds in which it gets no call."""
        return max(0.0, self.paused_until - time.monotonic())

    def url_of(self, path: str) -> str:
        """Return the URL of a path such as /v1/completions."""
        return self.url + path

    def _request(self, method: str, path: str, **more: Any) -> Any:
        if self._http is None:
            socket = self._socket
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(socket, limit=0)
                if socket
                else aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_SECONDS),
                trust_env=self._uses_proxy,
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

    async def events(self, call: Call) -> AsyncIterator[bytes]:
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
        super().__init__(f"endpoint {base}", base, config.max_concurrency, key=key, uses_proxy=True)
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
            said = printable(found.body[:200].decode("utf-8", "replace"))
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


class OwnServer(Target):
    """A server that we have started."""

    def __init__(self, process: ServerProcess) -> None:
        self.process, launch = process, process.launch
        url = "http://server" if launch.socket else f"http://127.0.0.1:{launch.port}"
        super().__init__(launch.name, url, launch.slots, socket=launch.socket)
        self.is_lost = False
        """Whether it has died so often that it is not started again."""
        self.num_deaths = 0
        """Deaths since it last answered a row."""
        self._counters = self._counters_before = Counter[str]()

    @property
    def counters(self) -> Counter[str]:
        """Counters of all its processes, by the fields of `EngineStats`."""
        return self._counters_before + self._counters

    def start(self) -> None:
        """Start the process. Returns at once."""
        self.num_answered = 0
        self._started = self._moved = time.monotonic()
        self._progress: Any = None
        self._counters_before, self._counters = self.counters, Counter()
        self.process.start()

    async def look(self, config: EngineConfig) -> str:
        """Look at the server once. Returns why it must be started again; "" while all is well."""
        self.process.copy_log()
        if self.process.exit_status() is not None:
            return self.process.reason()
        now = time.monotonic()
        if not self.is_ready:
            self.is_ready, self._moved = await self.is_healthy(), now
            seconds = config.load_timeout_seconds
            is_late = not self.is_ready and now - self._started > seconds
            return f"not loaded after {seconds:g} s{self.process.last_lines()}" if is_late else ""
        await self.read_counters(config.stall_seconds)
        tokens = (self._counters["prompt_tokens"], self._counters["completion_tokens"])
        if (self.num_answered, tokens) != self._progress or not self.in_flight:
            self._progress, self._moved = (self.num_answered, tokens), now
        if now - self._moved > config.stall_seconds:
            waiting = f"{len(self.in_flight)} calls in flight"
            return f"no token and no answer for {config.stall_seconds:g} s with {waiting}"
        return ""

    async def is_healthy(self) -> bool:
        """Whether the server says that it is well. Some in vLLM's place have no /health, but a list of models."""
        status = (await self.get("/health")).status
        return (status if status != 404 else (await self.get("/v1/models")).status) == 200

    async def read_counters(self, most_seconds: float = _ASK_SECONDS) -> None:
        """Read the server's counters. Servers without any answer something else, which changes nothing."""
        found = Counter[str]()
        for name, value in _COUNTER.findall((await self.get("/metrics", most_seconds)).body):
            if name in _NAMES:
                found[_NAMES[name]] += int(float(value))
        self._counters = found or self._counters

    def load_error(self, reason: str) -> BatchinferError:
        """See Target.load_error."""
        return self.process.load_error(reason)


@functools.lru_cache(64)
def read_parameters(description: bytes, path: str) -> frozenset[str]:
    """Return the fields that an /openapi.json names for the body of a POST to a path; empty if it does not. Pure."""
    names: set[str] = set()
    with contextlib.suppress(
        msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError
    ):
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
