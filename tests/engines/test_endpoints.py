"""Endpoints that run elsewhere: what they may do wrong, and how the rows are shared among several."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import msgspec
import pytest

from batchinfer.core.errors import (
    AccessDenied,
    ConfigError,
    EngineDied,
    EngineLoadError,
    Interrupted,
)
from batchinfer.core.records import Reply
from batchinfer.engines import create_engine, endpoints, http, lists, targets
from batchinfer.engines.endpoints import Pace, estimate_tokens
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.replies import judge
from echo_server import fake_endpoint, refusal
from engine_contract import EngineContract, ListSource, body_of, call, calls, code_of, drive
from making import wait_for
from web_server import endless, raw, reply

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http, "pause_seconds", lambda _: 0.02)
    monkeypatch.setattr(targets, "_LARGEST_BYTES", 100_000)  # a longer answer has no end
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def clock_of_requests(endpoint, monkeypatch):
    """`stall_seconds` is a number of requests from here on: a slow machine sends fewer of them in a second."""
    clock = SimpleNamespace(monotonic=lambda: float(len(endpoint.calls)))
    monkeypatch.setattr(endpoints, "time", clock)


@pytest.fixture
def reach():
    """A function that opens an engine over endpoints; `info` is what it says of itself. All are closed."""
    with contextlib.ExitStack() as stack:

        def reach_them(*endpoints, **options):
            fields = {"stall_seconds": 5.0, "max_concurrency": 16, "model": "echo-model", **options}
            urls = [getattr(each, "url", each) for each in endpoints]
            config = EngineConfig(engine="openai", base_urls=urls, **fields)
            engine = stack.enter_context(contextlib.closing(create_engine(config)))
            engine.info = engine.open(Event())
            return engine

        yield reach_them


@pytest.fixture
def engine(reach, endpoint):
    return reach(endpoint)


def failed(engine, rows):
    """Have rows answered to the end. Returns the codes of those that fail, by row."""
    found = drive(engine, ListSource(rows))
    assert len(found) == len(rows)
    return {key[1]: code for key, each in found.items() if (code := code_of(each))}


class TestContract(EngineContract):
    @pytest.fixture
    def opened(self, reach, endpoint):
        engine = reach(endpoint)
        return engine, engine.info


PASSING = {
    "500": refusal(500),
    "500, not so soon": refusal(500, Retry_After="0.1"),
    "403": refusal(403),
    "502 page": reply(502, "<html>Bad Gateway</html>", "text/html"),
    "503": refusal(503),
    "429": refusal(429, Retry_After="0.1"),
    "a page": reply(200, "<html>Welcome</html>", "text/html"),
    "half a body": raw(b'HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n{"choices": ['),
    "an error with 200": reply(200, {"error": {"message": "boom", "type": "server_error"}}),
    "empty choice": reply(200, {"choices": [{}]}),
    "a redirection": reply(307, "", "text/html"),
    "closed at once": raw(b""),
    "no HTTP": raw(b"SSH-2.0-OpenSSH\r\n"),
    "no end": endless(b" " * 999),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_costs_no_row(endpoint, engine, name):
    endpoint.rule = lambda text, _: [PASSING[name]] * 2 if text.startswith("row 3 ") else None
    assert failed(engine, calls(8)) == {}
    assert endpoint.seen["row 3 says hello"] == 3


FAULTS = {"500": "server_error", "500, not so soon": "server_error", "closed at once": "server_error",
          "an error with 200": "invalid_answer", "a page": "invalid_answer", "no end": "invalid_answer"}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_that_always_fails_fails_alone(endpoint, engine, name):
    endpoint.rule = lambda text, _: PASSING[name] if text.startswith("row 3 ") else None
    endpoint.delay_seconds = 0.02
    assert failed(engine, calls(400)) == {3: FAULTS[name]}


def test_a_transcription_may_be_plain_text(endpoint, engine):
    endpoint.rule = lambda *_: reply(200, "what was said", "text/plain")
    asked = call(0, "/v1/audio/transcriptions")
    asked = msgspec.structs.replace(asked, content_type="multipart/form-data; boundary=b")
    assert engine.ask(asked).body == b"what was said"
    for body, verdict in ((b'{"text": "a"}', "final"), (b'{"text": null}', "failed")):
        assert judge(asked, 200, body)[1] == verdict


def test_a_response_may_have_no_item():
    assert judge(call(0, "/v1/responses"), 200, b'{"output": []}')[1] == "final"
    assert judge(call(0, "/v1/responses"), 200, b'{"output": null}')[1] == "failed"


@pytest.mark.usefixtures("clock_of_requests")
def test_a_row_that_fails_alone_at_the_end_is_given_up(endpoint, reach):
    endpoint.rule = lambda text, _: PASSING["500"] if text.startswith("row 3 ") else None
    assert failed(reach(endpoint, stall_seconds=10), [call(3)]) == {3: "server_error"}


@pytest.mark.usefixtures("clock_of_requests")
@pytest.mark.parametrize("name", ["500", "403", "502 page"])
def test_only_rows_that_the_endpoint_itself_fails_on_are_given_up_at_the_end(endpoint, name, reach):
    endpoint.rule = lambda text, _: PASSING[name] if int(text.split()[1]) > 30 else None
    found: list = []
    batches = reach(endpoint, stall_seconds=200).generate(ListSource(calls(40)), Event())
    with contextlib.suppress(EngineDied):
        found.extend(reply for batch in batches for reply in batch)
    assert len(found) == (31 if name == "502 page" else 40)


def test_a_row_that_takes_too_long_alone_is_said_with_the_option(endpoint, reach):
    endpoint.rule = lambda *_: endless(b" ", 0.05)
    engine = reach(endpoint, request_timeout_seconds=0.2, stall_seconds=0.3)
    with pytest.raises(EngineDied, match=r"last: no answer within 0\.2 s") as caught:
        drive(engine, ListSource([call(3)]))
    assert "--request-timeout-seconds" in caught.value.hint


@pytest.mark.parametrize("name", ["500", "429", "a page", "closed at once"])
def test_an_outage_ends_the_engine_after_a_while_and_fails_no_row(endpoint, name, reach):
    engine = reach(endpoint, stall_seconds=0.6)
    endpoint.rule = lambda _text, _body: PASSING[name]
    begin = time.monotonic()
    with pytest.raises(EngineDied):
        drive(engine, source := ListSource(calls(20)))
    assert len(source.left) == 4, "no row was finished, so none beyond 16 was taken"
    assert time.monotonic() - begin > 0.5


GONE = {
    "vLLM": reply(404, {"error": {"message": "No such model.", "param": "model", "code": 404}}),
    "OpenAI": reply(404, {"error": {"message": "No such model.", "code": "model_not_found"}}),
    "a proxy": reply(404, "No such model.", "text/html"),
    "a proxy's page": reply(405, "No such page.", "text/html"),
}


@pytest.mark.parametrize("name", GONE)
def test_an_endpoint_that_loses_its_model_fails_no_row(endpoint, name, reach):
    """Rows that ask for another model, or for what was never answered, are refused."""
    gone, refused = GONE[name], "unknown_url" if "proxy" in name else "model_not_found"
    other = call(0, model="other")
    endpoint.rule = lambda text, _: gone if text.startswith("row 0 ") else None
    engine = reach(endpoint, stall_seconds=0.5)
    assert failed(engine, [call(1), call(2)]) == {}
    unserved = call(3, "/v1/completions", prompt="row 0 again")
    assert failed(engine, [other, unserved]) == {0: refused, 3: refused}
    own = {"error": {"message": "no such file", "type": "invalid_request_error"}}
    endpoint.rule = lambda *_: reply(404, own)
    assert failed(engine, [call(4)]) == {4: "unknown_url"}
    endpoint.rule = lambda *_: gone
    with pytest.raises(EngineDied, match=rf"{endpoint.url}: answered nothing .*40[45]: No such"):
        drive(engine, ListSource(calls(40)))


def test_an_endpoint_that_wants_to_be_asked_at_once_is_left_alone(endpoint, reach):
    with fake_endpoint() as busy:
        busy.rule = lambda *_: refusal(429, Retry_After="0")
        assert failed(reach(endpoint, busy), calls(60)) == {}
        assert len(busy.bodies) < 200


def test_an_endpoint_that_pauses_or_is_not_there_yet_has_no_room():
    target = targets.Target("t", "http://127.0.0.1:9", 2)
    assert target.free_slots == 0
    target.is_ready = True
    assert target.free_slots == 2
    target.pause(60.0)
    assert target.free_slots == 0
    target.pause(1.0)
    assert target.pause_seconds > 50, "calls that were on their way bring shorter ones later"


def test_an_endpoint_that_needs_no_proxy_is_asked_without(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "own.example")
    config = EngineConfig(engine="openai", model="m")
    hosts = ("own.example", "other.example")
    found = [endpoints.Endpoint(f"http://{host}/v1", config).proxy for host in hosts]
    assert found == [None, "http://proxy:3128"]


def test_no_row_is_sent_on_to_where_an_endpoint_redirects(endpoint, engine):
    with fake_endpoint() as other:
        elsewhere = reply(307, "", "text/html", Location=f"{other.url}/completions")
        endpoint.rule = lambda *_: [elsewhere]
        assert failed(engine, calls(1)) == {}
        assert other.bodies == []


def test_a_slow_endpoint_is_no_outage(endpoint, reach):
    endpoint.delay_seconds = 1.0
    assert failed(reach(endpoint, stall_seconds=0.3), calls(20)) == {}


@pytest.mark.parametrize(("limit", "most"), [({}, 16), ({"requests_per_minute": 300}, 8)])
def test_a_wait_that_the_endpoint_asks_for_is_kept_by_all_calls(endpoint, reach, limit, most):
    times: list[float] = []
    endpoint.delay_seconds = 0.3

    def rule(_text, _body):
        times.append(time.monotonic())
        return refusal(429, Retry_After="1") if len(times) == 1 else None

    endpoint.rule = rule
    drive(reach(endpoint, **limit), ListSource(calls(20), per_take=1))
    before = [each for each in times if each - times[0] < 0.95]
    assert len(before) <= most, "those that were on their way"
    assert times[-1] - times[0] > 0.95


@pytest.mark.parametrize("status", [401, 402, 403, 429])
def test_a_refused_key_or_account_ends_the_engine_and_is_repeated_nowhere(endpoint, reach, status):
    endpoint.rule = lambda *_: refusal(status, f"bad key {KEY}", code="insufficient_quota")
    engine = reach(endpoint, stall_seconds=3600)
    with pytest.raises(AccessDenied) as caught:
        drive(engine, ListSource(calls(9)))
    assert caught.value.exit_status == 2
    assert KEY not in str(caught.value) + caught.value.hint
    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"


def test_an_account_that_has_nothing_left_is_no_server_that_is_busy():
    for field in ("code", "type"):
        said = json.dumps({"error": {"message": "m", field: "insufficient_quota"}}).encode()
        assert judge(call(0), 429, said)[1] == "denied"


def test_a_row_that_is_forbidden_before_any_is_answered_fails_alone(endpoint, reach):
    async def slowly(request):
        await asyncio.sleep(0.1)
        return await reply(200, {"choices": [{"text": "hello"}]})(request)

    endpoint.rule = lambda text, _: refusal(403) if text.startswith("row 0 ") else slowly
    engine = reach(endpoint, max_concurrency=2)
    codes = {key[1]: code_of(each) for key, each in drive(engine, ListSource(calls(25))).items()}
    assert {row for row, code in codes.items() if code} == {0}
    assert list(codes)[-1] != 0, "and does not wait until no other row is left"


def test_a_password_in_netrc_is_not_sent_and_a_proxy_of_the_environment_is_asked(
    endpoint, reach, tmp_path, monkeypatch
):
    (tmp_path / "netrc").write_text("default login me password hush")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    drive(reach(endpoint), ListSource(calls(1)))
    monkeypatch.setenv("http_proxy", endpoint.url.replace("//", "//me:word@").removesuffix("/v1"))
    drive(reach("http://nowhere.invalid"), ListSource(calls(1)))
    assert {each["authorization"] for each in endpoint.headers} == {f"Bearer {KEY}"}
    assert endpoint.headers[1]["proxy-authorization"] == "Basic bWU6d29yZA=="
    monkeypatch.setenv("http_proxy", endpoint.url.removesuffix("/v1"))
    drive(reach("http://nowhere.invalid"), ListSource(calls(1)))
    assert "proxy-authorization" not in endpoint.headers[2], "which would be the endpoint's key"


def test_rows_that_are_forbidden_are_not_what_is_told_of_an_outage(endpoint, reach):
    endpoint.rule = lambda text, _: PASSING["502 page" if text.startswith("row 3 ") else "403"]
    with pytest.raises(EngineDied, match="502"):
        drive(reach(endpoint, stall_seconds=0.5), ListSource(calls(9)))


@pytest.mark.parametrize(("slots", "seconds"), [(16, 0.5), (80, 3600)])
def test_a_key_that_is_withdrawn_meanwhile_fails_no_row(endpoint, reach, slots, seconds):
    endpoint.rule = lambda text, _: refusal(403) if int(text.split()[1]) > 30 else None
    engine = reach(endpoint, max_concurrency=slots, stall_seconds=seconds)
    found: list = []
    batches = engine.generate(ListSource(calls(200)), Event())
    with pytest.raises(AccessDenied, match="403"):
        found.extend(reply for batch in batches for reply in batch)
    assert [code_of(each) for each in found] == [""] * 31


@pytest.mark.parametrize("key", ["EMPTY", "null", "echo-model"])
def test_a_key_without_a_secret_changes_no_answer(endpoint, monkeypatch, key, reach):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    answer = '{"choices": [{"text": "the shelf is EMPTY", "stop": null}], "model": "echo-model"}'
    endpoint.rule = lambda *_: reply(200, answer)
    found = reach(endpoint).ask(call(0, "/v1/completions", prompt="a"))
    assert found.body.decode() == answer


def test_what_is_said_of_an_answer_that_is_none_has_no_key(endpoint, reach):
    endpoint.rule = lambda *_: reply(200, "x" * 160 + KEY, "text/html")
    engine = reach(endpoint, stall_seconds=0.3)
    with pytest.raises(EngineDied, match="answer is none: xxx") as caught:
        drive(engine, ListSource(calls(4)))
    assert KEY[:5] not in str(caught.value)


@pytest.mark.parametrize(
    ("models", "error", "said"),
    [
        (refusal(401), AccessDenied, "401"),
        (reply(200, "<html>hello</html>", "text/html"), ConfigError, "not as the OpenAI API"),
        (endless(b" ", 0.05), EngineLoadError, r"is not reached \(no answer within"),
    ],
)
def test_a_wrong_endpoint_is_said_when_it_opens(endpoint, monkeypatch, models, error, said, reach):
    monkeypatch.setattr(endpoints, "OPEN_SECONDS", 0.3)
    endpoint.models = models
    with pytest.raises(error, match=said):
        reach(endpoint)


def test_a_bug_in_the_loop_ends_the_engine_and_hangs_nothing(engine, monkeypatch):
    monkeypatch.setattr(http, "judge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(engine, ListSource(calls(9)))


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_an_interruption_ends_a_stream_and_not_the_engine(endpoint, engine, number, error):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))  # as in the command line
    endpoint.delay_seconds = 3.0
    engine._runner.get_loop().call_later(0.1, signal.raise_signal, number)
    with pytest.raises(error):
        list(engine.stream(call(0, stream=True)))
    endpoint.delay_seconds = 0.0
    assert len(drive(engine, ListSource(calls(3)))) == 3


def test_a_stream_that_is_answered_whole_is_yielded(endpoint, engine):
    endpoint.rule = lambda *_: reply(200, '{"choices": []}')
    assert list(engine.stream(call(0, stream=True))) == [b'{"choices": []}']


def test_a_close_ends_an_ask_of_another_thread(endpoint, engine):
    is_over = Event()

    async def late(request):
        await asyncio.to_thread(is_over.wait, 60)
        return await reply(500)(request)

    endpoint.rule = lambda *_: late
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(engine.ask, call(0))
        wait_for(lambda: endpoint.calls)
        engine.close()
        error = asked.exception(60)
        is_over.set()
    assert isinstance(error, Interrupted)
    with pytest.raises(Interrupted):  # and Python does not warn of work that nobody awaits
        engine._run(engine._drop())


def test_a_url_without_a_path_gets_the_apis_and_needs_no_list_of_models(endpoint, reach):
    endpoint.models = None
    engine = reach(endpoint.url.removesuffix("/v1"))
    assert len(drive(engine, ListSource([call(0), call(1, "/classify", input="a")]))) == 2
    assert {"/classify", "/v1/chat/completions", "/v1/models"} <= {*endpoint.paths}


def test_several_endpoints_share_the_rows_and_one_may_die(endpoint, reach):
    with fake_endpoint(delay_seconds=0.01) as other:
        endpoint.delay_seconds = 0.01
        engine = reach(endpoint, other)
        assert engine.info.num_replicas == 2
        drive(engine, ListSource(calls(100)))
        assert min(len(endpoint.bodies), len(other.bodies)) > 20
        for fault in (refusal(503), refusal(500), PASSING["502 page"], raw(b""), *GONE.values()):
            other.rule = lambda *_, fault=fault: fault
            assert failed(engine, calls(100)) == {}
        other.close()
        assert failed(engine, calls(100)) == {}
        assert failed(reach(endpoint, other), calls(20)) == {}


@pytest.mark.parametrize(
    "listed",
    [
        [{"id": "other", "max_model_len": 1}, {"id": "echo-model", "max_model_len": 512}],
        {"data": [{"id": "echo-model", "max_model_len": 512}]},
    ],
)
def test_facts_are_those_of_the_models_entry_at_an_endpoint_that_answers(endpoint, listed, reach):
    endpoint.models = reply(200, listed)
    with fake_endpoint() as gone:
        gone.close()
        engine = reach(gone, endpoint, stall_seconds=0.5)
    assert engine.info.max_model_len == 512
    reach(endpoint, model="echo-model:nitro")


@pytest.mark.parametrize("limit", [{"requests_per_minute": 1200}, {"tokens_per_minute": 27_000}])
def test_a_pace_is_kept(limit):
    """A call counts as 28 tokens, of which 4,500 may go at once."""
    config = EngineConfig(engine="openai", **limit)
    count = 30 if "requests_per_minute" in limit else 170

    async def time_of(count):
        pace, begin = Pace(config), time.monotonic()
        for _ in range(count):
            await pace.wait(call(0))
        return time.monotonic() - begin

    assert 0.4 < asyncio.run(time_of(count)) < 30
    assert estimate_tokens(call(0, max_tokens=100, n=2)) > 200
    assert estimate_tokens(call(0, max_output_tokens=200)) > 200
    assert estimate_tokens(call(0, prompt="QUJD" * 10_000)) < 1100, "a picture"


def test_a_row_of_several_bursts_keeps_the_pace_and_goes_before_the_next(monkeypatch):
    """100 tokens may go at once, and 500 a second."""
    monkeypatch.setattr(endpoints, "_TOKEN_BURST", 1 / 300)
    pace = Pace(EngineConfig(engine="openai", tokens_per_minute=30_000))
    times = [time.monotonic()]

    async def send(index):
        await pace.wait(call(index, max_tokens=270))
        times.append(time.monotonic())

    async def send_both():
        await asyncio.gather(send(0), send(1))

    asyncio.run(send_both())
    assert times[1] - times[0] > 0.3
    assert times[2] - times[1] > 0.4


# --------------------------------------------------------------------------- pooling in lists


def embed(index, text, **body):
    return call(index, "/v1/embeddings", input=text, **body)


@pytest.mark.parametrize(("step", "left_out"), [(1, ()), (-1, ()), (1, range(1)), (1, range(10))])
def test_texts_go_in_lists_and_come_back_singly_by_their_indexes(endpoint, engine, step, left_out):
    answer = endpoint.answer

    def turned(asked):
        body = json.loads((found := answer(asked)).body)
        body["data"] = body["data"][::step]
        for item in body["data"]:
            if len(body["data"]) > 1 and item["index"] in left_out:
                del item["index"]
        return msgspec.structs.replace(found, body=json.dumps(body).encode())

    endpoint.answer = turned
    rows = [embed(index, f"text {index}") for index in range(10)]
    rows += [embed(index, "x", dimensions=4) for index in range(10, 14)]
    rows += [embed(14, ["x"]), call(15, "/classify", input="x")]
    rows += [call(index, "/pooling", input="x", task="token_embed") for index in (16, 17)]
    rows += [call(index, "/pooling", input="x") for index in (18, 19)]
    found = drive(engine, ListSource(rows))
    assert sorted(len(body["input"]) for body in endpoint.bodies) == [1, 1, 1, 1, 2, 4, 10]
    for each in rows[:14]:
        alone = json.loads(answer(each).body)["data"][0]["embedding"]
        assert body_of(found[each.key])["data"][0]["embedding"] == alone
    assert sum(found["c", index].prompt_tokens for index in range(10)) == 20
    assert all("usage" not in body_of(found["c", index]) for index in range(14))
    assert all(body_of(each)["data"][0]["index"] == 0 for each in found.values())


def test_a_text_that_always_fails_holds_up_no_list(endpoint, reach):
    endpoint.rule = lambda text, _: PASSING["500"] if "text 3" in text else None
    rows = [embed(index, f"text {index}") for index in range(6)]
    assert failed(reach(endpoint, stall_seconds=2.0), rows).keys() == {3}


@pytest.mark.parametrize(("num_items", "count"), [(2, -1), (2, 10**400), (1, 9)])
def test_a_list_with_too_few_answers_or_a_count_that_cannot_be_is_not_divided(num_items, count):
    calls = [embed(0, "a"), embed(1, "b")]
    items = [{"index": index, "embedding": [1]} for index in range(num_items)]
    body = {"data": items, "usage": {"prompt_tokens": count}}
    found = Reply(key=calls[0].key, status=200, body=json.dumps(body).encode())
    assert lists.split(calls, found) == []


@pytest.mark.parametrize("bad", ["", "long " * 900])
def test_a_bad_text_in_a_list_fails_alone(endpoint, engine, bad):
    rows = [embed(index, f"text {index}") for index in range(6)]
    rows[4] = embed(4, bad)
    assert failed(engine, rows).keys() == {4}
