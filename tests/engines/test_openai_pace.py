"""How fast requests go to an endpoint. The event loop's clock jumps over the waits, so nothing here takes time."""

from __future__ import annotations

import asyncio
import time

import pytest

from batchinfer.engines import openai_pace
from batchinfer.engines.openai_pace import Bucket, Pace, retry_after


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


@pytest.fixture
def run(monkeypatch):
    """Run a coroutine on a jumping clock. Returns its result and the seconds that it seemed to take."""
    loop = JumpingLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)

    def run(make):
        start = loop.now
        return loop.run_until_complete(make()), loop.now - start

    yield run
    loop.close()


async def send(pace: Pace, count: int, seconds: float = 0.0, num_tokens: int = 1) -> int:
    """Send requests that each take some seconds. Returns how many ran at once at most."""
    running = most = 0

    async def one() -> None:
        nonlocal running, most
        async with pace.turn(num_tokens):
            running += 1
            most = max(most, running)
            await asyncio.sleep(seconds)
            running -= 1

    await asyncio.gather(*(one() for _ in range(count)))
    return most


def test_requests_run_at_once_up_to_the_limit(run):
    most, seconds = run(lambda: send(Pace(4), 40, seconds=1.0))
    assert most == 4
    assert 10 <= seconds < 11


def test_requests_of_a_minute_are_limited(run):
    _, seconds = run(lambda: send(Pace(100, requests_per_minute=60), 185))
    assert 179 <= seconds <= 190


def test_tokens_of_a_minute_are_limited_and_the_estimate_is_put_right(run):
    _, seconds = run(lambda: send(Pace(100, tokens_per_minute=6000), 60, num_tokens=100))
    assert 53 <= seconds <= 62
    cheap = Pace(100, tokens_per_minute=6000)

    async def answered() -> None:
        for _ in range(60):
            await send(cheap, 1, num_tokens=100)
            cheap.note_answer(10, 100)

    _, seconds = run(answered)
    assert seconds <= 5


def test_a_request_larger_than_the_limit_is_sent_when_nothing_else_is(run):
    _, seconds = run(lambda: send(Pace(100, tokens_per_minute=600), 2, num_tokens=300))
    assert 25 <= seconds <= 31


def test_a_bucket_gives_back_what_was_not_used():
    bucket = Bucket(60, 0.0)
    bucket.take(5)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(1.0)
    bucket.take(-2)
    assert bucket.seconds_until(1, 0.0) == 0.0


def test_refusals_slow_down_step_by_step_and_answers_speed_up_again(run):
    pace = Pace(64)
    loop_seconds = []

    async def refused() -> int:
        for _ in range(4):
            sent = time.monotonic()
            for _ in range(50):  # requests that were under way together count once
                pace.note_refusal(sent, None)
            before = time.monotonic()
            await send(pace, 1)
            loop_seconds.append(time.monotonic() - before)
        return await send(pace, 30, seconds=1.0)

    most, _ = run(refused)
    assert loop_seconds == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert most == 4

    async def answered() -> int:
        for _ in range(3000):
            pace.note_answer(0, 0)
        return await send(pace, 100, seconds=1.0)

    assert run(answered)[0] == 64


def test_what_an_endpoint_asks_for_is_kept(run):
    async def asked() -> None:
        pace = Pace(8)
        pace.note_refusal(time.monotonic(), 90.0)
        await send(pace, 1)

    assert run(asked)[1] == pytest.approx(90.0)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"limit-requests": "60", "remaining-requests": "0", "reset-requests": "60s"}, 1.0),
        ({"limit-requests": "60", "remaining-requests": "30", "reset-requests": "30s"}, 0.0),
        ({"limit-tokens": "6000", "remaining-tokens": "100", "reset-tokens": "59s"}, 5.0),
        ({"limit-tokens": "6000", "remaining-tokens": "5000", "reset-tokens": "10s"}, 0.0),
        ({"limit-tokens": "100", "remaining-tokens": "0", "reset-tokens": "1m"}, 60.0),
        ({"limit-tokens": "many", "remaining-tokens": "0", "reset-tokens": "1m"}, 0.0),
        ({"remaining-requests": "0"}, 0.0),
    ],
)
def test_headers_that_name_a_limit_hold_requests_back(run, headers, seconds):
    async def told() -> None:
        pace = Pace(8)
        pace.note_headers({f"x-ratelimit-{name}": text for name, text in headers.items()}, 500)
        await send(pace, 1)

    assert run(told)[1] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:02:00 GMT"}, 20.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "nan"}, None),
        ({}, None),
    ],
)
def test_every_form_of_retry_after_is_read(headers, seconds):
    assert retry_after(headers, 100.0) == seconds


def test_an_absurd_wait_is_cut(run):
    async def asked() -> None:
        pace = Pace(8)
        pace.note_refusal(time.monotonic(), 1e12)
        await send(pace, 1)

    assert run(asked)[1] == pytest.approx(openai_pace.LONGEST_ASKED_SECONDS)
