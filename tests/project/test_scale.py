"""Small versions of `make simulate-scale`: near the ideal, and little is done again where machines are lost."""

import logging

import pytest

from simulation.scale import Campaign, Plan


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)


def test_ten_workers_share_the_work_until_its_end():
    result = Campaign(Plan(num_workers=10, num_chunks=200, lost_per_hour=0.0)).run()
    assert 1.0 <= result["of_ideal"] < 1.06
    assert result["done_twice"] < 0.005
    assert result["requests_by_place"]["GET job.json"] == 10


def test_machines_that_are_lost_cost_little():
    """A machine that is lost with its last chunk alone costs a tenth of the time, so one seed says little."""
    plans = [
        Plan(num_workers=10, num_chunks=200, lost_per_hour=1.0, seed=seed) for seed in range(4)
    ]
    results = [Campaign(plan).run() for plan in plans]
    assert min(each["of_ideal"] for each in results) >= 1.0
    assert sum(each["of_ideal"] for each in results) / len(results) < 1.12
    assert results[0]["machines_lost"] > 5
    assert results[0]["done_twice"] < 0.03
    assert results[0]["dollars"] > 0
