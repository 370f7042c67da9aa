"""Background threads: work does not wait for other work, and exit is never held up."""

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


def test_a_hanging_upload_does_not_hold_up_the_exit():
    code = (
        "import time; from batchinfer.worker.background import Background;"
        "Background().submit(lambda: time.sleep(600)); print('end')"
    )
    assert python(code) == "end\n"
