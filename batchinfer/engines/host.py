"""An engine process: loads one engine and answers the worker's requests until the worker sends `Close` or dies.

`batchinfer.engines.replica` starts this process as ``python -m batchinfer.engines.host FD PARENT``. FD is the number of
this process's end of a socket pair; PARENT is the worker's process id. This process does not outlive the worker:
on Linux the kernel kills it when the worker's thread that started it ends, and everywhere it kills its own process
group when the worker's end of the socket closes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from batchinfer.core.errors import BatchinferError, EngineDied, EngineError
from batchinfer.core.records import Completion, EngineStats, Request
from batchinfer.engines import Engine, find_engine
from batchinfer.engines.channel import (
    Abandon,
    Channel,
    Close,
    Closed,
    Done,
    Failed,
    Load,
    Ready,
    Work,
    to_engine_decoder,
    unpack_request,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.parent_death import ENGINE_VARIABLE, die_with_parent, guard_forks, register

logger = logging.getLogger(__name__)

# Seconds between two reports of the counters to the worker, whose watchdog reads them.
STATS_SECONDS = 0.5
# Seconds between two attempts to send bytes that the socket did not accept.
FLUSH_SECONDS = 0.01
# Most seconds that a process waits before it ends, so that the socket accepts the `Failed` frame with the reason.
LAST_WORDS_SECONDS = 2.0


class Inbox:
    """The requests that the worker sent and the engine has not taken. Implements RequestSource and Stop.

    A thread fills the inbox. When the worker abandons a round, the inbox sets the stop signal, so that
    `Engine.generate` ends. `take` returns requests of the next round only after `resume`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._requests: deque[Request] = deque()
        self._rejected: list[Completion] = []
        self._interrupted = False
        self._closing = False
        self._config: EngineConfig | None = None
        self._next_round = 0
        self.round = 0

    def run(self) -> None:
        """Read frames until the worker sends `Close`.

        If the connection ends without `Close`, or a frame cannot be read, kill this process's group at once.
        """
        try:
            while not self._closing:
                for frame in self._channel.receive(block=True):
                    with self._changed:
                        self._put(frame)
                        self._changed.notify_all()
        except Closed:
            pass
        except Exception:
            logger.exception("the engine process cannot read what the worker sends")
        if not self._closing:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def _put(self, frame: object) -> None:
        if isinstance(frame, Load):
            self._config = frame.config
        elif isinstance(frame, Work):
            for data in frame.requests:
                request = unpack_request(data)
                if isinstance(request, Request):
                    self._requests.append(request)
                else:
                    self._rejected.append(request)
        elif isinstance(frame, Abandon):
            self._requests.clear()
            self._rejected.clear()
            self._next_round = frame.round
            self._interrupted = True
        elif isinstance(frame, Close):
            self._interrupted = self._closing = True

    def config(self) -> EngineConfig | None:
        """Wait until the worker has sent the engine's configuration, and return it.

        Returns:
            None if the worker has sent `Close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._config is not None or self._closing)
            return None if self._closing else self._config

    def resume(self) -> bool:
        """Begin the next round, clearing the stop signal. Returns False if the worker has asked to close."""
        with self._changed:
            self._interrupted = self._closing
            self.round = self._next_round
            return not self._closing

    def is_set(self) -> bool:
        """Whether `Engine.generate` should drop all work and return."""
        return self._interrupted

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """Return up to `max_requests` requests. Never returns None, since more requests may come until `Close`."""
        del free_slots  # unused, since this process has only one engine
        # Read without the lock, because this runs at every step and the queue is mostly empty.
        if not self._requests:
            return []
        with self._changed:
            if self._interrupted:
                return []
            count = min(max_requests, len(self._requests))
            return [self._requests.popleft() for _ in range(count)]

    def take_rejected(self) -> list[Completion]:
        """Return the failures of requests that could not be decoded. The engine never gets these requests."""
        if not self._rejected:
            return []
        with self._changed:
            rejected, self._rejected = self._rejected, []
            return [] if self._interrupted else rejected

    def _has_news(self) -> bool:
        return bool(self._requests or self._rejected) or self._interrupted

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a request or the stop signal arrives, but at most `timeout_seconds`.

        Meanwhile, go on sending the bytes that the socket did not accept.
        """
        end = time.monotonic() + timeout_seconds
        while (left := end - time.monotonic()) > 0:
            self._channel.flush()
            pause = min(left, FLUSH_SECONDS) if self._channel.has_unsent else left
            with self._changed:
                if self._changed.wait_for(self._has_news, pause):
                    return


