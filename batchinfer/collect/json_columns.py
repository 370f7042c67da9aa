"""Columns of JSON values: each has the type that all of its values share. Where they share none, it is JSON text.

No value becomes another: no float stands for an integer that it would round, and no number for a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.collect.answers import quoted, rows_of
from batchinfer.core.json_text import is_deep

MAX_NAMES = 100
"""Most names of an object. One with more is probably a map with arbitrary keys, and stays JSON text."""
_LARGE = r"(^|[\[,:{\s])-?([0-9]{%d,}|[0-9.]+[eE]\+?[0-9]{3,})([,\]}\s]|$)"
"""Numbers of so many digits, or beyond float64."""
_FLOAT_DIGITS, _INT_DIGITS = 16, 19

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
        known: Types of members that are known beforehand, which a member has if its values allow it.
    """

    def __init__(
        self, sql: Any, relation: str, value: str, known: Mapping[str, str] | None = None
    ) -> None:
        self._value = f"CASE WHEN json_type({value}) = 'OBJECT' THEN {value} END"
        shape = _group(sql, relation, self._value)
        self.is_flat = shape != "JSON" and len(shape) <= MAX_NAMES
        """Whether the objects have few members, none of them nested deep."""
        shape = shape if isinstance(shape, dict) else {}
        folded = [name.casefold() for name in shape]
        shape = {
            name: "JSON" if not name or folded.count(name.casefold()) > 1 else kind
            for name, kind in shape.items()
        }
        self.kinds = _fitting(
            sql, relation, {name: (self._member(name), kind) for name, kind in shape.items()}
        )
        for name, kind in (known or {}).items():
            if self.kinds.get(name, "NULL") in ("NULL", "BIGINT" if kind == "DOUBLE" else kind):
                self.kinds[name] = kind

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
            name: f"nullif({self._member(name)}::VARCHAR, 'null')"
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
        types = set(_types(shape))
        kinds[name] = "JSON" if "JSON" in types else _signed(shape)
        if "JSON" not in types and types & {"DOUBLE", "UBIGINT", "HUGEINT", "UHUGEINT"}:
            pattern = _LARGE % (_FLOAT_DIGITS if "DOUBLE" in types else _INT_DIGITS)
            large[name] = f"bool_or(regexp_matches(({value})::VARCHAR, '{pattern}'))"
    if large:
        [row] = rows_of(sql, f"SELECT {', '.join(large.values())} FROM {relation}")
        kinds |= {name: "JSON" for name, is_large in zip(large, row, strict=True) if is_large}
    return kinds


def _signed(shape: Shape) -> Shape:
    """Return a shape with one type for all integers."""
    if isinstance(shape, str):
        return "BIGINT" if shape.endswith(("BIGINT", "HUGEINT")) else shape
    if isinstance(shape, list):
        return list(map(_signed, shape))
    return {name: _signed(kind) for name, kind in shape.items()}


def _types(shape: Shape) -> Iterator[str]:
    """Yield the types in a shape; JSON stands for objects that Arrow or DuckDB cannot hold."""
    if isinstance(shape, str):
        yield shape
    elif isinstance(shape, list):
        yield from _types(shape[0])
    else:
        names = {name.casefold() for name in shape}
        if len(names) < len(shape) or len(names) > MAX_NAMES or not all(names):
            yield "JSON"
        for kind in shape.values():
            yield from _types(kind)


# --------------------------------------------------------------------------- the schema of a run


def schema_of(body: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a run's own body fields ask for JSON, and the schema that they give; None if they give none."""
    asked, constraint = body.get("response_format") or {}, body.get("structured_outputs") or {}
    schema = (asked.get("json_schema") or {}).get("schema", constraint.get("json"))
    if isinstance(schema, str):
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
