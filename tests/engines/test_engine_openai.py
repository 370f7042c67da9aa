"""The engine for endpoints, against one on 127.0.0.1 that answers well or badly."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import types
from collections.abc import Iterator

import msgspec
import pytest

from batchinfer.core.errors import (
    AccessDenied,
    ConfigError,
    EngineLoadError,
    EngineStalled,
    Interrupted,
)
from batchinfer.core.records import Request, Sampling
from batchinfer.engines import (
    create_engine,
    openai_calls,
    openai_client,
    openai_engine,
    openai_pace,
    openai_requests,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.openai_engine import OpenAIEngine
from engine_contract import EngineContract, Flag, ListSource, drive, requests, stream
from fake_endpoint import (
    PROBE,
    FakeEndpoint,
    fake_endpoint,
    half_a_body,
    raw,
    refusal,
    reply,
    slow_bytes,
    without_certificates,
)

pytest.importorskip("openai")

OPENED: list[OpenAIEngine] = []
KEY = "sk-a1B2c3D4e5F6"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same waits, a hundred times shorter; and a key."""
    monkeypatch.setattr(openai_calls, "FIRST_WAIT_SECONDS", 0.005)
    monkeypatch.setattr(openai_pace, "FIRST_HOLD_SECONDS", 0.005)
    monkeypatch.setattr(openai_pace, "LONGEST_HOLD_SECONDS", 0.1)
    monkeypatch.setattr(openai_calls, "LONGEST_HOLD_SECONDS", 0.1)
    monkeypatch.setattr(openai_engine, "OPEN_PAUSE_SECONDS", 0.02)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("openai.DefaultAsyncHttpxClient", without_certificates())
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def endpoint():
    with fake_endpoint() as found:
        yield found


def opened(endpoint: FakeEndpoint, **options) -> OpenAIEngine:
    engine = create_engine(
        EngineConfig(
            **{"engine": "openai", "base_url": endpoint.url, "model": "echo-model", **options}
        )
    )
    assert isinstance(engine, OpenAIEngine)
    OPENED.append(engine)
    engine.open(Flag())
    return engine


@pytest.fixture
def engine(endpoint):
    return opened(endpoint, max_concurrency=8)


def refuse_long_prompts(text: str, _body: dict) -> object:
    if len(text.split(" ")) >= 512:
        return refusal(400, "too many tokens", code="context_length_exceeded")
    return None


class TestOpenAIContract(EngineContract):
    @pytest.fixture
    def engine(self, endpoint):
        endpoint.rule = refuse_long_prompts
        return opened(endpoint, max_concurrency=8)

    def test_several_choices_come_in_order(self, engine):
        """The API does not count the tokens of each choice."""
        found = drive(engine, ListSource(requests(3, n=3, temperature=1.0, seed=1)))
        for completion in found.values():
            assert [choice.index for choice in completion.choices] == [0, 1, 2]
            assert completion.completion_tokens == 12
            assert [choice.num_tokens for choice in completion.choices] == [0, 0, 0]


def codes(found: dict) -> list[str | None]:
    return [found[key].failure and found[key].failure.code for key in sorted(found)]


# --------------------------------------------------------------------------- what is sent


