"""The echo engine in the worker's process; see `echo` for its options and its answers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import msgspec

from batchinfer import __version__
from batchinfer.core import codec
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import EngineDied, EngineStalled, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply, RowKey
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo import (
    answer,
    is_marked,
    latency_of,
    longest,
    most_at_once,
    stream_of,
)

# Seconds between two calls of `RequestSource.take` while slots are free and the source has no call ready.
POLL_SECONDS = 0.02
# Most seconds to sleep before the engine checks the stop signal again.
LONGEST_SLEEP_SECONDS = 0.2


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


_body_decoder = codec.json_decoder(_Body)


class EchoEngine:
    """Answers every call with its own prompt. Implements Engine in the calling process.

    Args:
        config: Configuration of the engine. Its parallel sizes and GPUs are ignored.
        clock: Replaces the system's clock.
    """

    def __init__(self, config: EngineConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or EngineConfig(engine="echo")
        self.max_num_seqs = most_at_once(self.config)
        self.max_in_flight = math.ceil(self.max_num_seqs * 1.5)
        self._clock = clock or SystemClock()
        self._num_steps = self._prompt_tokens = self._completion_tokens = 0
        self._reset()

    def _reset(self) -> None:
        # Heap of the times at which the slots become free.
        self._slots: list[float] = []
        # Heap of the calls in flight: the time at which each finishes, its number, and its reply.
        self._running: list[tuple[float, int, Reply]] = []
        self._num_admitted = 0
        self._kill_reason = ""

    def open(self, stop: Stop) -> EngineInfo:
        """Wait for `load_seconds`; there is nothing to load."""
        start = self._clock.monotonic()
        while (left := start + self.config.echo.load_seconds - self._clock.monotonic()) > 0:
            if stop.is_set():
                raise Interrupted("echo: stopped while it was loading")
            self._clock.sleep(min(left, LONGEST_SLEEP_SECONDS))
        return EngineInfo(
            name="echo",
            version=__version__,
            model=self.config.model or "echo",
            max_model_len=longest(self.config),
            max_num_seqs=self.max_num_seqs,
            max_in_flight=self.max_in_flight,
            revision=self.config.revision or "",
            device="none",
            load_seconds=self._clock.monotonic() - start,
        )

    def close(self) -> None:
        """Drop the calls in flight."""
        self._reset()

    def parameters(self, path: str) -> frozenset[str]:
        """See Engine.parameters. The echo engine takes every field."""
        del path
        return frozenset()

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """See Engine.ask."""
        del stop
        self._clock.sleep(latency_of(call, self.config))
        return self._counted([answer(call, self.config)])[0]

    def stream(self, call: Call) -> Iterator[bytes]:
        """See Engine.stream. Each event has one word."""
        yield from stream_of(answer(call, self.config))

    def stats(self) -> EngineStats:
        """Return the counters since the engine was created. A step is a turn of `generate` with calls in flight."""
        return EngineStats(
            steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
        )

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        """Answer all calls of `source`; see Engine.generate. A call with the kill marker raises EngineDied."""
        clock, config = self._clock, self.config
        now = last_progress = clock.monotonic()
        exhausted = False
        self._reset()
        while not stop.is_set():
            if self._kill_reason:
                raise EngineDied(f"echo: {self._kill_reason}", in_flight=self._keys())
            num_free = self.max_in_flight - len(self._running)
            finished: list[Reply] = []
            taken: list[Call] | None = None
            if not exhausted and num_free > 0:
                taken = source.take(num_free)
                exhausted = taken is None
            if taken:
                finished = self._admit(taken, now)
            finished += self._finish(now)
            if finished or taken:
                last_progress = now
                self._num_steps += 1
                yield finished
                now = clock.monotonic()
                continue
            if not self._running:
                if exhausted:
                    return
                yield []
                source.wait(1.0)
                now = last_progress = clock.monotonic()
                continue
            if now - last_progress >= config.stall_seconds and self._running[0][0] == math.inf:
                raise EngineStalled(
                    f"echo: nothing finished for {config.stall_seconds:g} s",
                    in_flight=self._keys(),
                )
            yield []
            longest = LONGEST_SLEEP_SECONDS if exhausted or num_free <= 0 else POLL_SECONDS
            clock.sleep(min(max(self._running[0][0] - clock.monotonic(), 0.0), longest))
            now = clock.monotonic()

    def _keys(self) -> list[RowKey]:
        return [reply.key for _, _, reply in self._running]

    def _admit(self, calls: list[Call], now: float) -> list[Reply]:
        """Start calls, and return the replies to those that finish at once."""
        echo = self.config.echo
        replies = [answer(call, self.config) for call in calls]
        if not (echo.latency_seconds or echo.kill_marker or echo.hang_marker):
            return self._counted(replies)
        finished: list[Reply] = []
        for call, reply in zip(calls, replies, strict=True):
            self._num_admitted += 1
            finish = math.inf
            if is_marked(call, echo.kill_marker):
                self._kill_reason = f"a prompt held {echo.kill_marker!r}"
            elif not is_marked(call, echo.hang_marker):
                if reply.status != 200:
                    finished.append(reply)
                    continue
                finish = self._start_time(now) + latency_of(call, self.config)
                heapq.heappush(self._slots, finish)
            heapq.heappush(self._running, (finish, self._num_admitted, reply))
        return finished

    def _start_time(self, now: float) -> float:
        """Return the time at which the next call starts: now, or when the first slot becomes free."""
        if len(self._slots) < self.max_num_seqs:
            return now
        return max(heapq.heappop(self._slots), now)

    def _finish(self, now: float) -> list[Reply]:
        finished: list[Reply] = []
        while self._running and self._running[0][0] <= now:
            finished.append(heapq.heappop(self._running)[2])
        return self._counted(finished)

    def _counted(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            usage = _body_decoder.decode(reply.body).usage
            self._prompt_tokens += usage.prompt_tokens
            self._completion_tokens += usage.completion_tokens
        return replies
