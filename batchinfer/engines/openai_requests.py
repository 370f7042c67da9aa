"""Translates requests into the OpenAI API's terms, and the API's answers into completions. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import RowError
from batchinfer.core.records import (
    Choice,
    Completion,
    Failure,
    Media,
    Request,
    RequestInput,
    Sampling,
    TokenLogprob,
)
from batchinfer.core.tasks import is_pooling
from batchinfer.engines.vllm_requests import keeps_best, num_generated

T = TypeVar("T")

CHAT_PATH = "/chat/completions"
COMPLETIONS_PATH = "/completions"

# Parameters with the same name in our Sampling and in the API. The later ones are vLLM's additions to the API.
_SHARED = (
    "max_tokens",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "prompt_logprobs",
)
# Flags of our Sampling that are vLLM's additions to the API, with the default of both.
_FLAGS = {"include_stop_str_in_output": False, "ignore_eos": False, "skip_special_tokens": True}
# Largest number of tokens that an answer's usage may report.
_MOST_TOKENS = 1_000_000_000


class BrokenAnswer(Exception):
    """An answer is no JSON, or not in the API's form. Another attempt may give a whole one."""


# --------------------------------------------------------------------------- requests


def body_of(request: Request, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path below the endpoint's URL, and the body, that ask for a request's answer.

    Raises:
        RowError: the prompt is empty, the task is not to generate, or `best_of` is less than `n`.
    """
    if request.task != "generate":
        raise RowError("engine_rejected", f"this engine does not do the task {request.task!r}")
    body: dict[str, Any] = {"model": model}
    is_chat = request.messages is not None
    if is_chat:
        body |= {"messages": _messages_of(request), **(request.chat_options or {})}
    elif request.media:
        raise RowError(
            "media_mismatch",
            "a prompt with images that is no conversation, expected a chat (--as-chat, --messages-column)",
        )
    else:
        prompt = request.token_ids if request.text is None else request.text
        if not prompt:
            raise RowError("empty_prompt", "the prompt is empty")
        # Without a limit, the API would end an answer after 16 tokens; vLLM takes null for what the model has room for.
        body |= {"prompt": prompt, "max_tokens": None}
    return CHAT_PATH if is_chat else COMPLETIONS_PATH, body | _parameters(
        request.sampling, is_chat=is_chat
    )


def _messages_of(request: Request) -> list[dict[str, Any]]:
    """Return a request's messages with their images as the API takes them: by URL, or as a data URL."""
    messages = request.messages or []
    if not request.media:
        return messages
    waiting = iter(request.media)
    return [
        message
        if not isinstance(message["content"], list)
        else {**message, "content": [_part_of(part, waiting) for part in message["content"]]}
        for message in messages
    ]


def _part_of(part: dict[str, Any], waiting: Iterator[Media]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    image = next(waiting)
    url = image.url or f"data:{image.mime};base64,{base64.b64encode(image.data).decode()}"
    found = {"url": url}
    if "detail" in part:
        found["detail"] = part["detail"]
    return {"type": "image_url", "image_url": found}


def _parameters(sampling: Sampling, *, is_chat: bool) -> dict[str, Any]:
    found = {name: value for name in _SHARED if (value := getattr(sampling, name)) is not None}
    for name, default in _FLAGS.items():
        if getattr(sampling, name) is not default:
            found[name] = not default
    count = num_generated(sampling, found)
    if count > 1:
        found["n"] = count
    num_logprobs = _num_logprobs(sampling)
    if num_logprobs is not None and is_chat:
        found |= {"logprobs": True, "top_logprobs": num_logprobs}
    elif num_logprobs is not None:
        found["logprobs"] = num_logprobs
    extra = sampling.extra or {}
    # A request's own constraint is in `extra`, unread, and takes the place of the run's.
    has_own = "response_format" in extra or "structured_outputs" in extra
    for kind, value in ({} if has_own else sampling.structured or {}).items():
        if kind == "json":
            schema = {"name": "answer", "schema": value}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind == "json_object":
            found["response_format"] = {"type": kind}
        else:  # vLLM's addition to the API
            found["structured_outputs"] = {kind: value}
    return found | extra


def _num_logprobs(sampling: Sampling) -> int | None:
    """Return how many alternatives to ask for; None for no log-probabilities. `best_of` ranks the answers by them."""
    if sampling.logprobs is None and keeps_best(sampling):
        return 0
    return sampling.logprobs


def num_tokens_asked(request: Request, mean_answer: float) -> int:
    """Estimate the tokens of prompt and answers together, as endpoints count them for their limits.

    Args:
        request: The request.
        mean_answer: Tokens of an answer whose length has no limit.
    """
    prompt = sum(map(_num_prompt_tokens, request.prompts))
    if is_pooling(request.task):
        return prompt
    sampling = request.sampling
    answer = mean_answer if sampling.max_tokens is None else sampling.max_tokens
    return prompt + math.ceil(answer * max(sampling.n, sampling.best_of or 0))


def _num_prompt_tokens(prompt: Request | RequestInput) -> int:
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if prompt.text is not None:
        return len(prompt.text) // 4
    return sum(len(str(message.get("content"))) // 4 + 4 for message in prompt.messages or [])


# --------------------------------------------------------------------------- answers


class _AnswerMessage(msgspec.Struct, gc=False):
    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _AnswerChoice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    message: _AnswerMessage | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _ReasoningTokens(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _AnswerUsage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _ReasoningTokens | None = None


class Answer(msgspec.Struct, gc=False):
    """The body of an answer, as far as it is used."""

    choices: list[_AnswerChoice]
    usage: _AnswerUsage | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


_decoder = codec.json_decoder(Answer)


def read_answer(data: bytes) -> Answer:
    """Read the body of an answer to a request for text. See `decode_body`."""
    return decode_body(_decoder, data)


def decode_body(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Decode the body of an answer.

    Raises:
        BrokenAnswer: the body is no JSON, or not in the API's form.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenAnswer(f"an answer that is not in the API's form ({error})") from error


def completion_of(request: Request, data: bytes, seconds: tuple[float, float]) -> Completion:
    """Convert the body of an answer to a completion.

    Counts of tokens are 0 if the endpoint does not report its usage.

    Args:
        request: The request that the body answers.
        data: The body.
        seconds: Seconds that the request waited here, and seconds that the endpoint took.

    Raises:
        BrokenAnswer: the body is no JSON, or not in the API's form.
    """
    answer = read_answer(data)
    try:
        choices = _choices_of(request.sampling, answer)
        prompt_logprobs = _prompt_positions(request, answer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BrokenAnswer(
            f"log-probabilities that are not in the API's form ({error!r})"
        ) from error
    usage = answer.usage or _AnswerUsage()
    details = usage.prompt_tokens_details or _CachedTokens()
    num_reasoning = (usage.completion_tokens_details or _ReasoningTokens()).reasoning_tokens
    num_answered = _count(usage.completion_tokens)
    wanted, sampling = request.sampling.n, request.sampling
    if len(choices) == 1 < wanted and num_generated(sampling, _temperature(sampling)) == 1:
        # At temperature 0 all answers would be equal, so one was asked for.
        choices = [msgspec.structs.replace(choices[0], index=index) for index in range(wanted)]
        num_answered *= wanted
        num_reasoning = None if num_reasoning is None else num_reasoning * wanted
    failure = None
    if len(choices) < wanted:
        reason = "; it may not know n above 1" if wanted > 1 else ""
        message = f"the endpoint gave {len(choices)} of {wanted} answers{reason}"
        failure = Failure(code="engine_rejected", message=message)
    return Completion(
        key=request.key,
        choices=[] if failure else choices[:wanted],
        failure=failure,
        prompt_tokens=_count(usage.prompt_tokens),
        cached_tokens=_count(details.cached_tokens),
        completion_tokens=num_answered,
        prompt_logprobs=prompt_logprobs,
        reasoning_tokens=None if num_reasoning is None else _count(num_reasoning),
        prompt_token_ids=_prompt_token_ids(answer),
        queue_seconds=seconds[0],
        generation_seconds=seconds[1],
    )


def _count(reported: int | None) -> int:
    """Return a number of tokens as the endpoint reports it; 0 for a number that cannot be true."""
    return reported if reported is not None and 0 < reported <= _MOST_TOKENS else 0


def _temperature(sampling: Sampling) -> dict[str, Any]:
    return {"temperature": sampling.temperature}


def _choices_of(sampling: Sampling, answer: Answer) -> list[Choice]:
    usage = answer.usage or _AnswerUsage()
    alone = _count(usage.completion_tokens) if len(answer.choices) == 1 else 0
    choices = [
        _choice_of(each, sampling, alone)
        for each in sorted(answer.choices, key=lambda each: each.index)
    ]
    if keeps_best(sampling):
        choices.sort(key=_mean_logprob, reverse=True)
    has_logprobs = sampling.logprobs is not None
    return [
        msgspec.structs.replace(
            choice,
            index=index,
            logprobs=choice.logprobs if has_logprobs else None,
            cumulative_logprob=choice.cumulative_logprob if has_logprobs else None,
        )
        for index, choice in enumerate(choices)
    ]


def _choice_of(found: _AnswerChoice, sampling: Sampling, num_tokens: int) -> Choice:
    positions = None
    if found.logprobs is not None and _num_logprobs(sampling) is not None:
        positions = _positions(found.logprobs)
    return Choice(
        index=found.index,
        text=_text_of(found),
        finish_reason=found.finish_reason or "stop",
        stop_reason=found.stop_reason,
        logprobs=positions,
        cumulative_logprob=None if positions is None else sum(each.logprob for each in positions),
        num_tokens=num_tokens or len(positions or ()),
        reasoning=_reasoning_of(found),
        tool_calls=(found.message.tool_calls or None) if found.message else None,
        token_ids=found.token_ids,
    )


def _text_of(found: _AnswerChoice) -> str:
    """Return a choice's text. A call of the older form `function_call` becomes JSON, after the text of the message."""
    message = found.message
    if message is None:
        return found.text or ""
    content = message.content
    if isinstance(content, list):  # parts, of which some endpoints make a message
        content = "".join(str(part.get("text") or "") for part in content)
    call = message.function_call
    shown = msgspec.json.encode([call]).decode() if call else ""
    return "\n".join(filter(None, (content or message.refusal, shown)))


def _reasoning_of(found: _AnswerChoice) -> str | None:
    message = found.message
    if message is None:
        return found.reasoning
    return message.reasoning or message.reasoning_content


def _mean_logprob(choice: Choice) -> float:
    return (choice.cumulative_logprob or 0.0) / max(1, len(choice.logprobs or ()))


def _positions(logprobs: dict[str, Any]) -> list[TokenLogprob] | None:
    """Return an answer's log-probabilities, which chats and completions write differently."""
    content = logprobs.get("content")
    if content is not None:
        return [
            TokenLogprob(
                token=str(each["token"]),
                logprob=float(each["logprob"]),
                top=[
                    (str(top["token"]), float(top["logprob"]))
                    for top in each.get("top_logprobs") or ()
                ],
            )
            for each in content
        ]
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if tokens is None or values is None:
        return None
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        TokenLogprob(
            token=str(token),
            logprob=float(value),
            top=[(str(text), float(other)) for text, other in (top or {}).items()],
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]


def _prompt_token_ids(answer: Answer) -> list[int] | None:
    """Return the prompt's token ids, which vLLM adds to the answer if `return_token_ids` asks for them."""
    in_choice = answer.choices[0].prompt_token_ids if answer.choices else None
    return answer.prompt_token_ids or in_choice


def _prompt_positions(request: Request, answer: Answer) -> list[TokenLogprob | None] | None:
    """Return the prompt's log-probabilities, which vLLM adds to the API; None if there are none."""
    if request.sampling.prompt_logprobs is None:
        return None
    found = answer.prompt_logprobs
    if found is None and answer.choices:
        found = answer.choices[0].prompt_logprobs
    if found is None:
        return None
    return [_prompt_position(each, request.sampling.prompt_logprobs) for each in found]


def _prompt_position(found: dict[str, Any] | None, most: int) -> TokenLogprob | None:
    if not found:
        return None
    # vLLM puts the prompt's own token first, and then the likeliest ones.
    token_id, own = next(iter(found.items()))
    ranked = sorted(found.items(), key=lambda item: item[1].get("rank") or 0)
    if most >= 0:
        ranked = ranked[:most]
    return TokenLogprob(
        token=str(own["decoded_token"]),
        logprob=float(own["logprob"]),
        token_id=int(token_id),
        top=[(str(each["decoded_token"]), float(each["logprob"])) for _, each in ranked],
        rank=int(own.get("rank") or 0),
        top_ids=[int(each) for each, _ in ranked],
    )
