"""Constraints on answers, which vLLM calls structured outputs: how options, columns and requests state them.

A constraint is a dictionary with one entry, as in `Sampling.structured`: the kind of the constraint, and its value.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.json_text import MAX_DEPTH, is_deep
from batchinfer.prompts.json_lines import has_lone_surrogate, json_type
from batchinfer.prompts.types import Code, RowProblem

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Kinds of constraints, by vLLM's names."""
JSON_KINDS = ("json", "json_object")
"""Kinds of constraints whose answers are JSON."""
OPTIONS = {
    "json": "--json-schema",
    "choice": "--choices",
    "regex": "--regex",
    "grammar": "--grammar",
    "structural_tag": "--structural-tag",
}
"""Options of a run that state a constraint, by its kind."""
_RULES = frozenset(
    {
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"),
        *("format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
        *("items", "prefixItems", "contains", "uniqueItems", "minItems", "maxItems"),
        "unevaluatedItems",
    }
)
"""Keywords of JSON Schema of which a schema must have one, because a schema without them lets any JSON through."""

Constraint = dict[str, Any]


class ConstraintProblem(Exception):
    """The reason why a value is no constraint."""


def read_options(
    *, json_schema: str, choices: Sequence[str], regex: str, grammar: str, structural_tag: str
) -> Constraint | None:
    """Return the constraint that a run's options state; None if none of them is given.

    Args:
        json_schema: JSON schema as text.
        choices: The texts; or one text that is a JSON array of them, or has commas between them.
        regex: Regular expression.
        grammar: Grammar in EBNF or Lark's notation.
        structural_tag: Structural tag as JSON text.

    Raises:
        ConfigError: several options are given, or one has a value that is no constraint.
    """
    values: dict[str, Any] = {
        "json": json_schema,
        "choice": choices,
        "regex": regex,
        "grammar": grammar,
        "structural_tag": structural_tag,
    }
    given = {kind: value for kind, value in values.items() if value}
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join(OPTIONS[kind] for kind in given)
        raise ConfigError(f"{flags}: expected one constraint", hint="keep one")
    [(kind, value)] = given.items()
    try:
        if kind == "json":
            value = _with_rules(_schema(value))
        elif kind == "choice":
            value = list(value) if len(value) > 1 else split_choices(value[0])
        return checked(kind, value)
    except ConstraintProblem as problem:
        raise ConfigError(f"{OPTIONS[kind]}: {problem}") from problem


def split_choices(text: str) -> Any:
    """Return the items of a text that is a JSON array; of any other text, the parts between its commas.

    >>> split_choices("yes, no"), split_choices('["yes, or no"]')
    (['yes', 'no'], ['yes, or no'])
    """
    if text.startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def read_column(value: Any) -> Constraint | None:
    """Return the constraint that a column of a row holds.

    The value, or the JSON that it holds as text, is one of these: an object whose only field is one of `KINDS`; a
    `response_format` of the OpenAI API; an object with a rule of a JSON schema; a list of texts, the choices.

    Returns:
        None for null, an empty text, and a `response_format` of the type ``text``.

    Raises:
        ConstraintProblem: the value is none of these.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = decode_json(value)
    if isinstance(value, list):
        return checked("choice", value)
    if not isinstance(value, dict):
        raise ConstraintProblem(
            f"is a JSON {json_type(value)}, expected a schema, a list of choices, or an object with one of "
            + ", ".join(KINDS)
        )
    if len(value) == 1 and next(iter(value)) in KINDS:
        [(kind, item)] = value.items()
        return checked(kind, item)
    if value.get("type") in RESPONSE_FORMATS:
        return read_response_format(value)
    return checked("json", _with_rules(value))


RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""Values of the field `type` of `response_format`."""


def read_response_format(value: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that a `response_format` of the OpenAI API states; None for the type ``text``.

    Raises:
        ConstraintProblem: its type is unknown, or it lacks its schema.
    """
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return checked("structural_tag", value)
    if kind != "json_schema":
        raise ConstraintProblem(
            f"type {_show(kind)}, expected {', '.join(RESPONSE_FORMATS[:-1])} or {RESPONSE_FORMATS[-1]}"
        )
    wrapper = value.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise ConstraintProblem("json_schema without an object in its field schema, expected one")
    return checked("json", schema)


def read_structured(value: Mapping[str, Any]) -> Constraint:
    """Return the constraint in vLLM's `structured_outputs`. Entries that are null count as absent.

    Raises:
        ConstraintProblem: it has not exactly one of `KINDS`, or has other entries.
    """
    given = {name: item for name, item in value.items() if item is not None}
    if len(given) != 1 or not given.keys() <= set(KINDS):
        raise ConstraintProblem(f"{_show(sorted(given))}, expected one of {', '.join(KINDS)}")
    [(kind, item)] = given.items()
    return checked(kind, item)


def checked(kind: str, value: Any) -> Constraint:
    """Return a constraint whose value has the type that its kind needs. Whether it compiles is not checked here.

    Raises:
        ConstraintProblem: the value has another type, or is empty.
    """
    if kind == "structural_tag" and isinstance(value, Mapping):
        value = json.dumps(value)
    if kind == "choice":
        is_right = isinstance(value, list) and all(isinstance(item, str) for item in value)
        expected = "a list of texts"
    elif kind == "json":
        is_right, expected = isinstance(value, dict | str), "a JSON schema"
    elif kind == "json_object":
        is_right, expected = value is True, "true"
    else:
        is_right, expected = isinstance(value, str), "a text"
    if not is_right or not value:
        raise ConstraintProblem(f"{kind} is {_show(value)}, expected {expected}, not empty")
    return {kind: value}


def problem_of_column(column: str, problem: ConstraintProblem | str) -> RowProblem:
    """Return the error of a row whose column holds no usable constraint."""
    return RowProblem(Code.INVALID_CONSTRAINT, f"column {column!r}: {problem}")


def _with_rules(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema. It may be a misspelt constraint, or an example of an answer, if it has no rule.

    Raises:
        ConstraintProblem: it has no rule, so any JSON would satisfy it.
    """
    if schema and not _RULES & schema.keys():
        raise ConstraintProblem(
            f"an object of {_show(sorted(schema))}, expected a JSON schema, with type, properties, enum or the like, "
            f"or one field of {', '.join(KINDS)}"
        )
    return schema


def _schema(text: str) -> dict[str, Any]:
    value = decode_json(text)
    if not isinstance(value, dict):
        raise ConstraintProblem(f"holds a JSON {json_type(value)}, expected a schema, an object")
    return value


def decode_json(text: str) -> Any:
    """Return the value that a text of JSON holds.

    Raises:
        ConstraintProblem: the text is no JSON, is nested too deep, or holds what is no Unicode text.
    """
    if is_deep(text.encode(errors="replace"), MAX_DEPTH // 2):
        raise ConstraintProblem(f"JSON nested deeper than {MAX_DEPTH // 2} levels")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConstraintProblem(f"not JSON ({error})") from error
    if "\\u" in text and has_lone_surrogate(value):
        raise ConstraintProblem(
            "a \\ud800 to \\udfff escape without its partner, expected Unicode text"
        )
    return value


def _show(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:60] + "…"
