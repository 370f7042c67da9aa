"""Turns conversations, in the various forms that data sets store them in, into messages of the OpenAI API."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.media import read_part

# Role of each speaker name. ShareGPT and similar data sets name the speaker of a message instead of its role.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Fields that are kept of a message besides role, content and calls. All others, such as language or time, are dropped.
EXTRA_FIELDS = ("name", "tool_call_id", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")

Message = dict[str, Any]


def read_conversation(value: Any, *, num_user_turns: int = 0, num_more: int = 0) -> list[Message]:
    """Turn a column's value into messages with `role` and `content`.

    Args:
        value: The column's value, in one of the forms below.
        num_user_turns: Reading stops after this number of user messages; 0 reads the whole conversation.
        num_more: Number of messages to read after the user message at which reading stops.

    Accepted forms: a list of {role, content} or {from, value} objects; one such object; an object with a list of
    roles and a list of contents, as some tables store a list of objects; an object that holds the list in `messages`,
    `conversations` or `conversation`; any of these forms as JSON text. Any other text becomes one user message.

    Raises:
        ValueError: the value has another form, or a message has no known role or no content.
    """
    messages: list[Message] = []
    end = -1
    for index, item in enumerate(_items(value)):
        if index == end:
            break
        messages.append(_message(item, index))
        if messages[-1]["role"] == "user":
            num_user_turns -= 1
            if num_user_turns == 0:
                end = index + 1 + num_more
    return messages


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        value = _parse_text(value)
    if isinstance(value, dict):
        value = _unwrap(value)
    if not isinstance(value, list):
        raise ValueError(f"the conversation is a JSON {json_type(value)}, expected a list")
    return value


def _parse_text(text: str) -> Any:
    if text.lstrip()[:1] in {"[", "{"}:
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            value = None
        first = value[0] if isinstance(value, list) and value else value
        known = {"role", "from", "messages", "conversations"}
        if value == [] or (isinstance(first, dict) and known & first.keys()):
            return value
    return [{"role": "user", "content": text}] if text.strip() else []


def _unwrap(value: dict[str, Any]) -> list[Any]:
    for name in ("messages", "conversations", "conversation"):
        if isinstance(value.get(name), list):
            return list(value[name])
    roles = value.get("role", value.get("from"))
    if isinstance(roles, list):
        lists = {key: column for key, column in value.items() if isinstance(column, list)}
        if all(len(column) == len(roles) for column in lists.values()):
            return [
                {key: column[index] for key, column in lists.items()} for index in range(len(roles))
            ]
    return [value]


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, dict):
        raise ValueError(
            f"message {index} is a JSON {json_type(item)}, expected an object with role and content"
        )
    role = item.get("role")
    if not isinstance(role, str) or not role:
        speaker = item.get("from")
        role = SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise ValueError(
                f"message {index} is from {str(speaker)[:40]!r}, expected a role, or a 'from' of "
                + ", ".join(SPEAKERS)
            )
    calls = item.get("tool_calls")
    given = (item.get(name) for name in ("content", "value", "text"))
    content = next((each for each in given if each is not None), None)
    if content is None and not calls:
        raise ValueError(f"message {index} ({role}) has no content, expected a text")
    if content is not None and not isinstance(content, str):
        content = _parts(content, index)
    message: Message = {"role": role, "content": content}
    message |= {name: item[name] for name in EXTRA_FIELDS if item.get(name)}
    if item.get("reasoning_content"):
        message.setdefault("reasoning", item["reasoning_content"])
    if calls:
        message["tool_calls"] = _calls(calls, index)
    return message


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Return earlier calls of tools in the form of the API, where arguments are JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"message {index}: tool_calls, expected a list of objects")
    found = []
    for place, call in enumerate(calls):
        function = call.get("function")
        function = dict(function if isinstance(function, dict) else call)
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        function = {"name": function.get("name"), "arguments": arguments}
        call_id = call.get("id") or f"call_{index}_{place}"
        found.append({"id": call_id, "type": "function", "function": function})
    return found


def _parts(content: Any, index: int) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        raise ValueError(
            f"message {index}: content is a JSON {json_type(content)}, expected a text or a list of parts"
        )
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise ValueError(f"message {index}: a part is a JSON {json_type(part)}")
        if part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            parts += read_part(part, f"message {index}")
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _has_content(message: Message) -> bool:
    content = message["content"]
    if isinstance(content, list):
        return any(part["type"] != "text" or part["text"].strip() for part in content)
    return bool(content and content.strip())


def check_turns(turns: str) -> str | int:
    """Read the value of ``--turns``: return "first" or "all" as given, or a number of user turns as an int.

    Raises:
        ValueError: the value is none of these, or the number is below 1.
    """
    if turns in {"first", "all"}:
        return turns
    number = int(turns)
    if number < 1:
        raise ValueError(turns)
    return number


def select_turns(
    messages: list[Message], turns: str | int, *, continue_final: bool
) -> list[Message]:
    """Return the beginning of a conversation, up to the message that the model shall answer.

    With ``first`` this is the first user message. With ``all`` it is the last message that is not the assistant's. With
    a number N it is the N-th user message, or the last user message if there are fewer. With `continue_final` the
    assistant message that follows is returned as well, and the model continues it.

    Raises:
        ValueError: no returned user message has text, or `continue_final` finds no assistant message that follows.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if turns == "all":
        end = len(messages)
        while end and messages[end - 1]["role"] == "assistant":
            end -= 1
    else:
        wanted = users[: 1 if turns == "first" else int(turns)]
        end = wanted[-1] + 1 if wanted else 0
    if not any(_has_content(messages[index]) for index in users if index < end):
        raise ValueError("the conversation has no user message with text, expected one")
    if continue_final:
        if end >= len(messages) or messages[end]["role"] != "assistant":
            raise ValueError("the last chosen turn has no answer after it to continue")
        end += 1
    return messages[:end]


def with_answers(messages: list[Message], turns: str | int) -> list[Message]:
    """Return the beginning of a conversation with the answers in it, for a model that judges or embeds it.

    With ``all`` this is the whole conversation, with a number N the first N user messages and what follows each of
    them. ``first`` means 1.

    Raises:
        ValueError: no returned message has text.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    most = len(users) if turns == "all" else 1 if turns == "first" else int(turns)
    selected = messages[: users[most]] if most < len(users) else messages
    if not any(map(_has_content, selected)):
        raise ValueError("the conversation has no message with text, expected one")
    return selected


def with_system(messages: list[Message], system_prompt: str) -> list[Message]:
    """Return the messages with this system prompt first; it replaces a system message at the beginning."""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system_prompt}, *rest]


def with_examples(messages: list[Message], examples: list[Message]) -> list[Message]:
    """Return the messages with worked examples at the beginning, but after a system message if there is one."""
    start = 1 if messages and messages[0]["role"] == "system" else 0
    return [*messages[:start], *examples, *messages[start:]]
