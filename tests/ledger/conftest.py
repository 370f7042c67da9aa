"""What the tests of the ledger share."""

from __future__ import annotations

import pytest

from fakes import MemoryStore


@pytest.fixture
def store(memory_url: str) -> MemoryStore:
    """A store of the test's own."""
    return MemoryStore(memory_url)
