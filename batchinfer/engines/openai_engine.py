"""An engine that another program runs: any endpoint that speaks the OpenAI API. See docs/endpoint.md.

It runs in the worker's process. The requests are sent by an event loop in a thread of its own, so the worker's loop,
heartbeats and checkpoints go on whatever the endpoint does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from batchinfer.core.errors import ConfigError, EngineLoadError, EngineStalled, Interrupted
from batchinfer.core.records import Completion, EngineInfo, EngineStats, Request, TextPiece
from batchinfer.engines import UNLIMITED_LENGTH, RequestSource, Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.openai_calls import Calls
from batchinfer.engines.openai_client import CallError, Endpoint
from batchinfer.engines.openai_options import base_url_of, read_key

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Number of requests that the engine holds, as a multiple of the number that may run at once.
IN_FLIGHT_FACTOR = 1.25
# Most seconds that `generate` waits for a completion before it yields: with free slots or streamed requests, and else.
POLL_SECONDS = 0.02
LONGEST_WAIT_SECONDS = 0.25
# Most seconds for the list of models.
LIST_SECONDS = 30.0
# Seconds between two attempts to reach the endpoint when the engine opens.
OPEN_PAUSE_SECONDS = 2.0
CLOSE_SECONDS = 5.0


class OpenAIEngine:
    """An endpoint. Implements Engine.

    Args:
        config: Configuration of the engine.

    Raises:
        ConfigError: the URL is no endpoint's, or the key cannot be sent.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.max_in_flight = math.ceil(config.max_concurrency * IN_FLIGHT_FACTOR)
        self._url = base_url_of(config.base_url)
        self._key = read_key()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._endpoint: Endpoint | None = None
        self._calls: Calls | None = None
        self._error: Exception | None = None
        self._pieces: queue.SimpleQueue[TextPiece] = queue.SimpleQueue()

    # ------------------------------------------------------------------ life

    def open(self, stop: Stop) -> EngineInfo:
        """Reach the endpoint, and find out whether it takes the model. Tries for up to `stall_seconds`."""
        start = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        version = self._wait(self._connect(), stop)
        ready = time.monotonic()
        return EngineInfo(
            name="openai",
            version=version,
            model=self.config.model,
            max_model_len=UNLIMITED_LENGTH,
            max_num_seqs=self.config.max_concurrency,
            max_in_flight=self.max_in_flight,
            dtype="none",
            device="none",
            load_seconds=ready - start,
        )

    def _wait(self, work: Coroutine[Any, Any, T], stop: Stop) -> T:
        """Wait for work in the event loop. Raises Interrupted if `stop` is set meanwhile."""
        assert self._loop is not None
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return running.result(LONGEST_WAIT_SECONDS)
            except concurrent.futures.TimeoutError:
                if running.done():
                    raise
                if stop.is_set():
                    running.cancel()
                    raise Interrupted("endpoint: stopped before it was reached") from None

    async def _connect(self) -> str:
        import openai

        self._endpoint = Endpoint(self.config, self._key)
        self._calls = Calls(
            self.config, self._endpoint, end=self._note_error, show=self._pieces.put
        )
        deadline = time.monotonic() + self.config.stall_seconds
        is_told = False
        while True:
            try:
                await self._calls.check_model(await self._endpoint.model_names(LIST_SECONDS))
                return str(openai.__version__)
            except CallError as error:
                if time.monotonic() >= deadline:
                    raise EngineLoadError(
                        f"endpoint {self._url}: not reached for {self.config.stall_seconds:g} s ({error})",
                        hint="is --base-url right? --stall-seconds waits longer",
                    ) from error
                if not is_told:
                    logger.warning("endpoint %s: %s; waiting for it", self._url, error)
                    is_told = True
                await asyncio.sleep(OPEN_PAUSE_SECONDS)

    def _note_error(self, error: Exception) -> None:
        self._error = self._error or error

    def close(self) -> None:
        """Drop all requests, close the connections and end the thread."""
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is None or thread is None:
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_SECONDS)
        if not thread.is_alive():
            loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.close()

    def take_pieces(self) -> list[TextPiece]:
        """See Engine.take_pieces."""
        return _drained(self._pieces)

    def stats(self) -> EngineStats:
        """Return the counters since `open`. A step is an answered request."""
        calls = self._calls
        if calls is None:
            return EngineStats()
        return EngineStats(
            steps=calls.num_answers,
            prompt_tokens=calls.prompt_tokens,
            cached_tokens=calls.cached_tokens,
            completion_tokens=calls.completion_tokens,
        )

    # ------------------------------------------------------------------ work

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """See Engine.generate. An outage of the endpoint (`Calls.outage`) counts as a stall; slow answers do not.

        Raises:
            AccessDenied: the key is missing or refused.
            ConfigError: the endpoint refuses all requests to the model.
        """
        assert self._loop is not None
        assert self._calls is not None
        flight = _Round(self._loop, self._calls, self._note_error)
        exhausted = False
        try:
            while not stop.is_set():
                num_free = self.max_in_flight - flight.num_in_flight
                taken: list[Request] | None = []
                if not exhausted and num_free > 0:
                    taken = source.take(num_free)
                    exhausted = taken is None
                flight.send(taken or [])
                if not flight.num_in_flight:
                    if exhausted:
                        return
                    yield []
                    source.wait(1.0)
                    continue
                is_hungry = not exhausted and num_free > len(taken or [])
                is_quick = is_hungry or flight.is_streamed
                finished = flight.collect(POLL_SECONDS if is_quick else LONGEST_WAIT_SECONDS)
                if finished:
                    yield finished
                self._check()
                if not finished:
                    yield []
        finally:
            flight.drop()
            self.take_pieces()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        assert self._calls is not None
        outage = self._calls.outage
        if outage is not None and time.monotonic() - outage[0] > self.config.stall_seconds:
            raise EngineStalled(
                f"endpoint {self._url}: answered no request for {self.config.stall_seconds:g} s, see --stall-seconds; "
                f"the latest reason: {outage[1]}",
                hint="finished rows are kept; the same command goes on when the endpoint answers again",
            )