def serve(channel: Channel, inbox: Inbox) -> None:
    """Load the engine, then answer requests until the worker sends `Close`.

    On a node other than node 0 there are no requests: vLLM on node 0 tells this node what to compute.
    """
    config = inbox.config()
    if config is None:
        return
    if config.node_rank:
        from batchinfer.engines.vllm_loading import run_node

        run_node(config, inbox)
        return
    kind = find_engine(config.engine)
    engine = kind.create(config)
    try:
        channel.send(Ready(info=engine.open(inbox)))
        while inbox.resume():
            answer(engine, channel, inbox)
    except EngineDied:
        if kind.is_rehearsal:
            os.kill(os.getpid(), signal.SIGKILL)
        raise
    finally:
        engine.close()


def answer(engine: Engine, channel: Channel, inbox: Inbox) -> None:
    """Answer the requests of one round, by one call of `Engine.generate`.

    Completions and pieces are sent as they come. Between them, the counters are sent about every `STATS_SECONDS`, but
    only if they have changed, so that nothing piles up in the connection while nobody drives the pool.
    """
    next_stats = 0.0
    last: tuple[EngineStats, int] | None = None
    for finished in engine.generate(inbox, inbox):
        now = time.monotonic()
        completions = finished + inbox.take_rejected()
        pieces = engine.take_pieces()
        if completions or pieces or now >= next_stats:
            stats = engine.stats()
            count = getattr(engine, "generated_tokens", None)
            tokens = count() if count and now >= next_stats else stats.completion_tokens
            next_stats = now + STATS_SECONDS
            if completions or pieces or (stats, tokens) != last:
                last = (stats, tokens)
                frame = Done(
                    round=inbox.round,
                    completions=completions,
                    stats=stats,
                    tokens=tokens,
                    pieces=pieces,
                )
                channel.send(frame)
                continue
        if channel.has_unsent:
            channel.flush()


def report(channel: Channel, error: BaseException) -> None:
    """Tell the worker why this process ends.

    Waits at most `LAST_WORDS_SECONDS` until the socket has accepted the message.
    """
    if isinstance(error, BatchinferError):
        in_flight = error.in_flight if isinstance(error, EngineError) else []
        frame = Failed(
            kind=type(error).__name__, message=error.message, hint=error.hint, in_flight=in_flight
        )
    else:
        reason = str(error).strip().splitlines()
        detail = f"{type(error).__name__}: {reason[-1] if reason else 'no message'}"
        frame = Failed(kind="EngineDied", message=detail)
    channel.send(frame)
    end = time.monotonic() + LAST_WORDS_SECONDS
    while channel.has_unsent and time.monotonic() < end:
        time.sleep(FLUSH_SECONDS)
        channel.flush()


def main(arguments: list[str]) -> int:
    """Run one engine process. Returns its exit status."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    os.environ[ENGINE_VARIABLE] = str(os.getpid())
    # Ignore Ctrl-C: the worker handles it, and decides what happens to its engines.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = Channel(connection, to_engine_decoder)
    # The worker notices that this process has ended when the connection closes. So an engine core that is forked from
    # this process must close its copy of the connection.
    guard_forks(channel.close)
    inbox = Inbox(channel)
    threading.Thread(target=inbox.run, name="inbox", daemon=True).start()
    try:
        serve(channel, inbox)
    except Closed:
        return 1
    except BatchinferError as error:
        # Log no traceback: the worker shows the last lines that this process wrote, and they should be vLLM's.
        report(channel, error)
        return 1
    except Exception as error:
        logger.exception("the engine process ends")
        report(channel, error)
        return 1
    return 0


if __name__ == "__mp_main__":
    # This runs in a process that vLLM spawned: multiprocessing imports the main module of the parent there.
    register()

if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skip the interpreter's own shutdown, which vLLM's threads and garbage collection could delay for ever.
    os._exit(status)
