"""What a machine costs an hour: the user's price, else that of SkyPilot's local catalog, else a dated list price."""

from __future__ import annotations

import csv
import importlib.resources
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click

CATALOGS = Path("~/.sky/catalogs/v8")
"""Folder in which SkyPilot 0.14 keeps its price lists once it has been used."""


class Price(NamedTuple):
    """Dollars an hour for one worker's machine, and the name of the list that says so."""

    per_hour: float
    source: str


class Machine(NamedTuple):
    """What is known of a worker's machine. Unknown texts are empty, an unknown number is 0."""

    cloud: str
    region: str
    accelerator: str
    gpus: int
    is_spot: bool


def accelerator_name(device: str) -> str:
    """SkyPilot's name of an accelerator, made from SkyPilot's own or the driver's name; empty for none.

    >>> [
    ...     accelerator_name(n)
    ...     for n in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "L40S:2", "Tesla T4", "cpu")
    ... ]
    ['A100-80GB', 'L4', 'L40S', 'T4', '']
    """
    text = device.partition(":")[0].strip()
    if text.lower() in ("", "cpu", "none"):
        return ""
    name = re.sub(r"(?i)nvidia|tesla|geforce", "", text).strip()
    found = re.match(r"(?i)(RTX)?[ -]?([A-Z]{0,2}\d{1,4}[A-Z]{0,2})", name)
    if found is None:
        return name
    short = f"{(found[1] or '').upper()}{found[2]}"
    return f"{short}-80GB" if short == "A100" and "80GB" in name else short


def accelerator_count(text: str) -> int:
    """The number of accelerators in a name like "L4:2", else 0.

    >>> accelerator_count("L4:2"), accelerator_count("L4")
    (2, 0)
    """
    count = text.partition(":")[2].strip()
    return int(count) if count.isdecimal() else 0


class Prices:
    """What machines cost: the user's price for any, else SkyPilot's catalog, else the package's table of list prices.

    Reads local files only, each machine's price once.

    Args:
        per_hour: Dollars an hour for any machine, as the user says.
        catalogs: Folder of SkyPilot's price lists, <cloud>/vms.csv; it need not be there.
    """

    def __init__(self, per_hour: float | None = None, catalogs: Path = CATALOGS) -> None:
        self._per_hour = per_hour
        self._catalogs = catalogs.expanduser()
        self._found: dict[Machine, Price | None] = {}

    def price(self, machine: Machine) -> Price | None:
        """Look up one machine; None where nobody knows its price."""
        if self._per_hour is not None:
            return Price(self._per_hour, "--price-per-hour")
        if machine not in self._found:
            self._found[machine] = _catalog_price(self._catalogs, machine) or _list_price(machine)
        return self._found[machine]


def _catalog_price(catalogs: Path, machine: Machine) -> Price | None:
    """The cheapest machine that has these GPUs in the region, or anywhere if that is unknown."""
    path = catalogs / machine.cloud.lower() / "vms.csv"
    if not machine.cloud.isalnum() or not machine.accelerator:
        return None
    column = "SpotPrice" if machine.is_spot else "Price"
    found: list[float] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                # A row without an instance type is the price of a GPU alone, without its machine.
                if row["AcceleratorName"] != machine.accelerator or not row["InstanceType"]:
                    continue
                is_there = machine.region in ("", row["Region"])
                if is_there and float(row["AcceleratorCount"]) == max(1, machine.gpus):
                    found += [float(row[column])] if row[column] else []
    except (OSError, KeyError, ValueError, TypeError):
        return None
    return Price(min(found), "SkyPilot's catalog") if found else None


def _list_price(machine: Machine) -> Price | None:
    """The price in the package's table; the on-demand price if it has no price for spot machines."""
    table = _table()
    prices = table["gpus"].get(machine.accelerator, {})
    per_gpu = (prices.get("spot") if machine.is_spot else None) or prices.get("on_demand")
    if per_gpu is None:
        return None
    return Price(per_gpu * max(1, machine.gpus), f"list prices of {table['as_of']}, check yours")


@cache
def _table() -> dict[str, Any]:
    import yaml

    text = importlib.resources.files("batchinfer.runs").joinpath("prices.yaml").read_text()
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def listed_accelerators() -> list[str]:
    """The accelerators in the package's table, by SkyPilot's names."""
    return list(_table()["gpus"])


def price_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what machines cost."""
    for option in (
        click.option(
            "--spot/--on-demand",
            "is_spot",
            default=None,
            help="What machines are, where workers do not say. Default: on-demand.",
        ),
        click.option(
            "--price-per-hour",
            type=click.FloatRange(0),
            help="Dollars an hour for one worker's machine. Default: SkyPilot's catalog if this machine "
            "has it, else list prices by GPU.",
        ),
    ):
        function = option(function)
    return function
