"""Translates requests into vLLM's terms, and vLLM's outputs into completions. Starts nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import RowError
from batchinfer.core.records import (
    Choice,
    Completion,
    Failure,
    Request,
    Sampling,
    TextPiece,
    TokenLogprob,
)

# Finish reasons by which vLLM says that a request ended without an answer. Another attempt may succeed.
UNFINISHED_REASONS = frozenset({"abort", "error"})
# Names that `Sampling.extra` must not hold. This module sets these parameters, or they are internal to vLLM.
RESERVED_PARAMETERS = frozenset({"output_kind", "skip_clone", "n", "detokenize", "flat_logprobs"})
# Parameters with the same name in our Sampling and in vLLM's SamplingParams.
SHARED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "min_tokens",
)


def sampling_kwargs(sampling: Sampling, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's sampling as keyword arguments of vLLM's SamplingParams, without structured outputs.

    Args:
        sampling: The request's sampling. A field that is None takes its value from `defaults`, or else vLLM's own
            default. If `max_tokens` is stated in neither, the answer may fill the model's context.
        defaults: Values of the model's generation_config.json.

    Raises:
        RowError: `invalid_parameter`: a parameter has a wrong value, or a request must not set it.
    """
    kwargs: dict[str, Any] = {"max_tokens": None, **defaults}
    for name in SHARED_PARAMETERS:
        value = getattr(sampling, name)
        if value is not None:
            kwargs[name] = value
    if sampling.max_tokens is not None:
        kwargs["max_tokens"] = sampling.max_tokens
    kwargs["include_stop_str_in_output"] = sampling.include_stop_str_in_output
    kwargs["ignore_eos"] = sampling.ignore_eos
    kwargs["skip_special_tokens"] = sampling.skip_special_tokens
    kwargs["n"] = num_generated(sampling, kwargs)
    if keeps_best(sampling) and sampling.logprobs is None:
        # With 0, vLLM returns only the log-probability of the chosen token. This is enough to rank answers.
        kwargs["logprobs"] = 0
    if sampling.logit_bias is not None:
        try:
            kwargs["logit_bias"] = {int(k): float(v) for k, v in sampling.logit_bias.items()}
        except ValueError as error:
            raise RowError("invalid_parameter", "logit_bias: keys are token ids") from error
    for name, value in (sampling.extra or {}).items():
        if name.startswith("_") or name in RESERVED_PARAMETERS:
            raise RowError("invalid_parameter", f"{name}: cannot be set by a request")
        kwargs[name] = value
    return kwargs


def num_generated(sampling: Sampling, kwargs: Mapping[str, Any]) -> int:
    """Return how many answers vLLM generates for a request: `n`, or `best_of` if that is larger.

    At temperature 0 all answers would be equal, so only one is generated.

    Raises:
        RowError: `invalid_parameter`: `best_of` is less than `n`.
    """
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        raise RowError(
            "invalid_parameter",
            f"best_of: is {sampling.best_of}, expected at least n = {sampling.n}",
        )
    wanted = max(sampling.n, sampling.best_of or 0)
    return 1 if kwargs.get("temperature") == 0 and wanted > 0 else wanted


def keeps_best(sampling: Sampling) -> bool:
    """Whether `best_of` is larger than `n`, so that only the best `n` answers are kept."""
    return sampling.best_of is not None and sampling.best_of > sampling.n


