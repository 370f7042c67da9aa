"""Prices of machines, and the lists that they come from."""

import pytest
from msgspec.structs import replace

from batchinfer.core import prices
from batchinfer.core.prices import Machine, _table, accelerator_name, price_of

L4 = Machine(cloud="aws", region="us-east-1", accelerator="L4", gpus=1, is_spot=False)

CATALOG = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,Zone
g6.xlarge,L4,1.0,4.0,16.0,x,0.8,0.3,us-east-1,a
g6.2xlarge,L4,1.0,8.0,32.0,x,0.97,0.4,us-east-1,a
g6.xlarge,L4,1.0,4.0,16.0,x,0.7,,eu-west-1,a
g6.12xlarge,L4,4.0,48.0,192.0,x,4.6,2.1,us-east-1,a
,L4,1.0,,,x,0.1,0.05,us-east-1,a
"""


@pytest.fixture(autouse=True)
def catalogs(tmp_path, monkeypatch):
    """The folder of the catalogs, which is empty."""
    monkeypatch.setattr(prices, "CATALOGS", tmp_path)
    (tmp_path / "aws").mkdir()
    return tmp_path


def test_every_price_of_the_table_is_a_price_and_others_are_not_known():
    for name in _table()["gpus"]:
        machine = replace(L4, accelerator=name)
        others = replace(machine, is_spot=True), replace(machine, gpus=4)
        one, spot, four = (price_of(each) for each in (machine, *others))
        assert None not in (one, spot, four), name
        assert 0 < spot.per_hour <= one.per_hour < 50, name
        assert four.per_hour == pytest.approx(4 * one.per_hour)
        assert one.source == "list prices of 2025-06, check yours"
    for name in ("", "X9000"):
        assert price_of(replace(L4, accelerator=name)) is None


def test_a_machine_whose_gpus_were_not_counted_costs_no_less_than_one_gpu():
    """With a price of nothing, --max-cost would never end a worker."""
    assert price_of(replace(L4, gpus=0)) == price_of(L4)


def test_the_memory_is_in_the_name_of_those_gpus_alone_that_have_two_sizes():
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3")
    assert [accelerator_name(each) for each in names] == ["A100-80GB", "A100", "H100"]


def test_skypilots_catalog_is_read_where_it_lies(catalogs):
    (catalogs / "aws" / "vms.csv").write_text(CATALOG)
    assert price_of(L4) == (0.8, "SkyPilot's catalog")
    assert price_of(replace(L4, is_spot=True)) == (0.3, "SkyPilot's catalog")
    assert price_of(replace(L4, gpus=4)) == (4.6, "SkyPilot's catalog")
    assert price_of(replace(L4, region="")) == (0.7, "SkyPilot's catalog")


@pytest.mark.parametrize("fields", [{"cloud": "gcp"}, {"gpus": 3}, {"cloud": "../x"}, {}])
def test_where_the_catalog_knows_nothing_the_table_answers(catalogs, fields):
    text = CATALOG if fields else "a,b\n1,2\n"  # of another form
    (catalogs / "aws" / "vms.csv").write_text(text)
    assert price_of(replace(L4, **fields)).source.startswith("list prices")