def test_parameters_go_by_their_names_in_the_api(engine, endpoint):
    sampling = Sampling(
        max_tokens=5, temperature=0.5, top_k=3, stop=["z"], seed=7, logprobs=2, n=2,
        structured={"json": {"type": "object"}}, extra={"reasoning_effort": "low"},
        skip_special_tokens=False, ignore_eos=True,
    )  # fmt: skip
    messages = [{"role": "user", "content": "a b"}]
    chat = Request(
        key=("c", 0),
        messages=messages,
        sampling=sampling,
        chat_options={"chat_template_kwargs": {"x": 1}},
    )
    regex = Request(
        key=("c", 1), text="a b", sampling=Sampling(temperature=0, n=3, structured={"regex": "a+"})
    )
    found = drive(engine, ListSource([chat, regex]))
    assert codes(found) == [None, None]
    [sent] = [body for body in endpoint.bodies if "messages" in body]
    assert sent == {
        "model": "echo-model", "messages": messages, "chat_template_kwargs": {"x": 1},
        "max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": ["z"], "seed": 7, "n": 2,
        "logprobs": True, "top_logprobs": 2, "skip_special_tokens": False, "ignore_eos": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        "reasoning_effort": "low",
    }  # fmt: skip
    [sent] = [body for body in endpoint.bodies if "prompt" in body]
    assert sent == {
        "model": "echo-model", "prompt": "a b", "max_tokens": None, "temperature": 0,
        "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    assert [choice.text for choice in found["c", 1].choices] == ["a b"] * 3
    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"


def test_a_requests_own_constraint_takes_the_place_of_the_runs(engine, endpoint):
    own = {"response_format": {"type": "json_object"}}
    sampling = [Sampling(structured={"choice": ["a"]}, extra=extra) for extra in (own, None)]
    rows = [Request(key=("c", i), text="a b", sampling=each) for i, each in enumerate(sampling)]
    drive(engine, ListSource(rows))
    [sent] = [body for body in endpoint.bodies if "response_format" in body]
    assert "structured_outputs" not in sent
    [sent] = [body for body in endpoint.bodies if "structured_outputs" in body]
    assert sent["structured_outputs"] == {"choice": ["a"]}


def test_counts_and_cached_tokens_come_from_the_usage(engine):
    found = drive(engine, ListSource(requests(1, max_tokens=2)))["c", 0]
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (4, 1, 2)
    assert found.generation_seconds > 0


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "tool_calls": [{"id": "t"}]}, ""),
        ({"content": "so", "tool_calls": [{"id": "t"}]}, "so"),
        ({"content": "so", "function_call": {"name": "f"}}, 'so\n[{"name":"f"}]'),
        ({"content": None, "refusal": "I cannot"}, "I cannot"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None}, ""),
    ],
)
def test_every_form_of_message_becomes_a_text(engine, endpoint, message, text):
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    endpoint.rule = lambda _text, _body: reply(200, body)
    found = drive(engine, ListSource(requests(1)))["c", 0]
    assert found.failure is None
    assert (found.choices[0].text, found.choices[0].finish_reason) == (text, "tool_calls")
    assert found.choices[0].tool_calls == message.get("tool_calls")
    assert found.completion_tokens == 0, "without usage nothing is made up"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_apart_from_the_text(engine, endpoint, name):
    message = {"content": "4", name: "2 + 2"}
    endpoint.rule = lambda _text, _body: reply(200, {"choices": [{"message": message}]})
    [choice] = drive(engine, ListSource(requests(1)))["c", 0].choices
    assert (choice.text, choice.reasoning) == ("4", "2 + 2")


def test_best_of_is_made_from_the_log_probabilities(engine, endpoint):
    def answer(_text, body):
        assert (body["n"], body["logprobs"]) == (3, 0)
        choices = [
            {"index": i, "text": f"t{i}", "logprobs": {"tokens": ["t"], "token_logprobs": [value]}}
            for i, value in enumerate([-3.0, -1.0, -2.0])
        ]
        return reply(200, {"choices": choices})

    endpoint.rule = answer
    found = drive(engine, ListSource(requests(1, n=2, best_of=3, temperature=1.0)))["c", 0]
    assert [choice.text for choice in found.choices] == ["t1", "t2"]
    assert found.choices[0].logprobs is None


# --------------------------------------------------------------------------- what goes wrong and passes


