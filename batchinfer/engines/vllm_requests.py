"""Requests to vLLM's terms, and vLLM's outputs back to completions. Starts nothing; vllm must be importable."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.core.records import Choice, Completion, Failure, Request, Sampling, TokenLogprob

# What vLLM says of a request that ended without an answer; another try may go better.
UNFINISHED_REASONS = frozenset({"abort", "error"})
# Decided by the adapter, or vLLM's own business.
RESERVED_PARAMETERS = frozenset({"output_kind", "skip_clone", "n", "detokenize", "flat_logprobs"})
# Names that are equal here and in vLLM's SamplingParams.
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
    """A request's sampling as keyword arguments of vLLM's SamplingParams, structured outputs aside.

    Args:
        sampling: None in it means `defaults`, and then vLLM's own default. Without a `max_tokens` anywhere the
            answer may fill the model's context.
        defaults: The model's, from its generation_config.json.

    Raises:
        RowError: `invalid_parameter`.
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
        # 0: of the chosen token only, which is what ranking needs.
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
    """How many answers vLLM generates: `best_of`, and one at temperature 0, where all are equal."""
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        raise RowError(
            "invalid_parameter",
            f"best_of: is {sampling.best_of}, expected at least n = {sampling.n}",
        )
    wanted = max(sampling.n, sampling.best_of or 0)
    return 1 if kwargs.get("temperature") == 0 and wanted > 0 else wanted


def keeps_best(sampling: Sampling) -> bool:
    """Whether more answers are generated than kept."""
    return sampling.best_of is not None and sampling.best_of > sampling.n


def sampling_params(sampling: Sampling, defaults: Mapping[str, Any]) -> Any:
    """VLLM's SamplingParams for a request.

    Raises:
        RowError: `invalid_parameter`.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    kwargs = sampling_kwargs(sampling, defaults)
    for name, value in (sampling.extra or {}).items():
        kwargs[name] = checked_extra(name, value)
    try:
        if sampling.structured:
            check_structured(sampling.structured)
            kwargs["structured_outputs"] = StructuredOutputsParams(**sampling.structured)
        return SamplingParams(**kwargs, output_kind=RequestOutputKind.FINAL_ONLY)
    except client_errors() as error:
        raise RowError("invalid_parameter", first_line(error)) from error


def checked_extra(name: str, value: Any) -> Any:
    """A value for a field of vLLM's SamplingParams, in that field's type: vLLM itself looks at few of them.

    Raises:
        RowError: `invalid_parameter`: no such field, or not its type.
    """
    types = _parameter_types()
    if name not in types:
        raise RowError("invalid_parameter", f"{name}: vLLM's SamplingParams has no such field")
    try:
        return msgspec.convert(value, types[name])
    except msgspec.ValidationError as error:
        raise RowError("invalid_parameter", f"{name}: {error}") from error
    except TypeError as error:  # a type that has no form in JSON
        raise RowError("invalid_parameter", f"{name}: cannot be given here") from error


@cache
def _parameter_types() -> dict[str, Any]:
    from vllm.sampling_params import SamplingParams

    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def check_structured(structured: Mapping[str, Any]) -> None:
    """Refuse a kind of structured output that vLLM does not have (it would ignore the key)."""
    from vllm.sampling_params import StructuredOutputsParams

    known = {field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init}
    for name in structured:
        if name not in known:
            expected = ", ".join(sorted(name for name in known if not name.startswith("_")))
            raise RowError(
                "invalid_parameter", f"structured output: no kind {name!r}, expected {expected}"
            )


def client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it will not have."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # older versions raise ValueError for these
        return (ValueError, TypeError, NotImplementedError)
    return (VLLMClientError, ValueError, TypeError, NotImplementedError)


def first_line(error: BaseException) -> str:
    """An error's first line, or its class's name."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


# --------------------------------------------------------------------------- the way back


def completion_of(request: Request, output: Any, seconds: tuple[float, float]) -> Completion:
    """A finished RequestOutput as a completion; `seconds` are those of waiting and of running."""
    sampling = request.sampling
    outputs = list(output.outputs)
    bad = next((each for each in outputs if each.finish_reason in UNFINISHED_REASONS), None)
    prompt_ids = output.prompt_token_ids or []
    if bad is not None:
        message = f"the engine ended the request: {bad.finish_reason}"
        failure = Failure(code="engine_error", message=message, transient=True)
        return Completion(key=request.key, failure=failure, prompt_tokens=len(prompt_ids))
    num_tokens = sum(len(each.token_ids) for each in outputs)
    if len(outputs) == 1 < sampling.n:  # temperature 0: the others would be equal
        outputs *= sampling.n
        num_tokens *= sampling.n
    if keeps_best(sampling):
        outputs = sorted(outputs, key=mean_logprob, reverse=True)[: sampling.n]
    return Completion(
        key=request.key,
        choices=[choice_of(index, each, sampling) for index, each in enumerate(outputs)],
        prompt_tokens=len(prompt_ids),
        cached_tokens=output.num_cached_tokens or 0,
        completion_tokens=num_tokens,
        prompt_logprobs=prompt_logprobs_of(output, sampling),
        queue_seconds=seconds[0],
        generation_seconds=seconds[1],
    )


def mean_logprob(output: Any) -> float:
    """Log-probability per token, by which OpenAI's `best_of` ranks."""
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))


def choice_of(index: int, output: Any, sampling: Sampling) -> Choice:
    """One CompletionOutput."""
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
    )


def position_of(token_id: int, alternatives: Mapping[int, Any], most: int) -> TokenLogprob:
    """One position; of the alternatives those that were asked for, likeliest first."""
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
    """One entry per prompt token, the first None; None if they were not asked for."""
    if sampling.prompt_logprobs is None or output.prompt_logprobs is None:
        return None
    most = sampling.prompt_logprobs
    pairs: Sequence[tuple[int, Any]] = list(
        zip(output.prompt_token_ids, output.prompt_logprobs, strict=False)
    )
    return [
        position_of(token_id, each, most) if each is not None else None for token_id, each in pairs
    ]


def known_parameters() -> frozenset[str]:
    """Fields of the installed vLLM's SamplingParams, read from its source: importing vLLM takes seconds.

    Empty where that cannot be read; then only the engine itself can tell.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        tree = ast.parse(Path(spec.origin).with_name("sampling_params.py").read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def check_parameter_names(names: Iterable[str]) -> None:
    """Refuse sampling parameters that vLLM does not have, before a model is loaded for them.

    Raises:
        ConfigError: with a near match.
    """
    known = known_parameters()
    for name in names:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"sampling options: vLLM has no {name}",
                hint=f"did you mean {near[0]}?" if near else "see docs/cli.md for the options",
            )
