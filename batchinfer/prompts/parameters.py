"""Reads sampling parameters from the bodies of requests and from the command-line options of a run.

A parameter of a request is either applied, or ignored because it has no effect here, or refused with an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import AnswerForm, Record, Sampling
from batchinfer.prompts.additions import ADDITIONS
from batchinfer.prompts.constraints import (
    KINDS,
    ConstraintProblem,
    read_response_format,
    read_structured,
)
from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.tools import FIELDS, form_of_request, is_forced
from batchinfer.prompts.types import Code, RowProblem

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
"""Number of tokens that the completions API generates if neither the request nor the run sets a limit."""

# Parameters of a request that are ignored: the model, which the run decides, and options of OpenAI's hosted service.
HARMLESS = frozenset(
    {
        "engine",
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Range of each parameter that is a number: (lowest, highest, whether the lowest value itself is allowed).
_NUMBERS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "repetition_penalty": (0, 1000, False),
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`."""
_INT64 = 2**63
# Range of each parameter that is a whole number: (lowest, highest), both allowed.
_INTEGERS: dict[str, tuple[int, int]] = {
    "seed": (-_INT64, _INT64 - 1),
    "top_k": (-1, _INT64 - 1),
    "min_tokens": (0, _INT64 - 1),
    "max_tokens": (0, _INT64 - 1),
    "max_completion_tokens": (1, _INT64 - 1),
    "n": (1, _INT64 - 1),
    "best_of": (1, _INT64 - 1),
    "prompt_logprobs": (0, _INT64 - 1),
    "top_logprobs": (0, _INT64 - 1),
}
_CHAT_ONLY = frozenset(
    {"chat_template_kwargs", "continue_final_message", "reasoning_effort", *FIELDS}
)
_BOOLEANS = frozenset({"ignore_eos", "skip_special_tokens", "include_stop_str_in_output"})
# Values that are accepted even where their parameter is not supported, because they ask for nothing special.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
}
# Values that ask for nothing. A parameter that goes to the engine unread is left out if it has one of them.
_EMPTY: tuple[Any, ...] = ([], "")


class RequestLimits(Record, frozen=True, kw_only=True):
    """What one request of a run may ask for at most."""

    max_n: int
    """Largest number of answers to one request (`n`, `best_of`)."""
    max_logprobs: int
    """Largest number of alternative tokens that are reported at each position (`logprobs`, `prompt_logprobs`)."""
    finds_calls: bool = True
    """Whether calls of tools are found in answers that no constraint makes calls."""
    passed_on: frozenset[str] = frozenset()
    """Names of further parameters that go to the engine unread (`Sampling.extra`)."""


class RequestOptions(msgspec.Struct):
    """Options of a request that are not sampling parameters."""

    echo: bool = False
    """Whether the output line shows the prompt before every answer."""
    is_prompt_only: bool = False
    """Whether the output line shows the prompt in place of the answer, as scoring requests want it."""
    continue_final: bool = False
    """Whether the model continues the last message of the conversation instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template gets besides the messages."""
    is_open_ended: bool = False
    """Whether the answer may fill the rest of the model's length, because neither request nor run set `max_tokens`."""
    includes_reasoning: bool = True
    """Whether the output line shows the model's reasoning."""
    form: AnswerForm | None = None
    """Tools that the answer may call, and the request's choice among them; None if it has no tools."""
    constraint_name: str = ""
    """Parameter that states the request's own constraint; empty if it states none."""
    most_prompt_tokens: int | None = None
    """Number of tokens to which a longer prompt is cut; -1 for as many as the model takes, None for no cut."""
    truncation_side: str = "left"
    """Side at which a prompt loses tokens by `most_prompt_tokens`: ``left`` or ``right``."""
    returns_token_ids: bool = False
    """Whether the output line shows the token ids of prompt and answers."""
    priority: int = 0
    """Place in the engine's queue: lower comes first."""


