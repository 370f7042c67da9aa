"""The main loop of a worker that is asked to stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from batchinfer.core.errors import Interrupted
from batchinfer.worker.main_loop import MainLoop


def test_finished_rows_are_saved_when_a_stop_is_asked_and_not_only_when_the_last_rows_have_come() -> (
    None
):
    """The machine may be gone before (P5)."""
    saved_at: list[int] = []
    stream: Any = Mock(num_in_flight=3, is_complete=False, num_pending=0)
    chunks: Any = Mock(is_closing=False)
    chunks.close.side_effect = lambda: setattr(chunks, "is_closing", True)
    chunks.checkpoint.side_effect = lambda: saved_at.append(stream.num_in_flight)

    def replies(*_: object) -> Any:
        for left in (3, 2, 1, 0):
            stream.num_in_flight = left
            yield []

    stopper: Any = Mock(is_requested=True, error=Interrupted("SIGTERM"))
    stopper.is_set.return_value = False
    stopper.raise_if_requested.side_effect = Interrupted("SIGTERM")
    config: Any = SimpleNamespace(max_error_rate=None)
    clock = Mock(monotonic=Mock(return_value=-1e9))
    chunks.telemetry = MagicMock()
    chunks.telemetry.counts.rows_error = 0
    loop = MainLoop(
        Mock(generate=replies), stream, chunks, config,
        MagicMock(stopper=stopper, clock=clock), Mock(),
    )  # fmt: skip
    with pytest.raises(Interrupted):
        loop.run()
    assert saved_at == [3]
