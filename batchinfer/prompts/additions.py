"""vLLM's additions to the OpenAI API whose values are only checked here, and where each value goes.

Kept apart from `batchinfer.prompts.parameters`, which reads all parameters of a request, for its size.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

_INT64 = 2**63
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=-1)]
_Priority = Annotated[int, msgspec.Meta(ge=-_INT64, le=_INT64 - 1)]
_Argument = str | int | float | list[str | int | float]


class Addition(NamedTuple):
    """A parameter that vLLM adds to the API."""

    target: str
    """Name of the field that gets the value: of vLLM's SamplingParams if `is_sampling`, else of RequestOptions."""
    kind: Any
    """Type of the values, for msgspec."""
    expected: str
    """Description of the values, for error messages."""
    is_sampling: bool = True
    """Whether the value goes to the engine among the sampling parameters (`Sampling.extra`)."""


_FLAG = "true or false"
ADDITIONS = {
    "bad_words": Addition("bad_words", list[_Text], "a list of texts, none empty"),
    "allowed_token_ids": Addition("allowed_token_ids", list[_TokenId], "a list of token ids"),
    "repetition_detection": Addition("repetition_detection", dict[str, Any], "an object"),
    "spaces_between_special_tokens": Addition("spaces_between_special_tokens", bool, _FLAG),
    "vllm_xargs": Addition(
        "extra_args", dict[str, _Argument], "an object of texts, numbers and lists of them"
    ),
    "thinking_token_budget": Addition("thinking_token_budget", _Length, "a whole number from -1"),
    "include_reasoning": Addition("includes_reasoning", bool, _FLAG, is_sampling=False),
    "priority": Addition("priority", _Priority, "a whole number of 64 bits", is_sampling=False),
    "return_token_ids": Addition("returns_token_ids", bool, _FLAG, is_sampling=False),
    "truncate_prompt_tokens": Addition(
        "most_prompt_tokens", _Length, "a whole number from -1", is_sampling=False
    ),
    "truncation_side": Addition(
        "truncation_side", Literal["left", "right"], "left or right", is_sampling=False
    ),
}
"""The parameters, by the names that requests use."""
