"""Prices of machines, and the lists that they come from."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from batchinfer.core.prices import Machine, Prices, _table

L4 = Machine(cloud="aws", region="us-east-1", accelerator="L4", gpus=1, is_spot=False)
NO_CATALOG = Path("/nonexistent")

CATALOG = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,Zone
g6.xlarge,L4,1.0,4.0,16.0,x,0.8,0.3,us-east-1,a
g6.2xlarge,L4,1.0,8.0,32.0,x,0.97,0.4,us-east-1,a
g6.xlarge,L4,1.0,4.0,16.0,x,0.7,,eu-west-1,a
g6.12xlarge,L4,4.0,48.0,192.0,x,4.6,2.1,us-east-1,a
,L4,1.0,,,x,0.1,0.05,us-east-1,a
"""


def catalog(folder: Path, text: str = CATALOG) -> Path:
    (folder / "aws").mkdir()
    (folder / "aws" / "vms.csv").write_text(text)
    return folder


def test_every_price_of_the_table_is_a_price_and_others_are_not_known():
    prices = Prices(catalogs=NO_CATALOG)
    for name in _table()["gpus"]:
        machine = replace(L4, accelerator=name)
        others = replace(machine, is_spot=True), replace(machine, gpus=4)
        one, spot, four = (prices.price(each) for each in (machine, *others))
        assert None not in (one, spot, four), name
        assert 0 < spot.per_hour <= one.per_hour < 50, name
        assert four.per_hour == pytest.approx(4 * one.per_hour)
        assert one.source == "list prices of 2025-06, check yours"
    for name in ("", "X9000"):
        assert prices.price(replace(L4, accelerator=name)) is None


def test_skypilots_catalog_is_read_where_it_lies(tmp_path):
    prices = Prices(catalogs=catalog(tmp_path))
    assert prices.price(L4) == (0.8, "SkyPilot's catalog")
    assert prices.price(replace(L4, is_spot=True)) == (0.3, "SkyPilot's catalog")
    assert prices.price(replace(L4, gpus=4)) == (4.6, "SkyPilot's catalog")
    assert prices.price(replace(L4, region="")) == (0.7, "SkyPilot's catalog")


@pytest.mark.parametrize("fields", [{"cloud": "gcp"}, {"gpus": 3}, {"cloud": "../x"}, {}])
def test_where_the_catalog_knows_nothing_the_table_answers(tmp_path, fields):
    text = CATALOG if fields else "a,b\n1,2\n"  # of another form
    price = Prices(catalogs=catalog(tmp_path, text)).price(replace(L4, **fields))
    assert price.source.startswith("list prices")
