"""Short campaigns; `make chaos` runs long ones."""

import json

import pytest

from chaos.campaign import PUBLISHING, Campaign, Plan

pytestmark = [pytest.mark.s3, pytest.mark.chaos]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("kills", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_and_frozen_workers_lose_nothing(s3_url, s3_environment, kills):
    """Kills anywhere and while publishing, freezes longer than the lease, lost replies: every row once and right."""
    freezes = kills // 4
    plan = Plan(kills=kills, freezes=freezes, seconds=360, rows=100 * kills, seed=1, loss_rate=0.2)
    tally = Campaign(plan, s3_url("chaos"), s3_environment).run()
    assert tally.kills.total() >= kills
    assert sum(tally.kills[event] for event in PUBLISHING) >= kills // 4
    assert tally.freezes >= freezes
    assert tally.lost_replies > 0
    assert tally.tracebacks == []
    assert json.loads(tally.line())["starts"] == tally.starts, "what `make chaos` prints"
