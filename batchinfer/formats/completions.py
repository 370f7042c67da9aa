"""The output format `completions`: each line holds a request and its result."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Choice, Completion
from batchinfer.formats.lines import (
    OutputChoice,
    OutputError,
    OutputFormat,
    OutputLine,
    answering_model,
    failure_of,
    shown_choices,
    to_line,
)
from batchinfer.formats.openai import (
    completion_logprobs,
    error_object,
    parts_beside_text,
    prompt_fields,
)
from batchinfer.prompts import Prepared


class CompletionsEncoder:
    """Writes lines of {request, result}. The line of a failed row has a null result and an error.

    Args:
        strip: Remove white space around every answer.
        has_timing: Write `request_time`. Its `batch_time` is the row's own seconds in the engine, and its
            `batch_size` is always 1, because the engine has no fixed batches.
        model: Name of the run's model, to write which model or adapter answered; empty if the run has no adapters.
    """

    def __init__(self, *, strip: bool, has_timing: bool, model: str = "") -> None:
        self._strip = strip
        self._has_timing = has_timing
        self._model = model

    def encode(self, prepared: Prepared, completion: Completion | None = None) -> bytes:
        """Return one line."""
        line: dict[str, Any] = {"request": prepared.body}
        if prepared.body is None:
            line["request"] = {} if prepared.prompt is None else {"prompt": prepared.prompt}
        failure = failure_of(prepared, completion)
        if failure is None and completion is not None:
            of_prompt = prompt_fields(prepared, completion)
            choices = shown_choices(prepared, completion)
            result: dict[str, Any] = {
                "choices": [self._choice(choice) | of_prompt for choice in choices]
            }
            if self._model:
                result["model"] = answering_model(prepared, self._model)
            if self._has_timing:
                seconds = completion.queue_seconds + completion.generation_seconds
                result["request_time"] = {"batch_time": round(seconds, 6), "batch_size": 1}
            line["result"] = result
        elif failure is not None:
            line["result"] = None
            line["error"] = error_object(failure, prepared.param)
        if prepared.source is not None:
            line["source"] = prepared.source
        return to_line(line)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        found = {
            "text": choice.text.strip() if self._strip else choice.text,
            "index": choice.index,
            "logprobs": completion_logprobs(choice),
            "finish_reason": choice.finish_reason,
            **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
        }
        return found | parts_beside_text(choice)


class _Result(msgspec.Struct, gc=False):
    choices: list[OutputChoice] = []
    model: str | None = None


class _ResultLine(msgspec.Struct, gc=False):
    request: msgspec.Raw
    result: _Result | None
    error: OutputError | None = None
    source: msgspec.Raw = msgspec.Raw()


def _to_output_line(line: _ResultLine) -> OutputLine:
    is_ok = line.error is None and line.result is not None
    return OutputLine(
        row=None,
        id=None,
        status="ok" if is_ok else "error",
        choices=line.result.choices if is_ok and line.result is not None else [],
        error=None if is_ok else line.error or OutputError(),
        source=line.source,
        model=line.result.model if is_ok and line.result is not None else None,
    )


FORMAT = OutputFormat(
    name="completions",
    make_encoder=lambda config, model, _created: CompletionsEncoder(
        strip=config.strip,
        has_timing=config.has_timing,
        model=model if config.adapters else "",
    ),
    decoder=codec.json_decoder(_ResultLine),
    convert=_to_output_line,
    repeats_request=True,
)
