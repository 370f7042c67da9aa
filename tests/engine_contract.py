"""What every engine must do. The tests of each engine inherit `EngineContract`."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from batchinfer.core.records import Call, Reply
from batchinfer.engines import Engine
from batchinfer.engines.replies import failure_of

CHAT = "/v1/chat/completions"


class ListSource:
    """A source that gives a list of calls, at most `per_take` at a time."""

    def __init__(self, given, per_take: int | None = None, gaps: int = 0) -> None:
        self.left = deque(given)
        self.per_take = per_take
        self.gaps = gaps
        self.num_asked = 0
        self.given = 0

    def take(self, max_calls: int) -> list[Call] | None:
        assert max_calls > 0
        self.num_asked += 1
        if not self.left:
            return None
        if self.gaps and self.num_asked % (self.gaps + 1):
            return []
        count = min(max_calls, self.per_take or max_calls, len(self.left))
        self.given += count
        return [self.left.popleft() for _ in range(count)]

    def wait(self, timeout_seconds: float) -> None:
        time.sleep(min(timeout_seconds, 0.002))


def call(index: int, path: str = CHAT, /, **body: Any) -> Call:
    """Return the call of row `index` with this body; without a prompt, it is a chat that names the row."""
    if not body.keys() & {"messages", "prompt", "input", "query", "text_1"}:
        text = f"row {index} says hello"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}
    return Call(key=("c", index), path=path, body=json.dumps(body).encode())


def calls(count: int, **body: Any) -> list[Call]:
    """Return `count` calls of chunk c, whose prompts differ in their row."""
    return [call(index, **body) for index in range(count)]


def body_of(reply: Reply) -> Any:
    """Return the body of an answer."""
    assert failure_of(reply) is None, reply
    return json.loads(reply.body)


def code_of(reply: Reply) -> str:
    """Return the error code of a reply; "" for an answer."""
    failure = failure_of(reply)
    return failure.code if failure else ""


def drive_once(engine: Engine, source: ListSource) -> tuple[dict, list[Reply]]:
    """Generate to the end. Returns replies by key, of which none comes twice, and those to rows of a dead server."""
    found: dict = {}
    deaths: list[Reply] = []
    for batch in engine.generate(source, Event()):
        assert engine.stats().restarts < 9, "servers are started again for ever"
        for reply in batch:
            assert reply.key not in found
            if reply.is_engine_death:
                deaths.append(reply)
            else:
                found[reply.key] = reply
    return found, deaths


def drive(engine: Engine, source: ListSource) -> dict:
    """Generate to the end, with servers that live on. Returns replies by key."""
    found, deaths = drive_once(engine, source)
    assert not deaths
    return found


def drive_again(engine: Engine, given: list[Call]) -> tuple[dict, list[Reply]]:
    """Generate to the end, and give rows of a dead server once more, as the worker does. Returns replies and deaths."""
    found: dict = {}
    deaths: list[Reply] = []
    while again := [each for each in given if each.key not in found]:
        more, dead = drive_once(engine, ListSource(again))
        assert not found.keys() & more.keys()
        found |= more
        deaths += dead
    return found, deaths


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, task.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def are_gone(pids: Iterable[int], seconds: float = 60.0) -> bool:
    """Whether processes end within some seconds."""
    left, end = set(pids), time.monotonic() + seconds
    while any(map(is_running, left)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_running, left))


class EngineContract:
    """Subclasses define the fixture `opened`: an open engine of 512 tokens or less, and what it says of itself."""

    @pytest.fixture
    def engine(self, opened):
        return opened[0]

    @pytest.fixture
    def info(self, opened):
        return opened[1]

    def test_every_call_is_answered_exactly_once_with_its_key(self, engine):
        found = drive(engine, ListSource(calls(50)))
        assert sorted(found) == [("c", index) for index in range(50)]
        assert all(len(body_of(reply)["choices"]) == 1 for reply in found.values())

    def test_a_source_without_calls_ends_at_once_and_it_can_generate_again(self, engine):
        assert drive(engine, ListSource([])) == {}
        assert len(drive(engine, ListSource(calls(3)))) == 3
        assert len(drive(engine, ListSource(calls(3)))) == 3

    def test_never_more_in_flight_than_it_says(self, engine, info):
        source = ListSource(calls(300, max_tokens=2))
        num_back = 0
        for batch in engine.generate(source, Event()):
            num_back += len(batch)
            assert source.given - num_back <= info.max_in_flight
        assert num_back == 300

    def test_a_slow_source_is_waited_on_only_while_nothing_is_in_flight(self, engine):
        source = ListSource(calls(6), per_take=2, gaps=2)
        num_back = 0
        wait, held = source.wait, []

        def checked_wait(timeout_seconds: float) -> None:
            held.append(source.given - num_back)
            wait(timeout_seconds)

        source.wait = checked_wait
        for batch in engine.generate(source, Event()):
            num_back += len(batch)
        assert num_back == 6
        assert set(held) <= {0}

    def test_a_stop_ends_it_and_abandons_what_is_in_flight(self, engine, info):
        stop = Event()
        source = ListSource(calls(2 * info.max_in_flight))
        for _ in engine.generate(source, stop):
            stop.set()
        assert source.left, "no more is taken than was in flight"
        assert len(drive(engine, ListSource(calls(4)))) == 4, "abandoned calls do not come back"

    def test_a_refused_call_fails_alone(self, engine):
        rows = calls(5)
        rows[1] = call(1, "/v1/completions", prompt="long " * 4000)
        rows[2] = call(2, model="nobody")
        rows[3] = call(3, "/v1/nothing")
        found = drive(engine, ListSource(rows))
        codes = [code_of(found["c", index]) for index in range(5)]
        assert codes == ["", "prompt_too_long", "model_not_found", "unknown_url", ""]
