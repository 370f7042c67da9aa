"""The output format `native`: how its lines are written and read. docs/format.md describes the fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Choice, Completion, Pooled, TokenLogprob
from batchinfer.formats.lines import (
    OutputError,
    OutputFormat,
    OutputLine,
    OutputUsage,
    answering_model,
    failure_of,
    finite,
    num_completion_tokens,
    shown_choices,
    task_of,
    to_line,
)
from batchinfer.formats.vectors import OutputVectors, Vector, is_base64, shown_vectors
from batchinfer.prompts import Prepared

_UNSET = msgspec.UNSET


class _TopLine(msgspec.Struct, gc=False):
    token: str
    logprob: float | None


class _LogprobLine(msgspec.Struct, omit_defaults=True, gc=False):
    token: str
    logprob: float | None
    token_id: int = -1
    top: list[_TopLine] = []


class _ChoiceLine(msgspec.Struct, gc=False):
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | msgspec.UnsetType = _UNSET
    num_tokens: int | msgspec.UnsetType = _UNSET
    logprobs: list[_LogprobLine] | msgspec.UnsetType = _UNSET
    reasoning: str | msgspec.UnsetType = _UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = _UNSET
    token_ids: list[int] | msgspec.UnsetType = _UNSET


class _Timing(msgspec.Struct, gc=False):
    queue_seconds: float
    generation_seconds: float


class _NativeLine(msgspec.Struct, gc=False, rename={"row": "_row", "row_id": "_id"}):
    row: int
    row_id: str
    status: str
    choices: list[_ChoiceLine]
    usage: OutputUsage
    timing: _Timing | msgspec.UnsetType
    error: OutputError | None
    prompt: Any = _UNSET
    prompt_logprobs: list[_LogprobLine | None] | msgspec.UnsetType = _UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = _UNSET
    source: dict[str, Any] | msgspec.UnsetType = _UNSET
    model: str | msgspec.UnsetType = _UNSET
    embedding: Vector | msgspec.UnsetType = _UNSET
    token_embeddings: list[Vector] | msgspec.UnsetType = _UNSET
    label: str | msgspec.UnsetType = _UNSET
    probs: list[float | None] | msgspec.UnsetType = _UNSET
    score: float | msgspec.UnsetType = _UNSET
    reward: float | msgspec.UnsetType = _UNSET
    rewards: list[list[float]] | msgspec.UnsetType = _UNSET
    data: list[OutputVectors] | msgspec.UnsetType = _UNSET


_NO_USAGE = OutputUsage(0, 0, 0)


class NativeEncoder:
    """Writes output lines of the format `native`.

    Args:
        strip: Remove white space around every answer.
        has_timing: Write the seconds that each row took. Without them, equal answers give equal bytes.
        model: Name of the run's model, to write which model or adapter answered; empty if the run has no adapters.
        as_base64: Write vectors as base64.
    """

    def __init__(
        self,
        *,
        strip: bool = False,
        has_timing: bool = True,
        model: str = "",
        as_base64: bool = False,
    ) -> None:
        self._as_base64 = as_base64
        self._strip = strip
        self._has_timing = has_timing
        self._model = model

    def encode(self, prepared: Prepared, completion: Completion | None = None) -> bytes:
        """Return one native line."""
        failure = failure_of(prepared, completion)
        line = _NativeLine(prepared.row, prepared.id, "ok", [], _NO_USAGE, _UNSET, None)
        if failure is not None:
            line.status = "error"
            line.error = OutputError(failure.code, failure.message)
        if completion is not None:
            self._add_answer(line, prepared, completion, is_ok=failure is None)
        if prepared.prompt is not None:
            line.prompt = prepared.prompt
        if prepared.source is not None:
            line.source = prepared.source
        return to_line(line)

    def _add_answer(
        self, line: _NativeLine, prepared: Prepared, completion: Completion, *, is_ok: bool
    ) -> None:
        line.usage = OutputUsage(
            completion.prompt_tokens,
            num_completion_tokens(prepared, completion),
            completion.cached_tokens,
        )
        if completion.reasoning_tokens is not None:
            line.usage.reasoning_tokens = completion.reasoning_tokens
        if self._has_timing:
            line.timing = _Timing(
                _rounded(completion.queue_seconds), _rounded(completion.generation_seconds)
            )
        if not is_ok:
            return
        if self._model:
            line.model = answering_model(prepared, self._model)
        if completion.pooled:
            self._add_vectors(line, prepared, completion.pooled)
        choices = shown_choices(prepared, completion)
        has_several = len(choices) > 1
        line.choices = [self._choice(choice, has_several) for choice in choices]
        if completion.prompt_logprobs is not None:
            line.prompt_logprobs = [
                None if position is None else _logprob(position)
                for position in completion.prompt_logprobs
            ]
        if completion.prompt_token_ids is not None:
            line.prompt_token_ids = completion.prompt_token_ids

    def _add_vectors(self, line: _NativeLine, prepared: Prepared, pooled: Sequence[Pooled]) -> None:
        task = task_of(prepared)
        form = (prepared.body or {}).get("encoding_format")
        as_base64 = form == "base64" if form else self._as_base64
        found = [shown_vectors(each, task, as_base64=as_base64) for each in pooled]
        if prepared.body is not None:  # a request may ask about several texts
            line.data = found
            return
        for name in OutputVectors.__struct_fields__:
            value = getattr(found[0], name)
            if value is not None:
                setattr(line, name, value)

    def _choice(self, choice: Choice, has_several: bool) -> _ChoiceLine:
        line = _ChoiceLine(
            choice.index,
            choice.text.strip() if self._strip else choice.text,
            choice.finish_reason,
        )
        if choice.stop_reason is not None:
            line.stop_reason = choice.stop_reason
        if choice.reasoning is not None:
            line.reasoning = choice.reasoning
        if choice.tool_calls:
            line.tool_calls = choice.tool_calls
        if has_several and (choice.num_tokens or not choice.text):
            line.num_tokens = choice.num_tokens
        if choice.logprobs is not None:
            line.logprobs = [_logprob(position) for position in choice.logprobs]
        if choice.token_ids is not None:
            line.token_ids = choice.token_ids
        return line


def _logprob(position: TokenLogprob) -> _LogprobLine:
    return _LogprobLine(
        position.token,
        finite(position.logprob),
        position.token_id,
        [_TopLine(token, finite(logprob)) for token, logprob in position.top],
    )


def _rounded(seconds: float) -> float:
    # Times are rounded to microseconds. An engine that measures no time gives 0.
    return round(seconds, 6) if seconds else 0.0


FORMAT = OutputFormat(
    name="native",
    make_encoder=lambda config, model, _created: NativeEncoder(
        strip=config.strip,
        has_timing=config.has_timing,
        model=model if config.adapters else "",
        as_base64=is_base64(config),
    ),
    decoder=codec.json_decoder(OutputLine),
    has_flat_lines=True,
)
