"""The limits of a run's cost and time: --max-cost and --max-hours.

Each worker with a limit adds up what all workers of the run have cost, by their records, and ends itself when the limit
is reached. Workers with the same limit see the same records, so they end at about the same time. Nothing is written
that would keep a later start with a higher limit from going on.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from batchinfer.core import units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, LimitReached
from batchinfer.core.events import event
from batchinfer.core.records import Worker
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE
from batchinfer.ledger.spending import Spending
from batchinfer.storage import Store
from batchinfer.worker.background import Background, Stopper
from batchinfer.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
"""Longest time between two checks. Most checks send no request: they estimate from the last look at the records."""
_LOOKS_AHEAD = 4.0
"""The next look at the records comes after the time that is left until a limit, divided by this number. So the looks
come more often as the limit comes nearer, and workers that join meanwhile are seen in time."""
_LONGEST_SECONDS = 600.0
"""Longest time between two looks. After a start, no wait is longer than the time since the start, or a heartbeat. So
workers that begin at about the same time are soon seen."""


class RunLimits:
    """Ends a worker when the run has cost or lasted as much as it may.

    Args:
        config: The worker's configuration, with the limits and the price of the machine.
        store: The run's store.
        clock: This machine's clock.
    """

    def __init__(self, config: WorkerConfig, store: Store, clock: Clock) -> None:
        self._max_cost = config.max_cost
        self._max_hours = config.max_hours
        self._heartbeat_seconds = config.lease_seconds / HEARTBEATS_PER_LEASE
        self._clock = clock
        self._began = self._next_look = clock.monotonic()
        self._has_ended_it = False
        self.spending = Spending(store, clock, config.price_per_hour)

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._max_cost is not None or self._max_hours is not None

    def check(self) -> None:
        """Compare the run with its limits. Reads the workers' records if it is time to, or if a limit seems reached.

        Raises:
            LimitReached: A limit is reached.
            StorageError: Storage cannot be read.
        """
        if self._clock.monotonic() >= self._next_look:
            self._look(is_exact=self.spending.num_live == 0)
        if self._reached() and self.spending.look_seconds > self._heartbeat_seconds:
            # Workers may have ended since the last look.
            with contextlib.suppress(BatchinferError):
                self._look(is_exact=True)
        if reached := self._reached():
            self._has_ended_it = True
            raise LimitReached(
                f"the run {reached}; finished rows are saved",
                hint="to go on where it stopped, start it again with a higher limit, or without one",
            )

    def watch(self, background: Background, stack: contextlib.ExitStack, stopper: Stopper) -> None:
        """Check the limits again and again until `stack` is left. `stopper` gets the request to stop."""
        if not self.is_set:
            return

        def check() -> None:
            try:
                self.check()
            except LimitReached as error:
                stopper.request(error)
            except BatchinferError as error:
                logger.warning("what the run has cost cannot be read (%s); trying again", error)
                self._next_look = self._clock.monotonic() + self._heartbeat_seconds

        seconds = min(_CHECK_SECONDS, self._heartbeat_seconds / HEARTBEATS_PER_LEASE)
        repeating = background.every(seconds, check)
        stack.callback(repeating.cancel)

    def result(self, own: Worker) -> dict[str, Any]:
        """Return what the worker's result says about the limits; an empty dictionary if there are none.

        Logs a warning if the run was done above its limit before that was noticed.

        `own` is this worker's record. A start may end before a look at all records has found it.
        """
        if not self.is_set:
            return {}
        own_cost = own.money.cost if own.money is not None else None
        found: dict[str, Any] = {
            "run_hours": round(max(self.spending.hours, own.up_seconds / 3600), 4)
        }
        if self._max_hours is not None:
            found["max_hours"] = self._max_hours
        if self._max_cost is not None:
            cost = max(self.spending.cost, own_cost or 0.0)
            found |= {"run_cost": round(cost, 4), "max_cost": self._max_cost}
            if cost > self._max_cost and not self._has_ended_it:
                logger.warning(
                    "the run has cost %s, more than --max-cost %s: its work was done before that was noticed",
                    *(units.money(cost), units.money(self._max_cost)),
                )
        return found

    def _look(self, *, is_exact: bool) -> None:
        spending = self.spending
        spending.look(is_exact=is_exact)
        seconds = min(_LONGEST_SECONDS, self._clock.monotonic() - self._began)
        if self._max_cost is not None and spending.cost_per_hour > 0:
            left = self._max_cost - spending.cost
            seconds = min(seconds, 3600 * left / spending.cost_per_hour / _LOOKS_AHEAD)
        if self._max_hours is not None:
            seconds = min(seconds, 3600 * (self._max_hours - spending.hours) / _LOOKS_AHEAD)
        self._next_look = self._clock.monotonic() + max(seconds, self._heartbeat_seconds)
        if spending.hours > 0:
            logger.info(
                "until now the run has cost %s and lasted %.2f h",
                units.money(spending.cost),
                spending.hours,
                extra=event(
                    "run_cost", cost=round(spending.cost, 6), hours=round(spending.hours, 6)
                ),
            )

    def _reached(self) -> str:
        """Return which limit is reached, as the rest of a sentence about the run; "" if none is."""
        spending = self.spending
        if self._max_cost is not None and spending.cost >= self._max_cost:
            return f"has cost {units.money(spending.cost)}, --max-cost is {units.money(self._max_cost)}"
        if self._max_hours is not None and spending.hours >= self._max_hours:
            return f"has lasted {spending.hours:.2f} h, --max-hours is {self._max_hours:g}"
        return ""
