"""Background threads: results and errors come back, waiting ends in time, exit is never held up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from batchinfer.worker.background import ThreadBackground


@pytest.fixture
def background() -> Iterator[ThreadBackground]:
    made = ThreadBackground(num_threads=2)
    yield made
    made.close()


def test_results_and_errors_come_back_to_who_asks(background: ThreadBackground) -> None:
    def fail() -> None:
        raise KeyError("x")

    good, bad = background.submit(lambda: 42), background.submit(fail)
    while not (good.is_done() and bad.is_done()):
        background.wait(1)
    assert good.result() == 42
    with pytest.raises(KeyError):
        bad.result()


def test_a_wait_ends_when_work_is_done_even_if_it_was_done_before_the_wait(
    background: ThreadBackground,
) -> None:
    release = threading.Event()
    job = background.submit(release.wait)
    release.set()
    for _ in range(100):
        background.wait(30)
        if job.is_done():
            break
    assert job.is_done()


def test_repeating_work_runs_until_it_is_cancelled(background: ThreadBackground) -> None:
    runs = threading.Semaphore(0)
    repeating = background.every(0.001, runs.release)
    for _ in range(3):
        assert runs.acquire(timeout=10)
    repeating.cancel()


def test_a_hanging_upload_does_not_hold_up_the_exit() -> None:
    code = (
        "import time; from batchinfer.worker.background import ThreadBackground;"
        "ThreadBackground().submit(lambda: time.sleep(600)); print('end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "end\n"
