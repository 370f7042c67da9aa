"""What every output format shares: the answers that a request wants to see, and failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from batchinfer.core.records import Choice, Completion, Failure, TokenLogprob
from batchinfer.prompts import Prepared

# Below this, log-probabilities are as good as minus infinity, which JSON does not have.
LOWEST_LOGPROB = -9999.0
UNANSWERED = Failure(code="internal_error", message="the row has neither an answer nor an error")

_encode = msgspec.json.Encoder().encode


class Encoder(Protocol):
    """Makes output lines. Pure."""

    def encode(self, prepared: Prepared, completion: Completion | None = None) -> bytes:
        """Return one JSON object, without a newline.

        Args:
            prepared: The row.
            completion: The engine's answer; None for a row that failed before it had a request.
        """
        ...


def failure_of(prepared: Prepared, completion: Completion | None) -> Failure | None:
    """Why the row has no answer, or None if it has one."""
    if completion is None:
        return prepared.failure or UNANSWERED
    return completion.failure or prepared.failure


def shown_choices(prepared: Prepared, completion: Completion) -> Sequence[Choice]:
    """Return the answers in the form that the request asked for."""
    view = prepared.view
    if view is None or not view.echo:
        return completion.choices
    prefix = prepared.prompt if isinstance(prepared.prompt, str) else ""
    positions = completion.prompt_logprobs
    return [
        _with_prompt(choice, prefix, positions, is_prompt_only=view.is_prompt_only)
        for choice in completion.choices
    ]


def num_completion_tokens(prepared: Prepared, completion: Completion) -> int:
    """Tokens generated, as the request sees them."""
    if prepared.view is not None and prepared.view.is_prompt_only:
        return 0
    return completion.completion_tokens


def _with_prompt(
    choice: Choice,
    prefix: str,
    positions: list[TokenLogprob | None] | None,
    *,
    is_prompt_only: bool,
) -> Choice:
    logprobs = choice.logprobs
    if is_prompt_only:
        logprobs = [] if logprobs is not None else None
    if logprobs is not None and positions is not None:
        logprobs = [*_named(prefix, positions), *logprobs]
    return msgspec.structs.replace(
        choice,
        text=prefix if is_prompt_only else prefix + choice.text,
        finish_reason="length" if is_prompt_only else choice.finish_reason,
        logprobs=logprobs,
    )


def _named(prefix: str, positions: list[TokenLogprob | None]) -> list[TokenLogprob]:
    # The first token has no predecessor, hence no log-probability, and engines leave it out; its text
    # is what the others leave of the prompt.
    rest = "".join(position.token for position in positions if position is not None)
    first = prefix[: len(prefix) - len(rest)] if rest and prefix.endswith(rest) else ""
    if not rest:
        first = prefix
    return [
        position if position is not None else TokenLogprob(token=first, logprob=float("nan"))
        for position in positions
    ]


def finite(logprob: float) -> float | None:
    """Return a log-probability as JSON can hold it: NaN marks a token that has none.

    >>> finite(float("-inf")), finite(float("nan"))
    (-9999.0, None)
    """
    if math.isnan(logprob):
        return None
    return max(logprob, LOWEST_LOGPROB)


def to_line(record: Any) -> bytes:
    """Encode an output line; a lone surrogate from an engine becomes U+FFFD rather than a lost row."""
    try:
        return _encode(record)
    except UnicodeEncodeError:
        return _encode(_clean(msgspec.to_builtins(record)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