PASSING = {
    "429 with seconds": refusal(429, retry_after="0.05"),
    "429 with milliseconds": refusal(429, retry_after_ms="20"),
    "429": refusal(429),
    "500": refusal(500),
    "503": refusal(503, retry_after="0"),
    "529": refusal(529),
    "409": refusal(409),
    "502 html": reply(502, "<html><h1>Bad gateway</h1></html>", "text/html"),
    "200 html": reply(200, "<html>please log in</html>", "text/html"),
    "wrong json": reply(200, "{]"),
    "error with 200": reply(200, {"choices": None, "error": {"message": "upstream", "code": 502}}),
    "wrong types": reply(200, {"choices": [{"text": 5}]}),
    "null": reply(200, "null"),
    "empty body": reply(200, ""),
    "cut before the status": raw(b""),
    "cut in the status": raw(b"HTTP/1.1 2"),
    "half a body": half_a_body,
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_costs_no_row(engine, endpoint, name):
    faulty = ("row 1 ", "row 3 ")
    endpoint.rule = lambda text, _body: [PASSING[name]] * 2 if text.startswith(faulty) else None
    found = drive(engine, ListSource(requests(5)))
    assert codes(found) == [None] * 5
    assert found["c", 3].choices[0].text == "row 3 says hello"
    assert sorted(endpoint.texts) == sorted(
        [f"row {i} says hello" for i in (0, 1, 1, 1, 2, 3, 3, 3, 4)]
    )


def test_slow_bytes_end_at_the_time_limit_and_the_request_is_sent_again(endpoint):
    engine = opened(endpoint, request_timeout_seconds=1.0)
    endpoint.rule = lambda text, _body: [slow_bytes] if text.startswith("row 1 ") else None
    assert codes(drive(engine, ListSource(requests(3)))) == [None] * 3


def test_a_wait_that_the_endpoint_asks_for_is_kept_by_all_requests(engine, endpoint):
    times = []

    def rule(_text, _body):
        times.append(time.monotonic())
        return refusal(429, retry_after="0.3") if len(times) == 1 else None

    endpoint.rule = rule
    source = ListSource(requests(6), per_take=1)
    assert codes(drive(engine, source)) == [None] * 6
    sent_at_once = [each for each in times if each < times[0] + 0.25]
    assert len(sent_at_once) <= 8, "what was under way already"
    assert max(times) >= times[0] + 0.25


# --------------------------------------------------------------------------- what is a row's own fault


OWN = {
    "400": (refusal(400, "bad"), "engine_rejected"),
    "422": (refusal(422, "bad"), "engine_rejected"),
    "413": (refusal(413, "large"), "engine_rejected"),
    "too long": (refusal(400, "long", code="context_length_exceeded"), "prompt_too_long"),
    "too long for vLLM": (refusal(400, "long", code=400, param="input_tokens"), "prompt_too_long"),
    "403": (refusal(403, "flagged"), "engine_rejected"),
    "404": (refusal(404, "no such file"), "engine_rejected"),
    "another form": (reply(400, {"detail": "bad"}), "engine_rejected"),
    "no json": (reply(400, "bad"), "engine_rejected"),
    "500": (refusal(500, "always"), "engine_error"),
    "wrong json": (reply(200, "{}"), "engine_error"),
    "half a body": (half_a_body, "engine_error"),
    "504": (refusal(504, "slow"), "engine_error"),
}


@pytest.mark.parametrize("name", OWN)
def test_a_row_of_its_own_fault_fails_alone(engine, endpoint, name):
    fault, code = OWN[name]
    endpoint.rule = lambda text, _body: fault if text.startswith("row 1 ") else None
    assert codes(drive(engine, ListSource(requests(3)))) == [None, code, None]


def test_a_request_larger_than_a_minutes_tokens_fails_alone(engine, endpoint):
    limit = {"x_ratelimit_limit_tokens": "1000", "retry_after": "0"}
    endpoint.rule = lambda _text, body: (
        refusal(429, "too large", **limit) if body["max_tokens"] > 1000 else [refusal(429, **limit)]
    )
    rows = [*requests(2), *requests(1, text="large", max_tokens=2000)]
    rows = [msgspec.structs.replace(row, key=("c", i)) for i, row in enumerate(rows)]
    found = drive(engine, ListSource(rows))
    assert codes(found) == [None, None, "engine_rejected"]
    assert "1000 a minute" in found["c", 2].failure.message


def test_parameters_that_every_request_would_be_refused_for_are_told_apart(engine, endpoint):
    endpoint.rule = lambda _text, body: (
        refusal(400, "too hot") if body.get("temperature") == 9 else None
    )
    found = drive(engine, ListSource(requests(4, temperature=9)))
    assert codes(found) == ["invalid_parameter"] * 4
    assert sum(endpoint.text_of(body) == PROBE for body in endpoint.bodies) == 1


@pytest.mark.parametrize("status", [503, 500, 404])
def test_parameters_are_told_apart_during_an_outage_too(engine, endpoint, status):
    lost = [0]

    def rule(text, body):
        if text == PROBE and lost[0] < 2:
            lost[0] += 1
            return refusal(status, "lost", retry_after="0")
        return refusal(400, "too hot") if body.get("temperature") == 9 else None

    assert codes(drive(engine, ListSource(requests(1)))) == [None]
    endpoint.rule = rule
    assert codes(drive(engine, ListSource(requests(3, temperature=9)))) == ["invalid_parameter"] * 3


def test_parameters_that_a_probe_always_fails_with_are_not_called_refused(engine, endpoint):
    endpoint.rule = lambda text, body: (
        None
        if body.get("temperature") != 9
        else refusal(500, "lost")
        if text == PROBE
        else refusal(400, "too hot")
    )
    assert codes(drive(engine, ListSource(requests(3, temperature=9)))) == ["engine_rejected"] * 3


def test_parameters_of_chats_and_completions_are_told_apart(engine, endpoint):
    endpoint.rule = lambda text, body: (
        refusal(400, "no") if "messages" in body or text != PROBE else None
    )
    sampling = Sampling(temperature=9, max_tokens=5)
    messages = [{"role": "user", "content": "a b"}]
    plain = Request(key=("c", 0), text="a b", sampling=sampling)
    chat = Request(key=("c", 0), messages=messages, sampling=sampling)
    assert codes(drive(engine, ListSource([plain]))) == ["engine_rejected"]
    assert codes(drive(engine, ListSource([chat]))) == ["invalid_parameter"]


def test_chats_and_completions_do_not_share_a_probe(endpoint):
    endpoint.rule = lambda _text, body: None if "messages" in body else refusal(404, "no such page")
    config = EngineConfig(engine="openai", base_url=endpoint.url, model="echo-model")

    async def probe() -> list[openai_client.CallError | None]:
        there = openai_client.Endpoint(config, "")
        calls = openai_calls.Calls(config, there, end=print, show=print)
        paths = (openai_requests.CHAT_PATH, openai_requests.COMPLETIONS_PATH)
        try:
            async with calls._probing:  # both wait for the end of an earlier probe
                both = asyncio.gather(*map(calls._probe, paths))
                await asyncio.sleep(0)
            return await both
        finally:
            await there.close()

    of_chats, of_completions = asyncio.run(probe())
    assert of_chats is None
    assert isinstance(of_completions, openai_client.Refusal)


@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"reason": "bad \\ud800"}}',
        '{"error": {"message": "bad \\ud800"}}',
        '{"error": {"message": null, "big": ' + "9" * 5000 + "}}",
        '{"error": {"big": ' + "9" * 400 + "}}",
        '{"error": {"x": ' + "[" * 3000 + "]" * 3000 + "}}",
    ],
    ids=["half a character", "half in the message", "5000 digits", "400 digits", "deep"],
)
def test_a_refusal_that_is_hard_to_write_fails_its_row_alone(engine, endpoint, body):
    fault = reply(400, body)
    endpoint.rule = lambda text, _body: fault if text.startswith("row 1 ") else None
    found = drive(engine, ListSource(requests(3)))
    assert codes(found) == [None, "engine_rejected", None]
    assert msgspec.json.encode(found["c", 1].failure)


