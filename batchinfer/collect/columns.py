"""Columns that SQL over the answers' bodies does not give: members of JSON values, verdicts on them, and vectors.

A column of JSON values has the type that all of its values share. Where they share none, it is JSON text. No value
becomes another: no float stands for an integer that it would round, and no number for a text.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from batchinfer.collect.answers import Answers, quoted, rows_of
from batchinfer.core.json_text import is_deep
from batchinfer.core.units import many

logger = logging.getLogger(__name__)

MAX_NAMES = 100
"""Most names of an object. One with more is probably a map with arbitrary keys, and stays JSON text."""
_LARGE = r"(^|[\[,:{\s])-?([0-9]{%d,}|[0-9.]+[eE]\+?[0-9]{3,})([,\]}\s]|$)"
"""Numbers of so many digits, or beyond float64."""
_FLOAT_DIGITS, _INT_DIGITS = 16, 19
_MOST_LEVELS = 40
"""Levels of arrays and objects that make a column. Readers of parquet take no more than 100, two for a list."""

_OF_SCHEMA = {"string": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
"""DuckDB's names for the types of a JSON schema's simple members."""

Shape = Any
"""As `json_group_structure` gives it: the name of a type, a list of one shape, or shapes by the names of members."""


class JsonColumns:
    """The columns of JSON objects.

    Args:
        sql: Connection with the relation.
        relation: SQL of a relation.
        value: SQL of its JSON values. Those that are no objects count as null.
        known: Types that the run's schema gives to members. A member gets its type if all of its values fit.
        most_names: Most names that all objects together may have, else they have no columns.
    """

    def __init__(
        self,
        sql: Any,
        relation: str,
        value: str,
        known: Mapping[str, str] | None = None,
        *,
        most_names: float = math.inf,
    ) -> None:
        self._value = f"CASE WHEN json_type({value}) = 'OBJECT' THEN {value} END"
        shape = _group(sql, relation, self._value)
        self.is_flat = shape != "JSON" and len(shape) <= most_names
        """Whether the objects have few members, none of them nested deep."""
        shape = shape if self.is_flat and isinstance(shape, dict) else {}
        folded = [name.casefold() for name in shape | dict(known or {})]
        odd = {name for name in folded if not name or folded.count(name) > 1}
        shape = {name: "JSON" if name.casefold() in odd else kind for name, kind in shape.items()}
        self.kinds = _fitting(
            sql, relation, {name: (self._member(name), kind) for name, kind in shape.items()}
        )
        wider = {
            name: (self._member(name), kind)
            for name, kind in (known or {}).items()
            if self.kinds.get(name, "NULL") in ("NULL", "BIGINT" if kind == "DOUBLE" else "")
            and name.casefold() not in odd
        }
        fitting = _fitting(sql, relation, wider)
        self.kinds |= {name: kind for name, kind in fitting.items() if kind != "JSON"}

    @property
    def json_texts(self) -> list[str]:
        """Names of the columns that are JSON text."""
        return [name for name, kind in self.kinds.items() if kind == "JSON"]

    @property
    def struct(self) -> str:
        """SQL of a struct of all members but those that are JSON text."""
        kinds = {name: kind for name, kind in self.kinds.items() if kind != "JSON"}
        return transform(self._value, kinds) if kinds else "NULL"

    def columns(self, struct: str) -> dict[str, str]:
        """Return the SQL of each column by its name, where the relation has `self.struct` under the name `struct`."""
        return {
            name: transform(self._member(name), kind)
            if kind == "JSON"
            else f"struct_extract({struct}, {quoted(name, chr(39))})"
            for name, kind in self.kinds.items()
        }

    def _member(self, name: str) -> str:
        pointer = "/" + name.replace("~", "~0").replace("/", "~1")
        return f"json_extract({self._value}, {quoted(pointer, chr(39))})"


def transform(value: str, shape: Shape) -> str:
    """Return the SQL that gives JSON values the types of a shape."""
    if shape == "JSON":
        return f"nullif(({value})::VARCHAR, 'null')"
    return f"json_transform({value}, {quoted(json.dumps(shape), chr(39))})"


def shape_of(sql: Any, relation: str, value: str) -> Shape:
    """Return the shape of JSON values, or JSON where they do not share one."""
    found = _group(sql, relation, value)
    return _fitting(sql, relation, {"": (value, found)})[""]


def _group(sql: Any, relation: str, value: str) -> Shape:
    # DuckDB keeps all values that json_group_structure reads, so it gets one of each structure.
    rows = f"(SELECT {value} AS v, row_number() OVER () AS r FROM {relation})"
    some = (
        f"SELECT any_value(v) AS v, min(r) AS r FROM {rows} GROUP BY json_structure(v) ORDER BY r"
    )
    [[found]] = rows_of(sql, f"SELECT json_group_structure(v) FROM ({some})")
    found = found or '"NULL"'
    return "JSON" if is_deep(found.encode()) else json.loads(found)


def _fitting(sql: Any, relation: str, found: dict[str, tuple[str, Shape]]) -> dict[str, Shape]:
    """Return the shapes of values by their names, JSON for those whose types would change a number."""
    kinds, large = {}, {}
    for name, (value, shape) in found.items():
        types = set[str]()
        signed = _signed(shape, types)
        types.update({"JSON"} if is_deep(json.dumps(shape).encode(), _MOST_LEVELS) else ())
        kinds[name] = "JSON" if "JSON" in types else signed
        if "JSON" not in types and types & {"DOUBLE", "UBIGINT", "HUGEINT", "UHUGEINT"}:
            pattern = _LARGE % (_FLOAT_DIGITS if "DOUBLE" in types else _INT_DIGITS)
            large[name] = f"bool_or(regexp_matches(({value})::VARCHAR, '{pattern}'))"
    names = list(large)
    for start in range(0, len(names), MAX_NAMES):  # each name takes memory
        some = names[start : start + MAX_NAMES]
        [row] = rows_of(sql, f"SELECT {', '.join(map(large.__getitem__, some))} FROM {relation}")
        kinds |= {name: "JSON" for name, is_large in zip(some, row, strict=True) if is_large}
    return kinds


def _signed(shape: Shape, types: set[str]) -> Shape:
    """Return a shape with one type for all integers. Its types are added to a set.

    JSON stands for objects that Arrow or DuckDB cannot hold.
    """
    if isinstance(shape, str):
        types.add(shape)
        return "BIGINT" if shape.endswith(("BIGINT", "HUGEINT")) else shape
    if isinstance(shape, list):
        return [_signed(shape[0], types)]
    names = {name.casefold() for name in shape}
    if len(names) < len(shape) or len(names) > MAX_NAMES or not all(names):
        types.add("JSON")
    return {name: _signed(kind, types) for name, kind in shape.items()}


# --------------------------------------------------------------------------- the schema of a run


def schema_of(body: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a run's own body fields ask for JSON, and the schema that they give; None if they give none."""
    # For speech, `response_format` is the name of a format.
    fields = body.get("response_format"), body.get("structured_outputs")
    asked, constraint = (each if isinstance(each, Mapping) else {} for each in fields)
    named = asked.get("json_schema")
    schema = (named if isinstance(named, Mapping) else {}).get("schema", constraint.get("json"))
    if isinstance(schema, str):
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    is_json = asked.get("type") == "json_object" or constraint.get("json_object")
    return schema is not None or bool(is_json), schema


