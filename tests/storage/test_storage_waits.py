"""A request that waits for long is named in the log, once; many requests that wait make few lines."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import pytest

from batchinfer.core.errors import StorageError
from batchinfer.storage import waits
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried
from batchinfer.storage.waits import LINE_SECONDS, WAIT_SECONDS, Waits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]


def test_a_long_wait_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = Waits(clock)
    with watch.waiting("get s3://bucket/job.json"):
        watch.look()
        clock.now = WAIT_SECONDS - 0.1
        watch.look()
        assert lines(caplog) == []
        for clock.now in (WAIT_SECONDS, WAIT_SECONDS + LINE_SECONDS, 99 * LINE_SECONDS):
            watch.look()
    assert lines(caplog) == ["waiting for storage: no answer for 10 s to get s3://bucket/job.json"]


def test_many_waits_make_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = Waits(clock)
    with contextlib.ExitStack() as stack:
        for index in range(50):
            stack.enter_context(watch.waiting(f"get {index}"))
        clock.now = WAIT_SECONDS
        watch.look()
        assert lines(caplog)[0].endswith(", and to 49 other requests")
        late = stack.enter_context(watch.waiting("get late"))
        clock.now += LINE_SECONDS - 0.1
        watch.look()
        assert len(lines(caplog)) == 1
        clock.now += WAIT_SECONDS
        watch.look()
        assert "to get late, and to 50 other requests" in lines(caplog)[1]
        late()
    clock.now += 1000.0
    watch.look()
    assert len(lines(caplog)) == 2


def test_bytes_that_come_end_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = Waits(clock)
    with watch.waiting("get s3://bucket/large") as has_come:
        for _ in range(20):
            clock.now += WAIT_SECONDS - 1
            watch.look()
            has_come()
    assert lines(caplog) == []


def test_each_failed_try_says_how_long_the_pause_is(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise TransientError("s3://bucket/k: the store answered 503")

    policy = RetryPolicy(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.01)
    with pytest.raises(StorageError, match="after 3 attempts"):
        retried(policy, fail)
    said = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert [line.partition(" (")[2] for line in said if line.startswith("s3")] == [
        "attempt 1 of 3, the next in about 0 s)",
        "attempt 2 of 3, the next in about 0 s)",
        "attempt 3 of 3)",
    ]


def test_every_store_of_the_network_says_for_what_it_waits(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from batchinfer.storage.opening import open_store

    monkeypatch.setattr(waits, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(waits, "LINE_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    policy = RetryPolicy(attempts=1, silence_seconds=3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for place in ("s3://bucket/job", f"{url}/job"):
            store = open_store(place, retries=policy)
            asking = threading.Thread(target=_ask, args=(store,), daemon=True)
            asking.start()
            asking.join(30)
    said = "\n".join(lines(caplog))
    assert "s3://bucket/job/job.json" in said
    assert f"{url}/job/job.json" in said


def _ask(store: object) -> None:
    with contextlib.suppress(StorageError):
        store.get("job.json")  # type: ignore[attr-defined]