@pytest.mark.parametrize("count", [10**400, 10**30, -5], ids=["10**400", "10**30", "-5"])
def test_a_usage_that_cannot_be_true_is_not_counted(engine, endpoint, count):
    usage = {
        "prompt_tokens": count,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": count},
    }
    body = {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage}
    endpoint.rule = lambda _text, _body: reply(200, body)
    found = drive(engine, ListSource(requests(1)))["c", 0]
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (0, 0, 0)
    assert found.choices[0].text == "x"


@pytest.mark.parametrize("given", [1, 3])
def test_the_number_of_answers_is_checked(engine, endpoint, given):
    choices = [{"index": i, "text": f"t{i}"} for i in range(given)]
    endpoint.rule = lambda _text, _body: reply(200, {"choices": choices})
    found = drive(engine, ListSource(requests(1, n=2, temperature=1.0)))["c", 0]
    if given == 3:
        assert [choice.text for choice in found.choices] == ["t0", "t1"]
    else:
        assert found.failure.code == "engine_rejected"
        assert "1 of 2 answers" in found.failure.message


def test_a_hanging_row_is_given_up_while_the_endpoint_answers_others(endpoint):
    engine = opened(endpoint, request_timeout_seconds=1.0)
    endpoint.rule = lambda text, _body: slow_bytes if text.startswith("row 1 ") else None
    found = drive(engine, ListSource(requests(3)))
    assert codes(found) == [None, "engine_error", None]
    assert "no whole answer within 1 s" in found["c", 1].failure.message


