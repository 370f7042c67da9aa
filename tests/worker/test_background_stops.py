"""Stop requests: the first one counts, with a period of grace that a second signal ends."""

from __future__ import annotations

import os
import signal

import pytest

from batchinfer.core.errors import Interrupted, StopRequested
from batchinfer.worker.background import Stopper, WhileLoading, install_signal_handlers
from fakes import FakeClock


def test_a_request_takes_effect_at_once_for_new_rows_and_after_the_grace_for_running_ones() -> None:
    clock = FakeClock()
    stopper = Stopper(clock, grace_seconds=20)
    assert (stopper.is_requested, stopper.is_set()) == (False, False)
    stopper.request(Interrupted("first"))
    assert (stopper.is_requested, stopper.is_set(), stopper.seconds_left) == (True, False, 20)
    assert WhileLoading(stopper).is_set()
    clock.sleep(20)
    assert stopper.is_set()


def test_the_first_reason_stands() -> None:
    clock = FakeClock()
    stopper = Stopper(clock, grace_seconds=20)
    stopper.request(StopRequested("by hand"))
    clock.sleep(10)
    stopper.request(Interrupted("later"))
    assert isinstance(stopper.error, StopRequested)
    assert stopper.seconds_left == 10


def test_the_first_signal_after_a_notice_leaves_the_grace() -> None:
    """A cloud announces the end of a machine and sends its signal at about the same time."""
    stopper = Stopper(FakeClock(), grace_seconds=20)
    install_signal_handlers(stopper)
    stopper.request(Interrupted("the cloud takes the machine"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stopper.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_grace(number: signal.Signals) -> None:
    stopper = Stopper(FakeClock(), grace_seconds=20)
    install_signal_handlers(stopper)
    os.kill(os.getpid(), number)
    assert (stopper.is_requested, stopper.is_set()) == (True, False)
    assert isinstance(stopper.error, Interrupted)
    assert number.name in stopper.error.message
    os.kill(os.getpid(), number)
    assert stopper.is_set()
