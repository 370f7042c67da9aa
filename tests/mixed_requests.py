"""An OpenAI batch file of requests of every kind, and bad ones of many kinds with the code that each must get."""

from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NAMES = ("France", "Italy", "Japan", "Spain", "Peru", "Egypt", "Kenya", "India", "Chile")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"name": "ab", "n": 1}}\n</tool_call>'
THOUGHT = "Here is my thought process: [a-c]{3} Here is my response: [x-z]{3}"
"""An answer in which vLLM's parser "granite" finds reasoning."""
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"model": "first"}),
    (CHAT, {"model": "second", "return_token_ids": True}),
    (CHAT, {"temperature": 1.0, "seed": 5, "n": 2}),
    (CHAT, {"response_format": BY_SCHEMA, "max_tokens": 40}),
    (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40}),
    (CHAT, {"tools": TOOLS, "structured_outputs": {"choice": [CALL]}, "max_tokens": 60}),
    (CHAT, {"structured_outputs": {"regex": THOUGHT}, "max_tokens": 60}),
    (CHAT, {"stop": ["a"], "include_stop_str_in_output": True}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"prompt": [77, 300, 5, 9]}),
    (COMPLETIONS, {"prompt": ["What is 2 plus 3?", "What is 4 plus 5?"]}),
    (COMPLETIONS, {"prompt": "Zażółć 🙂 \u0000 gęślą \u2028"}),
    (COMPLETIONS, {"min_tokens": 5, "ignore_eos": True, "presence_penalty": 0.5}),
    (RESPONSES, {}),
]  # fmt: skip
"""Endpoints, and the fields of a request in which it differs from a plain one."""
PART = {"type": "input_audio", "input_audio": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"body": {"model": "third"}}, "model_not_found"),
    ({"body": {"temperature": -1}}, "invalid_parameter"),
    ({"body": {"n": 0}}, "invalid_request"),
    ({"body": {"logprobs": True, "top_logprobs": 21}}, "invalid_parameter"),
    ({"body": {"min_tokens": 9, "max_tokens": 3}}, "invalid_request"),
    ({"body": {"logit_bias": {"99999": 1}}}, "invalid_parameter"),
    ({"body": {"response_format": {"type": "json_schema"}}}, "invalid_constraint"),
    ({"body": {"structured_outputs": {"json": {"type": "nothing"}}}}, "invalid_request"),
    ({"body": {"structured_outputs": {"grammar": "root ::= root"}}}, "server_error"),
    ({"body": {"structured_outputs": {"choice": []}}}, "invalid_request"),
    ({"body": {"max_token": 5}}, "unknown_parameter"),
    ({"body": {"tools": "x"}}, "invalid_parameter"),
    ({"body": {"messages": []}}, "invalid_request"),
    ({"body": {"messages": [{"role": "user", "content": [PART]}]}}, "invalid_request"),
    ({"body": {"messages": [{"role": "user", "content": "word " * 4000}]}}, "prompt_too_long"),
    ({"url": COMPLETIONS, "body": {"prompt": ""}}, "invalid_parameter"),
    ({"url": COMPLETIONS, "body": {"prompt": [99999]}}, "invalid_request"),
    ({"url": "/v1/embeddings", "body": {"input": "x"}}, "unknown_url"),
    ({"url": "/../health"}, "unknown_url"),
]
"""What is wrong with a request, and the code of its error row."""


def plain_body(url: str, index: int) -> dict[str, Any]:
    """Return the body of a plain request."""
    text = f"What is the capital of {NAMES[index % len(NAMES)]}?"
    prompts: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": text, "max_tokens": 8},
        RESPONSES: {"input": text, "max_output_tokens": 8},
    }
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return {**prompts.get(url, chat), "temperature": 0}


def good_request(index: int) -> dict[str, Any]:
    """Return a request that can be answered."""
    url, fields = GOOD[index % len(GOOD)]
    body = {**plain_body(url, index), **fields}
    return {"custom_id": f"good-{index}", "method": "POST", "url": url, "body": body}


def bad_request(index: int) -> dict[str, Any]:
    """Return a request that cannot be answered."""
    change, _ = BAD[index % len(BAD)]
    url = change.get("url", CHAT)
    body = {**plain_body(url, index), **change.get("body", {})}
    return {"custom_id": f"bad-{index}", "method": "POST", "url": url, "body": body}


def expected_code(index: int) -> str:
    """Return the code of a bad request's row."""
    return BAD[index % len(BAD)][1]