def read_parameters(
    body: dict[str, Any], base: Sampling, limits: RequestLimits, *, is_chat: bool
) -> tuple[Sampling, RequestOptions]:
    """Return the sampling parameters of a request and its other options.

    Args:
        body: The request without its prompt or messages. A parameter that is null counts as absent.
        base: The run's sampling parameters. A parameter that the request sets itself replaces the run's.
        limits: The run's limits on requests.
        is_chat: True for the chat API, False for the completions API. Their parameters differ in part, for example
            `logprobs` and `echo`.

    Raises:
        RowProblem: a parameter is unsupported, out of its range, or contradicts another one.
    """
    found: dict[str, Any] = {}
    options = RequestOptions()
    for name, value in body.items():
        if name in limits.passed_on:
            if value not in (None, *_EMPTY):
                found["extra"] = {**(found.get("extra") or base.extra or {}), name: value}
            continue
        if value is None or name in HARMLESS or (is_chat and name in _CHAT_ONLY):
            continue
        if name in _PLAIN:
            found[name] = _PLAIN[name](name, value)
        elif name == "logprobs":
            found[name] = _boolean(name, value) if is_chat else _integer(name, value, 0)
        elif name in _READERS:
            _READERS[name](value, found)
        elif name in _CONSTRAINT_READERS:
            if _read_constraint(name, value, found):
                options.constraint_name = name
        elif name in ADDITIONS:
            _read_addition(name, value, found, options, base)
        elif name == "echo" and not is_chat:
            options.echo = _boolean(name, value)
        elif not _asks_for_nothing(name, value, body):
            raise _unsupported(name)
    if is_chat:
        _read_chat(body, options, limits)
    _settle_lengths(found, base, options, is_chat=is_chat)
    _settle_logprobs(found, options, is_chat=is_chat)
    sampling = msgspec.structs.replace(base, **found)
    check_sampling(sampling, limits)
    return sampling, options


