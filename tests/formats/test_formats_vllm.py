"""Requests of every kind, answered by real vLLM, in the line that their format promises."""

from __future__ import annotations

import json

import jsonschema
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from batchinfer.core.records import Sampling
from batchinfer.engines.tokenizers import load_tokenizer
from batchinfer.formats import encoder_for
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow
from engine_contract import ListSource, drive
from samples import SCHEMAS, SEED_REQUEST

pytestmark = pytest.mark.vllm


def run(engine, model, rows, request_format):
    config = PromptConfig(request_format=request_format, output_format=request_format)
    builder = PromptBuilder(config, Sampling(), 7, load_tokenizer(model), 512)
    data = [json.dumps(row).encode() for row in rows]
    prepared = builder.build("c", 0, [RawRow(index, line) for index, line in enumerate(data)])
    requests = [item.request for item in prepared if item.request is not None]
    completions = drive(engine, ListSource(requests))
    encoder = encoder_for(config, model="tiny")
    lines = [json.loads(encoder.encode(item, completions.get(item.key))) for item in prepared]
    for line in lines:
        jsonschema.validate(line, SCHEMAS[f"output-{request_format}"])
    return lines


def test_completions_have_the_documents_shape(vllm_engine, tiny_model):
    seed_request = {**SEED_REQUEST, "stop": ["\n\n\n"]}
    rows = [
        seed_request,
        {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0},
        {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt": "abc", "n": 2, "best_of": 4, "seed": 3, "max_tokens": 4},
        {"prompt": [5, 6, 7], "n": 3, "temperature": 0, "max_tokens": 2},
        {"prompt": "abc", "temperature": -1},
        {"prompt": [10**9]},
        {
            "prompt": "abc",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "nothing"}},
            },
        },
    ]
    lines = run(vllm_engine, str(tiny_model), rows, "completions")
    assert [line["request"] for line in lines] == rows
    results = [line["result"] for line in lines]
    first = results[0]["choices"][0]
    assert len(first["logprobs"]["tokens"]) == len(first["logprobs"]["text_offset"]) == 2
    echoed = results[1]["choices"][0]
    assert echoed["text"].startswith("abc")
    assert "".join(echoed["logprobs"]["tokens"]).startswith("abc")
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert results[2]["choices"][0]["text"] == "abc"
    assert [len(result["choices"]) for result in results[3:5]] == [2, 3]
    assert results[3]["choices"][0]["logprobs"] is None
    assert results[5:] == [None, None, None]
    codes = [line["error"]["code"] for line in lines[5:]]
    assert codes[0] == "invalid_parameter"
    assert set(codes[1:]) <= {"engine_rejected", "invalid_parameter"}


def test_batch_lines_satisfy_the_openai_package(vllm_engine, tiny_model):
    frame = {"method": "POST", "url": "/v1/chat/completions"}
    messages = [{"role": "user", "content": "abc"}]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    bodies = [
        {"messages": messages, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2},
        {
            "messages": messages,
            "max_tokens": 60,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            },
        },
        {"messages": messages, "max_tokens": 2, "n": 2, "seed": 1},
        {"messages": messages, "tools": [{"type": "function"}]},
    ]
    rows = [{"custom_id": f"r{index}", **frame, "body": body} for index, body in enumerate(bodies)]
    rows.append(
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc"}}
    )
    lines = run(vllm_engine, str(tiny_model), rows, "openai-batch")
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 200, 400, 200], lines
    chats = [
        ChatCompletion.model_validate(line["response"]["body"], strict=True) for line in lines[:3]
    ]
    assert len(chats[0].choices[0].logprobs.content) == 3
    assert len(chats[0].choices[0].logprobs.content[0].top_logprobs) == 2
    assert len(chats[2].choices) == 2
    completion = OpenAICompletion.model_validate(lines[4]["response"]["body"], strict=True)
    assert completion.usage.completion_tokens <= 16
