"""The output format `openai-batch`: lines as in the output file of OpenAI's batch API, with the response bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Choice, Completion, Failure, TokenLogprob
from batchinfer.core.tasks import is_pooling
from batchinfer.formats.lines import (
    OutputChoice,
    OutputError,
    OutputFormat,
    OutputLine,
    OutputUsage,
    answering_model,
    asked_prompt_logprobs,
    digest_of,
    failure_of,
    finite,
    num_completion_tokens,
    shown_choices,
    task_of,
    to_line,
)
from batchinfer.formats.openai_vectors import PooledBody, pooled_body
from batchinfer.formats.vectors import is_base64
from batchinfer.prompts import COMPLETIONS_URL, Code, Prepared

# Finish reasons that OpenAI's chat and completions APIs know. Other reasons are written as "stop".
_CHAT_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_COMPLETION_REASONS = frozenset({"stop", "length", "content_filter"})
# Error codes that mean that the request is wrong or that the engine refused it. They are written as HTTP status 400.
_CLIENT_CODES = frozenset({*(code.value for code in Code), "engine_rejected"})


class OpenAIBatchEncoder:
    """Writes lines of OpenAI's batch output file.

    The ids in a line, except `custom_id`, are derived from the row's key, so every worker writes the same ids for it.

    Args:
        model: The run's model.
        created: Time to write into the response bodies, in Unix seconds.
        strip: Remove white space around every answer.
        as_base64: Write vectors as base64, where a request does not say otherwise.
    """

    def __init__(self, *, model: str, created: int, strip: bool, as_base64: bool = False) -> None:
        self._as_base64 = as_base64
        self._model = model
        self._created = created
        self._strip = strip

    def encode(self, prepared: Prepared, completion: Completion | None = None) -> bytes:
        """Return one line of the batch output."""
        digest = digest_of(prepared.key)
        line: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": prepared.id}
        failure = failure_of(prepared, completion)
        if failure is None and completion is not None:
            body = self._body(digest, prepared, completion)
            line |= {"response": _response(digest, 200, body), "error": None}
        elif failure is not None and failure.code in _CLIENT_CODES:
            body = {"error": error_object(failure, prepared.param)}
            line |= {"response": _response(digest, 400, body), "error": None}
        elif failure is not None:
            # The row failed for a reason outside the request. OpenAI writes a null response in such cases, for
            # example if a batch expired.
            error = {"code": failure.code, "message": failure.message}
            line |= {"response": None, "error": error}
        if prepared.source is not None:
            line["source"] = prepared.source
        if prepared.prompt is not None and (prepared.view is None or not prepared.view.echo):
            line["prompt"] = prepared.prompt
        return to_line(line)

    def _body(self, digest: str, prepared: Prepared, completion: Completion) -> dict[str, Any]:
        if is_pooling(task_of(prepared)):
            return pooled_body(
                prepared,
                completion,
                digest=digest,
                created=self._created,
                model=answering_model(prepared, self._model),
                as_base64=self._as_base64,
            )
        choices = shown_choices(prepared, completion)
        is_completion = _is_completion(prepared)
        make = self._completion_choice if is_completion else self._chat_choice
        num_generated = num_completion_tokens(prepared, completion)
        usage = {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": completion.prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        }
        if completion.reasoning_tokens is not None:
            details = {"reasoning_tokens": completion.reasoning_tokens}
            usage["completion_tokens_details"] = details
        of_prompt = prompt_fields(prepared, completion)
        of_choice, of_body = (of_prompt, {}) if is_completion else ({}, of_prompt)
        return {
            "id": f"{'cmpl' if is_completion else 'chatcmpl'}-{digest}",
            "object": "text_completion" if is_completion else "chat.completion",
            "created": self._created,
            "model": answering_model(prepared, self._model),
            "choices": [make(choice) | of_choice for choice in choices],
            "usage": usage,
            **of_body,
        }

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            logprobs = {"content": list(map(_chat_logprob, choice.logprobs)), "refusal": None}
        text = self._text(choice)
        content = text if text or not choice.tool_calls else None
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= parts_beside_text(choice)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _reason(choice, _CHAT_REASONS),
            **_additions(choice),
        }

    def _completion_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": self._text(choice),
            "logprobs": completion_logprobs(choice),
            "finish_reason": _reason(choice, _COMPLETION_REASONS),
            **parts_beside_text(choice),
            **_additions(choice),
        }

    def _text(self, choice: Choice) -> str:
        return choice.text.strip() if self._strip else choice.text


def parts_beside_text(choice: Choice) -> dict[str, Any]:
    """Return an answer's reasoning and its calls of tools, as far as it has them."""
    parts = {"reasoning": choice.reasoning, "tool_calls": choice.tool_calls}
    return {name: part for name, part in parts.items() if part}


def _additions(choice: Choice) -> dict[str, Any]:
    """Return the fields that vLLM adds to a choice of the API, as far as they have a value."""
    added = {"stop_reason": choice.stop_reason, "token_ids": choice.token_ids}
    return {name: value for name, value in added.items() if value is not None}


