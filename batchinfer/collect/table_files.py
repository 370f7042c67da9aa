"""Write rows to files: parquet, JSON Lines or CSV of a table, or ready lines. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from batchinfer.core import codec
from batchinfer.storage.scratch import Scratch, scratch_errors

if TYPE_CHECKING:
    from batchinfer.collect.table import Collection as Rows

_BLOCK_ROWS = 1000
_GROUP_ROWS = 20_000
_GROUP_BYTES = 64 << 20
"""Rows and bytes of which one suffices to end a row group of parquet."""
_FEW_VALUES = ("status", "finish_reason", "error_code", "model", "label")
_encode = msgspec.json.Encoder(enc_hook=str).encode


class TableFile(NamedTuple):
    """A finished file in the scratch folder."""

    path: Path
    rows: int
    bytes: int
    sha256: str


def write_files(rows: Rows, kind: str, most: int | None, scratch: Scratch) -> Iterator[TableFile]:
    """Write rows to files of at most so many rows each, and yield each file when it is finished.

    Without any row there is one file, which has the columns only.
    """

    def opened() -> tuple[Path, Any]:
        path = scratch.new_path("table")
        if kind == "parquet":
            from pyarrow import parquet

            few = [name for name in _FEW_VALUES if name in rows.schema.names]
            return path, parquet.ParquetWriter(
                path, rows.schema, compression="zstd", compression_level=1, use_dictionary=few
            )
        return path, CsvWriter(path, rows.schema) if kind == "csv" else LinesWriter(
            path, rows.json_texts
        )

    def finished() -> TableFile:
        writer.close()
        with path.open("rb") as file:
            return TableFile(path, count, path.stat().st_size, codec.sha256_file(file))

    with scratch_errors(scratch.folder):
        (path, writer), count = opened(), 0
        for table in _grouped(rows.tables()):
            start = 0
            while start < len(table):
                if count == most:
                    yield finished()
                    (path, writer), count = opened(), 0
                part = table.slice(start, most and most - count)
                writer.write_table(part)
                start, count = start + len(part), count + len(part)
        yield finished()


def _grouped(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield the same rows in tables of the size of row groups.

    Only the rows decide where a group ends, and how Arrow holds it: DuckDB's threads cut tables anywhere.
    """
    import pyarrow as pa

    held: list[Any] = []
    for block in _blocks(tables):
        held.append(block)
        size = sum(each.nbytes for each in held)
        if len(held) * _BLOCK_ROWS >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _blocks(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield the same rows in blocks of one size, each without chunks of its own."""
    import pyarrow as pa

    rest: Any = None
    for table in tables:
        rest = pa.concat_tables([rest, table]) if rest else table
        start = 0
        while len(rest) - start >= _BLOCK_ROWS:
            yield rest.slice(start, _BLOCK_ROWS).combine_chunks()
            start += _BLOCK_ROWS
        rest = rest.slice(start)
    if rest:
        yield rest.combine_chunks()


class LinesWriter:
    """Writes one JSON object a row. A table whose only column is `line` has the lines themselves.

    Args:
        path: The file.
        json_texts: Columns that hold JSON texts. They are written as what they hold.
    """

    def __init__(self, path: Path, json_texts: Collection[str]) -> None:
        self._json_texts = json_texts
        self._file = path.open("wb")
        self.close: Callable[[], None] = self._file.close

    def write_table(self, table: Any) -> None:
        """Append the rows of an Arrow table."""
        names = table.column_names
        if names == ["line"]:
            self._file.writelines(line + b"\n" for line in table["line"].to_pylist())
            return
        columns = [
            map(_raw, values) if name in self._json_texts else values
            for name, values in zip(names, map(_values, table.columns), strict=True)
        ]
        for row in zip(*columns, strict=True):
            self._file.write(_encode(dict(zip(names, row, strict=True))) + b"\n")


class CsvWriter:
    """Writes CSV. An empty text is "", a null is nothing; what CSV has no form for is JSON text."""

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow as pa
        from pyarrow import csv, types

        tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string)
        fields = [
            (field.name, field.type if any(test(field.type) for test in tests) else pa.string())
            for field in schema
        ]
        self._file = csv.CSVWriter(str(path), pa.schema(fields))
        self._types = [kind for _, kind in fields]
        self.close: Callable[[], None] = self._file.close

    def write_table(self, table: Any) -> None:
        """Append the rows of an Arrow table."""
        import pyarrow as pa

        columns = [
            column if column.type == kind else pa.array(map(_cell, _values(column)), kind)
            for column, kind in zip(table.columns, self._types, strict=True)
        ]
        self._file.write_table(pa.table(columns, table.column_names))


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    text = _encode(value).decode()
    return text[1:-1] if text[0] == '"' else text


def _raw(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_raw, value))
    return None if value is None else msgspec.Raw(value.encode())


def _values(column: Any) -> list[Any]:
    """Return a column as Python values for which JSON has a form: times in ISO 8601, bytes as base64."""
    import pyarrow as pa

    if getattr(column.type, "unit", "") == "ns":  # Python's times have no nanoseconds
        column = column.cast(pa.int64() if pa.types.is_duration(column.type) else pa.string())
    return list(column.to_pylist())
