"""A small flat view of an output line, for what people read: samples, comparisons, the Python interface."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core.records import Record, Usage
from batchinfer.formats import bodies
from batchinfer.formats.lines import OutputLine

_LONGEST_SHOWN = 1000


class Answer(Record, frozen=True, kw_only=True):
    """What a row's answer says. Fields that the answer does not have are empty or None."""

    texts: list[str] = []
    """Text of every answer; several where the request asked for `n`."""
    finish_reasons: list[str] = []
    reasoning: str | None = None
    """Reasoning before the first answer."""
    tool_calls: list[dict[str, Any]] = []
    """Tool calls of the first answer."""
    usage: Usage = Usage()
    embedding: list[float] | None = None
    """Vector of the first input."""
    label: str | None = None
    probs: list[float] | None = None
    score: float | None = None
    """Score of the first pair, or of the best document of a reranking."""

    @property
    def text(self) -> str:
        """Text of the first answer; empty if there is none."""
        return self.texts[0] if self.texts else ""

    @property
    def finish_reason(self) -> str:
        """Reason why the first answer ended; empty if there is none."""
        return self.finish_reasons[0] if self.finish_reasons else ""

    def shown(self) -> list[str]:
        """Return an answer that is no text as text for people: a label, a score, a vector; empty if there is none."""
        values = (self.label, self.score, self.probs, self.embedding)
        return [str(value)[:_LONGEST_SHOWN] for value in values if value is not None]


def answer_of(line: OutputLine) -> Answer:
    """Return what an answer says. A row without one, or with one of an unknown shape, has an empty answer."""
    if not line.is_ok:
        return Answer()
    try:
        body = msgspec.json.decode(line.body)
        found = _found(body)
    except (*bodies.DECODE_ERRORS, AttributeError, KeyError, TypeError, ValueError):
        return Answer()
    usage = bodies.usage_of(msgspec.json.decode(line.body, type=dict[str, msgspec.Raw]))
    return Answer(**found, usage=usage)


def _found(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an Answer.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the body has an unknown shape.
    """
    if "choices" in body:
        return _of_choices(body["choices"])
    if "output" in body:
        return _of_items(body)
    if "results" in body:  # of a reranking, the best first
        return {"score": body["results"][0]["relevance_score"]} if body["results"] else {}
    if body.get("data"):
        return _of_input(body["data"][0])
    return {"texts": [body["text"]]} if isinstance(body.get("text"), str) else {}


def _of_choices(choices: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [choice.get("message") or {"content": choice.get("text")} for choice in choices]
    first = messages[0] if messages else {}
    return {
        "texts": [str(message.get("content") or "") for message in messages],
        "finish_reasons": [choice.get("finish_reason") or "" for choice in choices],
        "reasoning": first.get("reasoning") or first.get("reasoning_content"),
        "tool_calls": first.get("tool_calls") or [],
    }


def _of_items(body: dict[str, Any]) -> dict[str, Any]:
    by_type: dict[str, list[dict[str, Any]]] = {}
    for item in body["output"]:
        by_type.setdefault(item.get("type", ""), []).append(item)
    reasoning = _joined(by_type.get("reasoning", ()))
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
    return {
        "texts": [_joined(by_type.get("message", ()))],
        "finish_reasons": [bodies.finish_reason_of(raw)],
        "reasoning": reasoning or None,
        "tool_calls": by_type.get("function_call", []),
    }


def _joined(items: Sequence[dict[str, Any]]) -> str:
    return "".join(part.get("text") or "" for item in items for part in item.get("content") or ())


def _of_input(item: dict[str, Any]) -> dict[str, Any]:
    """Return what a pooling model says about one input."""
    if "probs" in item or "label" in item:
        return {"label": item.get("label"), "probs": item.get("probs")}
    if "score" in item:
        return {"score": item["score"]}
    vector = item.get("embedding", item.get("data"))
    if isinstance(vector, str):
        vector = memoryview(base64.b64decode(vector)).cast("f").tolist()
    if isinstance(vector, list) and vector and isinstance(vector[0], list):
        return {}  # one vector a token
    return {"embedding": vector}
