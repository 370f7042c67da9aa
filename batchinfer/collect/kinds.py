"""Find the types of columns by looking at every JSON value.

A JSON Lines file does not say what types its columns have, so the types are found from the values. A column whose
values have no common type becomes a column of JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Kind = Any
"""A type of values: NULL, "bool", "int", "float", "str", JSON, ("list", Kind) or ("struct", {name: Kind}).

A column whose type job.json holds has that pyarrow type as its kind, instead of a kind found here.
"""

NULL = "null"
JSON = "json"
MAX_FIELDS = 100
"""Largest number of fields of a struct.

An object with more fields is probably a map with arbitrary keys. It becomes JSON text.
"""

_SCALARS: dict[type, Kind] = {
    type(None): NULL,
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
}
_INT64 = range(-(1 << 63), 1 << 63)


def kind_of(value: Any) -> Kind:
    """Return the kind of one decoded JSON value.

    >>> kind_of({"role": "user", "turns": [1, 2.5]})
    ('struct', {'role': 'str', 'turns': ('list', 'float')})
    """
    kind = _SCALARS.get(type(value))
    if kind is not None:
        return JSON if kind == "int" and value not in _INT64 else kind
    if isinstance(value, list):
        return ("list", merge_all(map(kind_of, value)))
    if isinstance(value, dict) and 0 < len(value) <= MAX_FIELDS:
        return ("struct", {name: kind_of(item) for name, item in value.items()})
    return JSON


def merge_all(kinds: Iterable[Kind]) -> Kind:
    """Return the kind that can hold values of all given kinds; NULL if no kinds are given."""
    merged: Kind = NULL
    for kind in kinds:
        merged = merge(merged, kind)
    return merged


def merge(left: Kind, right: Kind) -> Kind:
    """Return the kind that can hold values of both given kinds.

    >>> merge("int", "float"), merge("int", "str"), merge(("list", "null"), ("list", "int"))
    ('float', 'json', ('list', 'int'))
    """
    if right in (left, NULL):
        return left
    if left == NULL:
        return right
    if isinstance(left, str) and isinstance(right, str) and {left, right} == {"int", "float"}:
        return "float"
    if isinstance(left, tuple) and isinstance(right, tuple) and left[0] == right[0]:
        if left[0] == "list":
            return ("list", merge(left[1], right[1]))
        fields = dict(left[1])
        for name, kind in right[1].items():
            fields[name] = merge(fields.get(name, NULL), kind)
        return ("struct", fields) if len(fields) <= MAX_FIELDS else JSON
    return JSON


def settle(kind: Kind) -> Kind:
    """Return the final kind of a column, after all of its values have been seen.

    If values differ in type at any depth, the whole column becomes JSON text. A column of nulls only becomes text.

    >>> settle(("struct", {"a": "json"})), settle(("list", "null")), settle("null")
    ('json', ('list', 'str'), 'str')
    """
    if kind == NULL:
        return "str"
    if isinstance(kind, str):
        return kind
    if kind[0] == "list":
        inner = settle(kind[1])
        return JSON if inner == JSON else ("list", inner)
    fields = {name: settle(inner) for name, inner in kind[1].items()}
    return JSON if JSON in fields.values() else ("struct", fields)


class KindObserver:
    """Looks at rows one by one, and finds their columns (in order of first appearance) and the columns' kinds."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}

    def see(self, row: dict[str, Any]) -> None:
        """Look at one row."""
        kinds = self._kinds
        for name, value in row.items():
            known = kinds.get(name)
            if (
                known == "str" and type(value) is str
            ):  # the most frequent case, tested first because it is fast
                continue
            if known == JSON:
                continue
            kinds[name] = kind_of(value) if known is None else merge(known, kind_of(value))

    def kinds(self) -> dict[str, Kind]:
        """Return the final kind of each column, by the column's name."""
        return {name: settle(kind) for name, kind in self._kinds.items()}
