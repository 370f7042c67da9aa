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
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "[ab]{4}"}, "end": "</f>"},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"name": "ab", "n": 1}}\n</tool_call>'
THOUGHT = "Here is my thought process: [a-c]{3} Here is my response: [x-z]{3}"
"""An answer in which vLLM's parser "granite" finds reasoning."""
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"model": "first"}),
    (CHAT, {"model": "second", "return_token_ids": True}),
    (CHAT, {"temperature": 1.0, "seed": 5, "n": 2}),
    (CHAT, {"model": "first", "temperature": 0.8, "seed": -9, "top_p": 0.9, "top_k": 30}),
    (CHAT, {"response_format": BY_SCHEMA, "max_tokens": 40}),
    (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 24}),
    (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}),
    (CHAT, {"model": "second", "structured_outputs": {"regex": "[A-C]{3}-[0-9]{2}"}}),
    (CHAT, {"structured_outputs": {"grammar": 'root ::= "x" ("a"|"b"){3}'}}),
    (CHAT, {"response_format": TAG}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40}),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 40}),
    (CHAT, {"tools": TOOLS, "structured_outputs": {"choice": [CALL]}, "max_tokens": 60}),
    (CHAT, {"tools": TOOLS, "tool_choice": "none"}),
    (CHAT, {"structured_outputs": {"regex": THOUGHT}, "max_tokens": 60}),
    (CHAT, {"structured_outputs": {"regex": THOUGHT}, "max_tokens": 60, "include_reasoning": False}),
    (CHAT, {"bad_words": ["Paris"]}),
    (CHAT, {"truncate_prompt_tokens": 12}),
    (CHAT, {"stop": ["a"], "include_stop_str_in_output": True}),
    (CHAT, {"priority": 3, "length_penalty": 1.2, "use_beam_search": False, "user": "u"}),
    (CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Peru?"}]}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": [77, 300, 5, 9]}),
    (COMPLETIONS, {"prompt": ["What is 2 plus 3?", "What is 4 plus 5?"]}),
    (COMPLETIONS, {"prompt": "Zażółć 🙂 \u0000 gęślą \u2028"}),
    (COMPLETIONS, {"allowed_token_ids": list(range(40, 60)), "temperature": 1.0, "seed": 2}),
    (COMPLETIONS, {"min_tokens": 5, "ignore_eos": True, "presence_penalty": 0.5}),
    (COMPLETIONS, {"logprobs": 2, "temperature": 1.0, "seed": 8, "min_p": 0.1, "repetition_penalty": 1.1}),
    (COMPLETIONS, {"model": "first", "logit_bias": {"70": 5}}),
    (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}, "vllm_xargs": {"a": 1}}),
    (RESPONSES, {}),
]  # fmt: skip
"""Endpoints, and the fields of a request in which it differs from a plain one."""
PART = {"type": "input_audio", "input_audio": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"body": {"model": "third"}}, "model_not_found"),
    ({"body": {"model": 5}}, "model_not_found"),
    ({"body": {"temperature": -1}}, "invalid_parameter"),
    ({"body": {"n": 0}}, "invalid_request"),
    ({"body": {"logprobs": True, "top_logprobs": 21}}, "invalid_parameter"),
    ({"body": {"min_tokens": 9, "max_tokens": 3}}, "invalid_request"),
    ({"body": {"logit_bias": {"99999": 1}}}, "invalid_parameter"),
    ({"body": {"stop_token_ids": [99999]}}, "invalid_parameter"),
    ({"body": {"allowed_token_ids": [99999]}}, "invalid_parameter"),
    ({"body": {"bad_words": "Paris"}}, "invalid_parameter"),
    ({"body": {"truncate_prompt_tokens": 9999}}, "invalid_parameter"),
    ({"body": {"priority": "high"}}, "invalid_parameter"),
    ({"body": {"vllm_xargs": {"a": {}}}}, "invalid_parameter"),
    ({"body": {"response_format": {"type": "json_schema"}}}, "invalid_constraint"),
    ({"body": {"structured_outputs": {"json": {"type": "nothing"}}}}, "invalid_request"),
    ({"body": {"structured_outputs": {"regex": "("}, "model": "first"}}, "invalid_request"),
    ({"body": {"structured_outputs": {"grammar": "root ::= root"}}}, "server_error"),
    ({"body": {"structured_outputs": {"choice": []}}}, "invalid_request"),
    ({"body": {"structured_outputs": {"structural_tag": "{}"}}}, "invalid_constraint"),
    ({"body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "invalid_request"),
    ({"body": {"max_token": 5}}, "unknown_parameter"),
    ({"body": {"tools": "x"}}, "invalid_parameter"),
    ({"body": {"tools": [{"type": "function"}]}}, "invalid_parameter"),
    ({"body": {"tool_choice": "required"}}, "invalid_parameter"),
    ({"body": {"reasoning_effort": "very"}}, "invalid_parameter"),
    ({"body": {"messages": []}}, "invalid_request"),
    ({"body": {"messages": [{"content": "x"}]}}, "invalid_parameter"),
    ({"body": {"messages": "hello"}}, "invalid_parameter"),
    ({"body": {"messages": [{"role": "user", "content": [PART]}]}}, "invalid_request"),
    ({"body": {"messages": [{"role": "user", "content": "word " * 4000}]}}, "prompt_too_long"),
    ({"body": {"continue_final_message": True}}, "invalid_request"),
    ({"url": COMPLETIONS, "body": {"prompt": ""}}, "invalid_parameter"),
    ({"url": COMPLETIONS, "body": {"prompt": 5}}, "invalid_parameter"),
    ({"url": COMPLETIONS, "body": {"prompt": [99999]}}, "invalid_request"),
    ({"url": "/v1/embeddings", "body": {"input": "x"}}, "unknown_url"),
    ({"url": "/v1/rerank", "body": {"query": "x", "documents": ["y"]}}, "unknown_url"),
    ({"url": "/v1/chat"}, "unknown_url"),
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