def _read_chat(body: dict[str, Any], options: RequestOptions, limits: RequestLimits) -> None:
    """Read the parameters that only chats have."""
    given = {name: body[name] for name in _CHAT_ONLY if body.get(name) is not None}
    if "continue_final_message" in given:
        options.continue_final = _boolean("continue_final_message", given["continue_final_message"])
    variables = _object("chat_template_kwargs", given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given and "reasoning_effort" not in limits.passed_on:
        variables = _effort(given["reasoning_effort"]) | variables
    options.chat_template_kwargs = variables or None
    if "tools" not in limits.passed_on:
        options.form = form_of_request(given)
        _check_form(options, limits)


def _check_form(options: RequestOptions, limits: RequestLimits) -> None:
    form = options.form
    if is_forced(form) and options.constraint_name:
        raise _invalid(
            "tool_choice",
            f"given together with {options.constraint_name}, expected one of the two: each decides the answer's form",
        )
    if form is not None and form.tool_choice == "auto" and not limits.finds_calls:
        raise _invalid(
            "tool_choice",
            "auto, the default, but the run has no --tool-call-parser, expected required, none, or a tool's name",
        )


def check_sampling(sampling: Sampling, limits: RequestLimits) -> None:
    """Check sampling parameters against each other and against a run's limits.

    Raises:
        RowProblem: two parameters contradict each other, one is too small, or one exceeds a limit.
    """
    best_of = sampling.best_of or sampling.n
    if sampling.n < 1:
        raise _invalid("n", f"{sampling.n}, expected at least 1")
    if best_of < sampling.n:
        raise _invalid("best_of", f"{best_of} with n {sampling.n}, expected at least n")
    if best_of > limits.max_n:
        name = "best_of" if sampling.best_of else "n"
        raise _invalid(name, f"{best_of}, expected at most {limits.max_n}")
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(sampling, name)
        if number is not None and number > limits.max_logprobs:
            raise _invalid(name, f"{number}, expected at most {limits.max_logprobs}")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise _invalid("max_tokens", f"{sampling.max_tokens}, expected at least 1")
    if (sampling.min_tokens or 0) > (sampling.max_tokens or _INT64):
        raise _invalid(
            "min_tokens",
            f"{sampling.min_tokens}, expected at most max_tokens {sampling.max_tokens}",
        )


def check_run_sampling(sampling: Sampling, limits: RequestLimits) -> None:
    """Check the sampling parameters that the options of a run set, before the engine is loaded.

    Raises:
        RowProblem: a parameter is out of its range, contradicts another one, or exceeds a limit.
    """
    for name in _NUMBERS:
        value = getattr(sampling, name)
        # The limit of 2 in _NUMBERS is the OpenAI API's. A run may set a higher temperature, since engines accept it.
        if value is not None and not (name == "temperature" and 2 < value < math.inf):
            _number(name, value)
    for name in ("top_k", "min_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None:
            _integer(name, value)
    check_sampling(sampling, limits)


def _settle_lengths(
    found: dict[str, Any], base: Sampling, options: RequestOptions, *, is_chat: bool
) -> None:
    newer = found.pop("max_completion_tokens", None)
    older = found.get("max_tokens")
    if newer is not None:
        if older is not None and older != newer:
            raise _invalid(
                "max_completion_tokens", f"{newer} with max_tokens {older}, expected one of the two"
            )
        found["max_tokens"] = newer
    elif older == 0 and options.echo:
        # A scoring request: `echo` with max_tokens 0 asks for the prompt and no answer. Engines must generate at least
        # one token, so max_tokens becomes 1 and the output line leaves the generated token out.
        found["max_tokens"] = 1
        options.is_prompt_only = True
    elif older is None and base.max_tokens is None:
        if is_chat:
            options.is_open_ended = True
        else:
            found["max_tokens"] = DEFAULT_COMPLETION_TOKENS


def _settle_logprobs(found: dict[str, Any], options: RequestOptions, *, is_chat: bool) -> None:
    top = found.pop("top_logprobs", None)
    if not is_chat:
        if top is not None:
            raise _unsupported("top_logprobs")
        if options.echo and found.get("logprobs") is not None:
            found.setdefault("prompt_logprobs", found["logprobs"])
        return
    wanted = found.pop("logprobs", None)
    if wanted:
        found["logprobs"] = top or 0
    elif top:
        raise _invalid("top_logprobs", f"{top} without logprobs, expected logprobs true with it")
    elif wanted is False:
        found["logprobs"] = None


def _number(name: str, value: Any) -> float:
    low, high, is_low_allowed = _NUMBERS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == low and not is_low_allowed):
        bound = "from" if is_low_allowed else "above"
        raise _invalid(name, f"{_show(value)}, expected a number {bound} {low:g} to {high:g}")
    return float(value)


def _integer(name: str, value: Any, lowest: int | None = None) -> int:
    low, high = _INTEGERS.get(name, (lowest or 0, _INT64 - 1))
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        to = f" to {high}" if low < -1 else ""
        raise _invalid(name, f"{_show(value)}, expected a whole number from {low}{to}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, f"{_show(value)}, expected true or false")
    return value


def _effort(value: Any) -> dict[str, Any]:
    """Return the variables of the chat template that `reasoning_effort` sets, as vLLM's server sets them."""
    if value not in EFFORTS:
        raise _invalid("reasoning_effort", f"{_show(value)}, expected one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": value, "enable_thinking": value != "none"}


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(name, f"a JSON {json_type(value)}, expected an object")
    return value


def _read_stop(value: Any, found: dict[str, Any]) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _invalid("stop", f"{_show(value)}, expected a text or a list of texts, none empty")
    found["stop"] = texts or None


def _read_stop_ids(value: Any, found: dict[str, Any]) -> None:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _invalid("stop_token_ids", f"{_show(value)}, expected a list of token ids")
    found["stop_token_ids"] = value or None


def _read_bias(value: Any, found: dict[str, Any]) -> None:
    for token, bias in _object("logit_bias", value).items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not token.isdecimal() or not is_number or not -100 <= bias <= 100:
            raise _invalid(
                "logit_bias",
                f"{_show({token: bias})}, expected token ids with numbers from -100 to 100",
            )
    found["logit_bias"] = {token: float(bias) for token, bias in value.items()} or None


def _read_constraint(name: str, value: Any, found: dict[str, Any]) -> bool:
    """Read a parameter that may state a constraint. Returns whether it states one."""
    try:
        constraint = _CONSTRAINT_READERS[name](_object(name, value))
    except ConstraintProblem as problem:
        raise _invalid(name, str(problem)) from problem
    if constraint is None:
        return False
    if "structured" in found:
        raise _invalid(
            name, "given together with another, expected one of response_format, structured_outputs"
        )
    found["structured"] = constraint
    return True


_CONSTRAINT_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "response_format": read_response_format,
    "structured_outputs": read_structured,
}


def _read_length_penalty(value: Any, _found: dict[str, Any]) -> None:
    # It only weighs the answers of a beam search. vLLM, too, takes it in requests that ask for none.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _invalid("length_penalty", f"{_show(value)}, expected a number")


def _read_addition(
    name: str, value: Any, found: dict[str, Any], options: RequestOptions, base: Sampling
) -> None:
    addition = ADDITIONS[name]
    try:
        read = codec.convert(value, addition.kind)
    except msgspec.ValidationError as error:
        raise _invalid(name, f"{_show(value)}, expected {addition.expected}") from error
    if addition.is_sampling:
        found["extra"] = {**(found.get("extra") or base.extra or {}), addition.target: read}
    else:
        setattr(options, addition.target, read)


_PLAIN: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_INTEGERS, _integer),
    **dict.fromkeys(_BOOLEANS, _boolean),
}
_READERS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "length_penalty": _read_length_penalty,
    "stop": _read_stop,
    "stop_token_ids": _read_stop_ids,
    "logit_bias": _read_bias,
}
KNOWN = sorted(
    {*_PLAIN, *_READERS, *_CONSTRAINT_READERS, *HARMLESS}
    | {*ADDITIONS, *_CHAT_ONLY, "logprobs", "echo"}
)
_INSTEAD = {
    "echo": "for a chat, --keep-prompt repeats the messages; /v1/completions has echo",
    "use_beam_search": "`n` and `best_of` draw several answers; with --engine openai a vLLM server "
    "does beam search",
    "stream": "each answer comes whole",
    **{
        f"guided_{kind}": f"vLLM's name of it is structured_outputs: {{{kind!r}: …}}"
        for kind in ("json", "regex", "choice", "grammar")
    },
}
"""Advice for parameters that are not supported. Requests for completions may have `echo`."""


