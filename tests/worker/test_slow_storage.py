"""A slow store keeps no engine waiting: chunks are opened ahead, and saved and published beside it."""

import logging

from simulation.stage import Stage

NUM_ROWS = 4000


class Timed(Stage):
    """Knows when the first row went to the engine, and when the last one was done."""

    began = ended = 0.0

    def took(self, process, call):
        self.began = self.began or self.scheduler.now
        super().took(process, call)

    def yielded(self, process, replies):
        self.ended = self.scheduler.now
        super().yielded(process, replies)


def seconds_with(latency_seconds: float) -> float:
    """Seconds of the engine's work, with so slow a store."""
    with Timed([[f"say {index}" for index in range(10)]] * (NUM_ROWS // 10)) as stage:
        stage.network.weather.latency_seconds = latency_seconds
        assert stage.run(lease_seconds=120.0, within_seconds=6000.0).is_success
        assert len(stage.finished) == NUM_ROWS
        return stage.ended - stage.began


def test_two_hundred_milliseconds_a_request_keep_no_engine_waiting(monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    # Rows take as long as they take; were the engine ever short of them, the whole would take longer.
    assert seconds_with(0.2) < 1.03 * seconds_with(0.001)
