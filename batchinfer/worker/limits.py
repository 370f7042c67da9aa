"""What one worker may cost, and for how long it may run: --max-cost and --max-hours.

A worker looks at its own record alone: all its starts count, and nobody adds up what others do. `launch` divides the
budget of a run among its workers. Nothing is written that would keep a later start with a higher limit from going on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchinfer.core import units
from batchinfer.core.errors import LimitReached
from batchinfer.core.records import Money, Worker
from batchinfer.worker.background import Background, Stopper
from batchinfer.worker.telemetry import Telemetry

_CHECK_SECONDS = 1.0


def check_limits(record: Worker) -> None:
    """Raise LimitReached if a worker has reached a limit."""
    money, hours = record.money or Money(), record.up_seconds / 3600
    cost = money.cost or 0.0
    if money.max_cost is not None and cost >= money.max_cost:
        said = f"has cost {units.money(cost)}, --max-cost is {units.money(money.max_cost)}"
    elif money.max_hours is not None and hours >= money.max_hours:
        said = f"has run for {hours:.2f} h, --max-hours is {money.max_hours:g}"
    else:
        return
    raise LimitReached(
        f"worker {record.id} {said}; finished rows are saved",
        hint="to go on where it stopped, start it again with a higher limit, or without one",
    )


def watch_limits(
    telemetry: Telemetry, stopper: Stopper, background: Background
) -> Callable[[], None]:
    """Ask for a stop within a second after a limit is reached. Returns a function that ends the watch.

    Raises:
        LimitReached: It was reached before.
    """
    check_limits(telemetry.up_to_date())

    def check() -> None:
        try:
            check_limits(telemetry.up_to_date())
        except LimitReached as error:
            stopper.request(error)

    return background.every(_CHECK_SECONDS, check)


def limits_result(record: Worker) -> dict[str, Any]:
    """Return what a worker's result says about its limits; empty if there are none. Pure."""
    money = record.money or Money()
    found: dict[str, Any] = {}
    if money.max_cost is not None:
        found |= {"cost": round(money.cost or 0.0, 4), "max_cost": money.max_cost}
    if money.max_hours is not None:
        found |= {"hours": round(record.up_seconds / 3600, 4), "max_hours": money.max_hours}
    return found
