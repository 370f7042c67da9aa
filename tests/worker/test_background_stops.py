"""Stop requests: the first one counts, with a period of grace that a second signal ends."""

import os
import signal

import pytest

from batchinfer.core.errors import Interrupted, StopRequested
from batchinfer.worker.background import Stopper, WhileLoading, install_signal_handlers


@pytest.fixture
def stopper(clock):
    made = Stopper(clock, grace_seconds=20)
    install_signal_handlers(made)
    return made


def test_a_request_takes_effect_at_once_for_new_rows_and_after_the_grace_for_running_ones(
    stopper, clock
):
    assert (stopper.is_requested, stopper.is_set()) == (False, False)
    stopper.request(StopRequested("by hand"))
    assert (stopper.is_requested, stopper.is_set(), stopper.seconds_left) == (True, False, 20)
    assert WhileLoading(stopper).is_set()
    clock.sleep(10)
    stopper.request(Interrupted("later"))
    assert isinstance(stopper.error, StopRequested), "the first reason stands"
    assert (stopper.is_set(), stopper.seconds_left) == (False, 10)
    clock.sleep(10)
    assert stopper.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_second_signal_ends_the_grace_and_the_first_one_after_a_notice_leaves_it(
    stopper, number, *, is_announced
):
    """A cloud announces the end of a machine and sends its signal at about the same time."""
    if is_announced:
        stopper.request(Interrupted("the cloud takes the machine"))
    os.kill(os.getpid(), number)
    assert (stopper.is_requested, stopper.is_set()) == (True, False)
    assert isinstance(stopper.error, Interrupted)
    assert ("the cloud" if is_announced else number.name) in stopper.error.message
    os.kill(os.getpid(), number)
    assert stopper.is_set()
