"""What one worker may cost, and for how long it may run: --max-cost and --max-hours.

A worker looks at its own record alone: all its starts count, and nobody adds up what others do. `launch` divides the
budget of a run among its workers. Nothing is written that would keep a later start with a higher limit from going on.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from batchinfer.core import units
from batchinfer.core.errors import LimitReached
from batchinfer.core.records import Worker
from batchinfer.worker.background import Background, Stopper
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0


def watch_limits(
    config: WorkerConfig,
    telemetry: Telemetry,
    stopper: Stopper,
    background: Background,
    stack: contextlib.ExitStack,
) -> None:
    """Request a stop as soon as a limit is reached, until `stack` is left, and tell of one that was seen too late."""
    if config.max_cost is None and config.max_hours is None:
        return

    def check() -> None:
        if reached := reached_limit(config, telemetry.up_to_date()):
            stopper.request(
                LimitReached(
                    f"worker {telemetry.latest.id} {reached}; finished rows are saved",
                    hint="to go on where it stopped, start it again with a higher limit, or without one",
                )
            )

    def tell() -> None:
        reached = reached_limit(config, telemetry.up_to_date())
        if reached and not stopper.is_requested:
            logger.warning(
                "worker %s %s: its work was done before that was seen", telemetry.latest.id, reached
            )

    check()
    stack.callback(tell)
    stack.callback(background.every(_CHECK_SECONDS, check))


def reached_limit(config: WorkerConfig, record: Worker) -> str:
    """Return which limit a worker has reached, as the rest of a sentence about it; "" if none. Pure."""
    cost = record.money.cost if record.money is not None else None
    if config.max_cost is not None and (cost or 0.0) >= config.max_cost:
        return f"has cost {units.money(cost)}, --max-cost is {units.money(config.max_cost)}"
    hours = record.up_seconds / 3600
    if config.max_hours is not None and hours >= config.max_hours:
        return f"has run for {hours:.2f} h, --max-hours is {config.max_hours:g}"
    return ""


def limits_result(config: WorkerConfig, record: Worker) -> dict[str, Any]:
    """Return what a worker's result says about its limits; empty if there are none. Pure."""
    found: dict[str, Any] = {}
    if config.max_cost is not None and record.money is not None:
        found |= {"cost": round(record.money.cost or 0.0, 4), "max_cost": config.max_cost}
    if config.max_hours is not None:
        found |= {"hours": round(record.up_seconds / 3600, 4), "max_hours": config.max_hours}
    return found
