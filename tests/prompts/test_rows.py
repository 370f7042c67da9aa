"""The request format `rows`: lines, columns, conversations, ids, places, and a row's own fields."""

import json
from typing import Any

import pytest

from batchinfer.prompts import readers
from batchinfer.prompts.types import EngineRules
from prompt_rows import code, prepare, sent

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LOOK = {"type": "function", "function": {"name": "look", "description": "d"}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
NAMED = {"name": "answer", "schema": SCHEMA}


def chat(*turns: str) -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
    return [{"role": names[turn[0]], "content": turn} for turn in turns]


def contents(value: Any, **options: Any) -> list[Any]:
    body = sent(prepare({"m": value}, messages_column="m", **options))
    return [message["content"] for message in body["messages"]]


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"p": "x", "n": ' + b"[" * 100_000, "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"p": null}', "invalid_column"),
        (b'{"p": ["x"]}', "invalid_column"),
        (b'{"p": ""}', "invalid_column"),
        (b'{"p": []}', "invalid_column"),
    ],
)
def test_a_bad_line_is_a_failure_with_a_code(line, found):
    assert code(prepare(line, prompt_column="p")) == found


def test_a_number_beyond_all_readers_concerns_its_own_column_alone():
    line = b'{"p": "x", "big": 1e400, "deep": ' + b"[" * 99 + b"]" * 99 + b"}"
    assert sent(prepare(line, prompt_column="p"))["prompt"] == "x"
    assert sent(prepare(line, prompt_template="{{ big }}"))["prompt"] == "1e400"


def test_text_goes_through_unchanged_and_a_large_one_too():
    for text in ("a\u2028b\u0085c\x00d\u200de😀", "x" * 10_000_000):
        assert sent(prepare({"p": text}, prompt_column="p"))["prompt"] == text


def test_ids_come_from_the_chunk_the_id_column_or_the_row_number():
    row, options = {"p": "x", "k": 7, "_id": "abc"}, {"prompt_column": "p"}
    assert prepare(row, **options).id == "abc"
    assert prepare(row, **options, columns={"id": ["k"]}).id == "7"
    assert prepare(row, **options, columns={"id": ["other"]}).id == "0"
    assert prepare({"p": "x", "_id": {"$oid": "1"}}, prompt_column="p").id == '{"$oid":"1"}'
    assert prepare({"p": "", "_id": "abc"}, prompt_column="p").id == "abc"


def test_a_fault_of_our_own_fails_the_row_and_not_the_worker(monkeypatch):
    monkeypatch.setattr(readers, "shown", None)
    failure = prepare({"p": []}, prompt_column="p").failure
    assert (failure.code, failure.status) == ("internal_error", 500)
    assert "TypeError" in failure.message


# ------------------------------------------------------------------ plain prompts


def test_a_prompt_is_the_first_field_and_may_fill_the_model():
    prepared = prepare({"p": "x"}, prompt_column="p", body={"temperature": 0})
    assert prepared.call.path == "/v1/completions"
    assert prepared.call.body == b'{"prompt":"x","temperature":0,"model":"m"}'
    rules = EngineRules(model="m", max_model_len=100)
    found = sent(prepare({"p": [5, 6]}, rules, prompt_column="p", truncate_prompt="left"))
    assert found["prompt"] == [5, 6]
    # The server clamps the first, and by default it would give the API's 16 tokens.
    assert (found["max_tokens"], found["truncate_prompt_tokens"]) == (100, 99)


def test_an_end_mark_at_the_end_is_removed_at_once():
    # Cut off mark by mark, it would take an hour.
    rules = EngineRules(model="m", eos_token="</s>")
    text = "x</s>y" + "</s>" * 3_000_000
    assert sent(prepare({"p": text}, rules, prompt_column="p"))["prompt"] == "x</s>y"
    for options in ({"as_chat": True}, {"task": "embed"}, {"task": "reward"}):
        found = prepare({"p": "x</s>"}, rules, prompt_column="p", **options)
        assert "x</s>" in str(sent(found))


# ------------------------------------------------------------------ conversations


@pytest.mark.parametrize(
    "value",
    [
        chat("s", "u1"),
        [{"from": "System", "value": "s"}, {"from": "Human", "value": "u1", "weight": 1}],
        json.dumps(chat("s", "u1")),
        {"messages": chat("s", "u1")},
        {"conversations": chat("s", "u1")},
        {"role": ["system", "user"], "content": ["s", "u1"]},
        {"from": ["system", "human"], "value": ["s", "u1"]},
        [{"role": 5, "from": "system", "value": "s"}, {"role": "", "from": "human", "value": "u1"}],
        [
            {"role": "system", "content": [{"type": "text", "text": "s"}], "id": 1},
            {"role": "user", "content": ["u1"], "language": "English", "tool_calls": None},
        ],
        [*chat("s", "u1"), {"role": "assistant", "content": None}],
    ],
)
def test_every_known_shape_of_a_conversation_is_read(value):
    assert sent(prepare({"m": value}, messages_column="m"))["messages"] == chat("s", "u1")


