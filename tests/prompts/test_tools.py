"""Tools in requests, options and columns, and the constraints that forced choices imply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import AnswerForm, Sampling
from batchinfer.engines.tokenizers import HfTokenizer
from batchinfer.prompts import EngineRules, Prepared, PromptBuilder, PromptConfig, RawRow
from batchinfer.prompts.conversation import for_template
from batchinfer.prompts.tools import check_run_tools, constraint_of


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
LOOK = tool("look", city={"type": "string"})
TALK = [{"role": "user", "content": "hi"}]
FINDS = EngineRules(finds_calls=True, finds_reasoning=True)
FINDS_NOTHING = EngineRules(finds_calls=False)


def build(
    row: dict[str, Any], rules: EngineRules, sampling: Sampling | None = None, **options: Any
) -> Prepared:
    config = PromptConfig(**options)
    builder = PromptBuilder(config, sampling or Sampling(), None, None, None, rules=rules)
    return builder.build("c", 0, [RawRow(0, json.dumps(row).encode())])[0]


def chat(rules: EngineRules = FINDS, **body: Any) -> Prepared:
    line = {
        "custom_id": "r",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": TALK, **body},
    }
    return build(line, rules, request_format="openai-batch")


def rows(row: dict[str, Any], rules: EngineRules = FINDS, **options: Any) -> Prepared:
    return build({"q": "hi", **row}, rules, prompt_column="q", as_chat=True, **options)


def form_of(prepared: Prepared) -> AnswerForm:
    assert prepared.failure is None, prepared.failure
    assert prepared.request is not None
    assert prepared.request.form is not None
    return prepared.request.form


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# ------------------------------------------------------------------ requests


def test_a_request_with_tools_lets_the_model_decide():
    form = form_of(chat(tools=[ADD, LOOK]))
    assert (form.tools, form.tool_choice, form.is_parallel) == ([ADD, LOOK], "auto", True)
    assert form_of(chat(tools=[ADD], parallel_tool_calls=False)).is_parallel is False


@pytest.mark.parametrize(
    ("choice", "is_parallel"), [("required", True), ("required", False), (named("add"), True)]
)
def test_a_forced_choice_becomes_the_schema_that_vllm_makes_of_it(choice, is_parallel):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    bare = {"type": "function", "function": {"name": "stop"}}
    shared = tool("deep", x={"$ref": "#/$defs/x"})
    shared["function"]["parameters"]["$defs"] = {"x": {"type": "string"}}
    body = {
        "tools": [ADD, LOOK, bare, shared],
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
    }
    prepared = chat(**body, rules=FINDS_NOTHING)
    assert prepared.request is not None
    found = json.loads(json.dumps(prepared.request.sampling.structured))
    request = ChatCompletionRequest(model="m", messages=TALK, **body)
    wanted = get_json_schema_from_tools(request.tool_choice, request.tools, is_parallel)
    assert found == {"json": wanted}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": named("ad")}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"include_reasoning": "no"}, "include_reasoning"),
    ],
)  # fmt: skip
def test_wrong_tools_are_an_error_row_that_names_the_parameter(body, param):
    prepared = chat(**body)
    assert prepared.failure is not None
    assert (prepared.failure.code, prepared.param) == ("invalid_parameter", param)


def test_without_a_parser_the_model_cannot_be_left_to_decide():
    prepared = chat(FINDS_NOTHING, tools=[ADD])
    assert prepared.failure is not None
    assert (prepared.failure.code, prepared.param) == ("invalid_parameter", "tool_choice")
    assert "--tool-call-parser" in prepared.failure.message
    assert form_of(chat(FINDS_NOTHING, tools=[ADD], tool_choice="none")).tool_choice == "none"


def test_effort_and_reasoning_reach_the_template_and_the_parsers():
    form = form_of(chat(reasoning_effort="none", include_reasoning=False))
    assert form.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    assert form.hides_reasoning
    kept = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert form_of(kept).template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


def test_a_completion_request_is_not_taken_apart():
    prepared = build({"prompt": "x"}, FINDS, request_format="completions")
    assert prepared.request is not None
    assert prepared.request.form is None


def test_a_budget_goes_to_the_engine():
    prepared = chat(thinking_token_budget=5)
    assert prepared.request is not None
    assert prepared.request.sampling.extra == {"thinking_token_budget": 5}


def test_a_constraint_of_type_text_is_not_blamed_for_another_one():
    class Refusing:
        is_slow = False

        def problem_of(self, _constraint):
            return "does not compile"

    rules = EngineRules(checker=Refusing())  # type: ignore[arg-type]
    body = {"structured_outputs": {"regex": "("}, "response_format": {"type": "text"}}
    assert chat(rules, **body).param == "structured_outputs"


# ------------------------------------------------------------------ options and columns


def test_rows_have_the_tools_of_the_run_or_their_own():
    bare = {"name": "look", "parameters": {"type": "object"}, "description": "d"}
    for own, name in [
        (None, "add"),
        ("", "add"),
        ([LOOK], "look"),
        (json.dumps([LOOK]), "look"),
        ([bare], "look"),
    ]:
        form = form_of(rows({"t": own}, tools=[ADD], tools_column="t"))
        assert [each["function"]["name"] for each in form.tools or []] == [name]
    assert rows({}, tools_column="t").request is not None, "a row without tools is answered as text"


@pytest.mark.parametrize("own", ["[", {"a": 1}, [1], 5, [{"name": 3}], [LOOK]])
def test_a_column_without_usable_tools_is_an_error_row(own):
    prepared = rows({"t": own}, tools_column="t", tool_choice="add")
    assert prepared.failure is not None
    assert prepared.failure.code == "invalid_tools"
    assert "column 't'" in prepared.failure.message


@pytest.mark.parametrize(
    ("options", "rules", "message"),
    [
        ({"tools": [ADD]}, FINDS_NOTHING, "--tools without --tool-call-parser"),
        ({"tools_column": "t"}, FINDS_NOTHING, "--tools-column without --tool-call-parser"),
        ({"tools": [ADD], "tool_choice": "ad"}, FINDS, "did you mean 'add'"),
        ({"tools": [{"x": 1}]}, FINDS, "--tools: tool 0"),
        ({"tool_choice": "required"}, FINDS, "no tools"),
        ({"tools": [ADD], "as_chat": False}, FINDS, "expected a chat"),
        (
            {"tools": [ADD], "tool_choice": "add", "constraint_column": "c"},
            FINDS,
            "--constraint-column",
        ),
    ],
)
def test_options_of_tools_that_cannot_work_are_refused(options, rules, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build({"q": "x"}, rules, **{"prompt_column": "q", "as_chat": True, **options})
    assert caught.value.hint or "tool" in caught.value.message


def test_a_forced_call_beside_another_constraint_is_refused():
    prompt = PromptConfig(prompt_column="q", as_chat=True, tools=[ADD], tool_choice="required")
    with pytest.raises(ConfigError, match="with a constraint"):
        check_run_tools(prompt, Sampling(structured={"regex": "a"}), None)
    check_run_tools(prompt, Sampling(), None)


def test_tools_with_different_schemas_of_one_name_cannot_be_required():
    one, other = tool("one"), tool("other")
    one["function"]["parameters"]["$defs"] = {"x": {"type": "string"}}
    other["function"]["parameters"]["$defs"] = {"x": {"type": "integer"}}
    prepared = chat(tools=[one, other], tool_choice="required")
    assert prepared.failure is not None
    assert "'x' in $defs" in prepared.failure.message
    assert constraint_of(AnswerForm(tools=[one], tool_choice="required"))["json"]["$defs"]


def test_an_endpoint_gets_the_tools_as_parameters_and_no_constraint():
    rules = EngineRules(own_parameters=frozenset({"tools", "tool_choice"}))
    prepared = rows({}, rules, tools=[ADD], tool_choice="add")
    assert prepared.request is not None
    assert prepared.request.sampling.extra == {"tools": [ADD], "tool_choice": named("add")}
    assert prepared.request.sampling.structured is None
    assert prepared.request.form is None


# ------------------------------------------------------------------ what the template gets

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]


class FakeTokenizer:
    """Renders what it gets as JSON."""

    eos_token = ""
    is_fast = False

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, conversation, **options):
        return json.dumps([conversation, options["tools"]])

    def __call__(self, texts, **_options):
        return {"input_ids": [[1, 2, 3] for _ in texts]}


@pytest.mark.parametrize(
    ("template", "content"), [("{{ 1 }}", ""), ("{% if m.content is none %}{% endif %}", None)]
)
def test_the_template_gets_tools_and_earlier_calls_as_it_wants_them(template, content):
    tokenizer = HfTokenizer(FakeTokenizer(template))
    config = PromptConfig(messages_column="m", turns="all", tools=[ADD], keep_prompt=True)
    builder = PromptBuilder(config, Sampling(), None, tokenizer, None, rules=FINDS)
    [prepared] = builder.build("c", 0, [RawRow(0, json.dumps({"m": CALLED}).encode())])
    assert prepared.failure is None, prepared.failure
    messages, tools = json.loads(prepared.prompt)
    assert tools == [ADD]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert messages[1]["content"] == content
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "1"}


def test_a_template_that_hides_tools_is_warned_of_once(caplog):
    tokenizer = HfTokenizer(FakeTokenizer("{{ hidden }}"))
    for tools in ([ADD], [ADD], None):
        options: dict[str, Any] = {"template": "", "continue_final": False}
        tokenizer.apply_chat_template(TALK, kwargs={"tools": tools}, **options)
    assert caplog.text.count("does not show tools") == 1


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_a_call_without_arguments_gets_an_empty_object(arguments):
    call = {"function": {"name": "stop", "arguments": arguments}}
    message = for_template({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "calls", [{"a": 1}, [3], [{"function": {"name": "f", "arguments": "{"}}], [{"arguments": "[]"}]]
)
def test_earlier_calls_that_no_template_can_read_are_an_error_row(calls):
    value = [*TALK, {"role": "assistant", "content": None, "tool_calls": calls}, TALK[0]]
    prepared = build({"m": value}, FINDS, messages_column="m", turns="all")
    assert prepared.failure is not None
    assert prepared.failure.code == "invalid_messages"
