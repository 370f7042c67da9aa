"""The request formats `completions` and `openai-batch`: parameters, frames, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.records import Sampling
from batchinfer.prompts import (
    CHAT_URL,
    COMPLETIONS_URL,
    EngineRules,
    Prepared,
    PromptBuilder,
    PromptConfig,
    RawRow,
)
from batchinfer.prompts.from_requests import RequestsReader
from batchinfer.prompts.types import Draft, EngineFacts
from samples import SEED_REQUEST

MESSAGES = [{"role": "user", "content": "hi"}]


def prepare(
    row: Any, request_format: str, *, sampling: Sampling | None = None, **options
) -> Prepared:
    config = PromptConfig(request_format=request_format, **options)
    builder = PromptBuilder(config, sampling or Sampling(), options.pop("seed", None), None, None)
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return builder.build("c", 0, [RawRow(0, data)])[0]


def completion(**parameters: Any) -> Prepared:
    return prepare({"prompt": "x", **parameters}, "completions")


def chat(**parameters: Any) -> Prepared:
    body = {"messages": MESSAGES, "model": "m", **parameters}
    return batch(body=body)


def batch(**fields: Any) -> Prepared:
    line = {"custom_id": "r1", "method": "POST", "url": CHAT_URL, "body": {"messages": MESSAGES}}
    return prepare({**line, **fields}, "openai-batch")


def sampling_of(prepared: Prepared) -> Sampling:
    assert prepared.request is not None, prepared.failure
    return prepared.request.sampling


def test_remembered_parameters_are_few_bytes() -> None:
    reader = RequestsReader(
        PromptConfig(request_format="completions"), Sampling(), EngineFacts(), is_batch=False
    )
    drafts = [Draft(index) for index in range(40)]
    lines = [
        json.dumps({"prompt": "x", "stop": [f"{index}" + "x" * 2_000_000]}).encode()
        for index in range(40)
    ]
    reader.fill(drafts, lines)
    assert all(draft.sampling is not None for draft in drafts)
    assert sum(len(key) for _, key in reader._plans) < 20_000_000


# ------------------------------------------------------------------ completions


def test_the_documents_own_request_is_understood():
    prepared = prepare({**SEED_REQUEST, "_row": 0, "_id": "0"}, "completions")
    assert prepared.request.text == SEED_REQUEST["prompt"]
    assert prepared.request.sampling == Sampling(
        max_tokens=2, temperature=0.0, top_p=1.0, stop=["\n"], logprobs=1, best_of=1
    )
    assert prepared.body == SEED_REQUEST
    assert prepared.view is None


def test_every_row_has_its_own_parameters_and_the_runs_for_the_rest():
    config = PromptConfig(request_format="completions")
    run = Sampling(max_tokens=50, temperature=0.3, top_k=5)
    builder = PromptBuilder(config, run, None, None, None)
    lines = [b'{"prompt":"a"}', b'{"prompt":"b","temperature":1.5,"max_tokens":null,"n":3}']
    first, second = builder.build("c", 0, [RawRow(i, line) for i, line in enumerate(lines)])
    assert sampling_of(first) == run
    assert sampling_of(second) == Sampling(max_tokens=50, temperature=1.5, top_k=5, n=3)


def test_a_completion_has_the_apis_default_length():
    assert sampling_of(completion()).max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("a", "a", None), ([1, 2], None, [1, 2]), (["a"], "a", None), ([[1, 2]], None, [1, 2])],
)
def test_a_prompt_is_text_or_token_ids(prompt, text, token_ids):
    request = completion(prompt=prompt).request
    assert (request.text, request.token_ids) == (text, token_ids)


def test_echo_shows_the_prompt_and_its_logprobs():
    prepared = completion(echo=True, logprobs=2)
    assert prepared.view.echo
    assert prepared.prompt == "x"
    assert sampling_of(prepared).prompt_logprobs == 2


def test_scoring_generates_one_token_and_drops_it():
    prepared = completion(echo=True, max_tokens=0, logprobs=0)
    assert sampling_of(prepared).max_tokens == 1
    assert prepared.view.is_prompt_only


@pytest.mark.parametrize(
    ("parameters", "field", "value"),
    [
        ({"stop": "\n"}, "stop", ["\n"]),
        ({"stop": []}, "stop", None),
        ({"logit_bias": {"5": -100, "7": 1.5}}, "logit_bias", {"5": -100.0, "7": 1.5}),
        ({"presence_penalty": 2, "frequency_penalty": -2}, "presence_penalty", 2.0),
        ({"n": 2, "best_of": 4, "temperature": 0}, "best_of", 4),
        ({"seed": -5}, "seed", -5),
        ({"top_k": -1}, "top_k", -1),
        ({"stop_token_ids": [3]}, "stop_token_ids", [3]),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"structured_outputs": {"regex": "a+"}}, "structured", {"regex": "a+"}),
        ({"prompt_logprobs": 1}, "prompt_logprobs", 1),
    ],
)
def test_parameters_reach_the_engine(parameters, field, value):
    assert getattr(sampling_of(completion(**parameters)), field) == value


@pytest.mark.parametrize(
    "parameters",
    [
        {"model": "any", "user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "flex"},
        {"stream": False, "suffix": None, "logprobs": None, "tools": [], "tool_choice": "auto"},
    ],
)
def test_bookkeeping_of_the_hosted_service_is_accepted(parameters):
    assert completion(**parameters).request is not None


def test_an_engines_own_parameters_reach_it_unread_and_empty_ones_are_left_out():
    rules = EngineRules(own_parameters=frozenset({"bad_words", "tools"}))
    config = PromptConfig(request_format="completions")
    builder = PromptBuilder(config, Sampling(), None, None, None, rules=rules)
    row = b'{"prompt": "x", "bad_words": [], "tools": [1]}'
    [found] = builder.build("c", 0, [RawRow(0, row)])
    assert sampling_of(found).extra == {"tools": [1]}


@pytest.mark.parametrize(
    ("parameters", "extra"),
    [
        ({"bad_words": ["x", "y z"]}, {"bad_words": ["x", "y z"]}),
        ({"allowed_token_ids": [5, 0]}, {"allowed_token_ids": [5, 0]}),
        ({"vllm_xargs": {"a": 1, "b": ["x", 2.5]}}, {"extra_args": {"a": 1, "b": ["x", 2.5]}}),
        ({"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": False}),
        (
            {"repetition_detection": {"min_count": 3}, "bad_words": ["x"]},
            {"repetition_detection": {"min_count": 3}, "bad_words": ["x"]},
        ),
        ({"length_penalty": 0.5, "use_beam_search": False}, None),
    ],
)
def test_vllms_additions_to_the_api_reach_its_sampling_parameters(parameters, extra):
    assert sampling_of(completion(**parameters)).extra == extra
    assert sampling_of(chat(**parameters)).extra == extra


def test_a_requests_additions_stand_beside_the_runs():
    run = Sampling(extra={"bad_words": ["x"], "logprob_token_ids": [1]})
    found = prepare({"prompt": "x", "bad_words": ["y"]}, "completions", sampling=run)
    assert sampling_of(found).extra == {"bad_words": ["y"], "logprob_token_ids": [1]}


def test_a_request_says_its_priority_and_whether_it_wants_token_ids():
    request = chat(priority=-3, return_token_ids=True).request
    assert (request.priority, request.returns_token_ids) == (-3, True)
    assert (chat().request.priority, chat().request.returns_token_ids) == (0, False)


class Numbers:
    """A tokenizer whose tokens are the words of a text, each a number."""

    eos_token = ""
    has_chat_template = True
    longest_token = 2

    def apply_chat_template(self, messages, **_):
        return messages[-1]["content"]

    def encode(self, texts, *, add_special_tokens):
        return [list(map(int, text.split())) for text in texts]

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"truncate_prompt_tokens": 3}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, [1, 2, 3, 4, 5, 6, 7]),
        ({"truncation_side": "right"}, [1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1, "prompt": "1 2 3 4 5 6 7 8 9 10 11 12 13 14"}, [*range(6, 15)]),
        ({"truncate_prompt_tokens": 2, "prompt": [1, 2, 3]}, [2, 3]),
        ({"truncate_prompt_tokens": 2, "prompt": "1 " * 500}, [1, 1]),
        ({"prompt": "1 " * 500}, "prompt_too_long"),
        ({"truncate_prompt_tokens": 10, "prompt": "1 " * 500}, "prompt_too_long"),
        ({"truncate_prompt_tokens": 11}, "invalid_parameter"),
        ({"truncate_prompt_tokens": 0}, "empty_prompt"),
    ],
)  # fmt: skip
def test_a_request_may_cut_its_own_prompt(body, found):
    config = PromptConfig(request_format="completions")
    builder = PromptBuilder(config, Sampling(), None, Numbers(), 10)
    row = json.dumps({"prompt": "1 2 3 4 5 6 7", **body}).encode()
    [prepared] = builder.build("c", 0, [RawRow(0, row)])
    if prepared.failure is not None:
        assert prepared.failure.code == found
    else:
        assert prepared.request.token_ids == found


@pytest.mark.parametrize(
    ("prepared", "advice"),
    [
        (lambda: chat(echo=True), "--keep-prompt repeats the messages"),
        (lambda: chat(use_beam_search=True), "best_of"),
        (lambda: completion(use_beam_search=True, n=4), "a vLLM server does beam search"),
    ],
)
def test_a_parameter_that_is_not_supported_comes_with_what_to_do_instead(prepared, advice):
    failure = prepared().failure
    assert failure.code == "unsupported_parameter"
    assert advice in failure.message
    assert "did you mean" not in failure.message


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        ({"bad_words": "x"}, "invalid_parameter", "bad_words"),
        ({"bad_words": ["x", ""]}, "invalid_parameter", "bad_words"),
        ({"allowed_token_ids": [-1]}, "invalid_parameter", "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "invalid_parameter", "allowed_token_ids"),
        ({"vllm_xargs": {"a": {"b": 1}}}, "invalid_parameter", "vllm_xargs"),
        ({"repetition_detection": []}, "invalid_parameter", "repetition_detection"),
        ({"priority": 1.5}, "invalid_parameter", "priority"),
        ({"priority": 2**63}, "invalid_parameter", "priority"),
        ({"return_token_ids": 1}, "invalid_parameter", "return_token_ids"),
        ({"truncate_prompt_tokens": -2}, "invalid_parameter", "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "invalid_parameter", "truncation_side"),
        ({"length_penalty": "x"}, "invalid_parameter", "length_penalty"),
        ({"temperature": -0.1}, "invalid_parameter", "temperature"),
        ({"temperature": "hot"}, "invalid_parameter", "temperature"),
        ({"temperature": True}, "invalid_parameter", "temperature"),
        ({"top_p": 0}, "invalid_parameter", "top_p"),
        ({"top_p": 1.5}, "invalid_parameter", "top_p"),
        ({"presence_penalty": 3}, "invalid_parameter", "presence_penalty"),
        ({"max_tokens": 0}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 2.5}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "invalid_parameter", "min_tokens"),
        ({"n": 0}, "invalid_parameter", "n"),
        ({"n": 100_000}, "invalid_parameter", "n"),
        ({"n": 3, "best_of": 2}, "invalid_parameter", "best_of"),
        ({"best_of": 100_000}, "invalid_parameter", "best_of"),
        ({"logprobs": 21}, "invalid_parameter", "logprobs"),
        ({"logprobs": True}, "invalid_parameter", "logprobs"),
        ({"echo": 1}, "invalid_parameter", "echo"),
        ({"stop": [""]}, "invalid_parameter", "stop"),
        ({"stop": 7}, "invalid_parameter", "stop"),
        ({"logit_bias": {"x": 1}}, "invalid_parameter", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "invalid_parameter", "logit_bias"),
        ({"logit_bias": [1]}, "invalid_parameter", "logit_bias"),
        ({"seed": 2**64}, "invalid_parameter", "seed"),
        ({"structured_outputs": {"a": 1}}, "invalid_parameter", "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "invalid_parameter",
            "response_format",
        ),
        ({"suffix": "end"}, "unsupported_parameter", "suffix"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"temprature": 1}, "unsupported_parameter", "temprature"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter", "prompt"),
        ({"prompt": None}, "invalid_prompt", "prompt"),
        ({"prompt": {"a": 1}}, "invalid_prompt", "prompt"),
        ({"prompt": ""}, "empty_prompt", "prompt"),
    ],
)
def test_what_cannot_be_done_is_a_failure_that_names_the_parameter(parameters, code, param):
    prepared = completion(**parameters)
    assert prepared.failure is not None
    assert (prepared.failure.code, prepared.param) == (code, param)
    assert prepared.body is not None


def test_an_unknown_parameter_comes_with_its_nearest_match():
    assert "did you mean 'temperature'?" in completion(temprature=1).failure.message


def test_a_kept_column_is_no_parameter():
    prepared = prepare({"prompt": "x", "topic": "y"}, "completions", keep=["topic"])
    assert prepared.request is not None
    assert prepared.source == {"topic": "y"}
    assert prepared.body == {"prompt": "x"}


# ------------------------------------------------------------------ OpenAI batch


def test_a_batch_request_is_named_by_its_custom_id():
    prepared = batch()
    assert (prepared.id, prepared.url) == ("r1", CHAT_URL)
    assert prepared.is_chat
    assert prepared.request.messages == MESSAGES


def test_a_batch_may_mix_both_endpoints():
    prepared = batch(url=COMPLETIONS_URL, body={"prompt": "x", "max_tokens": 3})
    assert prepared.request.text == "x"
    assert not prepared.is_chat
    assert sampling_of(prepared).max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"custom_id": None}, "invalid_request", "custom_id"),
        ({"custom_id": 7}, "invalid_request", "custom_id"),
        ({"custom_id": ""}, "invalid_request", "custom_id"),
        ({"method": "GET"}, "invalid_request", "method"),
        ({"body": None}, "invalid_request", "body"),
        ({"body": [1]}, "invalid_request", "body"),
        ({"body": "text"}, "invalid_request", "body"),
        ({"url": None}, "unknown_url", "url"),
        ({"url": "/v1/chat"}, "unknown_url", "url"),
        ({"url": "/v1/embeddings"}, "wrong_task", "url"),
        ({"body": {}}, "invalid_messages", "messages"),
        ({"body": {"messages": []}}, "empty_conversation", "messages"),
        ({"body": {"messages": [{"role": "user"}]}}, "missing_content", None),
    ],
)
def test_a_wrong_frame_is_a_failure_that_names_the_field(fields, code, param):
    prepared = batch(**fields)
    assert prepared.failure is not None
    assert (prepared.failure.code, prepared.param) == (code, param)


@pytest.mark.parametrize(
    ("parameters", "field", "value"),
    [
        ({"max_completion_tokens": 9}, "max_tokens", 9),
        ({"max_completion_tokens": 9, "max_tokens": 9}, "max_tokens", 9),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False}, "logprobs", None),
        ({"top_logprobs": 0}, "logprobs", None),
        ({"stop": "x"}, "stop", ["x"]),
        ({"response_format": {"type": "text"}}, "structured", None),
        ({"response_format": {"type": "json_object"}}, "structured", {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
            "structured",
            {"json": {"type": "object"}},
        ),
    ],
)
def test_chat_parameters_reach_the_engine(parameters, field, value):
    assert getattr(sampling_of(chat(**parameters)), field) == value


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        (
            {"max_completion_tokens": 9, "max_tokens": 8},
            "invalid_parameter",
            "max_completion_tokens",
        ),
        ({"top_logprobs": 3}, "invalid_parameter", "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "invalid_parameter", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_parameter", "logprobs"),
        ({"logprobs": 3}, "invalid_parameter", "logprobs"),
        ({"response_format": "json"}, "invalid_parameter", "response_format"),
        ({"response_format": {"type": "xml"}}, "invalid_parameter", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "invalid_parameter", "response_format"),
        ({"tools": [{"type": "function"}]}, "invalid_parameter", "tools"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"audio": {}}, "unsupported_parameter", "audio"),
        ({"continue_final_message": True}, "nothing_to_continue", "continue_final_message"),
    ],
)
def test_chat_parameters_that_cannot_work_are_refused(parameters, code, param):
    prepared = chat(**parameters)
    assert prepared.failure is not None
    assert (prepared.failure.code, prepared.param) == (code, param)


def test_a_chat_may_continue_its_last_message():
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure"}]
    prepared = chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert prepared.request.messages == messages


def test_a_request_with_a_seed_keeps_it_and_others_get_theirs():
    config = PromptConfig(request_format="completions")
    builder = PromptBuilder(config, Sampling(), 7, None, None)
    lines = [b'{"prompt":"a","seed":1}', b'{"prompt":"a"}', b'{"prompt":"a","temperature":0}']
    seeds = [
        item.request.sampling.seed
        for item in builder.build("c", 0, [RawRow(i, line) for i, line in enumerate(lines)])
    ]
    assert seeds[0] == 1
    assert seeds[1] not in {None, 1}
    assert seeds[2] is None
