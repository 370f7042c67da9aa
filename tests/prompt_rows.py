"""Rows as the prompt builder makes calls of them: for tests of prompts, and of what stands on them."""

import json
from typing import Any

from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.types import EngineRules, Prepared, PromptConfig, RawRow

CHAT = "/v1/chat/completions"
PLAIN_RULES = EngineRules(model="m")


def builder(
    rules: EngineRules = PLAIN_RULES, seed: int | None = None, **options: Any
) -> PromptBuilder:
    """A builder with these prompt options."""
    return PromptBuilder(PromptConfig(**options), seed, rules=rules)


def prepare(
    row: Any, rules: EngineRules = PLAIN_RULES, seed: int | None = None, **options: Any
) -> Prepared:
    """The first row of a chunk, prepared with these prompt options. `row` is its data, or its line as bytes."""
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return builder(rules, seed, **options).build("part-00000", 0, [RawRow(0, data)])[0]


def request(
    body: Any,
    url: str = CHAT,
    rules: EngineRules = PLAIN_RULES,
    run: dict[str, Any] | None = None,
    **options: Any,
) -> Prepared:
    """A line of an OpenAI batch file, prepared. `run` holds the run's own fields."""
    line = {"custom_id": "r1", "method": "POST", "url": url, "body": body}
    return prepare(line, rules, request_format="openai-batch", body=run or {}, **options)


def sent(prepared: Prepared) -> dict[str, Any]:
    """The body that goes to the server, without the name of the model."""
    assert prepared.call is not None, prepared.failure or prepared.media
    body = json.loads(prepared.call.body)
    assert body.pop("model") == "m"
    return dict(body)


def code(prepared: Prepared) -> str:
    """The code of a row's failure."""
    assert prepared.failure is not None, prepared.call
    assert prepared.failure.message
    return prepared.failure.code


def knows(*names: str) -> EngineRules:
    """Rules of a server whose bodies may have these fields, whatever the path."""
    known = frozenset({"model", "messages", "prompt", "input", "seed", "temperature", *names})
    return EngineRules(model="m", parameters=lambda _path: known)
