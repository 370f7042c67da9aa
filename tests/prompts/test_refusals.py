"""What a request is told whose parameter is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.records import Sampling
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"stream": True}, "expected the request without it; each answer comes whole"),
        ({"guided_json": {"type": "object"}}, "structured_outputs: {'json': …}"),
        ({"seed": 2**70}, "from -9223372036854775808 to 9223372036854775807"),
        ({"n": 0}, "expected a whole number from 1"),
    ],
)
def test_a_refusal_says_what_to_do_instead(parameters: dict[str, Any], said: str) -> None:
    builder = PromptBuilder(PromptConfig(request_format="openai-batch"), Sampling(), 0, None, None)
    body = {"messages": [{"role": "user", "content": "hi"}], **parameters}
    row = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    [prepared] = builder.build("part-00000", 0, [RawRow(0, json.dumps(row).encode())])
    assert prepared.failure is not None
    assert prepared.failure.message.endswith(said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "hi"}, "custom_id is missing, expected a text that is not empty"),
        ({"custom_id": None}, "custom_id is a JSON null, expected"),
        ({"custom_id": "a"}, "url is missing, expected /v1/chat/completions or"),
        ({"custom_id": "a", "url": [1]}, "url is a JSON array, expected"),
        ({"custom_id": "a", "url": "/v2"}, "url is '/v2', expected"),
        ({"custom_id": "a", "url": CHAT}, "method is missing, expected POST"),
        ({"custom_id": "a", "url": CHAT, "method": "GET"}, "method is 'GET', expected POST"),
        ({"custom_id": "a", "url": CHAT, "method": "POST"}, "body is missing, expected an object"),
        (
            {"custom_id": "a", "url": CHAT, "method": "POST", "body": {}},
            "messages is missing, expected a list",
        ),
    ],
)
def test_a_part_that_is_missing_is_called_missing(row: dict[str, Any], said: str) -> None:
    builder = PromptBuilder(PromptConfig(request_format="openai-batch"), Sampling(), 0, None, None)
    [prepared] = builder.build("part-00000", 0, [RawRow(0, json.dumps(row).encode())])
    assert prepared.failure is not None
    assert prepared.failure.message.startswith(said)
