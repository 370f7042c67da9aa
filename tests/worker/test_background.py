"""Background threads: results and errors come back, waiting ends in time, exit is never held up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from batchinfer.worker.background import Pending, Priority, ThreadBackground


@pytest.fixture
def background() -> Iterator[ThreadBackground]:
    made = ThreadBackground(num_threads=1)
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


class Upload:
    """Work that takes until it is released."""

    def __init__(self, background: ThreadBackground, priority: Priority) -> None:
        self._begun, self._release = threading.Event(), threading.Event()
        self._pending = background.submit(self._run, priority=priority)
        assert self._begun.wait(30)

    def _run(self) -> None:
        self._begun.set()
        self._release.wait()

    def end(self, background: ThreadBackground) -> None:
        self._release.set()
        finish(background, self._pending)


def finish(background: ThreadBackground, *jobs: Pending[Any]) -> None:
    for _ in range(100):
        if all(job.is_done() for job in jobs):
            return
        background.wait(30)
    raise AssertionError("the work is not done")


def test_work_of_a_higher_priority_waits_for_no_other_work(background: ThreadBackground) -> None:
    uploads = [Upload(background, Priority.NORMAL)]
    finish(background, background.submit(lambda: None, priority=Priority.CHECKPOINT))
    uploads.append(Upload(background, Priority.CHECKPOINT))
    finish(background, background.submit(lambda: None, priority=Priority.URGENT))
    for upload in uploads:
        upload.end(background)


def test_a_free_thread_takes_the_highest_priority_first(background: ThreadBackground) -> None:
    uploads = [Upload(background, each) for each in (Priority.NORMAL, Priority.CHECKPOINT)]
    uploads.append(Upload(background, Priority.URGENT))
    order: list[str] = []
    jobs = [
        background.submit(partial(order.append, name), priority=priority)
        for name, priority in [
            ("look", Priority.NORMAL),
            ("segment", Priority.CHECKPOINT),
            ("prompts", Priority.URGENT),
            ("more prompts", Priority.URGENT),
        ]
    ]
    uploads[0].end(background)
    finish(background, *jobs)
    assert order == ["prompts", "more prompts", "segment", "look"]
    for upload in uploads[1:]:
        upload.end(background)


def test_a_thread_for_all_work_does_urgent_work_too(background: ThreadBackground) -> None:
    meeting = threading.Barrier(2)
    jobs = [background.submit(lambda: meeting.wait(30), priority=Priority.URGENT) for _ in "ab"]
    finish(background, *jobs)
    assert sorted(job.result() for job in jobs) == [0, 1]


def test_threads_end_after_the_work_submitted_so_far() -> None:
    before = set(threading.enumerate())
    background = ThreadBackground(num_threads=2)
    threads = set(threading.enumerate()) - before
    jobs = [background.submit(lambda: 1, priority=each) for each in Priority]
    background.close()
    for thread in threads:
        thread.join(30)
    assert len(threads) == 4
    assert not any(thread.is_alive() for thread in threads)
    assert [job.result() for job in jobs] == [1, 1, 1]


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
