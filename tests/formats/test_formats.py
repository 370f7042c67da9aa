"""Output lines: equal answers are equal bytes, nothing that a server sends breaks a line, and lines are read back."""

from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest

from batchinfer.core.errors import InputError
from batchinfer.core.records import Failure, FinishedRow, Reply, Usage
from batchinfer.core.row_codes import Code
from batchinfer.formats.lines import Answer, answer_of, encode_row, read_line
from batchinfer.prompts.types import BestOf, Prepared
from samples import SCHEMAS

KEY = ("part-00000", 3)


def row(**fields: Any) -> Prepared:
    return Prepared(key=KEY, row=3, id="a", **fields)


def encoded(body: Any, **fields: Any) -> FinishedRow:
    """The line of an answer, which is as docs/format.md says."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    found, _ = encode_row(row(**fields), Reply(key=KEY, status=200, body=data))
    jsonschema.validate(msgspec.json.decode(line_of(found)), SCHEMAS["output"])
    return found


def line_of(found: FinishedRow) -> bytes:
    return bytes(found.output)


def usage_of(found: FinishedRow) -> Usage:
    return msgspec.convert(found, Usage, from_attributes=True)


def test_items_are_in_the_order_of_the_inputs():
    """An endpoint may send them in another one."""
    items = [{"index": 10, "embedding": [1]}, {"index": 2, "embedding": [2]}]
    assert b'[{"index":2,"embedding":[2]},{"index":10,' in line_of(encoded({"data": items}))


def chat(number: int = 1, **message: Any) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number:032x}",
        "created": 1_700_000_000 + number,
        "choices": [{"message": {"content": "hello"} | message, "finish_reason": "stop"}],
        "system_fingerprint": f"vllm-0.32.0-tp{number}-0123",
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": number},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    }


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"a": 1}'}
    return {"id": f"chatcmpl-tool-{number:x}", "type": "function", "function": function}


def response(number: int) -> dict[str, Any]:
    thought = {"type": "reasoning_text", "text": "hm"}
    text = {"type": "output_text", "text": "hello"}
    return {
        "id": f"resp_{number}",
        "created_at": number,
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [
            {"type": "reasoning", "id": f"rs_{number}", "content": [thought]},
            {"type": "message", "id": f"msg_{number}", "content": [text]},
            {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}"},
        ],
        "usage": {
            "input_tokens": 7,
            "output_tokens": 5,
            "input_tokens_details": {"cached_tokens": 4, "created_cache_tokens": number},
            "output_tokens_details": {"reasoning_tokens": 2},
        },
    }


# ------------------------------------------------------------------ bodies


def test_equal_answers_with_ids_and_times_of_their_own_are_equal_bytes():
    answers: list[Callable[[int], Any]] = [
        chat,
        lambda n: chat(n, tool_calls=[call(n), call(n + 2)]),
        response,
        lambda n: {"id": f"embd-{n}", "created": n, "data": []},
        lambda n: {"id": f"score-{n}", "results": []},
    ]
    for make in answers:
        assert encoded(make(1)) == encoded(make(2))


def test_ids_follow_from_the_row_and_keep_the_servers_prefix():
    line = encoded(chat(tool_calls=[call(1), call(2), call(1) | {"id": "functions.add:2"}]))
    body = msgspec.json.decode(line_of(line))["body"]
    calls = [each["id"] for each in body["choices"][0]["message"]["tool_calls"]]
    assert body["id"].startswith("chatcmpl-")
    assert "created" not in body
    assert len({body["id"], *calls}) == 4
    other = Reply(key=("part-00000", 4), status=200, body=msgspec.json.encode(chat()))
    found, _ = encode_row(Prepared(key=other.key, row=3, id="a"), other)
    assert line_of(found) != line_of(encoded(chat()))
    assert b'{"id":"mine"}' in line_of(encoded(response(1) | {"metadata": {"id": "mine"}}))
    assert calls[2] == "functions.add:2"


def test_what_the_server_wrote_stays_as_it_wrote_it():
    body = (
        b'{"choices":[{"text":"\\u00e9 \xc3\xa9","x":1.10,"y":12345678901234567890123}],"z":1e-7}'
    )
    assert line_of(encoded(body)) == b'{"_row":3,"_id":"a","status":200,"body":%b}' % body


# ------------------------------------------------------------------ lines


def test_counts_of_an_answer():
    for body, reason in ((chat(), "stop"), (response(1), "length")):
        found = encoded(body)
        assert (found.ok, found.code, found.finish_reason) == (True, "", reason)
        assert usage_of(found) == Usage(
            prompt_tokens=7, cached_tokens=4, completion_tokens=5, reasoning_tokens=2
        )


@pytest.mark.parametrize(
    "other",
    [
        {"input_tokens": 0, "output_tokens": 0, "input_tokens_details": None},
        {"input_tokens_details": {"cached_tokens": 4}, "prompt_tokens_details": []},
    ],
)
def test_counts_in_both_spellings_or_without_details(other):
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, **details, **other}
    found = usage_of(encoded(chat() | {"usage": usage}))
    assert found == Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=5)


def test_half_a_character_in_the_message_of_a_failure_breaks_no_line():
    failure = Failure(code=Code.PROMPT_TOO_LONG, message="too \ud800 long")
    line = read_line(line_of(encode_row(row(), failure)[0]))
    assert (line.error.message, answer_of(line)) == ("too \ufffd long", Answer())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"text": "a\\ud800b"}',
        b'{"text": "a", "score": NaN, "less": -Infinity}',
        b"[1]",
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"{" * 100_000,
    ],
)
def test_a_body_that_is_no_json_is_an_error_row(body):
    found = encoded(body)
    assert (found.code, found.ok) == ("invalid_answer", False)
    assert read_line(line_of(found)).code == "invalid_answer"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"text": "a\xffb"}', "a�b"),
        (b'{"text": "a\\\\ud800b"}', "a\\ud800b"),
        (b'{\n "text": "a\\nb",\n "more": [1,\n2]}\n', "a\nb"),
        ('{"text": "a\u2028b 😀"}'.encode(), "a\u2028b 😀"),
        (b'{"text": "a", "choices": [7]}', ""),
        (b'{"text": "a", "usage": "much", "id": 7, "output": "no"}', ""),
        (b'{"text": "a", "usage": {"prompt_tokens": -3, "completion_tokens": 2}}', "a"),
        (b'{"text": "a", "usage": {"completion_tokens": 1%b}}' % (b"0" * 400), "a"),
    ],
)
def test_odd_bodies_stay_one_line_that_is_read_back(body, text):
    found = encoded(body)
    assert found.ok
    assert usage_of(found) == Usage(), "a marker could not hold its sum"
    assert b"\n" not in line_of(found)
    line_of(found).decode()
    assert "".join(answer_of(read_line(line_of(found))).texts) == text


def test_every_depth_that_is_written_can_be_read():
    found = [encoded(b'{"a":' * depth + b"1" + b"}" * depth) for depth in range(90, 110)]
    for each in found:
        read_line(line_of(each))
    assert {each.ok for each in found} == {True, False}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"_row": 1, "_id": "a", "status": 200}',
        b'{"_row": 1, "_id": "a", "status": 200, "body": {}, "error": {"code": "x"}}',
        b'{"_row": 1, "_id": "a", "status": 200, "body": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
def test_other_lines_are_refused(line):
    with pytest.raises(InputError):
        read_line(line)


# ------------------------------------------------------------------ the best of several


@pytest.mark.parametrize(
    ("is_chat", "keeps_logprobs"), [(False, True), (True, True), (False, False)]
)
def test_the_most_likely_answers_to_each_prompt_are_kept(is_chat, keeps_logprobs):
    choices: list[dict[str, Any]] = []
    for index, logprobs in enumerate(([-9.0, None], [-1.0, -0.1], [-1.0]) * 2):
        positions = [{"token": "x", "logprob": each} for each in logprobs]
        held = {"content": positions} if is_chat else {"token_logprobs": logprobs}
        choices.append({"index": index, "logprobs": held})
    best = BestOf(n=2, asked=3, keeps_logprobs=keeps_logprobs)
    found = encoded({"choices": choices}, best_of=best)
    own = {} if keeps_logprobs else {"logprobs": None}
    expected = [choices[n] | {"index": i} | own for i, n in enumerate((1, 2, 4, 5))]
    assert msgspec.json.decode(line_of(found))["body"]["choices"] == expected


def test_an_answer_without_log_probabilities_is_not_taken_for_the_best():
    choices = [{"index": 0, "logprobs": None}, {"index": 1, "logprobs": {"token_logprobs": [-9.0]}}]
    found = encoded({"choices": choices}, best_of=BestOf(n=1, asked=2, keeps_logprobs=True))
    [kept] = msgspec.json.decode(line_of(found))["body"]["choices"]
    assert kept["logprobs"] == {"token_logprobs": [-9.0]}


# ------------------------------------------------------------------ what an answer says


@pytest.mark.parametrize(
    ("body", "texts", "reason"),
    [
        (chat(), ["hello"], "stop"),
        (response(1), ["hello"], "length"),
        ({"choices": [{"message": {"tool_calls": []}}, {"message": {"content": "a"}}]}, ["", "a"], ""),
        ({"choices": [{"text": each, "finish_reason": "length"} for each in "ab"]}, ["a", "b"], "length"),
        ({"data": [{"embedding": "AACAPw=="}]}, ["AACAPw=="], ""),
        ({"data": [{"data": [1.0, -0.5]}]}, ["[1.0, -0.5]"], ""),
        ({"data": [{"label": "good", "probs": [0.9]}]}, ["good", "[0.9]"], ""),
        ({"results": [{"index": 1, "relevance_score": 0.5}]}, ["0.5"], ""),
        ({"text": "spoken", "usage": {"type": "duration", "seconds": 1}}, ["spoken"], ""),
        ({"other": 1}, [], ""),
    ],
)  # fmt: skip
def test_every_kind_of_answer_has_a_text(body, texts, reason):
    found = encoded(body)
    answer = answer_of(read_line(line_of(found)))
    assert (answer.texts, answer.finish_reason) == (texts, reason)
    assert answer.usage.completion_tokens == found.completion_tokens


def test_an_answer_with_a_number_that_no_float_holds_is_read():
    """A repair of its chunk ended with a traceback at every start."""
    line = line_of(encoded(chat())).replace(b'"choices"', b'"scale":1e400,"choices"', 1)
    assert answer_of(read_line(line)).finish_reason == "stop"
