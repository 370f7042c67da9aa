"""Answers that are JSON as columns, and whether they keep the schema that the run asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from batchinfer.collect.json_columns import MAX_FIELDS, JsonColumns
from batchinfer.core.json_text import is_deep, read_object

_OF_SCHEMA = {"string": "string", "integer": "int64", "number": "float64", "boolean": "bool"}
"""Names that Arrow has for the types of a JSON schema's simple members."""
_PREFIX = "answer_"


class JsonAnswers:
    """The columns of answers that are JSON, and of whether they keep the run's schema.

    An object's members are columns `answer_NAME`; other values, and lists of answers, are the column `answer`.

    Args:
        texts: Gives all answers, some at a time: a text, a list of texts or None for each row.
        schema: JSON schema of the run; None if it has none.
        columns: Names of the columns with answers and finish reasons.
    """

    def __init__(
        self, texts: Callable[[], Iterable[list[Any]]], schema: Any, columns: Sequence[str]
    ) -> None:
        import pyarrow as pa

        self._texts, self._reasons = columns
        self.num_broken = 0
        """Number of finished answers that break the schema, among those looked at so far."""
        self._validator: Any = _validator(schema) if isinstance(schema, Mapping) else None
        self._valid_type = pa.bool_() if self._texts == "text" else pa.list_(pa.bool_())
        known = {
            _PREFIX + name: pa.type_for_alias(_OF_SCHEMA[member["type"]])
            for name, member in _members(schema)
            if isinstance(member, Mapping) and str(member.get("type")) in _OF_SCHEMA
        }
        self._is_flat = True
        blocks = lambda: (list(map(self._row, block)) for block in texts())  # noqa: E731
        self._columns = JsonColumns(blocks, known)
        if len(self._columns.names) > MAX_FIELDS:
            self._is_flat = False
            self._columns = JsonColumns(blocks)

    def made(self, table: Any) -> Any:
        """Return an Arrow table of rows with these columns behind its own."""
        import pyarrow as pa

        texts, reasons = table[self._texts].to_pylist(), table[self._reasons].to_pylist()
        found = self._columns.arrays(list(map(self._row, texts)), self._columns.names)
        if self._validator is not None:
            name = "answer_valid" if "answer_valid" not in found else "_answer_valid"
            found[name] = pa.array(map(self._is_valid, texts, reasons), self._valid_type)
        for name, array in found.items():
            table = table.append_column(name, array)
        return table

    @property
    def json_texts(self) -> list[str]:
        """Names of the columns that are JSON text."""
        return self._columns.json_texts

    def _row(self, text: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"answer": list(map(_value, text))}
        value = _value(text)
        if self._is_flat and isinstance(value, dict):
            return {_PREFIX + name: item for name, item in value.items()}
        return {"answer": value} if value is not None else {}

    def _is_valid(self, text: Any, reason: Any) -> Any:
        """Return whether an answer keeps the schema; None for one that did not end by itself."""
        from referencing.exceptions import Unresolvable

        if isinstance(text, list):
            return list(map(self._is_valid, text, reason))
        if text is None or reason != "stop":
            return None
        try:
            is_valid = bool(self._validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            is_valid = False
        except Unresolvable:  # the schema points to another place
            return None
        self.num_broken += not is_valid
        return is_valid


def _value(text: str | None) -> Any:
    """Return the JSON value of a text; None if it is none, or is nested too deep."""
    data = (text or "").encode()
    if not data or is_deep(data):
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        has_numbers = b"NaN" in data or b"Infinity" in data  # which JSON does not have
        return None if has_numbers else read_object(data)


def _members(schema: Any) -> Iterable[tuple[str, Any]]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found.items() if isinstance(found, Mapping) else ()


def _validator(schema: Mapping[str, Any]) -> Any:
    """Return a validator that fetches no schema from elsewhere; None if the schema is none."""
    import jsonschema
    import referencing

    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return None
    return kind(schema, registry=referencing.Registry())


def schema_of(body: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a run's own body fields ask for JSON, and the schema that they give; None if they give none."""
    asked, constraint = body.get("response_format") or {}, body.get("structured_outputs") or {}
    schema = (asked.get("json_schema") or {}).get("schema", constraint.get("json"))
    if isinstance(schema, str):
        schema = json.loads(schema)
    is_json = asked.get("type") == "json_object" or constraint.get("json_object")
    return schema is not None or bool(is_json), schema
