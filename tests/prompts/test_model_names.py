"""Which model or adapter a row asks for: by a column, or by the field `model` of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.prompts import EngineRules, Prepared, PromptBuilder, PromptConfig, RawRow, only_name

ADAPTERS = ["sql", "poems"]
RULES = EngineRules(own_names=["Qwen/Qwen3-0.6B", "Qwen3-0.6B"])


def build(row: dict[str, Any], rules: EngineRules | None = RULES, **config: Any) -> Prepared:
    builder = PromptBuilder(PromptConfig(**config), Sampling(), None, None, None, rules=rules)
    return builder.build("part-00000", 0, [RawRow(0, json.dumps(row).encode())])[0]


def outcome(prepared: Prepared) -> Any:
    if prepared.failure is not None:
        return prepared.failure.code
    assert prepared.request is not None
    return prepared.request.adapter


def request(model: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    return {"custom_id": "i", "method": "POST", "url": "/v1/chat/completions", "body": body}


CASES = [
    ("sql", "sql"),
    ("poems", "poems"),
    (None, None),
    ("", None),
    ("Qwen/Qwen3-0.6B", None),
    ("Qwen3-0.6B", None),
    ("served", None),
    ("SQL", "model_not_found"),
    ("gpt-4", "model_not_found"),
    (7, "model_not_found"),
    (["sql"], "model_not_found"),
]


@pytest.mark.parametrize(("name", "wanted"), CASES)
@pytest.mark.parametrize("way", ["chat", "completion", "column", "kept", "template", "messages"])
def test_a_name_means_an_adapter_the_model_or_nothing(way: str, name: Any, wanted: Any) -> None:
    row: dict[str, Any] = {"instruction": "x", "lora": name}
    config: dict[str, Any] = {"lora_column": "lora", "prompt_column": "instruction"}
    if way == "chat":
        row, config = request(name), {"request_format": "openai-batch"}
    elif way == "completion":
        row, config = {"prompt": "x", "model": name}, {"request_format": "completions"}
    elif way == "kept":
        config["keep"] = ["*"]
    elif way == "template":
        config = {"lora_column": "lora", "template_name": "alpaca"}
    elif way == "messages":
        row["instruction"] = [{"role": "user", "content": "x"}]
        config = {"lora_column": "lora", "messages_column": "instruction"}
    found = build(row, adapters=ADAPTERS, served_model_name=["served"], **config)
    assert outcome(found) == wanted
    if wanted == "model_not_found":
        assert found.param == ("model" if way in ("chat", "completion") else None)
        assert "none of the run's adapters (poems, sql)" in str(found.failure) or name != "SQL"


def test_any_name_may_mean_the_model() -> None:
    config: dict[str, Any] = {"request_format": "openai-batch", "adapters": ADAPTERS}
    names = ["gpt-4", "sql"]
    found = [build(request(name), served_model_name=["*"], **config) for name in names]
    assert [outcome(one) for one in found] == [None, "sql"]


def test_a_row_without_the_column_is_the_models() -> None:
    found = build({"p": "x"}, adapters=ADAPTERS, lora_column="lora", prompt_column="p")
    assert outcome(found) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lora_column": "c", "prompt_column": "p"}, "--lora-column: the run has no adapter"),
        (
            {"lora_column": "c", "adapters": ["a"], "request_format": "openai-batch"},
            "--lora-column with --request-format",
        ),
    ],
)
def test_a_column_that_cannot_be_used_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build({}, **config)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([request("a"), request("a")], "a"),
        ([request("a"), request("b")], ""),
        ([request("a"), request(None)], ""),
        ([{"prompt": "x", "model": "a"}], "a"),
        ([[1], "x", {"body": 5}], ""),
        ([], ""),
    ],
)
def test_requests_that_all_name_one_model(lines: list[Any], name: str) -> None:
    assert only_name([b"no JSON", *(json.dumps(line).encode() for line in lines)]) == name