def test_a_stream_that_breaks_after_its_first_words_fails(engine, endpoint):
    """What was shown cannot be taken back, so the request is not sent again."""
    part = b'data: {"choices": [{"index": 0, "text": "so"}]}\n\n'
    endpoint.rule = lambda _text, _body: raw(EVENTS + part)
    [row] = requests(1)
    row = msgspec.structs.replace(row, is_streamed=True)
    found, pieces = stream(engine, ListSource([row]))
    assert codes(found) == ["engine_error"]
    assert [piece.text for piece in pieces[row.key, 0]] == ["so"]


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    "choice",
    [b'{"index": 0, "delta": {"reasoning": "hm"}}', b"5", b'{"index": 0, "text": ["so"]}'],
)
def test_a_stream_that_breaks_before_its_first_word_is_sent_again(engine, endpoint, choice):
    broken = raw(EVENTS + b'data: {"choices": [' + choice + b"]}\n\n")
    endpoint.rule = lambda _text, _body: broken if len(endpoint.bodies) == 1 else None
    [row] = requests(1)
    row = msgspec.structs.replace(row, is_streamed=True)
    found, _ = stream(engine, ListSource([row]))
    [answer] = found[row.key].choices
    assert (answer.text, answer.reasoning) == (row.text, None)


@pytest.mark.parametrize(
    "part", [b'{"choices": [5]}', b"{", b"[]", b'{"error": {"message": "no"}}']
)
def test_no_stream_is_left_to_the_garbage_collector(engine, endpoint, part, monkeypatch):
    """It closed one in another thread than the event loop's, which used parts of it at this moment."""
    # pytest keeps what was logged, and with it the error and its stream.
    monkeypatch.setattr(openai_calls.logger, "disabled", True)
    broken = raw(EVENTS + b"data: " + part + b'\n\ndata: {"choices": []}\n\n')
    endpoint.rule = lambda _text, _body: broken if len(endpoint.bodies) == 1 else None
    [row] = requests(1)
    row = msgspec.structs.replace(row, is_streamed=True)
    gc.collect()
    gc.disable()
    try:
        assert codes(stream(engine, ListSource([row]))[0]) == [None]
        deadline = time.monotonic() + 10
        while open_streams() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert open_streams() == []
    finally:
        gc.enable()


