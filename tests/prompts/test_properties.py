"""Promise P7 for the prompt builder: whatever a chunk holds, every line gives one result and nothing is raised."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from batchinfer.core.row_codes import Code
from batchinfer.prompts.builder import PromptBuilder, finish_call
from batchinfer.prompts.types import EngineRules, Prepared, PromptConfig, RawRow

RULES = EngineRules(model="m", max_model_len=100)
CODES = {code.value for code in Code} - {"internal_error"}


def check(prepared: Prepared) -> None:
    """Check that a row has a call whose body is JSON, or a failure with a code that is no fault of ours."""
    if prepared.media:
        prepared = finish_call(prepared, [b"x"] * len(prepared.media))
    assert (prepared.call is None) != (prepared.failure is None)
    if prepared.failure is not None:
        assert prepared.failure.code in CODES, prepared.failure
    elif prepared.call is not None and prepared.call.content_type == "application/json":
        json.loads(prepared.call.body)


GARBAGE: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, "", " ", "x", "\0", [], [[]], [None], {}, {"a": 2**70}),
    *("\ud800", ["\udfff\u2028"], float("inf"), {"\ud800": float("nan")}),
    *([1], ["a", 5], {"type": ["x"]}, [{"type": {"a": 1}, "text": "y"}], [{"from": ["human"]}]),
    *({"url": 5}, "file:///etc/passwd", [{"role": ["user"], "content": "x"}], {"content": {}}),
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]
LINK = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}]
TALK = [
    {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}, LINK]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "ok"},
]
CHAT = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "n": 1, "best_of": 2}
SOUND = {"file_url": "https://example.com/a.wav", "language": "en"}
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"request_format": "openai-batch"}, {"url": "/v1/chat/completions", "body": CHAT}),
    ({"request_format": "openai-batch"}, {"url": "/v1/audio/transcriptions", "body": SOUND}),
    ({"request_format": "completions"}, {"prompt": [1, 2], "best_of": 2, "logprobs": 1, "n": 1}),
    (
        {"messages_column": "p", "columns": {"image": ["i"]}},
        {"p": TALK[:1], "i": ["https://a/b.png"]},
    ),
    (
        {"messages_column": "p", "columns": {"image": ["i"]}, "turns": 0},
        {"p": [{"from": "human", "value": "<image> <image>"}], "i": [{"bytes": "AAAA"}, "a.png"]},
    ),
    ({"prompt_column": "p", "columns": {"constraint": ["c"]}}, {"p": "x", "c": {"json": SCHEMA}}),
    ({"prompt_template": "{{ p }}{% for x in q %}{{ x.y }}{% endfor %}"}, {"p": "x", "q": [{}]}),
    ({"prompt_column": "p", "columns": {"lora": ["l"]}, "adapters": ["ad"]}, {"p": "x", "l": "ad"}),
    ({"prompt_column": "p", "columns": {"tools": ["t"]}, "as_chat": True}, {"p": "x", "t": TOOLS}),
    ({"task": "transcribe", "columns": {"audio": ["p"]}}, {"p": "AAAA"}),
]


def broken(value: Any) -> Iterator[Any]:
    """Yield copies of a value, each with something else in the place of one of its parts."""
    yield from GARBAGE
    if not isinstance(value, dict | list):
        return
    for name, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        for other in broken(part):
            copied: Any = value.copy()
            copied[name] = other
            yield copied
        if isinstance(value, dict):
            yield {key: item for key, item in value.items() if key != name}


@pytest.mark.parametrize(("options", "row"), ROWS)
def test_wrong_types_at_every_depth_give_a_call_or_an_error_row_with_a_code(options, row):
    builder = PromptBuilder(PromptConfig(**options), 0, rules=RULES)
    if "url" in row:
        row = {"custom_id": "a", "method": "POST", **row}
    data = [json.dumps(each).encode() for each in broken(row)]
    rows = [RawRow(index, line) for index, line in enumerate(data)]
    for item in builder.build("c", 0, rows):
        check(item)
    assert len(rows) > 40
