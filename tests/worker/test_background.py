"""Background threads: work does not wait for other work, and exit is never held up."""

import threading

from batchinfer.worker.background import Background
from making import python


def test_no_work_waits_for_other_work():
    background, meeting = Background(), threading.Barrier(30)
    jobs = [background.submit(lambda: meeting.wait(30)) for _ in range(30)]
    assert sorted(job.result(60) for job in jobs) == [*range(30)]


def test_a_hanging_upload_does_not_hold_up_the_exit():
    code = (
        "import time; from batchinfer.worker.background import Background;"
        "Background().submit(lambda: time.sleep(600)); print('end')"
    )
    assert python(code) == "end\n"
