"""A small flat view of an output line, for what people read: samples and the command `generate`."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.core.records import Record, Usage
from batchinfer.formats import bodies
from batchinfer.formats.lines import OutputLine

_OF_AN_INPUT = ("label", "probs", "score", "relevance_score", "embedding", "data")
"""What a pooling model says about an input."""


class Answer(Record, frozen=True, kw_only=True):
    """What a row's answer says. Fields that the answer does not have are empty."""

    texts: list[str] = []
    """Text of every answer (several if the request asked for `n`), or what a pooling model says of the first input."""
    finish_reason: str = ""
    """Reason why the first answer ended."""
    usage: Usage = Usage()


def answer_of(line: OutputLine) -> Answer:
    """Return what an answer says. A row without one, or with one of an unknown shape, has an empty answer."""
    if not line.is_ok or bytes(line.body)[:1] != b"{":
        return Answer()
    members = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
    try:
        texts = _texts(msgspec.json.decode(line.body))
    except (AttributeError, LookupError, TypeError):
        texts = []
    reason, usage = bodies.finish_reason_of(members), bodies.usage_of(members)
    return Answer(texts=texts, finish_reason=reason, usage=usage)


def _texts(body: dict[str, Any]) -> list[str]:
    """Return the texts of an answer.

    Raises:
        AttributeError, LookupError, TypeError: the body has an unknown shape.
    """
    if "choices" in body:
        messages = [
            choice.get("message") or {"content": choice["text"]} for choice in body["choices"]
        ]
        return [message["content"] or "" for message in messages]
    if "output" in body:
        spoken = [item for item in body["output"] if item["type"] == "message"]
        return ["".join(part.get("text") or "" for item in spoken for part in item["content"])]
    if "text" in body:
        return [body["text"]]
    first = (body.get("results") or body["data"])[0]
    return [str(first[name]) for name in _OF_AN_INPUT if name in first]