def types_of(schema: Any) -> dict[str, str]:
    """Return DuckDB's types of the members to which a schema gives simple ones."""
    members = schema.get("properties") if isinstance(schema, Mapping) else None
    return {
        name: _OF_SCHEMA[member["type"]]
        for name, member in (members if isinstance(members, Mapping) else {}).items()
        if isinstance(member, Mapping) and str(member.get("type")) in _OF_SCHEMA
    }


class AnswerSchema:
    """A JSON schema that answers are validated against. It fetches no schema from elsewhere.

    Args:
        schema: The schema. If it is no valid one, `is_usable` is False, and no answer is validated.
    """

    def __init__(self, schema: Any) -> None:
        import jsonschema
        import referencing

        self.is_usable = False
        """Whether answers can be validated."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$schema", ""), str):
            kind = jsonschema.validators.validator_for(schema)
            self.is_usable = not list(kind(kind.META_SCHEMA).iter_errors(schema))
            self._validator = kind(schema, registry=referencing.Registry())

    def array(self, texts: Any, reasons: Any) -> Any:
        """Return whether the answers of an Arrow column are valid: a truth value a row, or a list of them.

        Null for an answer that did not end by itself, and where the schema refers to another place, or has a pattern or
        a number that Python cannot use.
        """
        import pyarrow as pa

        is_list = pa.types.is_list(texts.type)
        kind = pa.list_(pa.bool_()) if is_list else pa.bool_()
        found = map(self._is_valid, texts.to_pylist(), reasons.to_pylist())
        return pa.array(found, kind)

    def _is_valid(self, text: Any, reason: Any) -> Any:
        from referencing.exceptions import Unresolvable

        if isinstance(text, list):
            reasons = reason if isinstance(reason, list) else [reason] * len(text)
            return list(map(self._is_valid, text, reasons))
        if text is None or reason != "stop":
            return None
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return False
        try:
            return bool(self._validator.is_valid(answer))
        except (Unresolvable, re.error, OverflowError, RecursionError):
            return None


def num_broken(column: Any) -> int:
    """Return how many answers of such a column break the schema."""
    from pyarrow import compute, types

    flat = compute.list_flatten(column) if types.is_list(column.type) else column
    return compute.sum(compute.invert(flat)).as_py() or 0


# --------------------------------------------------------------------------- vectors

_decode_vectors = msgspec.json.Decoder(list[float | list[float | None] | None] | str).decode
_LENGTH = r"""CASE WHEN regexp_matches(v, '^\s*\[\s*\[') THEN -1
WHEN v[1] = '"' THEN length(trim(v, '"=')) * 3 // 16 ELSE json_array_length(v) END"""
_ALL = "coalesce(list_transform(items, lambda i: i.embedding), [embedding])"
_LENGTHS = f"list_transform({_ALL}, lambda v: {_LENGTH})"


