"""Conversations in the forms that data sets use, turned into chat messages."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.types import Code, RowProblem

# Role of each speaker. ShareGPT and data sets like it name the speaker instead of the role.
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
# Fields of a message that chat templates know, besides role and content. Other fields of a data set's
# messages (language, time, moderation) are left out.
EXTRA_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")

Message = dict[str, Any]


def read_conversation(value: Any, *, num_user_turns: int = 0, num_more: int = 0) -> list[Message]:
    """Turn a column's value into messages with `role` and `content`.

    Args:
        value: The column's value, in one of the forms below.
        num_user_turns: Number of user messages to read, with the messages between them; 0 reads everything.
        num_more: Number of messages to read after the last of these user messages.

    Accepted: a list of {role, content} or {from, value}; one such object; an object of two lists
    (how some tables store a list of objects); any of these as JSON text; an object with the list in
    `messages` or `conversations`; any other text is one user message.

    Raises:
        RowProblem: anything else, or a message without a known role or without content.
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
    content = item.get("content")
    if content is None:
        content = item.get("value")
    if content is None:
        content = item.get("text")
    if content is None:
        if not item.get("tool_calls"):
            raise RowProblem(
                Code.MISSING_CONTENT, f"message {index} ({role}) has no content, expected a text"
            )
        content = ""
    elif not isinstance(content, str):
        content = _parts(content, index)
    message: Message = {"role": role, "content": content}
    if len(item) > 2:
        for name in EXTRA_FIELDS:
            if item.get(name):
                message[name] = item[name]
    return message


def _parts(content: Any, index: int) -> str | list[dict[str, str]]:
    if not isinstance(content, list):
        raise RowProblem(
            Code.INVALID_MESSAGES,
            f"message {index}: content is a JSON {json_type(content)}, expected a text or text parts",
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else json_type(part)
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in {"text", "input_text", "output_text"} or not isinstance(text, str):
            raise RowProblem(
                Code.UNSUPPORTED_CONTENT,
                f"message {index}: a part of type {str(kind)[:40]!r}, expected only text parts",
            )
        texts.append(text)
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def text_of(message: Message) -> str:
    """Return the content of a message as one text; parts are joined by line breaks, as chat servers do."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def with_texts(messages: list[Message]) -> list[Message]:
    """Return the messages with texts as contents; the same list if all contents are texts already."""
    for message in messages:
        if type(message["content"]) is not str:
            return [{**message, "content": text_of(message)} for message in messages]
    return messages


def first_turn(value: Any) -> list[Message] | None:
    """Return the first turn of a list that begins with a plain {role, content} user message, else None.

    Fast path for the bar "a third of bare msgspec" (docs/performance.md): this form is the commonest one and needs no
    conversion, and without a model most of a row's time goes into conversions.
    """
    if type(value) is list and value:
        first = value[0]
        if type(first) is dict and len(first) == 2 and first.get("role") == "user":
            content = first.get("content")
            if type(content) is str and content and not content.isspace():
                return value[:1]
    return None


def check_turns(turns: str) -> str | int:
    """Return "first", "all" or a number of user turns.

    Raises:
        ValueError: anything else.
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
    """Return the part of a conversation that the model answers, up to the chosen user turn.

    ``first`` takes everything up to and including the first user message. ``all`` leaves out only the
    answers after the last user (or tool) message. A number takes that many user turns, or all if there
    are fewer. With `continue_final` the answer after that turn is included: the model continues it.

    Raises:
        RowProblem: there is no user message with text, or no answer to continue.
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
        if message["role"] == "user" and not text_of(message).isspace() and message["content"]:
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


def with_system(messages: list[Message], system_prompt: str) -> list[Message]:
    """Put a system message first. It replaces the conversation's own, if there is one."""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system_prompt}, *rest]


def with_examples(messages: list[Message], examples: list[Message]) -> list[Message]:
    """Put worked examples between the system message and the conversation."""
    start = 1 if messages and messages[0]["role"] == "system" else 0
    return [*messages[:start], *examples, *messages[start:]]
