"""The request formats `openai-batch` and `completions`: envelopes, parameters, `best_of`, and what a run adds."""

from typing import Any

import pytest

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError
from batchinfer.prompts.types import BestOf, EngineRules, Prepared
from prompt_rows import CHAT, PLAIN_RULES, builder, code, knows, prepare, request, sent
from samples import SEED_REQUEST

MESSAGES = [{"role": "user", "content": "hi"}]
SHORT = EngineRules(model="m", max_model_len=100)


def completion(rules: EngineRules = PLAIN_RULES, **fields: Any) -> Prepared:
    return prepare({"prompt": "x", **fields}, rules, request_format="completions")


# ------------------------------------------------------------------ envelopes


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"custom_id": 7}, "custom_id is 7, expected a text"),
        ({"custom_id": "a"}, "url is missing, expected a path"),
        ({"custom_id": "a", "url": "v1/chat"}, "url is 'v1/chat', expected"),
        ({"custom_id": "a", "url": CHAT, "method": "GET"}, "method is 'GET', expected POST"),
        ({"custom_id": "a", "url": CHAT, "method": "POST", "body": []}, "body is []"),
    ],
)
def test_a_line_without_a_part_of_the_envelope_says_which(row, said):
    failure = prepare(row, request_format="openai-batch").failure
    assert failure.message.startswith(said)
    assert failure.param == said.split(maxsplit=1)[0]
    assert failure.code == ("unknown_url" if failure.param == "url" else "invalid_request")


def test_the_prompt_goes_first_and_a_name_of_a_model_stays():
    body = request({"temperature": 0, "model": "own", "messages": MESSAGES}).call.body
    assert body == b'{"messages":%b,"temperature":0,"model":"own"}' % codec.encode(MESSAGES)


def test_a_request_of_the_first_completions_api_is_understood():
    prepared = prepare(
        {**SEED_REQUEST, "_row": 0, "_id": "a", "id": "a", "k": 1},
        request_format="completions",
        columns={"id": ["k"]},
    )
    dropped = {"engine": SEED_REQUEST["engine"], "best_of": 1}
    assert sent(prepared) | dropped == SEED_REQUEST
    assert not sent(prepared).keys() & dropped
    assert (prepared.best_of, prepared.id) == (None, "1")
    assert sent(completion(prompt=[[1, 2]], echo=True))["prompt"] == [[1, 2]]


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": []}, {"prompt": None}])
def test_a_completion_needs_a_prompt(fields):
    failure = completion(**fields).failure
    assert (failure.code, failure.param) == ("invalid_request", "prompt")
    assert failure.message.startswith("prompt: is missing or empty")


@pytest.mark.parametrize(("custom_id", "expected"), [("c", "c"), (None, "k"), ("", "k")])
def test_the_id_of_a_line_is_its_custom_id(custom_id, expected):
    line = {"custom_id": custom_id, "k": "k", "_id": "k"}
    for columns in ({}, {"id": ["k"]}):
        assert prepare(line, request_format="openai-batch", columns=columns).id == expected


# ------------------------------------------------------------------ parameters


def test_names_that_the_server_does_not_know_are_refused():
    known = knows("max_tokens", "structured_outputs", "best_of")
    failure = request({"messages": MESSAGES, "max_token": 5}, rules=known).failure
    assert (failure.code, failure.param) == ("unknown_parameter", "max_token")
    assert failure.message.endswith("did you mean 'max_tokens'?")
    hosted = {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "flex"}
    for body, rules in ((hosted, known), ({"anything": 1, "stream": False}, PLAIN_RULES)):
        body |= {"messages": MESSAGES}
        assert sent(request(body, rules=rules)) == body


@pytest.mark.parametrize("name", ["stream", "background"])
def test_an_answer_in_pieces_is_refused(name):
    assert code(request({"messages": MESSAGES, name: True})) == "invalid_parameter"


def test_a_run_fills_what_a_row_leaves_open():
    run = {"temperature": 0.5, "max_tokens": 9, "logprobs": 2, "structured_outputs": {"regex": "a"}}
    filled = {"messages": MESSAGES, **run, "logprobs": True, "top_logprobs": 2}
    assert sent(request({"messages": MESSAGES, "temperature": None}, run=run)) == filled
    own = {"max_completion_tokens": 3, "logprobs": False, "response_format": {"type": "text"}}
    own["messages"] = MESSAGES
    assert sent(request(own, run=run)) == {**own, "temperature": 0.5}
    assert sent(request({"prompt": "x"}, "/v1/completions", run=run)) == {"prompt": "x", **run}


def test_fields_of_chats_do_not_go_to_completions():
    run = {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}, "top_k": 2}
    assert sent(request({"prompt": "x"}, "/v1/completions", run=run)) == {"prompt": "x", "top_k": 2}
    assert sent(request({"messages": MESSAGES}, run=run)) == {"messages": MESSAGES, **run}


