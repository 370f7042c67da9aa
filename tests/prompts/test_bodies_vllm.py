"""What the server's own definitions of its requests say of the bodies that are built here. No server is started."""

import json
from typing import Any

import pytest

from batchinfer.prompts.builder import finish_call
from batchinfer.prompts.prompt_config import make_body
from batchinfer.prompts.types import EngineRules, Sampling
from pictures import as_hub, picture
from prompt_rows import prepare

pytestmark = pytest.mark.vllm

RULES = EngineRules(model="m", max_model_len=100)
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}}'
TOOLS = [{"name": "add", "description": "Adds.", "parameters": json.loads(SCHEMA)}]
NAMES = "top_k min_p repetition_penalty thinking_budget bad_words min_new_tokens logprobs"
VALUES = [3, 0.1, 1.1, 4, ["x"], 1, 2]
GENERATE = make_body(
    Sampling(max_tokens=5, n=2, stop=["x"], sampling=dict(zip(NAMES.split(), VALUES, strict=True)))
)
TALK = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "<image> What, and what sound?"},
    {"from": "gpt", "value": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "1"},
    {"role": "developer", "content": "d"},
    {"role": "assistant", "content": "a", "reasoning_content": "hm"},
    {"role": "user", "name": "bob", "content": [{"type": "text", "text": "b"}]},
]


MEDIA = {"columns": {"image": ["i"], "audio": ["s"], "video": ["v"]}}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt_column": "p", "body": GENERATE}, {"p": "x"}),
    ({"prompt_column": "p"}, {"p": [1, 2]}),
    ({"messages_column": "p", "body": GENERATE, "truncate_prompt": "left"}, {"p": "x"}),
    ({"messages_column": "p", "body": make_body(Sampling(json_schema=SCHEMA))}, {"p": "x"}),
    ({"prompt_column": "p", "body": make_body(Sampling(choices=["a,b"]))}, {"p": "x"}),
    ({"messages_column": "p", "body": make_body(Sampling(tools=TOOLS))}, {"p": "x"}),
    (
        {"messages_column": "p", "turns": 0, **MEDIA},
        {"p": TALK, "i": as_hub(picture()), "s": "a.wav", "v": "a.mp4"},
    ),
]


CHECK = """
import json, sys
from pydantic import TypeAdapter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

kinds = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
models = {"messages", "tools", "tool_choice", "response_format", "structured_outputs"}
for path, text in json.loads(sys.argv[1]):
    found, body = TypeAdapter(kinds[path]).validate_json(text), json.loads(text)
    assert body.keys() <= type(found).model_fields.keys(), body
    for name in body.keys() - models:
        assert dict(found)[name] == body[name], name
"""


def test_the_servers_own_definition_takes_every_body(forks, tmp_path):
    bodies = []
    for options, row in CASES:
        prepared = prepare(row, RULES, seed=7, **options)
        if prepared.media:
            prepared = finish_call(prepared, [b"\0\0\0\0ftypmp42", b"RIFF\0\0\0\0WAVE"])
        assert prepared.call is not None, prepared.failure
        bodies.append((prepared.path, prepared.call.body.decode()))
    log = tmp_path / "log"
    assert forks.run(CHECK, [json.dumps(bodies)], log) == 0, log.read_text()