def _asks_for_nothing(name: str, value: Any, body: dict[str, Any]) -> bool:
    if name == "add_generation_prompt" and value is False:
        # A request that continues an answer must set this parameter to false, so the value is accepted there.
        return body.get("continue_final_message") is True
    return value in _NEUTRAL.get(name, ())


def _unsupported(name: str) -> RowProblem:
    advice = f"; {_INSTEAD[name]}" if name in _INSTEAD else near(name, KNOWN)
    return RowProblem(
        Code.UNSUPPORTED_PARAMETER,
        f"{name}: not supported, expected the request without it{advice}",
        param=name,
    )


def _invalid(name: str, finding: str) -> RowProblem:
    return RowProblem(Code.INVALID_PARAMETER, f"{name}: {finding}", param=name)


def _show(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


# --------------------------------------------------------------------------- sampling parameters of a run

ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
}
"""Names that transformers' GenerationConfig or the OpenAI API use, each with the name of the same parameter here."""

_WITHOUT_EFFECT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_cache": ("a KV cache is always used, the answers are the same", ()),
    "pad_token_id": ("prompts are not padded", ()),
    "early_stopping": ("it is about beam search", ()),
    "num_beams": ("1 is what is done anyway", (1,)),
    "num_beam_groups": ("1 is what is done anyway", (1,)),
    "length_penalty": ("it is about beam search", (1.0,)),
    "typical_p": ("1 leaves out no token", (1.0,)),
    "return_dict_in_generate": ("--output-format decides what is written", ()),
    "output_scores": ("--logprobs decides what is written", ()),
    "prepend_bos": ("the tokenizer puts its special tokens before every prompt by itself", (True,)),
}
"""Parameters of generation scripts that would change no answer here. Each has a reason and the values ignored
for this reason. An empty tuple means that every value is ignored; otherwise other values are refused."""


