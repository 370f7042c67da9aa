"""What a request is told whose parameter is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.records import Sampling
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow


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
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    [prepared] = builder.build("part-00000", 0, [RawRow(0, json.dumps(row).encode())])
    assert prepared.failure is not None
    assert prepared.failure.message.endswith(said)
