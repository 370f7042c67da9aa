"""Sends single requests to an endpoint by the official client, and sorts what can go wrong with them.

    Unavailable   the endpoint takes no requests now: refused connections, 429, 503
    Cut           the answer was not whole: cut connections, 500, bodies that are no JSON
    TooSlow       no whole answer within the time limit: of this package, or of a proxy (408, 504)
    Refusal       the endpoint refuses this request: 400, 404, 422

The key is never part of a message.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from batchinfer.core.errors import AccessDenied, ConfigError
from batchinfer.core.printable import printable
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.openai_options import KEY_VARIABLE, base_url_of
from batchinfer.engines.openai_pace import number_of, retry_after

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
# Most bytes of one answer. A longer body is a fault of the endpoint.
MOST_BYTES = 64 << 20
_LONGEST_MESSAGE = 300
_NO_KEY = "none"
# Errors of the client's HTTP library for connections that were never made.
_NOT_CONNECTED = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout"})


class CallError(Exception):
    """A request has no answer. The text says why, for people."""


class Unavailable(CallError):
    """The endpoint takes no requests now.

    Args:
        message: Why.
        seconds: Seconds for which the endpoint asks to wait; None if it does not say.
        most_tokens: Tokens that it takes in a minute, and so in one request; None if it does not say.
    """

    def __init__(
        self, message: str, seconds: float | None = None, most_tokens: float | None = None
    ) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.most_tokens = most_tokens


class Cut(CallError):
    """The answer was not whole."""


class TooSlow(CallError):
    """No whole answer came within the time limit."""


class Refusal(CallError):
    """The endpoint refuses the request. `status`, `code` and `param` are those of its answer."""

    def __init__(self, message: str, *, status: int, code: str, param: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Reply(NamedTuple):
    """An answer as the endpoint sent it."""

    data: bytes
    headers: Any


class Endpoint:
    """One endpoint and the connections to it. Made and used in one event loop.

    Args:
        config: Configuration of the engine.
        key: The key; empty for none.

    Raises:
        ConfigError: as in `base_url_of`, or the client does not take the URL.
    """

    def __init__(self, config: EngineConfig, key: str) -> None:
        import openai

        self.url = base_url_of(config.base_url)
        self.timeout_seconds = config.request_timeout_seconds
        self._key = key
        self._openai = openai
        library = _library_of(openai.DefaultAsyncHttpxClient)
        client = openai.DefaultAsyncHttpxClient(
            timeout=openai.Timeout(None, connect=CONNECT_SECONDS),
            event_hooks={"response": [_body_limit(library)]},
            # The limit counts bytes as they arrive, and a packed body would grow after that.
            headers={"accept-encoding": "identity"},
        )
        try:
            self._client = openai.AsyncOpenAI(
                base_url=self.url, api_key=key or _NO_KEY, max_retries=0, http_client=client
            )
        except library.InvalidURL as error:
            raise ConfigError(
                f"--base-url: is no URL of an endpoint: {error}",
                hint="give it as in --base-url http://127.0.0.1:8000/v1",
            ) from error
        self._response_class = library.Response

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def post(self, path: str, body: dict[str, Any], timeout_seconds: float) -> Reply:
        """Send one request and return its answer.

        Raises:
            CallError: there is no answer; see the module's docstring.
            AccessDenied: the key is missing or refused, or what it pays for is used up.
        """
        with self._sorted(path, timeout_seconds):
            async with asyncio.timeout(timeout_seconds):
                found = await self._client.post(path, cast_to=self._response_class, body=body)
        return Reply(found.content, found.headers)

    async def stream(
        self, path: str, body: dict[str, Any], timeout_seconds: float
    ) -> AsyncGenerator[dict[str, Any]]:
        """Send one request and yield the parts of its answer as they come.

        Raises:
            CallError, AccessDenied: as in `post`.
        """
        with self._sorted(path, timeout_seconds):
            async with asyncio.timeout(timeout_seconds):
                parts = await self._client.post(
                    path,
                    cast_to=object,
                    body={**body, "stream": True, "stream_options": {"include_usage": True}},
                    stream=True,
                    stream_cls=self._openai.AsyncStream[object],
                )
                try:
                    async for part in parts:
                        if isinstance(part, dict):
                            yield part
                except (ValueError, RecursionError) as error:
                    raise Cut("a part of an answer that is no JSON") from error

    async def model_names(self, timeout_seconds: float) -> list[str] | None:
        """Return the names of the models that the endpoint lists; None if it has no list.

        Raises:
            CallError: the endpoint does not answer.
            AccessDenied: the key is missing or refused.
        """
        try:
            with self._sorted("/models", timeout_seconds):
                async with asyncio.timeout(timeout_seconds):
                    found = await self._client.get("/models", cast_to=self._response_class)
        except Refusal as error:
            if error.status == 403:
                raise self._denied(error.status, str(error)) from error
            return None
        try:
            listed = msgspec.json.decode(found.content)
            return [str(each["id"]) for each in listed["data"]]
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
            return None

    @contextmanager
    def _sorted(self, path: str, timeout_seconds: float) -> Iterator[None]:
        """Turn the client's errors into AccessDenied and those of this module."""
        try:
            yield
        except (TimeoutError, self._openai.APITimeoutError) as error:
            if type(error.__cause__).__name__ in _NOT_CONNECTED:
                raise Unavailable(f"no connection within {CONNECT_SECONDS:g} s") from error
            raise TooSlow(f"no whole answer within {timeout_seconds:g} s") from error
        except self._openai.APIStatusError as error:
            raise self._by_status(path, error) from error
        except self._openai.APIConnectionError as error:
            cause = error.__cause__ or error
            message = self._clean(f"{type(cause).__name__}: {cause}")
            if type(cause).__name__ in _NOT_CONNECTED:
                raise Unavailable(message) from error
            raise Cut(message) from error
        except self._openai.APIError as error:  # sent as a part of a stream
            raise Cut(self._clean(str(error.message))) from error

    def _by_status(self, path: str, error: Any) -> Exception:
        status, code = int(error.status_code), error.code or ""
        message = self._clean(f"{status}: {_detail(error.body)}")
        if status in (401, 402) or code == "insufficient_quota":
            return self._denied(status, message)
        if status in (429, 503, 529):
            headers = error.response.headers
            most_tokens = number_of(headers.get("x-ratelimit-limit-tokens"))
            return Unavailable(message, retry_after(headers, time.time()), most_tokens)
        if status in (408, 504):
            return TooSlow(message)
        if status in (409, 425) or (status >= 500 and status != 501):
            return Cut(message)
        param = error.param if isinstance(error.param, str) else ""
        return Refusal(
            f"{message} ({path})" if status == 404 else message,
            status=status,
            code=code,
            param=param,
        )

    def _denied(self, status: int, message: str) -> AccessDenied:
        if status in (402, 429):
            hint = "the account behind the key has nothing left to pay with; finished rows are kept"
        elif self._key:
            hint = f"the endpoint refuses the key in {KEY_VARIABLE}; finished rows are kept"
        else:
            hint = f"set the environment variable {KEY_VARIABLE} to the endpoint's key"
        return AccessDenied(f"endpoint {self.url}: {message}", hint=hint)

    def denied(self, error: Refusal) -> AccessDenied:
        """Return the error for an endpoint that refuses every request by this refusal."""
        return self._denied(error.status, str(error))

    def _clean(self, text: str) -> str:
        """Return the first line of what the endpoint says, without the key."""
        if self._key:
            text = text.replace(self._key, "…")
        lines = text.strip().splitlines()
        return printable(lines[0])[:_LONGEST_MESSAGE] if lines else "no message"


def _detail(body: Any) -> str:
    """Return what the body of an error says, for people."""
    if isinstance(body, dict):
        found = body.get("message") or body.get("detail") or body.get("error") or body
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return " ".join(str(body or "no message").split())


def _library_of(client_class: type) -> Any:
    """Return the HTTP library that the official client is built on: httpx, or httpx2 in later versions."""
    base = next(base for base in client_class.__mro__ if base.__module__.startswith("httpx"))
    return importlib.import_module(base.__module__.partition(".")[0])


def _body_limit(library: Any) -> Callable[[Any], Awaitable[None]]:
    """Return a hook that makes the reading of a response's body fail above `MOST_BYTES`."""

    class LimitedBody(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for part in self._stream:
                num_bytes += len(part)
                if num_bytes > MOST_BYTES:
                    raise library.ReadError(f"an answer of more than {MOST_BYTES >> 20} MiB")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def limit(response: Any) -> None:
        response.stream = LimitedBody(response.stream)

    return limit