def make_sampling(
    options: dict[str, Any], pairs: dict[str, Any], constraint: dict[str, Any] | None = None
) -> Sampling:
    """Make the run's sampling parameters from options and ``--sampling`` pairs. A pair replaces an option.

    The name of a pair may be a field of Sampling or an alias of one (`ALIASES`). The pair `do_sample` becomes a
    temperature, and `_WITHOUT_EFFECT` lists pairs that are ignored. Any other pair goes to the engine unchanged.

    Args:
        options: Values by the names of Sampling's fields; None stands for an option that was not given.
        pairs: Values by name, as `batchinfer.cli.values.read_pairs` gives them.
        constraint: Constraint that options of their own state.

    Raises:
        ConfigError: a value has the wrong type, two pairs set the same parameter under different names, two constraints
            are given, `seed` is among the pairs, or a parameter has no equivalent here.
    """
    fields = {field.name for field in msgspec.structs.fields(Sampling)} - {"extra", "seed"}
    values = {
        name: value for name, value in options.items() if name in fields and value is not None
    }
    extra: dict[str, Any] = {}
    for name, value in _translate(pairs).items():
        if name == "seed":
            raise ConfigError("--sampling seed: is the run's", hint="use --seed")
        (values if name in fields else extra)[name] = value
    if constraint is not None:
        if values.get("structured"):
            raise ConfigError(
                "--sampling structured with another constraint: expected one",
                hint="keep one of them",
            )
        values["structured"] = constraint
    _check_kinds(values.get("structured"))
    try:
        return codec.convert({**values, "extra": extra or None}, Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--sampling: {error}", hint="see the sampling options in docs/cli.md"
        ) from error


def _check_kinds(constraint: Any) -> None:
    """Refuse a misspelt kind of constraint. Other names are the engine's to judge, which may be a later vLLM."""
    names = constraint if isinstance(constraint, dict) else {}
    for name in names:
        if name not in KINDS and (meant := near(name, KINDS)):
            raise ConfigError(
                f"--sampling structured: {name!r} is no kind of constraint{meant}",
                hint=f"expected one of {', '.join(KINDS)}",
            )


def _translate(pairs: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters by their names in `Sampling`, without aliases and without those that have no effect.

    `do_sample` is left out, because the caller turns it into a temperature.
    """
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in pairs.items():
        if name == "do_sample":
            continue
        if name in _WITHOUT_EFFECT:
            _ignore(name, value)
            continue
        known = ALIASES.get(name, name)
        if spelled.setdefault(known, name) != name:
            raise ConfigError(
                f"--sampling {name} and {spelled[known]}: are the same parameter, expected one of them"
            )
        found[known] = _as_list(known, value)
    return found | _greedy(pairs)


def _greedy(pairs: dict[str, Any]) -> dict[str, Any]:
    """Return temperature 0 if the pairs hold ``do_sample=false``, else nothing.

    The result replaces a temperature among the pairs, because transformers ignores the temperature in that case too.
    """
    sample = pairs.get("do_sample", True)
    if not isinstance(sample, bool):
        raise ConfigError(f"--sampling do_sample: is {sample!r}, expected true or false")
    return {} if sample else {"temperature": 0.0}


def _as_list(name: str, value: Any) -> Any:
    is_single = name in ("stop", "stop_token_ids") and isinstance(value, str | int)
    return [value] if is_single else value


def _ignore(name: str, value: Any) -> None:
    reason, harmless_values = _WITHOUT_EFFECT[name]
    if harmless_values and value not in harmless_values:
        raise _no_equivalent(name, value)
    logger.info("--sampling %s: has no effect here (%s)", name, reason)


def _no_equivalent(name: str, value: Any) -> ConfigError:
    hint = "leave it out"
    if name == "prepend_bos":
        hint = "for prompts without special tokens, give token ids: --prompt-column of lists"
    return ConfigError(f"--sampling {name}={value}: has no equivalent here", hint=hint)
