"""Promise P7 for the prompt builder: whatever a chunk holds, every line gives one result and nothing is raised."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchinfer.core.records import Choice, Completion, Sampling
from batchinfer.formats import encoder_for, read_line
from batchinfer.prompts import Code, PromptBuilder, PromptConfig, RawRow

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