def open_streams() -> list[types.AsyncGeneratorType]:
    """The official client's streams, and what they read from, that have neither come to their end nor been closed."""
    return [
        found
        for found in gc.get_objects()
        # isinstance() would ask for `__class__`, at which torch's deprecated objects warn.
        if type(found) is types.AsyncGeneratorType and found.ag_frame is not None
    ]


@pytest.mark.parametrize("limit", ["0", "-1", "nan"])
def test_a_header_without_a_real_limit_of_tokens_fails_no_row(engine, endpoint, limit):
    busy = refusal(429, "busy", x_ratelimit_limit_tokens=limit, retry_after="0")
    endpoint.rule = lambda _text, _body: busy if len(endpoint.bodies) == 1 else None
    assert codes(drive(engine, ListSource(requests(2)))) == [None, None]


def test_a_character_that_comes_in_two_parts_of_a_stream_is_one(engine, endpoint):
    halves = [b'"text": "a \\ud83d"', b'"text": "\\ude00", "finish_reason": "stop"']
    parts = [b'data: {"choices": [{"index": 0, ' + half + b"}]}\n\n" for half in halves]
    endpoint.rule = lambda _text, _body: raw(EVENTS + b"".join(parts) + b"data: [DONE]\n\n")
    [row] = requests(1)
    row = msgspec.structs.replace(row, is_streamed=True)
    found, _ = stream(engine, ListSource([row]))
    assert found[row.key].choices[0].text == "a \N{GRINNING FACE}"


def test_half_a_character_in_a_stream_fails_its_row_alone(engine, endpoint):
    part = b'data: {"choices": [{"index": 0, "text": "a \\ud83d", "finish_reason": "stop"}]}\n\n'
    endpoint.rule = lambda _text, _body: raw(EVENTS + part + b"data: [DONE]\n\n")
    [row] = requests(1)
    row = msgspec.structs.replace(row, is_streamed=True)
    assert codes(stream(engine, ListSource([row]))[0]) == ["engine_error"]


def test_an_endpoint_that_answers_everything_with_a_page_fails_no_row(endpoint):
    engine = opened(endpoint, stall_seconds=1.5)
    endpoint.rule = lambda _text, _body: reply(200, "<html>log in</html>", "text/html")
    with pytest.raises(EngineStalled, match="not in the API's form"):
        assert drive(engine, ListSource(requests(3))) == {}


def test_a_newer_name_of_max_tokens_is_found_out(engine, endpoint):
    old = refusal(400, "use the other", code="unsupported_parameter", param="max_tokens")
    endpoint.rule = lambda _text, body: old if body.get("max_tokens") else None
    messages = [{"role": "user", "content": "a b c"}]
    rows = [
        Request(key=("c", i), messages=messages, sampling=Sampling(max_tokens=2)) for i in range(3)
    ]
    found = drive(engine, ListSource(rows))
    assert [found["c", i].choices[0].text for i in range(3)] == ["a b"] * 3


def test_an_answer_without_end_is_cut_off(engine, endpoint, monkeypatch):
    monkeypatch.setattr(openai_client, "MOST_BYTES", 10_000)
    huge = reply(200, {"choices": [{"text": "x" * 20_000}]})
    endpoint.rule = lambda text, _body: huge if text.startswith("row 1 ") else None
    found = drive(engine, ListSource(requests(3)))
    assert codes(found) == [None, "engine_error", None]


# --------------------------------------------------------------------------- what ends the engine


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_refused_key_ends_the_engine_and_is_repeated_nowhere(engine, endpoint, status):
    numbers = iter(range(1000))
    endpoint.rule = lambda _text, _body: (
        refusal(status, f"wrong key {KEY}") if next(numbers) >= 5 else None
    )
    found = {}
    batches = engine.generate(ListSource(requests(200)), Flag())
    with pytest.raises(AccessDenied) as caught:  # noqa: PT012 - what came before the error counts
        for batch in batches:
            found.update({completion.key: completion for completion in batch})
    assert len(found) <= 5
    assert all(not completion.failure for completion in found.values())
    assert KEY not in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.exit_status == 2


