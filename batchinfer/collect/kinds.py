"""Find the types of columns by looking at every JSON value.

A JSON Lines file does not say what types its columns have, so the types are found from the values. A column whose
values have no common type becomes a column of JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from batchinfer.collect.source_rows import LINE, escape_surrogates

Kind = Any
"""A type of values: NULL, "bool", "int", LONG, "float", "str", JSON, ("list", Kind) or ("struct", {name: Kind}).

A column whose type job.json holds has that pyarrow type as its kind, instead of a kind found here.
"""

NULL = "null"
JSON = "json"
LONG = "long"
"""Integers of 64 bits beyond the range in which a float holds every integer exactly."""
MAX_FIELDS = 100
"""Largest number of fields of a struct.

An object with more fields is probably a map with arbitrary keys. It becomes JSON text.
"""
MAX_LEVELS = 32
"""Largest number of lists and structs within each other. Some readers of parquet refuse deeper types."""

_SCALARS: dict[type, Kind] = {
    type(None): NULL,
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
}
_NUMBERS: dict[tuple[str, str], Kind] = {
    ("int", "float"): "float",
    ("float", "int"): "float",
    ("int", LONG): LONG,
    (LONG, "int"): LONG,
}
"""Kind that can hold the numbers of two kinds. Floats cannot hold every LONG."""
_INT64 = range(-(1 << 63), 1 << 63)
_EXACT = range(-(1 << 53), (1 << 53) + 1)
"""Range in which a float holds every integer exactly."""


def kind_of(value: Any, unfit: list[Any] | None = None, level: int = 0) -> Kind:
    """Return the kind of one decoded JSON value.

    Args:
        value: The value. A `msgspec.Raw` is JSON that Python cannot hold exactly.
        unfit: A list to which the parts that no type can hold are added: integers beyond 64 bits, every `msgspec.Raw`,
            and values that are nested deeper than MAX_LEVELS.
        level: Number of lists and objects around the value.

    >>> kind_of({"role": "user", "turns": [1, 2.5]})
    ('struct', {'role': 'str', 'turns': ('list', 'float')})
    """
    kind = _SCALARS.get(type(value))
    if kind == "int":
        if value in _EXACT:
            return kind
        if value in _INT64:
            return LONG
    elif kind is not None:
        return kind
    elif type(value) in (list, dict) and level < MAX_LEVELS:
        if isinstance(value, list):
            return ("list", merge_all([kind_of(item, unfit, level + 1) for item in value]))
        if 0 < len(value) <= MAX_FIELDS:
            kinds = {name: kind_of(item, unfit, level + 1) for name, item in value.items()}
            return ("struct", kinds)
        return JSON
    if unfit is not None:
        unfit.append(value)
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
    if isinstance(left, str) and isinstance(right, str):
        return _NUMBERS.get((left, right), JSON)
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

    If values at any depth have no common type, the whole column becomes JSON text. A column of nulls becomes text.

    >>> settle(("struct", {"a": "json"})), settle(("list", "null")), settle("null")
    ('json', ('list', 'str'), 'str')
    """
    if kind == NULL:
        return "str"
    if isinstance(kind, str):
        return "int" if kind == LONG else kind
    if kind[0] == "list":
        inner = settle(kind[1])
        return JSON if inner == JSON else ("list", inner)
    fields = {name: settle(inner) for name, inner in kind[1].items()}
    return JSON if JSON in fields.values() else ("struct", fields)


class KindObserver:
    """Looks at rows one by one, and finds their columns (in order of first appearance) and the columns' kinds."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self.num_lines = 0
        """Number of lines that are no JSON object."""
        self.num_unfit: dict[str, int] = {}
        """Number of values that no type can hold as they are, by column. Columns without such values are absent."""
        self.examples: dict[str, str] = {}
        """Text that shows the first value counted in `num_unfit`, or the part of it that does not fit, by column."""

    def see(self, row: dict[str, Any]) -> None:
        """Look at one row."""
        kinds = self._kinds
        self.num_lines += LINE in row
        for name, value in row.items():
            known = kinds.get(name)
            # The most frequent cases are tested first, because the tests are fast.
            if known == "str" and type(value) is str:
                continue
            if known == "float" and type(value) is float:
                continue
            unfit: list[Any] = [value] if type(value) is msgspec.Raw else []
            kind = kind_of(escape_surrogates(value), unfit)
            kinds[name] = kind if known is None else merge(known, kind)
            if unfit:
                self.num_unfit[name] = self.num_unfit.get(name, 0) + 1
                self.examples.setdefault(name, _excerpt(unfit[0]))

    def without_common_type(self) -> list[str]:
        """Return the columns that become JSON text although none of their values is counted in `num_unfit`."""
        return [
            name
            for name, kind in self.kinds().items()
            if kind == JSON and name not in self.num_unfit
        ]

    def kinds(self) -> dict[str, Kind]:
        """Return the final kind of each column, by the column's name."""
        return {name: settle(kind) for name, kind in self._kinds.items()}


def _excerpt(value: Any) -> str:
    if isinstance(value, msgspec.Raw):
        return bytes(value)[:60].decode("utf-8", "replace")
    return str(value)[:60] if isinstance(value, int) else f"nested deeper than {MAX_LEVELS} levels"
