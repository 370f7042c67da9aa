"""Stop requests by signals: the first one counts, with a period of grace that a second one ends."""

import os
import signal

import pytest

from batchinfer.core.errors import Interrupted
from batchinfer.worker.background import Stopper, install_signal_handlers


@pytest.fixture
def stopper(clock):
    made = Stopper(clock, grace_seconds=20)
    install_signal_handlers(made)
    return made


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