def test_a_used_up_account_ends_the_engine(engine, endpoint):
    endpoint.rule = lambda _text, _body: refusal(429, "pay", code="insufficient_quota")
    with pytest.raises(AccessDenied, match="pay"):
        drive(engine, ListSource(requests(3)))


@pytest.mark.parametrize("models", [["another"], None])
def test_a_wrong_model_is_refused_before_or_at_the_first_row(endpoint, models):
    endpoint.models = models
    endpoint.rule = lambda _text, _body: refusal(404, "The model `echo-model` does not exist")
    with pytest.raises(ConfigError, match="echo-model") as caught:
        drive(opened(endpoint), ListSource(requests(3)))
    assert models is None or "another" in caught.value.hint


def test_a_proxy_that_loses_its_server_for_a_while_costs_no_row(engine, endpoint):
    """Such a proxy refuses every request by 404, as an endpoint without the model does."""
    numbers = iter(range(1000))
    endpoint.rule = lambda _text, _body: (
        refusal(404, "page not found") if 10 <= next(numbers) < 40 else None
    )
    assert codes(drive(engine, ListSource(requests(60)))) == [None] * 60


def test_a_parameter_that_is_refused_under_both_names_fails(engine, endpoint):
    old = refusal(400, "use the other", code="unsupported_parameter", param="max_tokens")
    endpoint.rule = lambda text, _body: None if text == PROBE else old
    messages = [{"role": "user", "content": "a b c"}]
    row = Request(key=("c", 0), messages=messages, sampling=Sampling(max_tokens=2))
    assert codes(drive(engine, ListSource([row]))) == ["engine_rejected"]


def test_a_model_that_is_not_listed_but_answers_is_taken(endpoint):
    endpoint.models = ["another"]
    assert codes(drive(opened(endpoint), ListSource(requests(2)))) == [None, None]


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_the_list_of_models_refuses_ends_the_opening(endpoint, status, monkeypatch):
    endpoint.models = refusal(status, "no")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(AccessDenied) as caught:
        opened(endpoint)
    assert "set the environment variable OPENAI_API_KEY" in caught.value.hint


