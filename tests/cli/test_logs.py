"""`core.events` lists every event of a worker."""

import re
from pathlib import Path

from batchinfer.core.events import EVENTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_event_in_the_code_is_listed_and_the_other_way_round():
    paths = [path for path in (ROOT / "batchinfer").rglob("*.py") if path.name != "events.py"]
    pattern = r'\b(?:event\(|tell\(\s*logger,)\s*"([a-z_]+)"'
    used = {name for path in paths for name in re.findall(pattern, path.read_text())}
    outcomes = {f"chunk_{outcome}" for outcome in ("done", "lost", "released")}  # by f-string
    assert used | outcomes == set(EVENTS)