def sampling_params(
    sampling: Sampling, defaults: Mapping[str, Any], *, is_streamed: bool = False
) -> Any:
    """Create vLLM's SamplingParams for a request.

    For a streamed request vLLM returns an output at every step, which holds one answer's whole text so far.

    Raises:
        RowError: `invalid_parameter`: vLLM refuses a parameter.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    kwargs = sampling_kwargs(sampling, defaults)
    for name, value in (sampling.extra or {}).items():
        kwargs[name] = checked_extra(name, value)
    try:
        if sampling.structured:
            check_structured(sampling.structured)
            kwargs["structured_outputs"] = StructuredOutputsParams(**sampling.structured)
        kind = RequestOutputKind.CUMULATIVE if is_streamed else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**kwargs, output_kind=kind)
    except client_errors() as error:
        raise RowError("invalid_parameter", first_line(error)) from error


def checked_extra(name: str, value: Any) -> Any:
    """Convert a value to the type of the field `name` of vLLM's SamplingParams. vLLM itself checks few types.

    Raises:
        RowError: `invalid_parameter`: there is no such field, or the value has a wrong type.
    """
    types = _parameter_types()
    if name not in types:
        raise RowError("invalid_parameter", f"{name}: vLLM's SamplingParams has no such field")
    try:
        return codec.convert(value, types[name])
    except msgspec.ValidationError as error:
        raise RowError("invalid_parameter", f"{name}: {error}") from error
    except TypeError as error:  # the field has a type for which JSON has no values
        raise RowError("invalid_parameter", f"{name}: cannot be given here") from error
    except client_errors() as error:
        raise RowError("invalid_parameter", f"{name}: {first_line(error)}") from error


@cache
def _parameter_types() -> dict[str, Any]:
    from vllm.sampling_params import SamplingParams

    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def check_structured(structured: Mapping[str, Any]) -> None:
    """Refuse a kind of structured output that this version of vLLM does not have, and would ignore.

    Raises:
        RowError: `invalid_parameter`: vLLM has no such kind; the message lists the kinds that it has.
    """
    from vllm.sampling_params import StructuredOutputsParams

    known = {field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init}
    for name in structured:
        if name not in known:
            expected = ", ".join(sorted(name for name in known if not name.startswith("_")))
            raise RowError(
                "invalid_parameter", f"structured output: no kind {name!r}, expected {expected}"
            )


def client_errors() -> tuple[type[Exception], ...]:
    """Return the classes of exceptions with which vLLM refuses a request."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # older versions of vLLM lack this class
        return (ValueError, TypeError, NotImplementedError)
    return (VLLMClientError, ValueError, TypeError, NotImplementedError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of the error's class if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


# --------------------------------------------------------------------------- outputs to completions


def completion_of(request: Request, output: Any, seconds: tuple[float, float]) -> Completion:
    """Convert vLLM's RequestOutput of a finished request to a completion.

    Args:
        request: The request that `output` answers.
        output: vLLM's RequestOutput.
        seconds: Seconds that the request waited, and seconds that it ran.
    """
    sampling = request.sampling
    outputs = list(output.outputs)
    bad = next((each for each in outputs if each.finish_reason in UNFINISHED_REASONS), None)
    prompt_ids = output.prompt_token_ids or []
    if bad is not None:
        message = f"the engine ended the request: {bad.finish_reason}"
        failure = Failure(code="engine_error", message=message, transient=True)
        return Completion(key=request.key, failure=failure, prompt_tokens=len(prompt_ids))
    num_tokens = sum(len(each.token_ids) for each in outputs)
    if len(outputs) == 1 < sampling.n:  # at temperature 0 vLLM generated one answer for all `n`
        outputs *= sampling.n
        num_tokens *= sampling.n
    if keeps_best(sampling):
        outputs = sorted(outputs, key=mean_logprob, reverse=True)[: sampling.n]
    return Completion(
        key=request.key,
        choices=[choice_of(index, each, request) for index, each in enumerate(outputs)],
        prompt_tokens=len(prompt_ids),
        cached_tokens=output.num_cached_tokens or 0,
        completion_tokens=num_tokens,
        prompt_logprobs=prompt_logprobs_of(output, sampling),
        prompt_token_ids=list(prompt_ids) if request.returns_token_ids else None,
        queue_seconds=seconds[0],
        generation_seconds=seconds[1],
    )


class AnswerStream:
    """The answers of one streamed request as far as vLLM has returned them."""

    def __init__(self, request: Request) -> None:
        self._key = request.key
        self._has_pieces = not keeps_best(request.sampling)
        self._outputs: dict[int, Any] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        """Number of characters and tokens that pieces have given so far, by index of the answer."""

    def add(self, outputs: Iterable[Any]) -> list[TextPiece]:
        """Take the CompletionOutputs of one step, and return what is new in them."""
        pieces: list[TextPiece] = []
        for output in outputs:
            self._outputs[output.index] = output
            num_chars, num_tokens = self._sent.get(output.index, (0, 0))
            self._sent[output.index] = (len(output.text), len(output.token_ids))
            pieces.append(
                TextPiece(
                    key=self._key,
                    index=output.index,
                    text=output.text[num_chars:],
                    num_tokens=len(output.token_ids) - num_tokens,
                )
            )
        return pieces if self._has_pieces else []

    def all_outputs(self) -> list[Any]:
        """Return the last CompletionOutput of every answer, in order."""
        return [self._outputs[index] for index in sorted(self._outputs)]


def mean_logprob(output: Any) -> float:
    """Return the mean log-probability of an answer's tokens. `best_of` keeps the answers with the highest mean."""
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))


def choice_of(index: int, output: Any, request: Request) -> Choice:
    """Convert one of vLLM's CompletionOutputs to a choice of this request's completion."""
    sampling = request.sampling
    logprobs = None
    if sampling.logprobs is not None and output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=False)
        logprobs = [position_of(token_id, each, sampling.logprobs) for token_id, each in pairs]
    return Choice(
        index=index,
        text=output.text,
        finish_reason=output.finish_reason or "stop",
        stop_reason=output.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=output.cumulative_logprob if sampling.logprobs is not None else None,
        num_tokens=len(output.token_ids),
        token_ids=list(output.token_ids) if request.returns_token_ids else None,
    )


def position_of(token_id: int, alternatives: Mapping[int, Any], most: int) -> TokenLogprob:
    """Return the log-probability of the token at one position, with its `most` likeliest alternatives.

    If `most` is negative, all alternatives are returned.
    """
    chosen = alternatives[token_id]
    ranked = sorted(alternatives.values(), key=lambda each: each.rank or 0)
    if most >= 0:
        ranked = ranked[:most]
    return TokenLogprob(
        token=chosen.decoded_token or "",
        logprob=chosen.logprob,
        token_id=token_id,
        top=[(each.decoded_token or "", each.logprob) for each in ranked],
    )


def prompt_logprobs_of(output: Any, sampling: Sampling) -> list[TokenLogprob | None] | None:
    """Return the log-probabilities of the prompt's tokens; None if the request did not ask for them.

    The list has one entry per token. The first token has no log-probability, so its entry is None.
    """
    if sampling.prompt_logprobs is None or output.prompt_logprobs is None:
        return None
    most = sampling.prompt_logprobs
    pairs: Sequence[tuple[int, Any]] = list(
        zip(output.prompt_token_ids, output.prompt_logprobs, strict=False)
    )
    return [
        prompt_position_of(token_id, each, most) if each is not None else None
        for token_id, each in pairs
    ]


def prompt_position_of(token_id: int, alternatives: Mapping[int, Any], most: int) -> TokenLogprob:
    """Return `position_of` for a token of the prompt, with its rank and the ids of its alternatives."""
    ranked = sorted(alternatives, key=lambda each: alternatives[each].rank or 0)
    return msgspec.structs.replace(
        position_of(token_id, alternatives, most),
        rank=alternatives[token_id].rank or 0,
        top_ids=ranked[:most] if most >= 0 else ranked,
    )