class VectorColumn:
    """A column of vectors: its name and type, which are those of all rows.

    Args:
        answers: The answers, some of which have vectors.
        task: The run's task.
        column: The column that holds them as JSON texts: `embedding`, or `embeddings` if a row may have several.
    """

    def __init__(self, answers: Answers, task: str, column: str) -> None:
        import pyarrow as pa

        is_list = column == "embeddings"
        least, most = answers.one(f"min(list_min({_LENGTHS}))", f"max(list_max({_LENGTHS}))")
        self._is_nested = least < 0
        self._is_number = task == "reward" and least == most == 1
        is_reward = task == "reward" and (self._is_number or self._is_nested)
        self.name = "reward" if is_reward else "embedding"
        if self._is_nested:
            self.name = "rewards" if is_reward else "token_embeddings"
        elif is_list:
            self.name += "s"
        self._length = most if least == most > 0 else -1
        self._num_odd = 0
        self.type = pa.list_(pa.float32(), self._length)
        if self._is_number:
            self.type = pa.float32()
        for is_so in (self._is_nested, is_list):
            self.type = pa.list_(self.type) if is_so else self.type

    def array(self, table: Any) -> Any:
        """Return this column of a table as an Arrow array, of its JSON texts. What is no vector becomes null."""
        import pyarrow as pa

        found = [self._value(text) for text in table[self.name].to_pylist()]
        if self._num_odd:
            logger.warning("%s cannot be read: null here", many(self._num_odd, "vector"))
            self._num_odd = 0
        return pa.array(found, self.type)

    def _value(self, text: Any) -> Any:
        import numpy as np

        if text is None or isinstance(text, list):
            return text and list(map(self._value, text))
        try:
            value = _decode_vectors(text)
            if self._is_nested and value == []:
                return []
            if isinstance(value, str):
                value = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
            found = np.array(value, np.float32, ndmin=2)
            if found.shape[1] != self._length > 0:
                raise ValueError("another length")
        except ValueError:
            self._num_odd += 1
            return None
        return list(found) if self._is_nested else found[0, 0] if self._is_number else found[0]