@pytest.mark.parametrize(
    "value",
    [
        *(7, None, [7], [], "", "[]", chat("s"), chat("a1"), [{"from": None, "value": "x"}]),
        *([{"role": "user", "content": 7}], [{"role": "user", "content": " \n"}]),
        *([{"role": "user"}], [{"content": "x"}], [{"from": "martian", "value": "x"}]),
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "x"}]}],
        [*chat("u"), {"role": "assistant", "tool_calls": [3]}, *chat("u")],
        *(str(chat("u", "a")), json.dumps(chat("u", "a"))[:-9], f"{{'messages': {chat('u')}}}"),
    ],
)
def test_a_bad_conversation_is_a_failure_with_a_code(value):
    assert code(prepare({"m": value}, messages_column="m", turns=0)) == "invalid_column"


@pytest.mark.parametrize("text", ["hi", "[INST] hi", "{'a': 1}", "[{'role'} is a set]"])
def test_a_text_is_what_a_user_says(text):
    assert contents(text) == [text]


def test_earlier_calls_of_tools_get_the_form_of_the_api():
    calls = [
        {"function": {"name": "add", "arguments": {"a": 1}}},
        {"name": "stop", "arguments": None},
    ]
    value = [
        *chat("u"),
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    body = sent(prepare({"m": value}, messages_column="m", turns=0))
    add, stop = {"name": "add", "arguments": '{"a":1}'}, {"name": "stop", "arguments": "{}"}
    assert body["messages"][1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1_0", "type": "function", "function": add},
            {"id": "call_1_1", "type": "function", "function": stop},
        ],
    }


def test_turns_choose_how_much_of_a_conversation_is_sent():
    talk = chat("s", "u1", "a1", "u2", "a2", "a3")
    assert contents(talk, turns=1) == ["s", "u1"]
    assert contents(talk, turns=2) == contents(talk, turns=0) == ["s", "u1", "a1", "u2"]
    fewer = chat("s", "u1", "a1", "t1")
    assert contents(fewer, turns=2) == ["s", "u1"], "it ends with its last user"
    assert contents(fewer, turns=0) == ["s", "u1", "a1", "t1"]


def test_a_system_prompt_takes_the_place_of_the_conversations_own():
    assert contents(chat("s", "u1"), system_prompt="new") == ["new", "u1"]
    assert contents(chat("u1"), system_prompt="new") == ["new", "u1"]
    assert contents(chat("d", "u1"), system_prompt="new") == ["new", "u1"]


# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize(
    ("task", "path", "extra"),
    [
        ("embed", "/v1/embeddings", {"encoding_format": "base64"}),
        ("classify", "/classify", {}),
    ],
)
def test_a_pooling_task_has_its_path_and_sees_answers(task, path, extra):
    prepared = prepare({"p": "x"}, task=task, prompt_column="p", seed=7)
    assert prepared.path == path
    assert sent(prepared) == {"input": "x", **extra}
    value = chat("u1", "a1", "u2", "a2")
    assert contents(value, task=task, turns=1) == ["u1", "a1"]
    assert contents(value, task=task, turns=0) == ["u1", "a1", "u2", "a2"]
    assert contents(chat("a1"), task=task, turns=0) == ["a1"]


# ------------------------------------------------------------------ a row's own fields


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (None, {"structured_outputs": {"regex": "a"}}),
        ("", {"structured_outputs": {"regex": "a"}}),
        (["x", "y"], {"structured_outputs": {"choice": ["x", "y"]}}),
        ({"json": None, "regex": "b"}, {"structured_outputs": {"regex": "b"}}),
        ('{"grammar": "root"}', {"structured_outputs": {"grammar": "root"}}),
        (SCHEMA, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        ({"type": "json_object", "regex": None}, {"response_format": {"type": "json_object"}}),
        ({"type": "text"}, {"structured_outputs": {"regex": "a"}}),
    ],
)
def test_a_rows_constraint_takes_the_place_of_the_runs(value, fields):
    run = {"structured_outputs": {"regex": "a"}}
    row = {"p": "x", "c": value}
    options = {"prompt_column": "p", "as_chat": True, "columns": {"constraint": ["c"]}}
    body = sent(prepare(row, body=run, **options))
    assert body == {"messages": [{"role": "user", "content": "x"}], **fields}


@pytest.mark.parametrize(
    "value",
    [5, "[", "{" * 200, {"chioce": ["a"]}, {"name": "Ada"}, {}, [], {"regex": ""}, {"json": [1]}],
)
def test_a_column_without_a_usable_constraint_is_an_error_row(value):
    prepared = prepare({"p": "x", "c": value}, prompt_column="p", columns={"constraint": ["c"]})
    assert code(prepared) == "invalid_constraint"


@pytest.mark.parametrize(
    "own", [[LOOK], json.dumps([LOOK]), [{"name": "look", "description": "d"}]]
)
def test_rows_have_the_tools_of_the_run_or_their_own(own):
    options: dict[str, Any] = {"prompt_column": "p", "as_chat": True, "columns": {"tools": ["t"]}}
    how = {"tool_choice": "required", "parallel_tool_calls": False}
    run = {"tools": [ADD], **how}
    body = sent(prepare({"p": "x", "t": own}, body=run, **options))
    assert body == {"messages": body["messages"], "tools": [LOOK], **how}
    for none in (None, "", [], "[]", "null"):
        assert sent(prepare({"p": "x", "t": none}, body=run, **options))["tools"] == [ADD]
    assert sent(prepare({"p": "x"}, body=how, **options)).keys() == {"messages"}
    for bad in ("[", {"a": 1}, [1], 5):
        assert code(prepare({"p": "x", "t": bad}, **options)) == "invalid_column"
