"""Time and cost of a job, from the rate of one worker: the user's, or that of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchinfer.check.model import parse_gpu
from batchinfer.core import units
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.prices import Machine, price_of
from batchinfer.ledger.looks import read_workers
from batchinfer.ledger.runs import no_run, read_run
from batchinfer.ledger.spending import machine_of
from batchinfer.storage.opening import open_store

START_SECONDS = 600.0
"""Assumed seconds until a machine is there and set up, before the model begins to load."""


def measure_run(url: str) -> dict[str, Any]:
    """Measure an earlier run: rows per second of one worker whose engine is busy, and how long a model takes to load.

    Raises:
        InputError: there is no such run, or no worker of it has finished a row.
    """
    store = open_store(url)
    run, (workers, _) = read_run(store), read_workers(store)
    if run is None and not workers:
        raise no_run(store)
    records = [one.record for one in workers if one.record.rows_done]
    rows = sum(record.rows_done for record in records)
    busy = sum(record.busy_seconds for record in records)
    if not rows or busy <= 0:
        raise InputError(
            f"--rate-from {url}: no worker there has finished a row",
            hint="give --rate ROWS_PER_SECOND, or name a run that got further",
        )
    machine = machine_of(records[0], run)
    return {
        "run": url,
        "rows": rows,
        "rate": rows / busy,
        "load_seconds": max(r.engine_load_seconds for r in records),
        "accelerator": machine.accelerator,
        "gpus": max(1, machine.gpus),
    }


def estimate(rows: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Estimate time and cost of `rows`. Each worker's time is its share of rows / rate, and a start.

    Args:
        rows: Number of rows; None if it is not known.
        options: The options rate, rate_from, gpu, workers, hours, price_per_hour, is_spot and max_cost.

    Returns:
        The entries `estimate` and `measured`; empty without a rate.

    Raises:
        ConfigError: --hours is less than a start takes, or beside --workers, or no price is known that --max-cost could
                be held to.

    >>> asked = {"rate": 1.0, "workers": 6, "price_per_hour": 2.0}
    >>> estimate(36_000, asked)["estimate"]["cost"]
    22.0
    >>> within = estimate(
    ...     36_000, {"rate": 1.0, "hours": 4.0}
    ... )  # ten hours of work, ten minutes to start
    >>> within["estimate"]["workers"]
    3
    """
    found: dict[str, Any] = {}
    if options.get("rate_from"):
        found["measured"] = measure_run(options["rate_from"])
    measured = found.get("measured", {})
    name, count = measured.get("accelerator", ""), measured.get("gpus", 1)
    if gpu := options.get("gpu"):
        name, count = parse_gpu(gpu.partition(",")[0])
    machine = Machine("", "", name, count, bool(options.get("is_spot")))
    price = price_of(machine, options.get("price_per_hour"))
    if gpu and price is None and options.get("max_cost") is not None:
        raise ConfigError(f"--max-cost: no price of {gpu} is known", hint="say --price-per-hour")
    rate = options.get("rate") or measured.get("rate")
    if not rate or not rows:
        return found
    start = START_SECONDS + measured.get("load_seconds", 0.0)
    hours, workers = options.get("hours"), options.get("workers") or 1
    if hours is not None:
        if options.get("workers"):
            raise ConfigError("--workers: not together with --hours", hint="leave one of them out")
        if hours * 3600 <= start:
            given = units.duration(hours * 3600)
            raise ConfigError(f"--hours {hours:g}: {given} is less than a worker takes to start")
        workers = max(1, math.ceil(rows / rate / (hours * 3600 - start)))
    worker_hours = (rows / rate + workers * start) / 3600
    return found | {
        "estimate": {
            "rows": rows,
            "rate": rate,
            "workers": workers,
            "hours": worker_hours / workers,
            "worker_hours": worker_hours,
            "cost": price and worker_hours * price.per_hour,
            "price_per_hour": price and price.per_hour,
            "price_source": price.source if price else "",
        },
    }
