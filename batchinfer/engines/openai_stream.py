"""The parts of an answer that an endpoint streams, put together as if the answer had come in one piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from batchinfer.core.records import Completion, Request, TextPiece
from batchinfer.engines.vllm_requests import keeps_best


class AnswerParts:
    """Takes the parts of one answer, and shows their texts at once.

    Args:
        request: The request.
        show: Function that takes the pieces of the answer's texts.
    """

    def __init__(self, request: Request, show: Callable[[TextPiece], None]) -> None:
        self._request = request
        self._show = show
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] | None = None
        self._num_shown: dict[int, int] = {}
        """Number of pieces with text that were shown, by index of the answer."""

    @property
    def has_shown(self) -> bool:
        """Whether pieces were shown. If so, the request cannot be tried again."""
        return bool(self._num_shown)

    def restart(self) -> None:
        """Forget the parts of an earlier attempt, of which nothing was shown."""
        self._choices.clear()
        self._usage = None

    def add(self, part: dict[str, Any]) -> None:
        """Take the next part."""
        self._usage = part.get("usage") or self._usage
        for found in part.get("choices") or ():
            index = int(found.get("index") or 0)
            choice = self._choices.setdefault(index, {"index": index, "text": ""})
            delta = found.get("delta") or found
            text = delta.get("content") or delta.get("text") or delta.get("refusal") or ""
            choice["text"] += text
            if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                choice["reasoning"] = choice.get("reasoning", "") + reasoning
            for name in ("finish_reason", "stop_reason"):
                choice[name] = found.get(name) or choice.get(name)
            if found.get("logprobs"):
                gathered = choice.setdefault("logprobs", {})
                for name, values in found["logprobs"].items():
                    if isinstance(values, list):
                        gathered.setdefault(name, []).extend(values)
            if text:
                self._num_shown[index] = self._num_shown.get(index, 0) + 1
                self._show(TextPiece(key=self._request.key, index=index, text=text, num_tokens=1))

    def whole(self) -> bytes:
        """Return the body that an answer in one piece would have had; empty if the last parts are missing."""
        choices = list(self._choices.values())
        if not choices or not all(choice["finish_reason"] for choice in choices):
            return b""
        # The two halves of a character may have come in two parts. Only as escapes they make one character again.
        return json.dumps({"choices": choices, "usage": self._usage}).encode()

    def settle(self, completion: Completion) -> Completion:
        """Make the numbers of tokens in pieces and in choices equal. An endpoint may send several tokens in a part."""
        choices = []
        for choice in completion.choices:
            num_shown = self._num_shown.get(choice.index, 0)
            rest = choice.num_tokens - num_shown
            if rest > 0:
                self._show(TextPiece(key=completion.key, index=choice.index, num_tokens=rest))
            choices.append(msgspec.structs.replace(choice, num_tokens=num_shown + max(rest, 0)))
        return msgspec.structs.replace(completion, choices=choices)


def parts_of(request: Request, show: Callable[[TextPiece], None]) -> AnswerParts | None:
    """Return what takes the parts of a request's answer; None for a request that is not streamed.

    Which answers `best_of` keeps is known only at the end, so they are not streamed.
    """
    is_streamed = request.is_streamed and not keeps_best(request.sampling)
    return AnswerParts(request, show) if is_streamed else None
