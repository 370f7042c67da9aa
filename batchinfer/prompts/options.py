"""The run's options as fields of request bodies, in the server's own names; and the forms of constraints and tools."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchinfer.core.errors import ConfigError, near
from batchinfer.prompts.json_lines import decode_text, json_type, shown
from batchinfer.prompts.tools import choice_of, read_tools

logger = logging.getLogger(__name__)

_SAME_NAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "n"),
    *("presence_penalty", "frequency_penalty", "stop_token_ids", "logprobs", "dimensions"),
    "chat_template_kwargs",
)
"""Options whose names are those of the fields."""
ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "structured": "structured_outputs",
}
"""Names that transformers' GenerationConfig or the OpenAI API use, each with the name of the same field here."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_cache", "pad_token_id", "early_stopping"), ()),
    **dict.fromkeys(("return_dict_in_generate", "output_scores"), ()),
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p"), (1,)),
    "prepend_bos": (True,),
}
"""Parameters of generation scripts that change no answer here if they have one of these values. An empty tuple means
that no value changes any. `prepend_bos` is what the tokenizer does by itself."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Kinds of constraints, by vLLM's names."""
_CONSTRAINT_OPTIONS = {
    "json_schema": "json",
    "choices": "choice",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_RULES = frozenset(
    {
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "format"),
        *("pattern", "properties", "required", "additionalProperties", "patternProperties"),
        *("items", "prefixItems", "contains", "minItems", "maxItems", "minimum", "maximum"),
    }
)
"""Keywords of JSON Schema. A schema with none of them is no schema, but, say, an example of an answer."""

Fields = dict[str, Any]


def make_body(options: Mapping[str, Any]) -> Fields:
    """Make the run's own fields of request bodies from its options. Options that are not given are None or empty.

    Besides the fields' own names, these options are read: ``thinking_budget``; one of ``json_schema``, ``choices``,
    ``regex``, ``grammar`` and ``structural_tag``; ``tools`` and ``tool_choice``; ``normalize``; and ``sampling``, further
    fields by their names in the server or in transformers, which replace those of options.

    Raises:
        ConfigError: a value cannot work, or two options contradict each other.
    """
    found = {name: options[name] for name in _SAME_NAME if options.get(name) not in (None, [], {})}
    if found.get("n") == 1:
        del found["n"]
    renamed = {"thinking_budget": "thinking_token_budget", "normalize": "use_activation"}
    for option, field in renamed.items():
        if options.get(option) is not None:
            found[field] = options[option]
    found |= _run_constraint(options) | _run_tools(options)
    extra = _translated(options.get("sampling") or {})
    if _constraints_in(found) and _constraints_in(extra):
        raise ConfigError("--sampling: a second constraint, expected one", hint="keep one of them")
    return found | extra


def _constraints_in(fields: Mapping[str, Any]) -> bool:
    return "response_format" in fields or "structured_outputs" in fields


def _translated(pairs: Mapping[str, Any]) -> Fields:
    """Return the fields that ``--sampling`` sets, by the server's names."""
    found: Fields = {}
    spelled: dict[str, str] = {}
    for name, value in pairs.items():
        if name == "seed":
            raise ConfigError("--sampling seed: is the run's", hint="use --seed")
        if name == "do_sample":
            if not isinstance(value, bool):
                raise ConfigError(
                    f"--sampling do_sample: is {shown(value)}, expected true or false"
                )
        elif name == "prepend_bos" and value is False:
            found["add_special_tokens"] = False
        elif name in _WITHOUT_EFFECT:
            if _WITHOUT_EFFECT[name] and value not in _WITHOUT_EFFECT[name]:
                raise ConfigError(
                    f"--sampling {name}={value}: has no equivalent here", hint="leave it out"
                )
            logger.info("--sampling %s: has no effect here", name)
        else:
            field = ALIASES.get(name, name)
            if spelled.setdefault(field, name) != name:
                raise ConfigError(
                    f"--sampling {name} and {spelled[field]}: are the same parameter, expected one of them"
                )
            is_single = field in ("stop", "stop_token_ids") and isinstance(value, str | int)
            found[field] = [value] if is_single else value
    if pairs.get("do_sample") is False:  # as in transformers, it outweighs a temperature
        found["temperature"] = 0.0
    return found


def _run_constraint(options: Mapping[str, Any]) -> Fields:
    given = {name: options[name] for name in _CONSTRAINT_OPTIONS if options.get(name)}
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: expected one constraint", hint="keep one")
    for name, value in given.items():
        try:
            if name == "choices" and len(value) == 1:
                value = _split_choices(value[0])
            return constraint_fields(
                _CONSTRAINT_OPTIONS[name], decode_text(value) if name == "json_schema" else value
            )
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from error
    return {}


def _split_choices(text: str) -> Any:
    """Return the items of a text that is a JSON array; of any other text, the parts between its commas.

    >>> _split_choices("yes, no"), _split_choices('["yes, or no"]')
    (['yes', 'no'], ['yes, or no'])
    """
    if text.startswith("["):
        return decode_text(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _run_tools(options: Mapping[str, Any]) -> Fields:
    tools, choice = options.get("tools"), options.get("tool_choice")
    try:
        found: Fields = {"tools": read_tools(tools)} if tools else {}
        if choice:
            found["tool_choice"] = choice_of(choice, found.get("tools"))
    except ValueError as error:
        raise ConfigError(f"--tools: {error}") from error
    return found


# --------------------------------------------------------------------------- constraints


def constraint_fields(kind: str, value: Any) -> Fields:
    """Return the field of a body that states a constraint: OpenAI's own for JSON, else vLLM's.

    Args:
        kind: One of `_KINDS`.
        value: Its value. Whether it compiles is left to the server.

    Raises:
        ValueError: the value has another type than its kind needs, or is empty.
    """
    is_right, expected = _CHECKS.get(kind, (_is_text, "a text"))
    if not is_right(value):
        raise ValueError(f"{kind} is {shown(value)}, expected {expected}")
    if kind == "json":
        schema = {"name": "answer", "schema": value}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {"structured_outputs": {kind: value}}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict) and (not value or bool(_RULES & value.keys()))


def _is_choice(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(map(_is_text, value))


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "json": (_is_schema, "a JSON schema, with type, properties, enum or the like"),
    "json_object": (lambda value: value is True, "true"),
    "choice": (_is_choice, "a list of texts, not empty"),
}


def read_constraint(value: Any) -> Fields:
    """Return the field of a body that states the constraint of a row's own column.

    The value, or the JSON that it holds as text, is one of these: an object whose only field is one of `_KINDS`; a
    `response_format` of the OpenAI API; a JSON schema; a list of texts, the choices. Null, an empty text and a
    `response_format` of the type ``text`` state none.

    Raises:
        ValueError: the value is none of these.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = decode_text(value)
    if isinstance(value, list):
        return constraint_fields("choice", value)
    if not isinstance(value, dict):
        raise ValueError(
            f"is a JSON {json_type(value)}, expected a schema, a list of choices, or an object with one of "
            + ", ".join(_KINDS)
        )
    if len(value) == 1:
        [(kind, item)] = value.items()
        if kind in _KINDS:
            return constraint_fields(kind, item)
        if meant := near(kind, _KINDS):
            raise ValueError(f"{kind!r} is no kind of constraint{meant}")
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind in ("json_object", "json_schema", "structural_tag"):
        return {"response_format": value}
    return constraint_fields("json", value)