@pytest.mark.parametrize("key", ["sk-1\nsk-2", "sk 1", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_repeated(endpoint, key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        opened(endpoint)
    assert key not in caught.value.message


def test_an_outage_ends_the_engine_after_a_while_and_fails_no_row(endpoint):
    engine = opened(endpoint, stall_seconds=0.5)
    endpoint.rule = lambda _text, _body: refusal(503, "overloaded")
    with pytest.raises(EngineStalled, match=r"answered no request for 0.5 s.*overloaded") as caught:
        assert drive(engine, ListSource(requests(20))) == {}
    assert caught.value.exit_status == 33
    assert caught.value.in_flight == [], "no row is under suspicion"


def test_an_endpoint_that_goes_away_and_comes_back_costs_no_row(endpoint):
    engine = opened(endpoint, max_concurrency=4)
    replaced = []

    def restart() -> None:
        endpoint.close()
        time.sleep(0.5)
        replaced.append(FakeEndpoint(endpoint.port))

    endpoint.delay_seconds = 0.02
    thread = threading.Timer(0.2, restart)
    thread.start()
    try:
        found = drive(engine, ListSource(requests(200)))
    finally:
        thread.join()
        for each in replaced:
            each.close()
    assert codes(found) == [None] * 200
    assert replaced[0].texts


def test_a_slow_endpoint_is_no_outage(endpoint):
    engine = opened(endpoint, stall_seconds=0.1)
    endpoint.delay_seconds = 0.5
    assert codes(drive(engine, ListSource(requests(3)))) == [None] * 3


def test_an_endpoint_that_cannot_be_reached_is_waited_for_and_then_given_up(caplog):
    with fake_endpoint() as endpoint:
        pass
    with pytest.raises(EngineLoadError, match=r"not reached for 0.3 s") as caught:
        opened(endpoint, stall_seconds=0.3)
    assert caught.value.exit_status == 33


def test_a_stop_ends_the_opening():
    with fake_endpoint() as endpoint:
        pass
    stop = Flag()
    threading.Timer(0.1, stop.set).start()
    engine = OpenAIEngine(EngineConfig(engine="openai", base_url=endpoint.url, model="m"))
    with pytest.raises(Interrupted):
        engine.open(stop)


# --------------------------------------------------------------------------- how fast


def test_never_more_requests_at_once_than_allowed(endpoint):
    engine = opened(endpoint, max_concurrency=3)
    endpoint.delay_seconds = 0.02
    assert len(drive(engine, ListSource(requests(40)))) == 40
    assert endpoint.most_at_once == 3


def test_a_bug_in_the_loop_ends_the_engine_and_hangs_nothing(engine, monkeypatch):
    monkeypatch.setattr(openai_calls, "completion_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(engine, ListSource(requests(2)))


@pytest.mark.parametrize(
    "url",
    ["http://me:pass-word@host:port/v1", "http://me:pass/word@host/", "me:pass-word@host", "http://[me:pass-word@host",
     "http://host:port?key=pass-word", "http://host:port#pass-word"],
)  # fmt: skip
def test_a_bad_url_with_a_password_is_refused_without_it(url):
    config = EngineConfig(engine="openai", base_url=url, model="m")
    with pytest.raises(ConfigError, match="--base-url") as caught:
        create_engine(config)
    assert "word" not in f"{caught.value}{caught.value.hint}".replace("a password", "")


@pytest.mark.parametrize("host", ["a\x01b", "[v1.x]", "-\N{LATIN SMALL LETTER U WITH DIAERESIS}"])
def test_a_url_that_the_client_does_not_take_is_refused(host):
    engine = OpenAIEngine(EngineConfig(engine="openai", base_url=f"http://{host}/v1", model="m"))
    OPENED.append(engine)
    with pytest.raises(ConfigError, match="--base-url: is no URL of an endpoint") as caught:
        engine.open(Flag())
    assert caught.value.exit_status == 2


def test_options_of_a_loaded_model_are_refused():
    base = EngineConfig(engine="openai", base_url="http://127.0.0.1:1", model="m")
    for name, value in {
        "tensor_parallel_size": 2,
        "dtype": "half",
        "engine_args": {"a": 1},
    }.items():
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-').removesuffix('s')}"):
            create_engine(msgspec.structs.replace(base, **{name: value}))


@pytest.mark.parametrize("is_chat", [True, False])
def test_what_a_vllm_server_adds_about_tokens_is_read(is_chat):
    """Its chats tell of the prompt in the body, its completions in each choice."""
    position = {
        "9": {"logprob": -3.0, "rank": 5, "decoded_token": " a"},
        "4": {"logprob": -0.5, "rank": 1, "decoded_token": " b"},
    }
    of_prompt = {"prompt_token_ids": [8, 9], "prompt_logprobs": [None, position]}
    choice = {"index": 0, "token_ids": [3], "finish_reason": "stop"}
    choice |= {"message": {"content": "x"}} if is_chat else {"text": "x", **of_prompt}
    body = {"choices": [choice], **(of_prompt if is_chat else {})}
    request = Request(key=("c", 0), text="x", sampling=Sampling(prompt_logprobs=1))
    found = openai_requests.completion_of(request, json.dumps(body).encode(), (0.0, 0.0))
    assert (found.prompt_token_ids, found.choices[0].token_ids) == ([8, 9], [3])
    [first, second] = found.prompt_logprobs
    assert first is None
    assert (second.token_id, second.rank, second.top_ids, second.top) == (9, 5, [4], [(" b", -0.5)])
