"""The run's options as fields of request bodies, in the server's own names; and the forms of constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.core.errors import ConfigError, near
from batchinfer.prompts.json_lines import decode_text, json_type, shown
from batchinfer.prompts.tools import choice_of, read_tools
from batchinfer.prompts.types import Unfit

_FIELDS = {
    **{
        name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "n")
    },
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
    **{name: name for name in ("stop_token_ids", "logprobs", "dimensions", "chat_template_kwargs")},
    "thinking_budget": "thinking_token_budget",
    "normalize": "use_activation",
}
"""Options whose values go into bodies as they are, each with the name of the field."""
ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "structured": "structured_outputs",
}
"""Names that transformers' GenerationConfig or vLLM's engine use, each with the name of the same field here."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_cache", "pad_token_id", "early_stopping"), ()),
    **dict.fromkeys(("return_dict_in_generate", "output_scores"), ()),
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p"), (1,)),
    "prepend_bos": (True,),
}
"""Parameters of generation scripts that change no answer here if they have one of these values. An empty tuple means
that no value changes any."""
_KINDS = {
    "json": "json_schema",
    "choice": "choices",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "",
}
"""Kinds of constraints, by vLLM's names, each with the option that states it."""
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

    Read are the options of `_FIELDS`; one of ``json_schema``, ``choices``, ``regex``, ``grammar`` and
    ``structural_tag``; ``tools`` and ``tool_choice``; and ``sampling``: further fields by their names in the server or
    in transformers, which replace those of options.

    Raises:
        ConfigError: a value cannot work, or two options contradict each other.
    """
    given = {field: options.get(option) for option, field in _FIELDS.items()}
    found = {name: value for name, value in given.items() if value not in (None, [], {})}
    if found.get("n") == 1:
        del found["n"]
    extra = _translated(options.get("sampling") or {})
    constraints = [each for each in (_constraint_of(options), extra) if _has_constraint(each)]
    if len(constraints) > 1:
        raise ConfigError("--sampling: a second constraint, expected one", hint="keep one of them")
    return found | _constraint_of(options) | _tools_of(options) | extra


def _has_constraint(fields: Fields) -> bool:
    return "response_format" in fields or "structured_outputs" in fields


def _translated(pairs: Mapping[str, Any]) -> Fields:
    """Return the fields that ``--sampling`` sets, by the server's names."""
    found: Fields = {}
    for name, value in pairs.items():
        field = ALIASES.get(name, name)
        if name == "prepend_bos" and value is False:
            found["add_special_tokens"] = False
        elif name == "seed":
            raise ConfigError("--sampling seed: is the run's", hint="use --seed")
        elif name in _WITHOUT_EFFECT:
            if _WITHOUT_EFFECT[name] and value not in _WITHOUT_EFFECT[name]:
                message = f"--sampling {name}={value}: has no equivalent here"
                raise ConfigError(message, hint="leave it out")
        elif field in found:
            raise ConfigError(f"--sampling {name}: sets {field}, which another name sets as well")
        elif name != "do_sample":
            is_single = field in ("stop", "stop_token_ids") and isinstance(value, str | int)
            found[field] = [value] if is_single else value
    if pairs.get("do_sample") is False:  # as in transformers, it outweighs a temperature
        found["temperature"] = 0.0
    return found


def _constraint_of(options: Mapping[str, Any]) -> Fields:
    given = {kind: options[name] for kind, name in _KINDS.items() if name and options.get(name)}
    flags = " and ".join("--" + _KINDS[kind].replace("_", "-") for kind in given)
    if len(given) > 1:
        raise ConfigError(f"{flags}: expected one constraint", hint="keep one")
    try:
        for kind, value in given.items():
            if kind == "json":
                return constraint_fields(kind, decode_text(value))
            is_one = kind == "choice" and len(value) == 1
            return constraint_fields(kind, _split_choices(value[0]) if is_one else value)
    except Unfit as error:
        raise ConfigError(f"{flags}: {error}") from error
    return {}


def _split_choices(text: str) -> Any:
    """Return the items of a text that is a JSON array; of any other text, the parts between its commas.

    >>> _split_choices("yes, no"), _split_choices('["yes, or no"]')
    (['yes', 'no'], ['yes, or no'])
    """
    if text.startswith("["):
        return decode_text(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _tools_of(options: Mapping[str, Any]) -> Fields:
    tools, choice = options.get("tools"), options.get("tool_choice")
    try:
        found: Fields = {"tools": read_tools(tools)} if tools else {}
        return found | ({"tool_choice": choice_of(choice, found.get("tools"))} if choice else {})
    except Unfit as error:
        raise ConfigError(f"--tools: {error}") from error


# --------------------------------------------------------------------------- constraints


def constraint_fields(kind: str, value: Any) -> Fields:
    """Return the field of a body that states a constraint: OpenAI's own for JSON, else vLLM's.

    Args:
        kind: One of `_KINDS`.
        value: Its value. Whether it compiles is left to the server.

    Raises:
        Unfit: the value has another type than its kind needs, or is empty.
    """
    if kind == "json":
        if not isinstance(value, dict) or (value and not _RULES & value.keys()):
            expected = "a JSON schema, with type, properties, enum or the like"
            raise Unfit(f"{shown(value)}, expected {expected}")
        schema = {"name": "answer", "schema": value}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    items = value if kind == "choice" and isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        expected = "a list of texts" if kind == "choice" else "a text"
        raise Unfit(f"{kind} is {shown(value)}, expected {expected}, not empty")
    return {"structured_outputs": {kind: value}}


def read_constraint(value: Any) -> Fields:
    """Return the field of a body that states the constraint of a row's own column.

    The value, or the JSON that it holds as text, is one of these: an object whose only field is one of `_KINDS`; a
    `response_format` of the OpenAI API; a JSON schema; a list of texts, the choices. Null, an empty text and a
    `response_format` of the type ``text`` state none.

    Raises:
        Unfit: the value is none of these.
    """
    if isinstance(value, str) and value:
        value = decode_text(value)
    if not value:
        return {}
    if isinstance(value, list):
        return constraint_fields("choice", value)
    if not isinstance(value, dict):
        raise Unfit(
            f"a JSON {json_type(value)}, expected a schema, a list of choices, or an object"
        )
    kind = next(iter(value)) if len(value) == 1 else ""
    if kind in _KINDS:
        return constraint_fields(kind, value[kind])
    if kind not in _RULES and (meant := near(kind, _KINDS)):
        raise Unfit(f"{kind!r} is no kind of constraint{meant}")
    if value.get("type") == "text":
        return {}
    if value.get("type") in ("json_object", "json_schema", "structural_tag"):
        return {"response_format": value}
    return constraint_fields("json", value)
