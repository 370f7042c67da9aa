"""Why a worker should stop, and how much time it has. Handlers and threads only set it; the main loop reads it."""

from __future__ import annotations

import signal
from types import FrameType

from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, Interrupted


class Stopper:
    """A stop request with a period of grace. Implements `engines.Stop`: set once everything must be dropped.

    The first request counts; a second signal ends the grace at once.
    """

    def __init__(self, clock: Clock, *, grace_seconds: float) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._deadline: float | None = None
        self.error: BatchinferError | None = None

    def request(self, error: BatchinferError) -> None:
        """Ask the worker to end with `error`, after its period of grace."""
        if self.error is None:
            self._deadline = self._clock.monotonic() + self._grace_seconds
            self.error = error

    def end_grace(self) -> None:
        """From now on nothing is waited for."""
        self._deadline = self._clock.monotonic()

    @property
    def is_requested(self) -> bool:
        """Whether the worker should take no new rows."""
        return self.error is not None

    def raise_if_requested(self) -> None:
        """Raise the error of the first request, if there was one."""
        if self.error is not None:
            raise self.error

    def is_set(self) -> bool:
        """Whether the grace is over."""
        return self._deadline is not None and self._clock.monotonic() >= self._deadline

    @property
    def seconds_left(self) -> float:
        """Of the grace."""
        if self._deadline is None:
            return self._grace_seconds
        return max(0.0, self._deadline - self._clock.monotonic())


class WhileLoading:
    """The same request as an engine sees it while it loads: there is nothing to finish, so no grace."""

    def __init__(self, stopper: Stopper) -> None:
        self._stopper = stopper
        self._is_cancelled = False

    def cancel(self) -> None:
        """The engine is not needed any more."""
        self._is_cancelled = True

    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._is_cancelled or self._stopper.is_requested


def install_signal_handlers(stopper: Stopper) -> None:
    """Let SIGTERM and SIGINT set `stopper`. A second one ends the grace. Call from the main thread."""
    num_signals = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        # Signals only: a cloud's notice, or `batchinfer stop`, often comes together with the first one.
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
