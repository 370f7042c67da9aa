"""Where calls are sent: one HTTP server, ours or somebody else's. Everything here belongs to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from batchinfer.core.errors import AccessDenied, BatchinferError, ConfigError, EngineLoadError
from batchinfer.core.printable import printable
from batchinfer.core.records import Call, EngineStats, RowKey
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.replies import DENIED, Problem, problem_of
from batchinfer.engines.server import ServerProcess

KEY_VARIABLE = "OPENAI_API_KEY"
"""Name of the environment variable with the endpoint's key."""
OPEN_SECONDS = 12.0
"""Seconds in which an endpoint must be reached when the engine opens."""
MOST_BYTES = 1 << 30
"""Bytes above which an answer is none."""
_ASK_SECONDS = 10.0
_NAMES = {
    "steps": b"iteration_tokens_total",
    "preemptions": b"num_preemptions",
    "prompt_tokens": b"prompt_tokens",
    "cached_tokens": b"prefix_cache_hits",
    "completion_tokens": b"generation_tokens",
}
"""vLLM's counters behind our statistics."""
_COUNTER = re.compile(rb"^vllm:(\w+?)(?:_total|_count)\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""What the client raises if no whole answer comes."""


class Answer(NamedTuple):
    """What a server answered. Status 0: no whole answer came, and the body is the reason."""

    status: int
    body: bytes
    wait_seconds: float | None = None
    """What its Retry-After asks for."""


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
        self.held = 0
        """Calls given to this target whose replies were not collected. Belongs to the thread that calls `generate`."""
        self.in_flight: dict[RowKey, asyncio.Task[None]] = {}
        self.num_answered = 0
        self.paused_until = 0.0
        self.num_pauses = 0
        """Pauses since the last answer."""
        self._socket, self._key = socket, key
        self._http: aiohttp.ClientSession | None = None

    @property
    def free_slots(self) -> int:
        """Number of calls that it can take now."""
        return max(0, self.slots - self.held) if self.is_ready and not self.pause_seconds else 0

    @property
    def pause_seconds(self) -> float:
        """Seconds in which it gets no call."""
        return max(0.0, self.paused_until - time.monotonic())

    def session(self) -> aiohttp.ClientSession:
        """Return the client, which is made on first use."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._socket, limit=0)
                if self._socket
                else aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_SECONDS),
                trust_env=self.uses_proxy,
                read_bufsize=1 << 20,
            )
        return self._http

    def url_of(self, path: str) -> str:
        """Return the URL of a path such as /v1/completions."""
        return self.url + path

    async def post(self, call: Call, timeout_seconds: float | None = None) -> Answer:
        """Send a call once."""
        try:
            async with asyncio.timeout(timeout_seconds), self._posted(call) as found:
                wait = found.headers.get("retry-after", "")
                wait_seconds = float(wait) if wait.replace(".", "", 1).isdecimal() else None
                body = await _read(found)
                if self._key:  # some endpoints repeat it in their refusals
                    body = body.replace(self._key.encode(), "…".encode())
                return Answer(found.status, body, wait_seconds)
        except _BROKEN as error:
            return Answer(0, f"no answer: {type(error).__name__}: {error}".encode())

    async def get(self, path: str, most_seconds: float = _ASK_SECONDS) -> Answer:
        """Ask for something small."""
        timeout = aiohttp.ClientTimeout(total=min(most_seconds, _ASK_SECONDS))
        try:
            async with self.session().get(self.url_of(path), timeout=timeout) as found:
                return Answer(found.status, await _read(found))
        except _BROKEN as error:
            return Answer(0, f"{type(error).__name__}: {error}".encode())

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """Send a call and yield the data of each server-sent event; a refusal is yielded as it is.

        Raises:
            ConnectionError: the connection broke.
        """
        try:
            async with self._posted(call) as found:
                if found.status != 200:
                    yield await _read(found)
                    return
                async for line in found.content:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield data
        except _BROKEN as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def _posted(self, call: Call) -> Any:
        headers = {"Content-Type": call.content_type}
        url = self.url_of(call.path)
        return self.session().post(url, data=call.body, headers=headers, allow_redirects=False)

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


async def _read(found: aiohttp.ClientResponse) -> bytes:
    """Read a whole body. Raises ValueError if it is too long, which counts as a broken connection."""
    parts, num_bytes = list[bytes](), 0
    async for part in found.content.iter_any():
        num_bytes += len(part)
        if num_bytes > MOST_BYTES:
            raise ValueError(f"an answer of more than {MOST_BYTES >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


# --------------------------------------------------------------------------- endpoints of others


class Endpoint(Target):
    """A server that somebody else runs.

    Args:
        url: URL up to and without /chat/completions; `/v1` is added to a URL without a path.
        config: Configuration of the engine.
        path: Path to which most rows go.

    Raises:
        ConfigError: the URL is none, or the key cannot be sent.
    """

    uses_proxy = True

    def __init__(self, url: str, config: EngineConfig, path: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(
                "--base-url: is no URL of an endpoint",
                hint="give it up to and without /chat/completions, as in http://127.0.0.1:8000/v1; "
                f"a key belongs into {KEY_VARIABLE}",
            )
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{KEY_VARIABLE}: holds characters that no key has")
        base = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        super().__init__(f"endpoint {base}", base, config.max_concurrency, key=key)
        self._model, self._path = config.model, path
        self._opened = time.monotonic()

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
        left = min(OPEN_SECONDS, config.stall_seconds) + self._opened - time.monotonic()
        found = await self.get("/v1/models", max(1.0, left))
        names = _model_names(found.body) if found.status == 200 else None
        if names is None and 0 < found.status < 500 and found.status not in DENIED:
            # An endpoint need not list its models, but it has something at the path.
            call = Call(key=("", 0), path=self._path, body=b"{}")
            found = await self.post(call, max(1.0, left))
        if found.status in DENIED:
            raise self.denied(found)
        if found.status == 0 or found.status >= 500 or found.status == 429:
            if left > 0:
                return ""
            said = printable(found.body[:200].decode("utf-8", "replace"))
            return f"is not reached ({found.status or 'no answer'}: {said})"
        if names is None and (found.status in (404, 405) or found.status < 400):
            raise ConfigError(
                f"{self.name}: answers, but not as an endpoint of the OpenAI API (no {self.url_of(self._path)})",
                hint="is --base-url right? It usually ends with /v1",
            )
        if names and self._model not in names:
            raise ConfigError(
                f"{self.name}: has no model {self._model!r}, but {', '.join(names[:10])}",
                hint="--model takes the name that the endpoint gives it",
            )
        self.is_ready = True
        return ""

    def denied(self, found: Answer) -> AccessDenied:
        """Return the error for an endpoint that refuses the key or the account."""
        said = (problem_of(found.body) or Problem()).message[:200]
        said = said.replace(self._key, "…") if self._key else said
        hint = f"set the environment variable {KEY_VARIABLE} to the endpoint's key"
        if self._key:
            hint = f"look at the key in {KEY_VARIABLE}, and at the account behind it"
        return AccessDenied(
            f"{self.name}: {found.status}: {said}", hint=f"{hint}; finished rows are kept"
        )


def _model_names(body: bytes) -> list[str] | None:
    """Return the models in an endpoint's list; None if it is no such list."""
    try:
        return [str(each["id"]) for each in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return None


# --------------------------------------------------------------------------- servers of our own


class OwnServer(Target):
    """A server that we have started."""

    def __init__(self, process: ServerProcess, config: EngineConfig) -> None:
        self.process, launch = process, process.launch
        url = "http://server" if launch.socket else f"http://127.0.0.1:{launch.port}"
        keys = config.server_options.get("api_key") or ""
        key = str(keys[0] if isinstance(keys, list) else keys)
        super().__init__(launch.name, url, launch.slots, socket=launch.socket, key=key)
        self.is_lost = False
        """Whether it has died so often that it is not started again."""
        self.num_deaths = 0
        """Deaths since it last answered a row."""
        self.stats = EngineStats()
        """Counters of all its processes."""
        self._stats_before = EngineStats()
        self._counters: dict[bytes, int] = {}

    def start(self) -> None:
        """Start the process. Returns at once."""
        self.num_answered = 0
        self.started = self.moved = time.monotonic()
        self._progress: Any = None
        self._stats_before = self.stats
        self.process.start()

    def forgive(self, seconds: float) -> None:
        """Do not hold a time against the server in which this process itself was frozen."""
        self.started += seconds
        self.moved += seconds

    async def look(self, config: EngineConfig) -> str:
        """Look at the server once. Returns why it must be started again; "" while all is well."""
        self.process.copy_log()
        if self.process.exit_status() is not None:
            return self.process.reason()
        now = time.monotonic()
        if not self.is_ready:
            self.is_ready, self.moved = await self._is_loaded(), now
            if not self.is_ready and now - self.started > config.load_timeout_seconds:
                return (
                    f"not loaded after {config.load_timeout_seconds:g} s{self.process.last_lines()}"
                )
            return ""
        await self.read_stats(config.stall_seconds)
        tokens = [
            self._counters.get(_NAMES[name]) for name in ("prompt_tokens", "completion_tokens")
        ]
        progress = (self.num_answered, tokens)
        if progress != self._progress or not self.in_flight:
            self._progress, self.moved = progress, now
        if now - self.moved > config.stall_seconds:
            waiting = f"{len(self.in_flight)} calls in flight"
            return f"no token and no answer for {config.stall_seconds:g} s with {waiting}"
        return ""

    async def _is_loaded(self) -> bool:
        status = (await self.get("/health")).status
        if status == 404:  # a server without such a path, as some in vLLM's place are
            status = (await self.get("/v1/models")).status
        return status == 200

    async def is_healthy(self) -> bool:
        """Whether the server says that it is well, or does not say."""
        return (await self.get("/health")).status in (200, 404)

    async def read_stats(self, most_seconds: float = _ASK_SECONDS) -> None:
        """Read the server's counters. Servers without any answer something else, which changes nothing."""
        found: dict[bytes, int] = dict.fromkeys(_NAMES.values(), 0)
        for name, value in _COUNTER.findall((await self.get("/metrics", most_seconds)).body):
            if name in found:
                found[name] += int(float(value))
        if any(found.values()):
            self._counters = found
            before = self._stats_before
            sums = {name: getattr(before, name) + found[each] for name, each in _NAMES.items()}
            self.stats = EngineStats(**sums)

    def load_error(self, reason: str) -> BatchinferError:
        """Return the error for a server that ended, or is given up, before it was ready."""
        if self.process.exit_status() is not None:
            return self.process.load_error()
        hint = "--load-timeout-seconds gives it longer"
        return EngineLoadError(f"{self.name}: {reason}", hint=hint)


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
