"""Columns of JSON values: each has the type that all of its values share. Where they share none, it is JSON text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

MAX_FIELDS = 100
"""Most names of an object. One with more is probably a map with arbitrary keys, and stays JSON text."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_FLOATS = {b"NaN": math.nan, b"Infinity": math.inf, b"-Infinity": -math.inf}

Rows = Sequence[Mapping[str, Any]]
"""JSON objects. A member that Arrow cannot hold is `msgspec.Raw` (see `read_object`)."""


class JsonColumns:
    """The columns of JSON objects, found from all of their values.

    No value becomes another: no float stands for an integer that it would round, and no number for a text. A single
    value that Arrow cannot hold is its JSON text, and where that does not fit the column's type, all values are.

    Args:
        blocks: Gives all objects, some at a time. They are looked at again as long as the later ones widen the types.
        types: Arrow types of columns that are known beforehand.
    """

    def __init__(
        self, blocks: Callable[[], Iterable[Rows]], types: Mapping[str, Any] | None = None
    ) -> None:
        self._types: dict[str, Any] = dict(types or {})
        self.num_texts: Counter[str] = Counter()
        """Number of values that `arrays` has made JSON text, by column."""
        self._is_settled = False
        while not self._is_settled:
            self._is_settled = True
            for rows in blocks():
                self._see(rows)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order in which the objects have them."""
        return list(self._types)

    @property
    def json_texts(self) -> list[str]:
        """Names of the columns that are JSON text."""
        return [name for name, kind in self._types.items() if kind is None]

    def _see(self, rows: Rows) -> None:
        import pyarrow as pa

        for name in dict.fromkeys(chain.from_iterable(rows)):
            known = self._types.get(name, pa.null())
            if known is None:
                continue
            values = [_plain(row.get(name)) for row in rows]
            found = _shared(known, values)
            self._types[name] = found
            self._is_settled &= found is None or known in (found, pa.null())

    def arrays(self, rows: Rows, names: Iterable[str]) -> dict[str, Any]:
        """Return columns as Arrow arrays by their names."""
        import pyarrow as pa

        found = {}
        for name in names:
            kind = self._types[name]
            values = [row.get(name) for row in rows]
            if kind is None:
                values = [None if value is None else _text(value) for value in values]
                self.num_texts[name] += len(values) - values.count(None)
            elif any(raw := [isinstance(value, msgspec.Raw) for value in values]):
                values = list(map(_plain, values))
                self.num_texts[name] += sum(raw) if pa.types.is_string(kind) else 0
            found[name] = pa.array(values, kind or pa.string())
        return found


def _plain(value: Any) -> Any:
    """Return a value as Arrow takes it."""
    return _FLOATS.get(bytes(value), _text(value)) if isinstance(value, msgspec.Raw) else value


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _shared(known: Any, values: list[Any]) -> Any:
    """Return the Arrow type that a known type and values share; None if there is none."""
    import pyarrow as pa

    try:
        both = [pa.schema([("", kind)]) for kind in (known, pa.infer_type(values))]
        found = pa.unify_schemas(both, promote_options="permissive").types[0]
        array = pa.array(values, found)  # refuses integers that a float would round
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None
    is_odd = _is_odd(found) or ("double" in str(found) and _loses_booleans(values, array))
    return None if is_odd else found


def _loses_booleans(values: list[Any], array: Any) -> bool:
    """Whether Arrow has made numbers of booleans, as it does after a float."""
    count = _num_booleans(values)
    return count > 0 and count != _num_booleans(array.to_pylist())


def _num_booleans(values: list[Any]) -> int:
    text = _STRING.sub(b"", msgspec.json.encode(values))
    return text.count(b"true") + text.count(b"false")


def _is_odd(kind: Any) -> bool:
    """Whether a type has objects with too many names, with none, or with two that differ in case only."""
    import pyarrow as pa

    fields = [kind.field(index) for index in range(kind.num_fields)]
    names = {field.name.casefold() for field in fields}
    is_odd = len(fields) > MAX_FIELDS or len(names) < len(fields) or not all(names)
    is_odd |= pa.types.is_struct(kind) and not fields
    return is_odd or any(_is_odd(field.type) for field in fields)
