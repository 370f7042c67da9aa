"""What the tests of the ledger share."""

from __future__ import annotations

import pytest

from fakes import MemoryStore


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    """A store of the test's own."""
    return MemoryStore(f"memory://{request.node.name}")
