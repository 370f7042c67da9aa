"""Columns of a table: their names, their types, and their values before they are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from batchinfer.collect.kinds import JSON, Kind
from batchinfer.collect.source_rows import escape_surrogates
from batchinfer.formats.columns import LISTS, Shape
from batchinfer.formats.vector_columns import column_types

LINE_COLUMN = "source_line"
"""Name of the column with the text of lines of the source that are no JSON object."""
Columns = dict[str, Any]
"""Values of each column, by the column's name: a list or a pyarrow array. All are equally long."""
_encoder = msgspec.json.Encoder()


class Schema:
    """Names and types of a table's columns, which are fixed before its first row is written.

    Args:
        shape: Columns of the answers.
        source: Kind of each of the source's columns, by the name that the column has in the table.
        dimension: Length of every vector; 0 if the table has none.
        is_half: Whether vectors are float16 instead of float32.
        has_chunk: Whether the table has a column with the name of the row's chunk, before the row's number.
        has_run: Whether the table's first column is the name of the row's run.
        parsed: Kind of the column of parsed answers, by its name; empty if there is none.
    """

    def __init__(
        self,
        shape: Shape,
        source: dict[str, Kind],
        *,
        dimension: int = 0,
        is_half: bool = False,
        has_chunk: bool = False,
        has_run: bool = False,
        parsed: dict[str, Kind] | None = None,
    ) -> None:
        self.source = source
        self._parsed = parsed or {}
        places = [name for name, has in (("run", has_run), ("chunk", has_chunk)) if has]
        self.names = [*places, *shape.names, *self._parsed, *source]
        self.typed = {name for name, kind in source.items() if not isinstance(kind, str | tuple)}
        """Columns whose types job.json holds."""
        self._shape = shape
        self.dimension = dimension
        self._is_half = is_half

    def arrow(self) -> Any:
        """The pyarrow schema."""
        import pyarrow as pa

        types = {
            "row": pa.int64(),
            "choice_index": pa.int32(),
            "prompt_tokens": pa.int32(),
            "cached_tokens": pa.int32(),
            "completion_tokens": pa.int32(),
            "texts": pa.list_(pa.string()),
            "finish_reasons": pa.list_(pa.string()),
            **column_types(
                self.dimension, is_half=self._is_half, has_lists=self._shape.answers == LISTS
            ),
        }
        if self._shape.answers == LISTS:
            types |= dict.fromkeys(("reasoning", "tool_calls", "logprobs"), pa.list_(pa.string()))
        for name, kind in self._parsed.items():
            one = arrow_type(kind)
            types[name] = pa.list_(one) if self._shape.answers == LISTS else one
        return pa.schema(
            [
                pa.field(
                    name,
                    arrow_type(self.source[name])
                    if name in self.source
                    else types.get(name, pa.string()),
                )
                for name in self.names
            ]
        )


def arrow_type(kind: Kind) -> Any:
    """The pyarrow type for the final kind of a source's column, see `settle`."""
    import pyarrow as pa

    if isinstance(kind, pa.DataType):
        return kind
    if isinstance(kind, str):
        return {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}.get(kind, pa.string())
    if kind[0] == "list":
        return pa.list_(arrow_type(kind[1]))
    return pa.struct([pa.field(name, arrow_type(inner)) for name, inner in kind[1].items()])


def table_names(own_names: dict[str, str], taken: Iterable[str]) -> dict[str, str]:
    """Return the name that each column of the source gets in the table, by the keys of `own_names`.

    It is the column's own name, with "source_" in front as often as needed to differ from all names in `taken` and from
    those of all other columns.

    >>> table_names({"text": "text", "_row2": "_row", "source_text": "source_text"}, ["text"])
    {'text': 'source_source_text', '_row2': '_row', 'source_text': 'source_text'}
    """
    used = set(taken)
    kept = set(own_names.values()) - used
    names = {}
    for column, own_name in own_names.items():
        name = own_name
        while name in used or (name in kept and name != own_name):
            name = f"source_{name}"
        used.add(name)
        names[column] = name
    return names


def json_text(value: Any) -> str | None:
    """Return a value, which may be JSON already (`msgspec.Raw`), as JSON text; null becomes None."""
    text = _encoder.encode(value).decode()
    return None if text == "null" else text


def as_column(values: list[Any], kind: Kind) -> list[Any]:
    """Return the values of a source's column: as JSON text if its kind is JSON, else with lone surrogates escaped."""
    if kind == JSON:
        return list(map(json_text, values))
    if msgspec.Raw in map(type, values):
        return list(map(escape_surrogates, values))
    return values