def test_fields_of_chats_have_other_names_in_responses():
    schema = {"name": "answer", "schema": {"type": "object"}}
    run = {
        "max_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "low",
        "top_p": 0.5,
    }
    assert sent(request({"input": "x"}, "/v1/responses", run=run)) == {
        "input": "x",
        "max_output_tokens": 9,
        "text": {"format": {"type": "json_schema", **schema}},
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "top_p": 0.5,
    }


def test_best_of_is_asked_as_answers_with_their_log_probabilities():
    found = completion(best_of=4, n=2)
    expected = BestOf(n=2, asked=4)
    assert (sent(found), found.best_of) == ({"prompt": "x", "n": 4, "logprobs": 0}, expected)
    found = completion(best_of=4, logprobs=1)
    assert sent(found)["logprobs"] == 1
    assert found.best_of == BestOf(n=1, asked=4, keeps_logprobs=True)
    found = request({"messages": MESSAGES, "best_of": 3, "logprobs": False})
    assert (sent(found)["logprobs"], found.best_of) == (True, BestOf(n=1, asked=3))
    found = prepare({"p": "x"}, prompt_column="p", body={"best_of": 3})
    assert (sent(found)["n"], found.best_of) == (3, BestOf(n=1, asked=3))
    for same in ({"best_of": 2, "n": 2}, {"best_of": 4, "temperature": 0}, {"best_of": None}):
        found = completion(**same)
        assert found.best_of is None
        assert {"best_of": same["best_of"], **sent(found)} == {"prompt": "x", **same}
        assert "best_of" not in sent(found)
    for bad in ({"best_of": 1, "n": 2}, {"best_of": "2"}, {"best_of": True}):
        assert code(completion(**bad)) == "invalid_parameter"


# ------------------------------------------------------------------ seeds


def test_only_drawn_answers_have_a_seed_and_a_rows_own_stays():
    def seed(body: dict[str, Any], url: str = CHAT, rules: EngineRules = PLAIN_RULES) -> Any:
        return sent(request({"messages": MESSAGES, **body}, url, rules, seed=7)).get("seed")

    seeds = codec.row_seeds(7, "part-00000")
    assert max(map(seeds, range(99))) < 1 << 63, "servers refuse what is no int64"
    drawn = seeds(0)
    assert seed({"seed": 3}) == 3
    assert seed({"seed": None}) == drawn
    assert seed({"temperature": 0}) is None
    assert seed({}, "/v1/embeddings") is None
    assert seed({}, "/v1/responses", knows()) == drawn
    assert sent(request({"messages": MESSAGES})).get("seed") is None


# ------------------------------------------------------------------ length


@pytest.mark.parametrize(
    ("body", "url", "room", "side"),
    [
        ({"messages": MESSAGES}, CHAT, 99, "left"),
        ({"messages": MESSAGES, "max_tokens": 80}, CHAT, 50, "left"),
        ({"messages": MESSAGES, "max_completion_tokens": 10}, CHAT, 90, "left"),
        ({"prompt": "x"}, "/v1/completions", 84, "left"),
        ({"prompt": "x", "truncate_prompt_tokens": 5}, "/v1/completions", 5, None),
        ({"input": "x"}, "/v1/responses", None, None),
    ],
)
def test_prompts_are_cut_so_that_the_answer_fits(body, url, room, side):
    found = sent(request(body, url, SHORT, truncate_prompt="left"))
    assert found.get("truncate_prompt_tokens") == room
    assert found.get("truncation_side") == side


def test_a_text_to_embed_is_cut_and_a_chat_with_an_image_is_not():
    for side, expected in (("right", None), ("left", "left")):
        embed = prepare({"p": "x"}, SHORT, task="embed", prompt_column="p", truncate_prompt=side)
        assert sent(embed)["truncate_prompt_tokens"] == 100
        assert sent(embed).get("truncation_side") == expected
    link = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    talk = {"messages": [{"role": "user", "content": [link]}]}
    assert sent(request(talk, rules=SHORT, truncate_prompt="left")) == talk


# ------------------------------------------------------------------ the run's own fields


def test_a_field_that_the_server_does_not_know_ends_the_run():
    with pytest.raises(ConfigError, match=r"tempature.*did you mean 'temperature'\?"):
        builder(knows(), prompt_column="p", body={"tempature": 0})
    builder(knows(), prompt_column="p", body={"temperature": 0, "best_of": 2})
    responses = frozenset({"reasoning"})
    rules = EngineRules(
        model="m", parameters=lambda path: responses if "responses" in path else frozenset("n")
    )
    builder(rules, request_format="openai-batch", body={"reasoning": {"effort": "low"}})
    with pytest.raises(ConfigError, match="no such parameter"):
        builder(rules, messages_column="m", body={"reasoning": {"effort": "low"}})
