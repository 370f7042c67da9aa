"""Turns conversations, in the various forms that data sets store them in, into messages of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from batchinfer.prompts.json_lines import decode_text, shown
from batchinfer.prompts.media import read_part
from batchinfer.prompts.types import Unfit

# Role of each speaker name. ShareGPT and similar data sets name the speaker of a message instead of its role.
SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model", "bard", "bing"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
# Fields that are kept of a message besides role, content and calls. All others, such as language or time, are dropped.
_EXTRA_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content")
_WRAPPERS = ("messages", "conversations", "conversation")
_LOOKS_LIKE_ONE = re.compile(
    r"""[\s\[{]{1,99}["'](role|from|content|messages|conversations?)["']\s*:"""
)
"""How a text begins that is a conversation, as Python prints one, for example."""
_TEXT_PARTS = ("text", "input_text", "output_text")

Message = dict[str, Any]


def read_conversation(value: Any) -> Iterator[Message]:
    """Yield the messages that a column's value holds, each with `role` and `content`: a list of parts.

    Accepted forms: a list of {role, content} or {from, value} objects; one such object; an object with a list of
    roles and a list of contents, as some tables store a list of objects; an object that holds the list in `messages`,
    `conversations` or `conversation`; any of these forms as JSON text. Any other text becomes one user message.

    Raises:
        Unfit: the value has another form, or is a text that looks like one and is no JSON; or a message has no known
            role or no content.
    """
    value = _unwrapped(_parsed(value) if isinstance(value, str) else value)
    if not isinstance(value, list):
        raise Unfit(f"the conversation is {shown(value)}, expected a list")
    yield from (_message(item, index) for index, item in enumerate(value))


def _parsed(text: str) -> Any:
    value: Any = None
    if text.lstrip()[:1] in ("[", "{"):
        try:
            value = decode_text(text)
        except Unfit as error:
            if _LOOKS_LIKE_ONE.match(text):
                raise Unfit(f"looks like a conversation and is no JSON: {error}") from error
    first = value[0] if isinstance(value, list) and value else value
    if value == [] or (isinstance(first, dict) and first.keys() & {"role", "from", *_WRAPPERS}):
        return value
    return [{"role": "user", "content": text}] if text.strip() else []


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name in _WRAPPERS:
        if isinstance(value.get(name), list):
            return value[name]
    lists = {name: item for name, item in value.items() if isinstance(item, list)}
    if {"role", "from"} & lists.keys() and len(set(map(len, lists.values()))) == 1:
        return [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]
    return [value]


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, dict):
        raise Unfit(f"message {index} is {shown(item)}, expected an object")
    role, speaker = item.get("role"), str(item.get("from"))[:40]
    role = (isinstance(role, str) and role) or SPEAKERS.get(speaker.lower())
    if not role:
        expected = f"expected a role, or a 'from' of {', '.join(SPEAKERS)}"
        raise Unfit(f"message {index} is from {speaker!r}, {expected}")
    calls = item.get("tool_calls")
    given = [item[name] for name in ("content", "value", "text") if item.get(name) is not None]
    if not given and not calls:
        raise Unfit(f"message {index} ({role}) has no content, expected a text")
    message: Message = {"role": role, "content": _content(given[0], index) if given else []}
    message |= {name: item[name] for name in _EXTRA_FIELDS if item.get(name)}
    if calls:
        message["tool_calls"] = _calls(calls, index)
    return message


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Return earlier calls of tools in the form of the API, where arguments are JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Unfit(f"message {index}: tool_calls, expected a list of objects")
    found = []
    for place, call in enumerate(calls):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        given = function.get("arguments") or {}
        arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        named = {"name": function.get("name"), "arguments": arguments}
        call_id = call.get("id") or f"call_{index}_{place}"
        found.append({"id": call_id, "type": "function", "function": named})
    return found


def _content(content: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(content, str | list):
        raise Unfit(f"message {index}: content is {shown(content)}, expected a text or parts")
    parts: list[dict[str, Any]] = []
    for item in [content] if isinstance(content, str) else content:
        part = {"type": "text", "text": item} if isinstance(item, str) else item
        if not isinstance(part, dict):
            raise Unfit(f"message {index}: a part is {shown(part)}")
        if part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            parts += read_part(part, f"message {index}")
    return parts


def select_turns(messages: Iterable[Message], turns: int, *, is_judged: bool) -> list[Message]:
    """Return the beginning of a conversation. What follows it is not read.

    Args:
        messages: The conversation.
        turns: Number of user messages; 0 for all.
        is_judged: Whether what follows the last of them is returned as well. Otherwise the beginning ends with the
            message that the model shall answer: with this last user message or, with 0, with the last message that is
            not the assistant's.

    Raises:
        Unfit: no returned message has text, or none of a user if the model shall answer.
    """
    selected: list[Message] = []
    num_asking = 0
    for message in messages:
        num_asking += message["role"] == "user"
        if is_judged and 0 < turns < num_asking:
            break
        selected.append(message)
        if not is_judged and num_asking == turns > 0:
            break
    while selected and not is_judged:
        role = selected[-1]["role"]
        if role == "user" or (not turns and role != "assistant"):
            break
        selected.pop()
    asking = [each for each in selected if is_judged or each["role"] == "user"]
    parts = [part for each in asking for part in each["content"]]
    if not any(part["type"] != "text" or part["text"].strip() for part in parts):
        raise Unfit("the conversation has no message of a user with text, expected one")
    return selected
