"""Background work and stop requests.

A real worker runs background work on threads; the simulation runs it on a deterministic scheduler. The worker's state
belongs to the main thread, which hands background work what it needs and collects its result or exception later. So the
state needs no lock. A signal handler or a heartbeat that wants the worker to end only sets the `Stopper`, which the
main loop reads.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, Interrupted, StorageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class Stopper:
    """A request that the worker ends, with a grace period in which it may still finish rows and save them.

    Implements the protocol `engines.Stop`: `is_set` turns true when the grace period is over. Of several requests only
    the first counts.
    """

    def __init__(self, clock: Clock, *, grace_seconds: float) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._deadline: float | None = None
        self.error: BatchinferError | None = None

    def request(self, error: BatchinferError) -> None:
        """Ask the worker to end with `error` before the grace period is over. Later requests change nothing."""
        if self.error is None:
            self._deadline = self._clock.monotonic() + self._grace_seconds
            self.error = error

    def end_grace(self) -> None:
        """End the grace period now."""
        self._deadline = self._clock.monotonic()

    @property
    def is_requested(self) -> bool:
        """Whether somebody has asked the worker to end. From then on it takes no new rows."""
        return self.error is not None

    def raise_if_requested(self) -> None:
        """Raise the error of the first request, if there was one."""
        if self.error is not None:
            raise self.error

    def is_set(self) -> bool:
        """Whether a stop was requested and its grace period is over, so that all work must be dropped now."""
        return self._deadline is not None and self._clock.monotonic() >= self._deadline

    @property
    def seconds_left(self) -> float:
        """Seconds left of the grace period; the whole period if no stop was requested."""
        if self._deadline is None:
            return self._grace_seconds
        return max(0.0, self._deadline - self._clock.monotonic())


class WhileLoading:
    """The stop signal for an engine that is still loading.

    It has no grace period, because a loading engine has no rows to finish. Implements the protocol `engines.Stop`.
    """

    def __init__(self, stopper: Stopper) -> None:
        self._stopper = stopper
        self._is_cancelled = False

    def cancel(self) -> None:
        """Stop the loading, because the engine is not needed any more."""
        self._is_cancelled = True

    def is_set(self) -> bool:
        """Whether the engine must stop loading: `cancel` was called, or the worker was asked to end."""
        return self._is_cancelled or self._stopper.is_requested


def install_signal_handlers(stopper: Stopper) -> None:
    """Let SIGTERM and SIGINT request a stop. The second signal ends the grace period. Call from the main thread."""
    num_signals = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        # Only a second signal ends the grace period. `batchinfer stop` also requests a
        # stop, but either one often comes together with the first signal, so they are not counted.
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            stopper.end_grace()
        stopper.request(
            Interrupted(
                f"stopped by {signal.Signals(number).name}",
                hint="start the same command again: it goes on where this one stopped",
            )
        )

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


class Background:
    """Runs each piece of work on a daemon thread of its own. Callers bound how many they begin at a time.

    At exit the interpreter does not wait for daemon threads, so an upload that hangs cannot delay the exit. It would
    wait for the threads of concurrent.futures.
    """

    def __init__(self) -> None:
        self._finished = threading.Event()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`."""
        pending: Future[T] = Future()

        def job() -> None:
            try:
                pending.set_result(work())
            except BaseException as error:  # noqa: BLE001 - `result` raises it again
                pending.set_exception(error)
            self.wake()

        try:
            threading.Thread(target=job, name="batchinfer", daemon=True).start()
        except RuntimeError as error:
            hint = "more memory or processes are needed, or less at once: --max-num-seqs"
            pending.set_exception(StorageError(f"no thread can be started: {error}", hint=hint))
        return pending

    def every(self, interval_seconds: float, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` again and again on its own thread, with a pause of `interval_seconds` before each run.

        Returns a function that ends this. It does not wait for a run that has begun.
        """
        cancelled = threading.Event()

        def loop() -> None:
            while not cancelled.wait(interval_seconds):
                try:
                    work()
                except Exception:
                    # If a bug in one heartbeat ended the thread, no heartbeat would follow.
                    logger.exception("work that is repeated every %g s failed", interval_seconds)

        threading.Thread(target=loop, name="batchinfer-timer", daemon=True).start()
        return cancelled.set

    def event(self) -> threading.Event:
        """Make an event."""
        return threading.Event()

    def gate(self, number: int) -> threading.Semaphore:
        """Make a gate that lets `number` threads in."""
        return threading.Semaphore(number)

    def wake(self) -> None:
        """End a `wait`, as finished work does. Work calls this when it has something to show before it ends."""
        self._finished.set()

    def wait(self, timeout_seconds: float) -> None:
        """Block until a piece of submitted work finishes, `wake` is called or the time is up.

        Returns at once if this has happened since the last `wait`.
        """
        self._finished.wait(timeout_seconds)
        self._finished.clear()


def unless_stopped(
    background: Background,
    stopper: Stopper,
    pending: Future[T],
    *,
    may_finish: bool = False,
    on_turn: Callable[[], object] = lambda: None,
) -> T:
    """Wait for the result of work in the background, but stop waiting when the worker is asked to stop.

    Used for requests to storage, which may never be answered. After the waiting was stopped, the work itself goes on.
    It may still take effect, but its result is lost, as if the process had been killed.

    Args:
        background: Where the work is done.
        stopper: Says when to stop waiting.
        pending: The work. It shares no state with the main thread.
        may_finish: Whether to go on waiting during the grace period. Set for writes, so that their result is known.
        on_turn: Called again and again while this waits.

    Raises:
        BatchinferError: the stopper's error, if the waiting was stopped; else the error that the work raised. An engine
            that is stopped while it loads raises an error too, which does not say why.
    """
    while not pending.done():
        on_turn()
        if stopper.is_set() or not may_finish:
            stopper.raise_if_requested()
        background.wait(_POLL_SECONDS)
    if not may_finish:
        stopper.raise_if_requested()
    return pending.result()