class _Round:
    """The requests of one call of `generate`.

    Args:
        loop: The event loop.
        calls: The requests to the endpoint.
        end: Function that ends the engine with an error.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: Calls,
        end: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._end = end
        self._finished: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dropped = False
        self.num_in_flight = 0
        self.is_streamed = False
        """Whether a request so far is streamed, so that a caller waits for pieces of its answer."""

    def send(self, requests: list[Request]) -> None:
        """Begin to ask for the answers."""
        if requests:
            self.num_in_flight += len(requests)
            self.is_streamed |= any(request.is_streamed for request in requests)
            self._loop.call_soon_threadsafe(self._begin, requests)

    def _begin(self, requests: list[Request]) -> None:
        for request in requests:
            if not self._is_dropped:
                task = self._loop.create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        try:
            completion = await self._calls.answer(request)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._end(error)
            return
        if completion is not None:
            self._finished.put(completion)

    def collect(self, timeout_seconds: float) -> list[Completion]:
        """Return what has finished, after waiting for the first completion for at most `timeout_seconds`."""
        found: list[Completion] = []
        with contextlib.suppress(queue.Empty):
            found = [self._finished.get(timeout=timeout_seconds), *_drained(self._finished)]
        self.num_in_flight -= len(found)
        return found

    def drop(self) -> None:
        """Cancel the requests that have not finished."""
        self._is_dropped = True
        if self.num_in_flight and not self._loop.is_closed():
            cancelling = asyncio.run_coroutine_threadsafe(self._cancel(), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                cancelling.result(CLOSE_SECONDS)

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _drained(items: queue.SimpleQueue[T]) -> list[T]:
    """Return what is in a queue now."""
    found: list[T] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(items.get_nowait())
    return found


def look(config: EngineConfig) -> None:
    """Find out whether an endpoint can be reached, takes the key and knows the model.

    Asks for its list of models. If the list lacks the model, also asks for an answer of one token.

    Raises:
        AccessDenied: the endpoint refuses the key, or forbids the model.
        ConfigError: the endpoint cannot be reached, or refuses requests to the model.
    """
    asyncio.run(_look(config))


async def _look(config: EngineConfig) -> None:
    endpoint = Endpoint(config, read_key())
    calls = Calls(config, endpoint, end=_ignore, show=_ignore)
    try:
        await calls.check_model(await endpoint.model_names(LIST_SECONDS))
    except CallError as error:
        raise ConfigError(
            f"endpoint {endpoint.url}: cannot be reached ({error})",
            hint="start it, or correct --base-url",
        ) from error
    finally:
        await endpoint.close()


def _ignore(_: object) -> None:
    pass
