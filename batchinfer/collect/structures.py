"""The types of JSON values: one structure that holds them all, in the form that DuckDB's json_transform takes.

A structure is the name of a type, a list of one structure, or a dictionary of structures. Values that have no type in
common stay JSON text, and so do numbers that the common type would round.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from batchinfer.collect.answers import arrow_reader, quoted

Structure = Any

_MAX_FIELDS = 100
"""Most fields of a struct. An object with more is probably a map with arbitrary keys, and stays JSON text."""
_LONG = "LONG"
"""Integers of 64 bits that a float may round."""
_LONG_NUMBER = "[0-9]{16}"
_COMMON = {("BIGINT", "DOUBLE"): "DOUBLE", ("BIGINT", _LONG): _LONG}
_NAMES = {"UBIGINT": "BIGINT", "HUGEINT": "BIGINT", _LONG: "BIGINT", "NULL": "VARCHAR"}
_OF_SCHEMA = {"string": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}


def find_structure(sql: Any, rows: str) -> Structure:
    """Return the structure of all JSON values in the column `json` of `rows`, a query; "NULL" if there are none."""
    found_long = (
        f"(SELECT json, regexp_matches(json::VARCHAR, '{_LONG_NUMBER}') AS is_long FROM {rows})"
    )
    shared = "json_group_structure(CASE WHEN NOT is_long THEN json END)"
    ((first, num_long),) = sql.execute(
        f"SELECT {shared}, count_if(is_long) FROM {found_long}"
    ).fetchall()
    found = json.loads(first or '"NULL"')
    if num_long:  # DuckDB would call integers of more than 64 bits floats, and round them
        for batch in arrow_reader(sql, f"SELECT json::VARCHAR FROM {found_long} WHERE is_long"):
            for text in batch.column(0).to_pylist():
                found = merged(found, _structure_of(json.loads(text)))
    return found


def _structure_of(value: Any) -> Structure:
    if isinstance(value, dict):
        return {name: _structure_of(item) for name, item in value.items()} or "JSON"
    if isinstance(value, list):
        return [functools.reduce(merged, map(_structure_of, value), "NULL")]
    if isinstance(value, int) and not isinstance(value, bool):
        size = value.bit_length()
        return "BIGINT" if size <= 53 else _LONG if size <= 63 else "JSON"
    return {bool: "BOOLEAN", float: "DOUBLE", str: "VARCHAR"}.get(type(value), "NULL")


def merged(a: Structure, b: Structure) -> Structure:
    """Return the structure that holds the values of two.

    >>> merged({"x": "BIGINT"}, {"x": "DOUBLE", "y": ["NULL"]}), merged("LONG", "DOUBLE")
    ({'x': 'DOUBLE', 'y': ['NULL']}, 'JSON')
    """
    if "NULL" in (a, b):
        return b if a == "NULL" else a
    if isinstance(a, list) and isinstance(b, list):
        return [merged(a[0], b[0])]
    if isinstance(a, dict) and isinstance(b, dict):
        return {name: merged(a.get(name, "NULL"), b.get(name, "NULL")) for name in {**a, **b}}
    if isinstance(a, str) and isinstance(b, str):
        a, b = sorted("BIGINT" if name in ("UBIGINT", "HUGEINT") else name for name in (a, b))
        return a if a == b else _COMMON.get((a, b), "JSON")
    return "JSON"


def settled(found: Structure) -> Structure:
    """Return a structure that DuckDB takes: it knows no two fields whose names differ in case only."""
    if isinstance(found, list):
        return [settled(found[0])]
    if isinstance(found, dict):
        folded = {name.casefold() for name in found}
        if len(found) > _MAX_FIELDS or len(folded) < len(found) or "" in folded:
            return "JSON"
        return {name: settled(item) for name, item in found.items()}
    return _NAMES.get(found, found)


def of_schema(schema: Any) -> Structure:
    """Return what a JSON schema says of the structure of its values; "NULL" where that is not simple."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "object" and isinstance(schema.get("properties"), dict):
        return {name: of_schema(item) for name, item in schema["properties"].items()}
    if kind == "array" and "items" in schema:
        return [of_schema(schema["items"])]
    return _OF_SCHEMA.get(kind, "NULL") if isinstance(kind, str) else "NULL"


def spelled(structure: Structure) -> str:
    """Return a structure as an SQL text."""
    return quoted(json.dumps(structure), "'")
