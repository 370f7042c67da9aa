"""Sampling parameters from the command line: pairs of NAME=VALUE, and the names that other tools give them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling

logger = logging.getLogger(__name__)

ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
}
"""Names of transformers' GenerationConfig and of the OpenAI API that have another one here."""

_WITHOUT_EFFECT = {
    "use_cache": "a KV cache is always used, the answers are the same",
    "pad_token_id": "prompts are not padded",
    "early_stopping": "it is about beam search",
    "num_beams": "1 is what is done anyway",
    "return_dict_in_generate": "--output-format decides what is written",
    "output_scores": "--logprobs decides what is written",
    "prepend_bos": "the tokenizer puts its special tokens before every prompt by itself",
}
"""Parameters of generation scripts that change no answer here, and why."""
_NEEDED_VALUES: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "prepend_bos": (True,)}
"""Of these, where only one value has no effect; any other asks for something that is not done."""
_NEUTRAL_VALUES: dict[str, Any] = {"typical_p": 1.0, "num_beam_groups": 1, "length_penalty": 1.0}

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*")
_NEXT = re.compile(r"\s*,(?=\s*[A-Za-z_][A-Za-z0-9_.-]*\s*=)")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
_decode_json = json.JSONDecoder().raw_decode


def read_pairs(option: str, arguments: Iterable[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; an argument may hold several, with commas between. Pure.

    A value is JSON where it can be (commas inside belong to it), else text up to the next pair. Of equal names the
    last one counts.

    Raises:
        ConfigError: an argument that does not begin with NAME=.

    >>> read_pairs("--sampling", ['top_k=20,do_sample=true,bad_words=["a,b=c", "d"]', "stop=,"])
    {'top_k': 20, 'do_sample': True, 'bad_words': ['a,b=c', 'd'], 'stop': ','}
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        position = 0
        while position < len(argument):
            match = _NAME.match(argument, position)
            if match is None:
                raise ConfigError(
                    f"{option} {argument[position:]!r}: expected NAME=VALUE",
                    hint=f"several pairs have commas between them: {option} top_k=20,min_p=0.1",
                )
            value, position = _read_value(argument, match.end())
            found[match[1].replace("-", "_")] = value
    return found


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, and where the next pair begins."""
    try:
        value, end = _decode_json(text, start)
    except ValueError:
        pass
    else:
        after = _NEXT.match(text, end)
        if after is not None:
            return value, after.end()
        if text[end:].strip() in ("", ","):
            return value, len(text)
    after = _NEXT.search(text, start)
    end, position = (after.start(), after.end()) if after else (len(text), len(text))
    word = text[start:end]
    return _WORDS.get(word.lower(), word), position


def make_sampling(options: dict[str, Any], pairs: dict[str, Any]) -> Sampling:
    """Make the run's sampling parameters of options and ``--sampling`` pairs; pairs win.

    A pair is a field of Sampling, a name of transformers' or OpenAI's for one, or goes to the engine as it is.

    Args:
        options: By the names of Sampling's fields; None is an option that was not given.
        pairs: From `read_pairs`.

    Raises:
        ConfigError: a value of the wrong type, two names of one parameter, or what has no equivalent.
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
    try:
        return msgspec.convert({**values, "extra": extra or None}, Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"sampling options: {error}", hint="check the values given to --sampling"
        ) from error


def _translate(pairs: dict[str, Any]) -> dict[str, Any]:
    """Pairs under the names that they have here."""
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in pairs.items():
        if name == "do_sample":
            continue
        if name in _WITHOUT_EFFECT:
            _ignore(name, value)
            continue
        if name in _NEUTRAL_VALUES:
            if value != _NEUTRAL_VALUES[name]:
                raise _no_equivalent(name, value)
            continue
        known = ALIASES.get(name, name)
        if spelled.setdefault(known, name) != name:
            raise ConfigError(
                f"--sampling {name} and {spelled[known]}: are the same parameter, expected one of them"
            )
        found[known] = _as_list(known, value)
    return found | _greedy(pairs)


def _greedy(pairs: dict[str, Any]) -> dict[str, Any]:
    """``do_sample=false`` is temperature 0, whatever temperature a copied configuration also holds."""
    sample = pairs.get("do_sample", True)
    if not isinstance(sample, bool):
        raise ConfigError(f"--sampling do_sample: is {sample!r}, expected true or false")
    return {} if sample else {"temperature": 0.0}


def _as_list(name: str, value: Any) -> Any:
    is_single = name in ("stop", "stop_token_ids") and isinstance(value, str | int)
    return [value] if is_single else value


def _ignore(name: str, value: Any) -> None:
    needed = _NEEDED_VALUES.get(name)
    if needed is not None and value not in needed:
        raise _no_equivalent(name, value)
    logger.info("--sampling %s: has no effect here (%s)", name, _WITHOUT_EFFECT[name])


def _no_equivalent(name: str, value: Any) -> ConfigError:
    hint = "leave it out"
    if name == "prepend_bos":
        hint = "for prompts without special tokens, give token ids: --prompt-column of lists"
    return ConfigError(f"--sampling {name}={value}: has no equivalent here", hint=hint)