def prompt_fields(prepared: Prepared, completion: Completion) -> dict[str, Any]:
    """Return what vLLM adds to the API about the prompt, if it was asked for: log-probabilities and token ids.

    vLLM writes both into the body of a chat, and into each choice of a completion.
    """
    fields: dict[str, Any] = {}
    positions = asked_prompt_logprobs(prepared, completion)
    if positions is not None:
        fields["prompt_logprobs"] = [
            None if position is None else _prompt_position(position) for position in positions
        ]
    if completion.prompt_token_ids is not None:
        fields["prompt_token_ids"] = completion.prompt_token_ids
    return fields


def _prompt_position(position: TokenLogprob) -> dict[str, Any]:
    """Return a token of the prompt and its alternatives by token id, the token itself first."""
    found = {str(position.token_id): _ranked(position.token, position.logprob, position.rank)}
    alternatives = zip(position.top_ids, position.top, strict=False)
    for rank, (token_id, (token, logprob)) in enumerate(alternatives, 1):
        found.setdefault(str(token_id), _ranked(token, logprob, rank))
    return found


def _ranked(token: str, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank or None, "decoded_token": token}


def error_object(failure: Failure, param: str | None) -> dict[str, Any]:
    """Return a failure as an error object of OpenAI's API. `param` is the request parameter that caused it, or None."""
    is_client = failure.code in _CLIENT_CODES
    return {
        "message": failure.message,
        "type": "invalid_request_error" if is_client else "server_error",
        "param": param,
        "code": failure.code,
    }


def completion_logprobs(choice: Choice) -> dict[str, list[Any]] | None:
    """Return an answer's log-probabilities as the completions API writes them: four lists with one entry per token.

    `text_offset` counts characters from the beginning of the choice's text. A token without a log-probability (the
    first of an echoed prompt) has null in `token_logprobs` and `top_logprobs`.
    """
    if choice.logprobs is None:
        return None
    offsets = []
    offset = 0
    for position in choice.logprobs:
        offsets.append(offset)
        offset += len(position.token)
    return {
        "tokens": [position.token for position in choice.logprobs],
        "token_logprobs": [finite(position.logprob) for position in choice.logprobs],
        "top_logprobs": [_top(position) for position in choice.logprobs],
        "text_offset": offsets,
    }


def _top(position: TokenLogprob) -> dict[str, float | None] | None:
    own = finite(position.logprob)
    if own is None:
        return None
    # Two tokens can have the same text, for example if each is a part of a character. Likelier tokens come first, so
    # `setdefault` keeps the likelier one.
    top: dict[str, float | None] = {}
    for token, logprob in [*position.top, (position.token, own)]:
        top.setdefault(token, finite(logprob))
    return top


def _chat_logprob(position: TokenLogprob) -> dict[str, Any]:
    alternatives: Sequence[tuple[str, float]] = position.top
    return {
        **_token(position.token, position.logprob),
        "top_logprobs": [_token(token, logprob) for token, logprob in alternatives],
    }


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {
        "token": token,
        "bytes": list(token.encode("utf-8", "replace")),
        "logprob": finite(logprob),
    }


def _is_completion(prepared: Prepared) -> bool:
    if prepared.url:
        return prepared.url == COMPLETIONS_URL
    return not prepared.is_chat


def _reason(choice: Choice, known: frozenset[str]) -> str:
    return choice.finish_reason if choice.finish_reason in known else "stop"


def _response(digest: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": f"req_{digest}", "body": body}


# --------------------------------------------------------------------------- reading


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _BatchChoice(OutputChoice, gc=False):
    message: _Message | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _AnswerDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _BatchUsage(OutputUsage, gc=False):
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _AnswerDetails | None = None


class _Body(PooledBody, gc=False):
    choices: list[_BatchChoice] = []
    usage: _BatchUsage = msgspec.field(default_factory=_BatchUsage)
    model: str | None = None
    error: OutputError | None = None


class _Response(msgspec.Struct, gc=False):
    status_code: int = 0
    body: _Body | None = None


class _BatchLine(msgspec.Struct, gc=False):
    custom_id: str
    response: _Response | None = None
    error: OutputError | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()


def _to_output_line(line: _BatchLine) -> OutputLine:
    response = line.response
    body = (response.body if response is not None else None) or _Body()
    is_ok = line.error is None and response is not None and response.status_code == 200
    usage = body.usage
    if usage.prompt_tokens_details is not None:
        usage.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if usage.completion_tokens_details is not None:
        usage.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens
    for choice in body.choices:
        message = choice.message
        if message is not None:
            choice.text = message.content or ""
            choice.reasoning = message.reasoning or message.reasoning_content
            choice.tool_calls = message.tool_calls
    return OutputLine(
        row=None,
        id=line.custom_id,
        status="ok" if is_ok else "error",
        choices=list(body.choices) if is_ok else [],
        usage=usage,
        error=None if is_ok else line.error or body.error or OutputError(),
        prompt=line.prompt,
        source=line.source,
        model=body.model if is_ok else None,
        data=body.vectors() if is_ok else [],
    )


FORMAT = OutputFormat(
    name="openai-batch",
    make_encoder=lambda config, model, created: OpenAIBatchEncoder(
        model=model, created=created, strip=config.strip, as_base64=is_base64(config)
    ),
    decoder=codec.json_decoder(_BatchLine),
    convert=_to_output_line,
)
