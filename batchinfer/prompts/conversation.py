"""Turns conversations, in the various forms that data sets store them in, into chat messages."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.media import IMAGE_KINDS, IMAGE_PART, read_part, refuse_part
from batchinfer.prompts.types import Code, RowProblem

# Chat role of each speaker name. ShareGPT and similar data sets name the speaker of a message instead of its role.
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
# Fields that are kept of a message besides role and content, because chat templates read them. All other fields, such
# as language or time, are dropped.
EXTRA_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")

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
        RowProblem: the value has another form, or a message has no known role or no content.
    """
    if isinstance(value, str):
        value = _parse_text(value)
    if isinstance(value, dict):
        value = _unwrap(value)
    if not isinstance(value, list):
        raise RowProblem(
            Code.INVALID_MESSAGES, f"the conversation is a JSON {json_type(value)}, expected a list"
        )
    messages: list[Message] = []
    for index, item in enumerate(value):
        message = _message(item, index)
        messages.append(message)
        if num_user_turns and message["role"] == "user":
            num_user_turns -= 1
            if not num_user_turns:
                rest = enumerate(value[index + 1 : index + 1 + num_more], index + 1)
                messages.extend(_message(item, place) for place, item in rest)
                break
    return messages


def _parse_text(text: str) -> Any:
    if text.lstrip()[:1] in {"[", "{"}:
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            value = None
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict) and (
            {"role", "from", "messages", "conversations"} & first.keys()
        ):
            return value
        if value == []:
            return value
    return [{"role": "user", "content": text}] if text.strip() else []


def _unwrap(value: dict[str, Any]) -> Any:
    for name in ("messages", "conversations", "conversation"):
        if isinstance(value.get(name), list):
            return value[name]
    role_key = "role" if "role" in value else "from"
    roles = value.get(role_key)
    if isinstance(roles, list):
        columns = {key: column for key, column in value.items() if isinstance(column, list)}
        if all(len(column) == len(roles) for column in columns.values()):
            return [
                {key: column[index] for key, column in columns.items()}
                for index in range(len(roles))
            ]
    return [value]


def _message(item: Any, index: int) -> Message:
    if type(item) is dict and len(item) == 2:
        role = item.get("role")
        if type(role) is str and role and type(item.get("content")) is str:
            return item
    if not isinstance(item, dict):
        raise RowProblem(
            Code.INVALID_MESSAGES,
            f"message {index} is a JSON {json_type(item)}, expected an object with role and content",
        )
    role = item.get("role")
    if not isinstance(role, str) or not role:
        speaker = item.get("from")
        role = SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise RowProblem(
                Code.UNKNOWN_ROLE,
                f"message {index} is from {str(speaker)[:40]!r}, expected a role, or a 'from' of "
                + ", ".join(SPEAKERS),
            )
    calls = item.get("tool_calls")
    content = item.get("content")
    if content is None:
        content = item.get("value")
    if content is None:
        content = item.get("text")
    if content is None:
        if not calls:
            raise RowProblem(
                Code.MISSING_CONTENT, f"message {index} ({role}) has no content, expected a text"
            )
    elif not isinstance(content, str):
        content = _parts(content, index)
    message: Message = {"role": role, "content": content}
    if len(item) > 2:
        for name in EXTRA_FIELDS:
            if item.get(name):
                message[name] = item[name]
        if calls:
            _check_calls(calls, index)
    return message


