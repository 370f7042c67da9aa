"""A small version of `make simulate-scale`: near the ideal, although machines are lost and their work is done again."""

from __future__ import annotations

import logging

import pytest

from simulation.scale import Campaign, Plan


def test_ten_workers_of_which_machines_are_lost_finish_near_the_ideal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One seed says little: a machine that is lost with its last chunk costs a tenth of the time."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    results = [
        # Raises if a row, an output or a marker is missing.
        Campaign(Plan(num_workers=10, num_chunks=200, lost_per_hour=1.0, seed=seed)).run()
        for seed in range(8)
    ]
    assert min(each["of_ideal"] for each in results) >= 1.0
    assert sum(each["of_ideal"] for each in results) / len(results) < 1.12
    result = results[0]
    assert result["machines_lost"] > 0
    assert result["done_twice"] < 0.03
    assert result["requests_by_place"]["GET job.json"] == 10 + result["machines_lost"]
    assert result["dollars"] > 0
