"""What every engine must do. The tests of each engine inherit `EngineContract`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from batchinfer.core.records import Completion, Request, Sampling
from batchinfer.engines import Engine


class Flag:
    """A stop signal that a test sets."""

    def __init__(self) -> None:
        self.value = False

    def set(self) -> None:
        self.value = True

    def is_set(self) -> bool:
        return self.value


class ListSource:
    """A source that gives a list of requests, at most `per_take` at a time, and records how it was asked."""

    def __init__(self, requests, per_take: int | None = None, gaps: int = 0) -> None:
        self.left = deque(requests)
        self.per_take = per_take
        self.gaps = gaps
        self.asked: list[int] = []
        self.given = 0
        self.waits = 0

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        assert not free_slots or sum(free_slots) >= max_requests
        assert max_requests > 0
        self.asked.append(max_requests)
        if not self.left:
            return None
        if self.gaps and len(self.asked) % (self.gaps + 1):
            return []
        count = min(max_requests, self.per_take or max_requests, len(self.left))
        self.given += count
        return [self.left.popleft() for _ in range(count)]

    def wait(self, timeout_seconds: float) -> None:
        self.waits += 1
        time.sleep(min(timeout_seconds, 0.002))


def requests(count: int, text: str = "row {index} says hello", **sampling) -> list[Request]:
    """Return `count` requests of chunk c, whose texts differ in their index."""
    sampling.setdefault("max_tokens", 8)
    return [
        Request(key=("c", index), text=text.format(index=index), sampling=Sampling(**sampling))
        for index in range(count)
    ]


def drive(engine: Engine, source: ListSource, stop: Flag | None = None) -> dict:
    """Generate to the end. Returns completions by key, after checking that no key comes twice."""
    found: dict = {}
    for batch in engine.generate(source, stop or Flag()):
        for completion in batch:
            assert completion.key not in found
            found[completion.key] = completion
    return found


def stream(engine: Engine, source: ListSource, stop: Flag | None = None) -> tuple[dict, dict]:
    """Generate to the end. Returns completions by key, and pieces by key and index of the answer.

    Checks that no piece comes after its request's completion.
    """
    found: dict = {}
    pieces: dict = {}
    for batch in engine.generate(source, stop or Flag()):
        for piece in engine.take_pieces():
            assert piece.key not in found
            pieces.setdefault((piece.key, piece.index), []).append(piece)
        found.update({completion.key: completion for completion in batch})
    return found, pieces


class EngineContract:
    """Subclasses define the fixture `engine`: an open engine whose max_model_len (words or tokens) is at most 512."""

    def test_every_request_is_answered_exactly_once_with_its_key(self, engine):
        found = drive(engine, ListSource(requests(50)))
        assert sorted(found) == [("c", index) for index in range(50)]
        assert all(not completion.failure for completion in found.values())
        assert all(len(completion.choices) == 1 for completion in found.values())

    def test_a_source_without_requests_ends_at_once(self, engine):
        assert drive(engine, ListSource([])) == {}

    def test_it_can_generate_again_after_the_source_ended(self, engine):
        assert len(drive(engine, ListSource(requests(3)))) == 3
        assert len(drive(engine, ListSource(requests(3)))) == 3

    def test_never_more_in_flight_than_it_says(self, engine):
        source = ListSource(requests(300, max_tokens=2))
        num_back = 0
        for batch in engine.generate(source, Flag()):
            num_back += len(batch)
            assert source.given - num_back <= self.max_in_flight(engine)
        assert num_back == 300

    def max_in_flight(self, engine) -> int:
        return engine.max_in_flight

    def test_a_source_that_is_slow_is_waited_for(self, engine):
        source = ListSource(requests(6), per_take=1, gaps=2)
        assert len(drive(engine, source)) == 6

    def test_the_source_is_waited_on_only_while_nothing_is_in_flight(self, engine):
        source = ListSource(requests(6), per_take=2, gaps=1)
        num_back = 0
        wait, held = source.wait, []

        def checked_wait(timeout_seconds: float) -> None:
            held.append(source.given - num_back)
            wait(timeout_seconds)

        source.wait = checked_wait
        for batch in engine.generate(source, Flag()):
            num_back += len(batch)
        assert num_back == 6
        assert set(held) <= {0}

    def test_a_stop_ends_it_and_abandons_what_is_in_flight(self, engine):
        stop = Flag()
        source = ListSource(requests(200))
        for _ in engine.generate(source, stop):
            stop.set()
        assert source.given < 200 or not source.left
        assert len(drive(engine, ListSource(requests(4)))) == 4, (
            "abandoned requests are not answered later"
        )

    def test_several_choices_come_in_order(self, engine):
        found = drive(engine, ListSource(requests(3, n=3, temperature=1.0, seed=1)))
        for completion in found.values():
            assert [choice.index for choice in completion.choices] == [0, 1, 2]
            assert completion.completion_tokens == sum(c.num_tokens for c in completion.choices)

    def test_max_tokens_cuts_and_says_so(self, engine):
        found = drive(engine, ListSource(requests(2, max_tokens=2, ignore_eos=True)))
        for completion in found.values():
            assert completion.choices[0].finish_reason == "length"
            assert completion.completion_tokens == completion.choices[0].num_tokens == 2
            assert completion.prompt_tokens > 2

    def test_token_ids_and_messages_are_answered(self, engine):
        sampling = Sampling(max_tokens=4)
        message = {"role": "user", "content": "hello there"}
        found = drive(
            engine,
            ListSource(
                [
                    Request(key=("c", 0), token_ids=[5, 6, 7], sampling=sampling),
                    Request(key=("c", 1), messages=[message], sampling=sampling),
                ]
            ),
        )
        assert [found["c", index].failure for index in range(2)] == [None, None]
        assert found["c", 0].prompt_tokens == 3

    def test_a_refused_request_fails_alone(self, engine):
        rows = requests(5)
        rows[2] = msgspec.structs.replace(rows[2], text="long " * 4000)
        rows[3] = msgspec.structs.replace(rows[3], text="")
        found = drive(engine, ListSource(rows))
        assert len(found) == 5
        codes = [found["c", i].failure and found["c", i].failure.code for i in range(5)]
        assert codes == [None, None, "prompt_too_long", "empty_prompt", None]
        assert found["c", 2].choices == []

    def test_log_probabilities_cover_the_answer(self, engine):
        found = drive(engine, ListSource(requests(2, logprobs=1, prompt_logprobs=1, max_tokens=3)))
        completion: Completion = found["c", 0]
        logprobs = completion.choices[0].logprobs
        assert logprobs
        assert len(logprobs) == completion.choices[0].num_tokens
        assert all(position.logprob <= 0 and position.top for position in logprobs)
        assert completion.prompt_logprobs
        assert completion.prompt_logprobs[0] is None
        assert len(completion.prompt_logprobs) == completion.prompt_tokens

    def test_the_pieces_of_streamed_answers_make_up_their_texts(self, engine):
        rows = requests(4, n=2, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
        rows = [msgspec.structs.replace(row, is_streamed=row.key[1] < 3) for row in rows]
        found, pieces = stream(engine, ListSource(rows))
        assert len(found) == 4
        assert sorted(pieces) == [(("c", row), index) for row in range(3) for index in range(2)]
        for (key, index), parts in pieces.items():
            choice = found[key].choices[index]
            assert "".join(part.text for part in parts) == choice.text
            assert sum(part.num_tokens for part in parts) == choice.num_tokens
            assert len(parts) > 1
        assert engine.take_pieces() == []

    def test_a_streamed_answer_equals_the_same_answer_in_one_piece(self, engine):
        rows = requests(3, temperature=1.0, seed=2, stop=["z", "says hello there"])
        streamed = [msgspec.structs.replace(row, is_streamed=True) for row in rows]
        found, pieces = stream(engine, ListSource(streamed))
        whole = drive(engine, ListSource(rows))
        for row in rows:
            assert found[row.key].choices == whole[row.key].choices
            text = "".join(part.text for part in pieces[row.key, 0])
            assert text == whole[row.key].choices[0].text

    def test_a_stop_drops_the_pieces_of_streamed_answers(self, engine):
        rows = [
            msgspec.structs.replace(row, is_streamed=True)
            for row in requests(50, max_tokens=200, ignore_eos=True)
        ]
        stop = Flag()
        for _ in engine.generate(ListSource(rows), stop):
            stop.set()
        after, pieces = stream(engine, ListSource(requests(2)))
        assert len(after) == 2
        assert pieces == {}

    def test_counters_grow(self, engine):
        before = engine.stats()
        found = drive(engine, ListSource(requests(4)))
        after = engine.stats()
        tokens = sum(completion.completion_tokens for completion in found.values())
        assert after.steps > before.steps
        assert after.completion_tokens - before.completion_tokens == tokens
        assert after.prompt_tokens > before.prompt_tokens
