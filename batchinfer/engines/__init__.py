"""What the worker needs of an engine, and the registry that imports one only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from batchinfer.core.records import Completion, EngineInfo, EngineStats, Request


class Stop(Protocol):
    """Read by whoever may wait: true once the worker should end now."""

    def is_set(self) -> bool:
        """Whether to abandon everything and return."""
        ...


class RequestSource(Protocol):
    """Where an engine takes its requests from. Never blocks on storage."""

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """Up to `max_requests` that are ready now, perhaps none; None once there will never be more.

        Args:
            max_requests: At least 1.
            free_slots: With several replicas, the number of requests that each can take now. The first `free_slots[0]`
                requests go to the first replica, and so on; a source may use this to bring requests together.
        """
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Block until something may have become ready, or the time is up. Called only while nothing is in flight."""
        ...


class Engine(Protocol):
    """Turns requests into completions. One thread opens, drives and closes it."""

    def open(self, stop: Stop) -> EngineInfo:
        """Load the model. Raises EngineLoadError (33), ConfigError (2) for a user's mistake, Interrupted if stopped."""
        ...

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """Take requests as there is room and yield what finished, in any order, each with its request's key.

        Yields after every step, at least once a second, perhaps an empty list, so that the caller keeps control.
        A request that the engine refuses comes back as a completion with a failure. Ends when the source gave None
        and nothing is in flight, or soon after `stop` is set (what is in flight is abandoned).

        Raises:
            EngineDied: an engine process ended; the engine can only be closed afterwards.
            EngineStalled: no progress for the configured time.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters since `open`. Cheap."""
        ...

    def close(self) -> None:
        """End every process and free what was held. Idempotent; also after a failure."""
        ...
