"""Background threads: results and errors come back, waiting ends in time, exit is never held up."""

import threading

import pytest

from batchinfer.worker.background import Background
from making import python


@pytest.fixture
def background():
    made = Background(num_threads=1)
    yield made
    made.close()


def test_work_beside_does_not_wait_for_other_work(background):
    release = threading.Event()
    other = background.submit(release.wait)
    background.beside(1).submit(lambda: None).result(30)
    assert not other.done()
    release.set()


def test_as_many_threads_work_at_once_as_there_may_be(background):
    beside = background.beside(3)
    meeting = threading.Barrier(3)
    jobs = [beside.submit(lambda: meeting.wait(30)) for _ in range(3)]
    assert sorted(job.result(60) for job in jobs) == [0, 1, 2]


def test_threads_end_after_the_work_submitted_so_far():
    before = set(threading.enumerate())
    background = Background(num_threads=1)
    jobs = [each.submit(lambda: 1) for each in (background, background, background.beside(1))]
    threads = set(threading.enumerate()) - before
    background.close()
    for thread in threads:
        thread.join(30)
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    assert [job.result() for job in jobs] == [1, 1, 1]


def test_repeating_work_runs_until_it_is_cancelled(background):
    runs = threading.Semaphore(0)
    cancel = background.every(0.001, runs.release)
    for _ in range(3):
        assert runs.acquire(timeout=60)
    cancel()


def test_a_hanging_upload_does_not_hold_up_the_exit():
    code = (
        "import time; from batchinfer.worker.background import Background;"
        "Background().submit(lambda: time.sleep(600)); print('end')"
    )
    assert python(code) == "end\n"
