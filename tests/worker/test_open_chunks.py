"""The chunks that a worker has at work."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from batchinfer.ledger.jobs import ChunkRef
from batchinfer.worker.background import Background
from batchinfer.worker.chunk_life import Life
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Limits
from fakes import FakeClock


def test_a_chunk_that_was_just_opened_counts_as_work_until_its_rows_do() -> None:
    """Its thread opens it between two looks of the main loop, which took the work for done and waited for ever."""
    clock, ring, config = FakeClock(), SimpleNamespace(is_finished=True), SimpleNamespace()
    config.limits = Limits()
    outside: Any = SimpleNamespace(clock=clock, background=Background())
    whole: list[Any] = [outside, None, ring, Telemetry("w", clock, host={}), config]
    chunks = OpenChunks(*whole)
    assert not chunks.may_grow
    life = Life(ChunkRef("c", "", "c"), chunks._hall, threading.Event())
    chunks._lives["c"] = life, Future()
    assert chunks.may_grow
    opened: Any = SimpleNamespace(num_unread=2)
    life.chunk = opened
    assert chunks.may_grow
    chunks.open["c"] = opened
    assert not chunks.may_grow
    assert chunks.num_unread == 2
