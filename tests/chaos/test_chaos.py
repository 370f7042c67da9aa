"""Short campaigns; `make chaos` runs long ones."""

import json

import pytest

from chaos.campaign import PUBLISHING, Campaign, Plan

pytestmark = [pytest.mark.s3, pytest.mark.chaos]


@pytest.mark.timeout(420)
def test_killed_and_frozen_workers_lose_nothing(s3_url, s3_environment):
    """Kills anywhere and while publishing, freezes longer than the lease, lost replies: every row once and right."""
    plan = Plan(kills=12, freezes=3, seconds=360, rows=1200, seed=1, loss_rate=0.2)
    tally = Campaign(plan, s3_url("chaos"), s3_environment).run()
    assert tally.kills.total() >= 12
    assert sum(tally.kills[event] for event in PUBLISHING) >= 3
    assert tally.freezes >= 3
    assert tally.lost_replies > 0
    assert tally.tracebacks == []
    assert json.loads(tally.line())["starts"] == tally.starts, "what `make chaos` prints"