def _check_calls(calls: Any, index: int) -> None:
    """Refuse earlier calls of tools whose arguments a chat template could not read."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowProblem(
            Code.INVALID_MESSAGES, f"message {index}: tool_calls, expected a list of objects"
        )
    for place, call in enumerate(calls):
        arguments = _function_of(call).get("arguments")
        if isinstance(arguments, str) and not isinstance(_parse_arguments(arguments), dict):
            raise RowProblem(
                Code.INVALID_MESSAGES,
                f"message {index}: the arguments of call {place} are {arguments[:60]!r}, expected a JSON object",
            )


def _function_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a call that has its name and arguments: `function`, or the call itself."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _parse_arguments(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def for_template(message: Message) -> Message:
    """Return a message as chat templates expect it: arguments of calls are objects, as vLLM's server gives them.

    The API has them as text. Templates read earlier reasoning from either of two fields, so both are set.
    """
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not calls and not reasoning:
        return message
    message = dict(message)
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [_with_object(call) for call in calls]
    return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = _function_of(call)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return call
    parsed = _parse_arguments(arguments) if isinstance(arguments, str) else arguments or {}
    changed = {**function, "arguments": parsed}
    return {**call, "function": changed} if function is not call else changed


def _parts(content: Any, index: int) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        raise RowProblem(
            Code.INVALID_MESSAGES,
            f"message {index}: content is a JSON {json_type(content)}, expected a text or a list of parts",
        )
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        if not isinstance(part, dict):
            raise refuse_part(json_type(part), f"message {index}")
        kind = str(part.get("type", "image_url" if "image_url" in part else "text"))
        if kind in IMAGE_KINDS:
            parts.append(read_part(part, kind, f"message {index}"))
            continue
        text = part.get("text")
        if kind not in {"text", "input_text", "output_text"} or not isinstance(text, str):
            raise refuse_part(kind, f"message {index}")
        parts.append({"type": "text", "text": text})
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def text_of(message: Message) -> str:
    """Return the content of a message as one text; empty if it has none. Line breaks join text parts, as in servers."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def has_images(message: Message) -> bool:
    """Whether a part of the message is an image."""
    content = message["content"]
    return type(content) is list and any(part["type"] == IMAGE_PART for part in content)


def with_texts(messages: list[Message]) -> list[Message]:
    """Return the messages with every content without images joined to one text.

    Returns the same list if no content has parts.
    """
    if any(type(message["content"]) is list for message in messages):
        return [
            {**message, "content": text_of(message)}
            if type(message["content"]) is list and not has_images(message)
            else message
            for message in messages
        ]
    return messages


def first_turn(value: Any) -> list[Message] | None:
    """Return a list's first message alone if it is a user's and has only a role and a text, not blank; else None.

    This is a fast path for the bar "a third of bare msgspec" (docs/performance.md). Many conversations
    begin with such a message, which can be sent as it is, without `read_conversation`.
    """
    if type(value) is list and value:
        first = value[0]
        if type(first) is dict and len(first) == 2 and first.get("role") == "user":
            content = first.get("content")
            if type(content) is str and content and not content.isspace():
                return value[:1]
    return None


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
        RowProblem: no returned user message has text, or `continue_final` finds no assistant message that follows.
    """
    end = 0
    if turns == "all":
        end = len(messages)
        while end and messages[end - 1]["role"] == "assistant":
            end -= 1
    else:
        wanted = 1 if turns == "first" else int(turns)
        for index, message in enumerate(messages):
            if message["role"] == "user":
                end = index + 1
                wanted -= 1
                if not wanted:
                    break
    selected = messages[:end] if end < len(messages) else messages
    for message in selected:
        if message["role"] != "user":
            continue
        if has_images(message) or (message["content"] and not text_of(message).isspace()):
            break
    else:
        raise RowProblem(
            Code.EMPTY_CONVERSATION, "the conversation has no user message with text, expected one"
        )
    if continue_final:
        if end >= len(messages) or messages[end]["role"] != "assistant":
            raise RowProblem(
                Code.NOTHING_TO_CONTINUE,
                "the last chosen turn has no answer after it, expected an assistant message",
            )
        selected = messages[: end + 1]
    return selected


def with_answers(messages: list[Message], turns: str | int) -> list[Message]:
    """Return the beginning of a conversation with the answers in it, for a model that judges or embeds it.

    With ``all`` this is the whole conversation, with a number N the first N user messages and what follows each of
    them. ``first`` means 1.

    Raises:
        RowProblem: no returned message has text.
    """
    end = len(messages)
    if turns != "all":
        starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
        most = 1 if turns == "first" else int(turns)
        end = starts[most] if most < len(starts) else end
    selected = messages[:end]
    if not any(text_of(message).strip() for message in selected):
        raise RowProblem(
            Code.EMPTY_CONVERSATION, "the conversation has no message with text, expected one"
        )
    return selected


def with_system(messages: list[Message], system_prompt: str) -> list[Message]:
    """Return the messages with this system prompt first; it replaces a system message at the beginning."""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system_prompt}, *rest]


def with_examples(messages: list[Message], examples: list[Message]) -> list[Message]:
    """Return the messages with worked examples at the beginning, but after a system message if there is one."""
    start = 1 if messages and messages[0]["role"] == "system" else 0
    return [*messages[:start], *examples, *messages[start:]]
