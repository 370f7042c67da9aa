"""A small version of `make simulate-scale`: what it prints is right, and helpers do not do each other's work again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from simulation.scale import Plan, Tally, simulate_scale


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_ten_workers_of_which_machines_are_lost_finish_near_the_ideal() -> None:
    """One seed says little: a machine that is lost with its last chunk costs a tenth of the time."""
    plans = [
        Plan(num_workers=10, num_chunks=200, lost_per_hour=1.0, seed=seed) for seed in range(8)
    ]
    results = list(map(simulate_scale, plans))  # raises if a row, an output or a marker is missing
    assert min(each["of_ideal"] for each in results) >= 1.0
    assert sum(each["of_ideal"] for each in results) / len(results) < 1.12
    plan, result = plans[0], results[0]
    assert result["rows"] == 2_000_000
    assert result["machines_lost"] > 0
    assert result["done_twice"] < 0.03
    places = result["requests_by_place"]
    assert places["PUT markers"] >= 200
    assert places["GET job.json"] == plan.num_workers + result["machines_lost"]
    assert sum(result["requests"].values()) == sum(places.values())


def test_requests_are_summed_by_second_and_priced() -> None:
    tally = Tally()
    for second in (3, 3, 4):
        tally.note("PUT", "markers", second, 1)
    tally.note("DELETE", "claims/", 4, 7)
    tally.note("LIST", "outputs/", 5, 1)
    tally.note("GET", "claims/", 5, 1)
    assert tally.worst("writes") == (4, {"DELETE claims/": 7, "PUT markers": 1})
    assert tally.worst("reads") == (5, {"LIST outputs/": 1, "GET claims/": 1})
    assert tally.dollars() == pytest.approx((4 * 0.005 + 0.0004) / 1000)
