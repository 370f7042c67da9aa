"""Promise P7 for the prompt builder: whatever a chunk holds, every line gives one result and nothing is raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchinfer.core.records import Choice, Completion, Sampling
from batchinfer.formats import encoder_for, read_line
from batchinfer.prompts import Code, PromptBuilder, PromptConfig, RawRow
from batchinfer.worker.repeats import repeat_key

CONFIGS = [
    PromptConfig(prompt_column="p", keep=["*"]),
    PromptConfig(prompt_column="p", as_chat=True, system_prompt="s"),
    PromptConfig(messages_column="p", turns="all", keep=["p", "q"]),
    PromptConfig(messages_column="p", turns="2", continue_final=True),
    PromptConfig(prompt_template="{{ p }}{% for x in q %}{{ x.y }}{% endfor %}"),
    PromptConfig(template_name="alpaca"),
    PromptConfig(request_format="completions", output_format="completions"),
    PromptConfig(request_format="openai-batch", output_format="openai-batch"),
]
BUILDERS = [PromptBuilder(config, Sampling(), 7, None, None) for config in CONFIGS]
ENCODERS = [encoder_for(config, model="m") for config in CONFIGS]
CODES = {code.value for code in Code}

names = st.sampled_from(
    [
        "p",
        "q",
        "_row",
        "_id",
        "role",
        "from",
        "content",
        "value",
        "messages",
        "prompt",
        "body",
        "url",
        "method",
        "custom_id",
        "n",
        "stop",
        "logprobs",
        "temperature",
        "response_format",
    ]
)
texts = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(
    [
        "user",
        "assistant",
        "human",
        "POST",
        "/v1/completions",
        "/v1/chat/completions",
        "\u2028",
        "\x00",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | texts, inner, max_size=4),
    max_leaves=12,
)
lines = st.binary(max_size=60) | st.dictionaries(names, values, max_size=6).map(
    lambda row: json.dumps(row).encode()
)


@pytest.mark.parametrize("index", range(len(CONFIGS)))
@settings(max_examples=150, deadline=None)
@given(data=st.lists(lines, max_size=4))
@example(data=[b'{"p":"\\ud800"}', b'{"p":[{"role":"user","content":"\\udfff"}]}'])
@example(data=[b'{"p":{"role":"user","content":"x","from":["a"]}}', b"\xef\xbb\xbf{}"])
@example(data=[b'{"p":"' + b"x" * 10_000_000 + b'"}', b'{"p":"\\u2028\\u0000\xe2\x80\xa8"}'])
@example(data=[b'{"p":"x","_row":1e400}', b'{"p":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_every_line_gives_one_result_and_one_valid_output_line(index, data):
    builder, encoder = BUILDERS[index], ENCODERS[index]
    prepared = builder.build("c", 0, [RawRow(line, text) for line, text in enumerate(data)])
    assert [item.key for item in prepared] == [("c", line) for line in range(len(data))]
    for item in prepared:
        assert (item.request is None) != (item.failure is None)
        completion = None
        if item.failure is None:
            choice = Choice(index=0, text="answer", num_tokens=1)
            completion = Completion(key=item.key, choices=[choice])
        else:
            assert item.failure.code in CODES
        line = encoder.encode(item, completion)
        assert b"\n" not in line
        json.loads(line)
        msgspec.json.decode(line)
        assert read_line(line).is_ok == (item.failure is None)


GARBAGE: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, "", " ", "x", "\0", [], [[]], [None], {}, {"a": 2**70}),
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
CHAT, REPLY = "/v1/chat/completions", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("generate", CHAT, {"messages": TALK, "tools": TOOLS, "tool_choice": "required"}),
    ("generate", CHAT, {"messages": TALK, "response_format": REPLY, "logit_bias": {"5": 1}}),
    ("generate", CHAT, {"messages": TALK, "chat_template_kwargs": {"a": 1}, "stop": ["x"]}),
    ("generate", "/v1/completions", {"prompt": [1, 2], "echo": True, "logprobs": 2, "n": 2}),
    ("generate", "/v1/completions", {"prompt": "x", "vllm_xargs": {"a": 1}, "bad_words": ["x"]}),
    ("embed", "/v1/embeddings", {"input": ["x", "y"], "dimensions": 4, "priority": 1}),
    ("embed", "/v1/embeddings", {"messages": TALK[2:], "chat_template_kwargs": {"a": 1}}),
    ("embed", "/v1/score", {"text_1": ["a"], "text_2": ["b", "c"], "use_activation": True}),
    ("embed", "/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
]
COLUMNS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages_column": "p", "image_columns": ["i"]}, {"p": TALK[:1], "i": ["https://a/b.png"]}),
    (
        {"messages_column": "p", "image_columns": ["i"], "turns": "all"},
        {"p": [{"from": "human", "value": "<image> <image>"}], "i": [{"bytes": "AAAA"}, "a.png"]},
    ),
    ({"prompt_column": "p", "constraint_column": "c"}, {"p": "x", "c": {"json": SCHEMA}}),
    ({"prompt_column": "p", "lora_column": "l", "adapters": ["ad"]}, {"p": "x", "l": "ad"}),
    ({"prompt_column": "p", "tools_column": "t", "as_chat": True}, {"p": "x", "t": TOOLS}),
    ({"task": "score", "pair_columns": ["p", "q"]}, {"p": "x", "q": "y"}),
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


def bad_rows() -> Iterator[tuple[PromptConfig, list[bytes]]]:
    for task, url, body in REQUESTS:
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        rows = [json.dumps(row).encode() for row in broken(line)]
        yield (
            PromptConfig(
                task=task,
                request_format="openai-batch",
                output_format="openai-batch",
                keep=["*"],
                keep_prompt=True,
            ),
            rows,
        )
    for options, row in COLUMNS:
        lines = [json.dumps(each).encode() for each in broken(row)]
        yield PromptConfig(**options, keep=["*"], keep_prompt=True), lines


def test_wrong_types_at_every_depth_give_a_request_or_an_error_row_with_a_code():
    num_rows = 0
    for config, lines in bad_rows():
        builder, encoder = PromptBuilder(config, Sampling(), 0, None, None), encoder_for(config)
        rows = [RawRow(index, line) for index, line in enumerate(lines)]
        for row, item in zip(rows, builder.build("c", 0, rows), strict=True):
            if item.failure is not None:
                assert item.failure.code in CODES, (item.failure, row.data)
                assert not read_line(encoder.encode(item)).is_ok
            else:
                assert repeat_key(item) is None or isinstance(repeat_key(item), bytes)
            num_rows += 1
    assert num_rows > 5000
