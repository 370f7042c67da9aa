"""Output lines as other commands read them: enough to count, to check and to collect answers."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.records import Record


class OutputSummary(Record, frozen=True, kw_only=True):
    """What a stored output line says.

    `row` and `id` are None where the format has none; token counts are 0 where it has none.
    """

    is_ok: bool
    output_format: str
    row: int | None = None
    id: str | None = None
    code: str = ""
    """Of an error row; empty for the others."""
    message: str = ""
    texts: list[str] = []
    """One per choice."""
    finish_reasons: list[str] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Response(msgspec.Struct):
    status_code: int = 0
    body: _Body | None = None


class _Line(msgspec.Struct, rename={"row": "_row", "row_id": "_id"}):
    """Every format's fields; which ones are there tells the format."""

    row: int | None = None
    row_id: str | None = None
    status: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    custom_id: str | None = None
    response: _Response | None = None
    request: msgspec.Raw = msgspec.Raw()
    result: _Body | None = None


_decode = msgspec.json.Decoder(_Line).decode


def read_line(data: bytes, output_format: str = "") -> OutputSummary:
    """Read one output line of any format.

    Args:
        data: The line, without its newline.
        output_format: What it should be; empty takes what it is.

    Raises:
        InputError: it is no output line, or one of another format.
    """
    try:
        line = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(str(error)) from error
    if line.status is not None:
        summary = _native(line)
    elif line.custom_id is not None:
        summary = _batch(line)
    elif bytes(line.request):
        summary = _completions(line)
    else:
        raise _unreadable("it has neither status, custom_id nor request")
    if output_format and summary.output_format != output_format:
        raise _unreadable(f"it is in the format {summary.output_format}, expected {output_format}")
    return summary


def _native(line: _Line) -> OutputSummary:
    is_ok = line.status == "ok"
    if not is_ok and line.status != "error":
        raise _unreadable(f"its status is {line.status!r}, expected ok or error")
    return OutputSummary(
        is_ok=is_ok,
        output_format="native",
        row=line.row,
        id=line.row_id,
        **_failure(None if is_ok else line.error, is_ok=is_ok),
        **_answers(line.choices, line.usage),
    )


def _batch(line: _Line) -> OutputSummary:
    response = line.response
    body = (response.body if response is not None else None) or _Body()
    is_ok = line.error is None and response is not None and response.status_code == 200
    return OutputSummary(
        is_ok=is_ok,
        output_format="openai-batch",
        id=line.custom_id,
        **_failure(line.error or body.error, is_ok=is_ok),
        **_answers(body.choices, body.usage),
    )


def _completions(line: _Line) -> OutputSummary:
    is_ok = line.error is None and line.result is not None
    choices = line.result.choices if line.result is not None else []
    return OutputSummary(
        is_ok=is_ok,
        output_format="completions",
        **_failure(line.error, is_ok=is_ok),
        **_answers(choices, None),
    )


def _failure(error: _Error | None, *, is_ok: bool) -> dict[str, Any]:
    if is_ok:
        return {}
    error = error or _Error()
    return {"code": error.code or "unknown", "message": error.message or ""}


def _answers(choices: list[_Choice], usage: _Usage | None) -> dict[str, Any]:
    usage = usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    return {
        "texts": [
            choice.text
            if choice.text is not None
            else (choice.message.content if choice.message is not None else None) or ""
            for choice in choices
        ],
        "finish_reasons": [choice.finish_reason or "" for choice in choices],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens or details.cached_tokens,
    }


def _unreadable(what: str) -> InputError:
    return InputError(
        f"output line: not readable ({what}), expected a line of a run's output",
        hint="`batchinfer verify` checks a run's outputs against their markers",
    )
