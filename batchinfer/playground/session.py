"""One loaded engine that answers a person's requests, shows texts while they come, and measures the times."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import msgspec

from batchinfer.core.records import Completion, EngineInfo, Record, Request, RowKey, TextPiece
from batchinfer.engines import create_engine
from batchinfer.engines.config import EngineConfig


class StopSignal:
    """A flag that asks an engine to drop its work. Implements `Stop`."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set the flag."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set


@contextmanager
def stopped_by_interrupt() -> Iterator[StopSignal]:
    """Give a stop signal that Ctrl-C sets while the context lasts; Ctrl-C then raises nothing."""
    stop = StopSignal()
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Answered(Record, frozen=True, kw_only=True):
    """A completion, and when it came, in seconds after the engine took the request."""

    completion: Completion
    first_seconds: float | None
    """Seconds until the first token; None if the engine did not stream the answer."""
    seconds: float
    """Seconds until the answer was complete."""


class RequestList:
    """A fixed list of requests. It notes when the engine takes each. Implements `RequestSource`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._left = list(requests)
        self.taken: dict[RowKey, float] = {}

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """See RequestSource."""
        del free_slots  # unused, since a session has only one replica
        if not self._left:
            return None
        requests, self._left = self._left[:max_requests], self._left[max_requests:]
        now = time.perf_counter()
        self.taken |= {request.key: now for request in requests}
        return requests

    def wait(self, timeout_seconds: float) -> None:
        """Return at once: all requests are ready from the beginning."""


class Session:
    """An engine with one replica for one person. The model loads in `open`.

    Args:
        config: Configuration of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._engine = create_engine(config)

    def open(self) -> EngineInfo:
        """Load the model. May be called again after `close` or a failure.

        Raises:
            BatchinferError: see `Engine.open`.
        """
        return self._engine.open(StopSignal())

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.close()

    def answer(
        self,
        requests: Sequence[Request],
        stop: StopSignal,
        on_piece: Callable[[TextPiece], None] = lambda _piece: None,
    ) -> Iterator[Answered]:
        """Answer requests together, and yield each answer when it is complete.

        Args:
            requests: Requests with different keys. Their answers are streamed.
            stop: Signal that drops what is not answered yet.
            on_piece: Function that is called with each part of a text when it comes.

        Raises:
            EngineError: see `Engine.generate`.
        """
        source = RequestList(
            [msgspec.structs.replace(request, is_streamed=True) for request in requests]
        )
        first: dict[RowKey, float] = {}
        for completions in self._engine.generate(source, stop):
            now = time.perf_counter()
            for piece in self._engine.take_pieces():
                if piece.num_tokens:
                    first.setdefault(piece.key, now)
                on_piece(piece)
            for completion in completions:
                start = source.taken[completion.key]
                begun = first.get(completion.key)
                yield Answered(
                    completion=completion,
                    first_seconds=None if begun is None else begun - start,
                    seconds=now - start,
                )
