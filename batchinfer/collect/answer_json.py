"""Parses answers that are JSON, for the column `answer_json`: a struct if the run's schema says so, else JSON text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from batchinfer.collect.kinds import JSON, MAX_FIELDS, MAX_LEVELS, Kind, kind_of, merge_all
from batchinfer.collect.schema import json_text
from batchinfer.prompts.constraints import JSON_KINDS

logger = logging.getLogger(__name__)

COLUMN = "answer_json"
_INT64 = range(-(1 << 63), 1 << 63)
_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}
_decode = msgspec.json.Decoder().decode


class AnswerParser:
    """Parses the answers of one run. An answer that is no JSON, or does not fit the schema, becomes null.

    Args:
        kind: Kind of the column: JSON, or what the run's schema says.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.num_unfit = 0
        """Number of answers that became null."""

    def column(self, texts: Any) -> list[Any]:
        """Return the column for the column `text`, or for the lists of the column `texts`."""
        values = texts if isinstance(texts, list) else texts.to_pylist()
        return [
            [self._parse(one) for one in text] if isinstance(text, list) else self._parse(text)
            for text in values
        ]

    def _parse(self, text: str | None) -> Any:
        if text is None:
            return None
        try:
            value = _decode(text)
            return text.strip() if self.kind == JSON else _fit(value, self.kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError, _Unfit):
            self.num_unfit += 1
            return None

    def tell(self) -> None:
        """Log how many answers became null."""
        if self.num_unfit:
            logger.warning(
                "%d answers are no JSON that fits; %s is null there, and the text is as the model wrote it",
                self.num_unfit,
                COLUMN,
            )


def parser_for(
    configs: Sequence[Mapping[str, Any]], *, is_wanted: bool | None
) -> AnswerParser | None:
    """Return the parser for the answers of some runs; None if their table gets no column of them.

    Args:
        configs: The `config` of each run.json.
        is_wanted: What the user asked for. None: the column is made where a run's options constrain answers to JSON.
    """
    kinds = [_kind_of_run(config) for config in configs]
    if not (any(kinds) if is_wanted is None else is_wanted):
        return None
    return AnswerParser(kinds[0] if kinds[0] and all(kind == kinds[0] for kind in kinds) else JSON)


def _kind_of_run(config: Mapping[str, Any]) -> Kind:
    """Return the kind of a run's answers; None if the run's options do not constrain them to JSON."""
    if (config.get("prompt") or {}).get("constraint_column"):
        return JSON  # a row's own constraint takes the place of the run's
    constraint = (config.get("sampling") or {}).get("structured") or {}
    if not any(name in constraint for name in JSON_KINDS):
        return None
    schema = constraint.get("json")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return JSON
    return kind_of_schema(schema, schema)


def kind_of_schema(schema: Any, root: Any, level: int = 0) -> Kind:
    """Return the kind of values that a JSON schema describes; JSON if no other kind holds them all.

    Args:
        schema: The schema.
        root: The whole schema, in which references are looked up.
        level: Number of schemas around this one.

    >>> kind_of_schema({"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}, {})
    ('struct', {'a': 'int'})
    """
    if not isinstance(schema, dict) or level > MAX_LEVELS:
        return JSON
    if "$ref" in schema:
        return kind_of_schema(_look_up(schema["$ref"], root), root, level + 1)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        kind = merge_all([kind_of(value) for value in values if value is not None])
        return kind if kind in ("str", "int", "float", "bool") else JSON
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return _kind_of_several(schema[name], root, level)
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    names = [str(one) for one in listed if one != "null"]
    if len(names) != 1:
        return "float" if set(names) == {"integer", "number"} else JSON
    if names[0] == "object":
        return _kind_of_object(schema, root, level)
    if names[0] == "array" and "prefixItems" not in schema and "items" in schema:
        return ("list", kind_of_schema(schema["items"], root, level + 1))
    return _SCALARS.get(names[0], JSON)


def _kind_of_several(schemas: Any, root: Any, level: int) -> Kind:
    if not isinstance(schemas, list):
        return JSON
    kinds = [kind_of_schema(one, root, level + 1) for one in schemas if one != {"type": "null"}]
    return kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else JSON


def _kind_of_object(schema: Mapping[str, Any], root: Any, level: int) -> Kind:
    properties = schema.get("properties")
    # Without additionalProperties, xgrammar lets an object have no others than the named ones.
    is_open = (
        schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    )
    if not isinstance(properties, dict) or is_open or not 0 < len(properties) <= MAX_FIELDS:
        return JSON
    fields = {name: kind_of_schema(one, root, level + 1) for name, one in properties.items()}
    return ("struct", fields)


def _look_up(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


class _Unfit(Exception):
    """A value is not of the kind that the schema says."""


def _fit(value: Any, kind: Kind) -> Any:
    """Return a value in the form in which a column of this kind holds it."""
    if value is None:
        return None
    if isinstance(kind, tuple):
        return _fit_nested(value, kind)
    if kind == JSON:
        return json_text(value)
    if kind == "float" and type(value) in (int, float):
        return float(value)
    if kind == "int" and type(value) is float and value.is_integer():
        value = int(value)
    if kind == "int" and type(value) is int and value in _INT64:
        return value
    if (kind, type(value)) in (("str", str), ("bool", bool)):
        return value
    raise _Unfit


def _fit_nested(value: Any, kind: tuple[str, Any]) -> Any:
    name, inner = kind
    if name == "list" and isinstance(value, list):
        return [_fit(item, inner) for item in value]
    if name == "struct" and isinstance(value, dict) and value.keys() <= inner.keys():
        return {field: _fit(value.get(field), one) for field, one in inner.items()}
    raise _Unfit
