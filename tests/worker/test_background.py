"""Background threads: work does not wait for other work, and exit is never held up."""

import resource
import threading
from unittest.mock import Mock

import pytest

from batchinfer.core.errors import StorageError
from batchinfer.worker import command
from batchinfer.worker.background import Background
from making import python, wait_for


def test_no_work_waits_for_other_work():
    background, meeting = Background(), threading.Barrier(30)
    jobs = [background.submit(lambda: meeting.wait(30)) for _ in range(30)]
    assert sorted(job.result(60) for job in jobs) == [*range(30)]


def test_where_no_thread_can_be_started_the_work_fails_as_storage_does(monkeypatch):
    """A worker ended with a traceback, which no cluster starts again."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start")))
    with pytest.raises(StorageError, match="can't start"):
        Background().submit(lambda: None).result(30)


def test_a_fault_in_one_heartbeat_ends_none_of_the_next(caplog):
    beat = Mock(side_effect=[KeyError("a bug"), *[None] * 10_000])
    end = Background().every(0.01, beat)
    wait_for(lambda: beat.call_count > 2)
    end()
    assert "a bug" in caplog.text


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch, hard):
    raised = Mock()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", raised)
    command._raise_file_limit()
    raised.assert_called_once_with(resource.RLIMIT_NOFILE, (4096 if hard == 4096 else 65_536, hard))


def test_a_hanging_upload_does_not_hold_up_the_exit():
    code = (
        "import time; from batchinfer.worker.background import Background;"
        "Background().submit(lambda: time.sleep(600)); print('end')"
    )
    assert python(code) == "end\n"
