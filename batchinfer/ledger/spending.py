"""What the machines of a run have cost, by the records of all its workers.

A worker's record says how long the worker has run and, if the worker knows its price, what that cost. Records stay when
a worker dies, so the cost of a dead start is not forgotten. What happens before a worker's process starts is not seen:
a machine that is being set up costs money, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.core.prices import Machine, accelerator_count, accelerator_name, price_of
from batchinfer.core.records import Money, Run, Worker

CLOCK_TOLERANCE_SECONDS = 5.0
"""Seconds of offset up to which a worker's clock counts as right.

A small offset is no sign of a wrong clock, because a heartbeat takes a while to reach storage.
"""


def machine_of(record: Worker, run: Run | None = None, *, is_spot: bool | None = None) -> Machine:
    """Return the machine that a worker's record describes.

    `is_spot` says whether it is a spot machine. It is used only if the record does not say.
    """
    engine = record.engine
    recorded: dict[str, Any] = run.recorded if run is not None else {}
    gpus = whole(engine.get("num_replicas")) or 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        gpus *= whole(recorded.get(name)) or 1
    return describe_machine(
        record.host, device=str(engine.get("device") or ""), num_gpus=gpus, is_spot=is_spot
    )


def describe_machine(
    host: dict[str, Any], *, device: str, num_gpus: int, is_spot: bool | None
) -> Machine:
    """Return a machine by the facts in a record's `host`. The other arguments are used where these say nothing.

    Args:
        host: The facts.
        device: Name of the GPU, as the driver gives it.
        num_gpus: Number of GPUs.
        is_spot: Whether it is a spot machine; None counts as no.
    """
    name = str(host.get("accelerator") or "")
    accelerator = accelerator_name(name or device)
    gpus = whole(host.get("gpus")) or accelerator_count(name) or num_gpus
    spot = host.get("spot") if isinstance(host.get("spot"), bool) else is_spot
    return Machine(
        cloud=str(host.get("cloud") or ""),
        region=str(host.get("region") or ""),
        accelerator=accelerator,
        gpus=gpus if accelerator else 0,
        is_spot=bool(spot),
    )


def whole(value: object) -> int:
    """Return a whole number that a record holds as a number or a text; 0 if it is none."""
    try:
        return int(str(value))
    except ValueError:
        return 0


def money_of(record: Worker, per_hour: float | None, machine: Machine) -> Money:
    """Return what a worker has cost, at the user's price, else the worker's own, else that of the lists.

    Price and cost are None if none of these has a price.
    """
    money = record.money or Money()
    if per_hour is not None or money.price_per_hour is None:
        price = price_of(machine, per_hour)
        if price is None:
            return money
        money = msgspec.structs.replace(
            money,
            price_per_hour=price.per_hour,
            price_source=price.source,
            cost=money.cost if per_hour is None else None,
        )
    if money.cost is None and money.price_per_hour is not None:
        cost = money.price_per_hour * record.up_seconds / 3600
        money = msgspec.structs.replace(money, cost=cost)
    return money


def offset_of(record: Worker, modified: float) -> float:
    """Return the seconds to add to a time by the worker's clock to get the time by storage's clock.

    The offset is 0 if the clocks differ by at most CLOCK_TOLERANCE_SECONDS, or if storage gives no times.

    Args:
        record: The worker's record.
        modified: Unix seconds at which storage received the record; 0 if unknown.
    """
    offset = modified - record.heartbeat if modified else 0.0
    return offset if abs(offset) > CLOCK_TOLERANCE_SECONDS else 0.0
