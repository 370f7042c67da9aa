"""What the tests of the ledger share."""

import pytest

from fakes import MemoryStore


@pytest.fixture
def store(memory_url):
    """A store of the test's own."""
    return MemoryStore(memory_url)
