"""Where calls are sent: one HTTP server, which is ours or somebody else's. Everything here belongs to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from batchinfer import __version__
from batchinfer.core.errors import AccessDenied, ConfigError
from batchinfer.core.printable import printable
from batchinfer.core.records import Call, EngineStats, RowKey
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.replies import DENIED, Problem, problem_of
from batchinfer.engines.server import ServerProcess

KEY_VARIABLE = "OPENAI_API_KEY"
"""Name of the environment variable with the endpoint's key."""
MOST_BYTES = 1 << 30
"""Bytes above which an answer is none."""
CONNECT_SECONDS = 10.0
_ASK_SECONDS = 10.0
_COUNTER = re.compile(rb"^vllm:(\w+?)(?:_total|_count)\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)
_NAMES = {
    "steps": b"iteration_tokens_total",
    "preemptions": b"num_preemptions",
    "prompt_tokens": b"prompt_tokens",
    "cached_tokens": b"prefix_cache_hits",
    "completion_tokens": b"generation_tokens",
}
"""vLLM's counters behind our statistics."""


class Unreachable(Exception):
    """No whole answer came: no connection, a broken one, or none in time."""


class Answer(NamedTuple):
    """What a server answered. `wait_seconds` is what its Retry-After asks for, or None."""

    status: int
    body: bytes
    wait_seconds: float | None


class Target:
    """One server.

    Args:
        name: Name for messages.
        url: URL to which paths are appended.
        slots: Number of calls that it holds at once.
        socket: Path of its unix socket; empty if the URL says where it is.
        key: Key for the header Authorization; empty for none.
    """

    uses_proxy = False
    """Whether the variables HTTPS_PROXY and the like count."""

    def __init__(self, name: str, url: str, slots: int, *, socket: str = "", key: str = "") -> None:
        self.name, self.url, self.slots = name, url, slots
        self.is_ready = False
        self.held = 0
        """Calls given to this target whose replies were not collected. Belongs to the thread that calls `generate`."""
        self.in_flight: dict[RowKey, asyncio.Task[None]] = {}
        self.num_answered = 0
        self.paused_until = 0.0
        self.num_refused = 0
        """Refusals for load since the last answer."""
        self._socket, self._key = socket, key
        self._http: aiohttp.ClientSession | None = None

    @property
    def free_slots(self) -> int:
        """Number of calls that it can take now."""
        if not self.is_ready or self.paused_until > time.monotonic():
            return 0
        return max(0, self.slots - self.held)

    def refuse(self, wait_seconds: float | None) -> None:
        """Note that the server has too much to do. It gets no call until it asks for one, or for a growing pause."""
        pause = min(60.0, 2.0 ** (self.num_refused - 1)) if wait_seconds is None else wait_seconds
        # Many calls come back at the same time. They are one refusal.
        if self.paused_until <= time.monotonic():
            self.num_refused += 1
        self.paused_until = max(self.paused_until, time.monotonic() + pause)

    def session(self) -> aiohttp.ClientSession:
        """Return the client, which is made on first use."""
        if self._http is None:
            connector: aiohttp.BaseConnector
            if self._socket:
                connector = aiohttp.UnixConnector(self._socket, limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0)
            headers = {"User-Agent": f"batchinfer/{__version__}"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._http = aiohttp.ClientSession(
                connector=connector,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                trust_env=self.uses_proxy,
                read_bufsize=1 << 20,
                max_line_size=1 << 16,
                max_field_size=1 << 16,
            )
        return self._http

    async def post(self, call: Call, timeout_seconds: float | None = None) -> Answer:
        """Send a call once.

        Raises:
            Unreachable: no whole answer came.
        """
        headers = {"Content-Type": call.content_type}
        try:
            async with asyncio.timeout(timeout_seconds):
                async with self.session().post(
                    self.url_of(call.path), data=call.body, headers=headers, allow_redirects=False
                ) as found:
                    return Answer(found.status, await _read(found), _retry_after(found))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    async def get(self, path: str) -> tuple[int, bytes]:
        """Ask for something small. Status 0 means that no answer came; the body then is the reason."""
        timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
        try:
            async with self.session().get(self.url_of(path), timeout=timeout) as found:
                return found.status, await _read(found)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return 0, f"{type(error).__name__}: {error}".encode()

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """Send a call and yield the data of each server-sent event; a refusal is yielded as it is.

        Raises:
            Unreachable: the connection broke.
        """
        headers = {"Content-Type": call.content_type}
        try:
            async with self.session().post(
                self.url_of(call.path), data=call.body, headers=headers
            ) as found:
                if found.status != 200:
                    yield await _read(found)
                    return
                async for line in found.content:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield data
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def url_of(self, path: str) -> str:
        """Return the URL of a path such as /v1/completions."""
        return self.url + path

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


async def _read(found: aiohttp.ClientResponse) -> bytes:
    """Read a whole body. Raises ValueError if it is too long, which `Target` treats as a broken connection."""
    parts, num_bytes = list[bytes](), 0
    async for part in found.content.iter_any():
        num_bytes += len(part)
        if num_bytes > MOST_BYTES:
            raise ValueError(f"an answer of more than {MOST_BYTES >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


def _retry_after(found: aiohttp.ClientResponse) -> float | None:
    value = found.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    return None


# --------------------------------------------------------------------------- endpoints of others


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
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"--base-url {url}: is no URL of an endpoint",
                hint="give it up to and without /chat/completions: http://127.0.0.1:8000/v1",
            )
        if parts.username or parts.password:
            raise ConfigError(
                "--base-url: holds a secret", hint=f"the key belongs into {KEY_VARIABLE}"
            )
        base = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key.isascii() or not key.isprintable():
            raise ConfigError(f"{KEY_VARIABLE}: holds characters that no key has")
        super().__init__(f"endpoint {base}", base, config.max_concurrency, key=key)
        self._model = config.model

    def url_of(self, path: str) -> str:
        """Return the URL of a path. Those that do not begin with /v1, such as /classify, lie beside the base URL."""
        if path.startswith("/v1/"):
            return self.url + path.removeprefix("/v1")
        return self.url.removesuffix("/v1") + path

    async def check(self, path: str) -> str:
        """Ask whether there is an endpoint that knows the model and the key. Returns why it cannot be reached, or "".

        Args:
            path: Path to which rows will go, for endpoints without a list of models.

        Raises:
            AccessDenied: the endpoint refuses the key.
            ConfigError: there is no endpoint at this URL, or it does not have the model.
        """
        status, body = await self.get("/v1/models")
        if status == 0 or status >= 500 or status == 429:
            return (
                printable(body[:200].decode("utf-8", "replace"))
                if not status
                else f"status {status}"
            )
        if status in DENIED:
            raise self.denied(status, body)
        names = _model_names(body) if status == 200 else None
        if names is None:
            # An endpoint need not list its models, but it has something at the path.
            call = Call(key=("", 0), path=path, body=b"{}")
            with contextlib.suppress(Unreachable):
                status = (await self.post(call, _ASK_SECONDS)).status
            if status in DENIED:
                raise self.denied(status, body)
            if status in (404, 405) or 200 <= status < 400:
                raise ConfigError(
                    f"{self.name}: answers, but not as an endpoint of the OpenAI API (no {self.url_of(path)})",
                    hint="is --base-url right? It usually ends with /v1",
                )
        elif names and self._model not in names:
            raise ConfigError(
                f"{self.name}: has no model {self._model!r}, but {', '.join(names[:10])}",
                hint="--model takes the name that the endpoint gives it",
            )
        self.is_ready = True
        return ""

    def denied(self, status: int, body: bytes) -> AccessDenied:
        """Return the error for an endpoint that refuses the key or the account."""
        said = (problem_of(body) or Problem()).message[:200]
        if self._key:
            said = said.replace(self._key, "…")
        if status in (402, 429):
            hint = "the account behind the key has nothing left to pay with"
        elif self._key:
            hint = f"the endpoint refuses the key in {KEY_VARIABLE}"
        else:
            hint = f"set the environment variable {KEY_VARIABLE} to the endpoint's key"
        return AccessDenied(
            f"{self.name}: {status}: {said}", hint=f"{hint}; finished rows are kept"
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
        launch = process.launch
        self.process, self.launch = process, launch
        url = "http://server" if launch.socket else f"http://127.0.0.1:{launch.port}"
        key = str(config.server_options.get("api_key") or "")
        super().__init__(launch.name, url, launch.slots, socket=launch.socket, key=key)
        self.is_lost = False
        """Whether it has died so often that it is not started again."""
        self.num_deaths = 0
        """Deaths since it last answered a row."""
        self.lost_stats = EngineStats()
        """Counters of the processes that have died."""
        self._counters: Counter[bytes] | None = None

    def start(self) -> None:
        """Start the process. Returns at once."""
        self.is_ready = False
        self.num_answered = 0
        self.started = self.moved = time.monotonic()
        self._progress: Any = None
        self._has_metrics = False
        self.process.start()

    def forgive(self, seconds: float) -> None:
        """Do not hold a time against the server in which this process itself was frozen."""
        self.started += seconds
        self.moved += seconds

    async def look(self, *, load_seconds: float, stall_seconds: float) -> str:
        """Look at the server once. Returns why it must be started again; "" while all is well."""
        self.process.copy_log()
        if self.process.exit_status() is not None:
            return self.process.reason()
        now = time.monotonic()
        if not self.is_ready:
            self.is_ready = await self._is_loaded()
            self.moved = now
            if not self.is_ready and now - self.started > load_seconds:
                return f"not loaded after {load_seconds:g} s{self.process.last_lines()}"
            return ""
        await self.read_stats()
        progress = (self.num_answered, self._counters)
        if progress != self._progress or not self.in_flight:
            self._progress, self.moved = progress, now
        if now - self.moved > stall_seconds:
            count = len(self.in_flight)
            return f"no token and no answer for {stall_seconds:g} s with {count} calls in flight"
        return ""

    async def _is_loaded(self) -> bool:
        status, _ = await self.get("/health")
        if status == 404:  # a server without such a path, as some in vLLM's place are
            status, _ = await self.get("/v1/models")
        if status != 200:
            return False
        self._has_metrics = (await self.get("/metrics"))[0] == 200
        return True

    async def is_healthy(self) -> bool:
        """Whether the server says that it is well, or does not say."""
        return (await self.get("/health"))[0] in (200, 404)

    async def read_stats(self) -> None:
        """Read the server's counters, if it has any."""
        if not self._has_metrics:
            return
        status, body = await self.get("/metrics")
        if status == 200:
            counters = Counter[bytes]()
            for name, value in _COUNTER.findall(body):
                counters[name] += int(float(value))
            self._counters = Counter({name: counters[name] for name in _NAMES.values()})

    @property
    def stats(self) -> EngineStats:
        """The counters of all its processes."""
        now = self._counters or Counter[bytes]()
        before = self.lost_stats
        return EngineStats(
            **{name: getattr(before, name) + now[theirs] for name, theirs in _NAMES.items()}
        )

    def note_death(self) -> None:
        """Keep what is known of a process that has died."""
        self.num_deaths = 1 if self.num_answered else self.num_deaths + 1
        self.lost_stats, self._counters = self.stats, None
        self.is_ready = False


def read_parameters(description: bytes, path: str) -> frozenset[str]:
    """Return the fields that an /openapi.json names for the body of a POST to a path; empty if it does not. Pure."""
    try:
        found = msgspec.json.decode(description)
        content = found["paths"][path]["post"]["requestBody"]["content"]
        schemas = found.get("components", {}).get("schemas", {})
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
        return frozenset()
    names: set[str] = set()
    left = [part.get("schema", {}) for part in content.values()]
    while left:
        schema = left.pop()
        reference = str(schema.get("$ref", "")).rpartition("/")[2]
        left += [schemas[reference]] if reference in schemas else []
        left += [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
        names.update(schema.get("properties", {}))
    return frozenset(names)
