"""Calls and reasoning with real vLLM: the demo model knows neither, so constraints hold its answers to their forms."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import AnswerForm
from batchinfer.engines import parser_host
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.parser_process import ParserProcess, Setup, Whole, parsers_of
from batchinfer.prompts.limited_process import LimitedProcess, read_frame, write_frame
from making import make_job
from tiny_model import DEMO_MODEL

pytestmark = pytest.mark.vllm

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PARAMETERS = {
    "type": "object",
    "properties": {"a": DIGIT, "b": DIGIT},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
THINK = "<think>[a-z]{4}</think>"


def in_marks(name: str) -> str:
    arguments = r"\{\"a\": [0-9], \"b\": [0-9]\}"
    return rf"<tool_call>\n\{{\"name\": \"{name}\", \"arguments\": {arguments}\}}\n</tool_call>"


def as_regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text.replace(r"\"", '"')}}


NAMED = {"type": "function", "function": {"name": "add"}}
THINKING = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
BODIES: dict[str, dict[str, Any]] = {
    "all": {"tools": [ADD], **as_regex(f"{THINK}so {in_marks('add')}")},
    "not offered": {"tools": [ADD], **as_regex(THINK + in_marks("sub"))},
    "broken": {"tools": [ADD], **as_regex(THINK + r"<tool_call>\{broken</tool_call>")},
    "cut off": {"tools": [ADD], "max_tokens": 40, **as_regex(THINK + in_marks("add"))},
    "none": {"tools": [ADD], "tool_choice": "none", **as_regex(THINK + in_marks("add"))},
    "required": {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [ADD], "tool_choice": NAMED},
    "hidden": {"include_reasoning": False, **as_regex(f"{THINK}[A-Z]{{3}}")},
    "wrong": {"tools": [{"x": 1}]},
    "budget": {
        "messages": THINKING,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 2,
        "ignore_eos": True,
        "max_tokens": 24,
    },
}


def make_row(index: int) -> dict[str, Any]:
    name, body = list(BODIES.items())[index]
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 90, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.usefixtures("workers_share_demo_engine")
def test_calls_and_reasoning_of_real_answers(tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=len(BODIES), per_chunk=len(BODIES), make_row=make_row)
    options = [
        "--job", f"{tmp_path}/job", "--output", f"{tmp_path}/run", "--model", str(DEMO_MODEL),
        "--request-format", "openai-batch", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
        "--max-model-len", "256",
    ]  # fmt: skip
    assert main(["worker", *options]) == 0
    [path] = Path(tmp_path, "run", "outputs").glob("*.jsonl")
    lines = {line["_id"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert lines["wrong"]["error"]["code"] == "invalid_parameter"
    found = {name: line["choices"][0] for name, line in lines.items() if line["choices"]}
    calls = {name: one["tool_calls"] for name, one in found.items() if "tool_calls" in one}
    assert sorted(calls) == ["all", "named", "not offered", "required"]
    for name, [call] in calls.items():
        assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
        assert call["function"]["name"] == ("sub" if name == "not offered" else "add")
        assert call.get("offered", True) is (name != "not offered")
    assert [found[name]["finish_reason"] for name in ("all", "required", "named", "cut off")] == [
        "tool_calls", "tool_calls", "stop", "length",
    ]  # fmt: skip
    assert found["all"]["text"] == "so "
    assert len(found["all"]["reasoning"]) == 4
    assert 1 <= lines["all"]["usage"]["reasoning_tokens"] <= 4
    assert found["broken"]["text"] == "<tool_call>{broken</tool_call>"
    assert found["cut off"]["text"].startswith("<tool_call>")
    assert found["none"]["text"].endswith("</tool_call>")
    assert "reasoning" not in found["hidden"]
    assert found["hidden"]["text"].isupper()
    # The demo model does not know how to end its reasoning, so without a budget there would be no text. Its tokenizer
    # makes several tokens of the marks, which makes the engine's count coarse.
    assert found["budget"]["text"]
    assert 1 <= lines["budget"]["usage"]["reasoning_tokens"] <= 8


def test_vllms_parsers_read_texts() -> None:
    """The process is that of the worker above."""
    config = EngineConfig(
        model=str(DEMO_MODEL), tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    parsers = parsers_of(config)
    assert parsers is not None
    facts = parsers.start()
    assert (facts.reasoning_start, facts.reasoning_end) == ("<think>", "</think>")
    assert facts.keeps_special_for_calls
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    texts = [
        f"<think>hm hm</think>ok {call}",
        "<think>hm</think><tool_call>{broken</tool_call>",
        "hm</think>4",
    ]
    form = AnswerForm(tools=[ADD])
    found = parsers.read([form], [Whole(form=0, text=text, token_ids=[5] * 9) for text in texts])
    assert [(each.reasoning, each.text) for each in found] == [
        ("hm hm", "ok "),
        ("hm", "<tool_call>{broken</tool_call>"),
        ("hm", "4"),
    ]
    calls = [[(name, json.loads(given)) for name, given, _ in each.calls] for each in found]
    assert calls == [[("add", {"a": 1})], [], []]
    refused = AnswerForm(tools=[{"type": "function", "function": {"name": "f", "description": 5}}])
    mixed = parsers.read([form, refused], [Whole(form=index, text=texts[2]) for index in (0, 1)])
    assert [(each.text, each.is_broken) for each in mixed] == [("4", False), (texts[2], True)]
    assert parsers._process.is_running


class ParserHostHere:
    """In place of `LimitedProcess`: the module's `main` runs in this process, which has imported vLLM already."""

    def __init__(self, setup: Setup) -> None:
        self._setup = msgspec.msgpack.encode(setup)

    def start(self) -> bytes | None:
        given, written, stdout = io.BytesIO(), os.pipe(), os.dup(1)
        write_frame(given, self._setup)
        given.seek(0)
        os.dup2(written[1], 1)
        os.close(written[1])
        try:
            with (
                mock.patch.object(sys, "stdin", SimpleNamespace(buffer=given)),
                mock.patch.dict(os.environ),
                warnings.catch_warnings(),
            ):
                parser_host.main()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            logging.disable(logging.NOTSET)
        with os.fdopen(written[0], "rb") as answer:
            return read_frame(answer)

    def note_end(self) -> int:
        return 0


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused() -> None:
    setup = Setup(model="demo", tokenizer=str(DEMO_MODEL), tool_call_parser="mistral")
    wrong = ParserProcess(setup)
    wrong._process = cast("LimitedProcess", ParserHostHere(setup))
    with pytest.raises(ConfigError, match=r"--tool-call-parser mistral: does not work .* token"):
        wrong.start()
