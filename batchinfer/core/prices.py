"""What a machine costs an hour.

The user's price comes first, then the price in SkyPilot's catalog on this machine, then the package's own list price.
"""

from __future__ import annotations

import csv
import importlib.resources
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core.records import Record

CATALOGS = Path("~/.sky/catalogs/v8")
"""Folder of SkyPilot's price lists, named <cloud>/vms.csv. SkyPilot 0.14 creates it when it is first used."""


class Price(NamedTuple):
    """Dollars an hour for one worker's machine, and the name of the source of this price."""

    per_hour: float
    source: str


class Machine(Record, frozen=True):
    """A worker's machine. A text that is not known is empty; a number that is not known is 0."""

    cloud: str
    region: str
    accelerator: str
    gpus: int
    is_spot: bool


def accelerator_name(device: str) -> str:
    """SkyPilot's name of the accelerator that `device` names; "" if there is none. `device` may be the driver's name.

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
    """The number of accelerators in a name like "L4:2"; 0 if the name holds no number.

    >>> accelerator_count("L4:2"), accelerator_count("L4")
    (2, 0)
    """
    count = text.partition(":")[2].strip()
    return int(count) if count.isdecimal() else 0


def price_of(machine: Machine, per_hour: float | None = None) -> Price | None:
    """Return what a machine costs: the user's price, else SkyPilot's catalog's, else the list price. None: not known.

    Only local files are read, and only once for each kind of machine.

    Args:
        machine: The machine.
        per_hour: The user's price in dollars an hour, which applies to every machine.
    """
    return (
        _looked_up(machine, CATALOGS.expanduser())
        if per_hour is None
        else Price(per_hour, "--price-per-hour")
    )


@cache
def _looked_up(machine: Machine, catalogs: Path) -> Price | None:
    return _catalog_price(catalogs, machine) or _list_price(machine)


def _catalog_price(catalogs: Path, machine: Machine) -> Price | None:
    """Return the price in SkyPilot's catalog of the cheapest machine with these GPUs; None if there is none.

    Only the machine's region is searched, or all regions if its region is not known.
    """
    path = catalogs / machine.cloud.lower() / "vms.csv"
    if not machine.cloud.isalnum() or not machine.accelerator:
        return None
    column = "SpotPrice" if machine.is_spot else "Price"
    found: list[float] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                # A row without an instance type has the price of a GPU alone, without the machine around it.
                if row["AcceleratorName"] != machine.accelerator or not row["InstanceType"]:
                    continue
                is_there = machine.region in ("", row["Region"])
                if is_there and float(row["AcceleratorCount"]) == max(1, machine.gpus):
                    found += [float(row[column])] if row[column] else []
    except (OSError, KeyError, ValueError, TypeError):
        return None
    return Price(min(found), "SkyPilot's catalog") if found else None


def _list_price(machine: Machine) -> Price | None:
    """Return the price in the package's own table; None if the table lacks the GPU.

    A spot machine gets the on-demand price if the table has no spot price for its GPU.
    """
    table = _table()
    prices = table["gpus"].get(machine.accelerator, {})
    per_gpu = (prices.get("spot") if machine.is_spot else None) or prices.get("on_demand")
    if per_gpu is None:
        return None
    return Price(per_gpu * max(1, machine.gpus), f"list prices of {table['as_of']}, check yours")


@cache
def _table() -> dict[str, Any]:
    import yaml

    text = importlib.resources.files("batchinfer.core").joinpath("prices.yaml").read_text()
    return dict(yaml.safe_load(text))
