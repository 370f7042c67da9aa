"""What a machine costs an hour: as told, by SkyPilot's catalog where it lies on this machine, else by a dated table."""

from __future__ import annotations

import csv
import importlib.resources
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click

CATALOGS = Path("~/.sky/catalogs/v8")
"""Where SkyPilot 0.14 keeps its price lists once it has been used."""


class Price(NamedTuple):
    """Dollars an hour for one worker's machine, and where that comes from."""

    per_hour: float
    source: str


class Machine(NamedTuple):
    """What is known of a worker's machine; empty or 0 where it is not."""

    cloud: str
    region: str
    accelerator: str
    gpus: int
    is_spot: bool


class PriceSource(Protocol):
    """Gives the price of a machine, or None where it does not know."""

    def price(self, machine: Machine) -> Price | None:
        """Look up one machine."""
        ...


def accelerator_name(device: str) -> str:
    """SkyPilot's name of an accelerator, from that or from what its driver calls it; empty for none.

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
    """How many of them a name like "L4:2" says, else 0.

    >>> accelerator_count("L4:2"), accelerator_count("L4")
    (2, 0)
    """
    count = text.partition(":")[2].strip()
    return int(count) if count.isdecimal() else 0


class FixedPrice:
    """What the user says a worker costs an hour."""

    def __init__(self, per_hour: float) -> None:
        self._price = Price(per_hour, "--price-per-hour")

    def price(self, machine: Machine) -> Price | None:  # noqa: ARG002 - every machine costs the same
        """See PriceSource."""
        return self._price


class PriceTable:
    """A dated table of dollars per GPU hour."""

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._gpus: dict[str, dict[str, float]] = table["gpus"]
        self.source = f"{name} of {table['as_of']}, check yours"

    @classmethod
    def load(cls) -> PriceTable:
        """Read the package's table."""
        import yaml

        text = importlib.resources.files("batchinfer.runs").joinpath("prices.yaml").read_text()
        return cls(yaml.safe_load(text), "list prices")

    def names(self) -> list[str]:
        """The accelerators in the table."""
        return list(self._gpus)

    def price(self, machine: Machine) -> Price | None:
        """See PriceSource. Without a spot price, spot counts as on-demand."""
        prices = self._gpus.get(machine.accelerator)
        if prices is None:
            return None
        kind = "spot" if machine.is_spot and "spot" in prices else "on_demand"
        if kind not in prices:
            return None
        count = max(1, machine.gpus)
        return Price(prices[kind] * count, self.source)


class SkyPilotCatalog:
    """The price lists that SkyPilot has left on this machine: <folder>/<cloud>/vms.csv. Read-only, no network."""

    def __init__(self, folder: Path = CATALOGS) -> None:
        self._folder = folder.expanduser()
        self._known: dict[Machine, Price | None] = {}

    def price(self, machine: Machine) -> Price | None:
        """See PriceSource. The cheapest machine that has these GPUs in the region, or anywhere if that is unknown."""
        if machine not in self._known:
            self._known[machine] = self._look_up(machine)
        return self._known[machine]

    def _look_up(self, machine: Machine) -> Price | None:
        path = self._folder / machine.cloud.lower() / "vms.csv"
        if not machine.cloud.isalnum() or not machine.accelerator:
            return None
        column = "SpotPrice" if machine.is_spot else "Price"
        found: list[float] = []
        try:
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    # Without an instance type it is a GPU's price, its machine not included.
                    if row["AcceleratorName"] != machine.accelerator or not row["InstanceType"]:
                        continue
                    is_there = machine.region in ("", row["Region"])
                    if is_there and float(row["AcceleratorCount"]) == max(1, machine.gpus):
                        found += [float(row[column])] if row[column] else []
        except (OSError, KeyError, ValueError, TypeError):
            return None
        return Price(min(found), "SkyPilot's catalog") if found else None


class FirstKnown:
    """Asks several sources in turn."""

    def __init__(self, *sources: PriceSource) -> None:
        self._sources = sources

    def price(self, machine: Machine) -> Price | None:
        """See PriceSource."""
        for source in self._sources:
            price = source.price(machine)
            if price is not None:
                return price
        return None


def price_source(per_hour: float | None, catalogs: Path = CATALOGS) -> PriceSource:
    """The user's price if there is one, else SkyPilot's catalog and then the package's table."""
    if per_hour is not None:
        return FixedPrice(per_hour)
    return FirstKnown(SkyPilotCatalog(catalogs), PriceTable.load())


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
            help="Dollars an hour for one worker's machine. Default: SkyPilot's catalog if it lies here, "
            "else list prices by GPU.",
        ),
    ):
        function = option(function)
    return function
