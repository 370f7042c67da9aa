"""Write rows to files: parquet, JSON Lines or CSV of a table, or ready lines. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec
from batchinfer.storage.scratch import Scratch, scratch_errors

_GROUP_ROWS = 20_000
_GROUP_BYTES = 64 << 20
"""Rows and bytes of which one suffices to end a row group of parquet."""
_FEW_VALUES = ("status", "finish_reason", "error_code", "model", "chunk", "label")
_encode = msgspec.json.Encoder(enc_hook=str).encode


class TableFile(NamedTuple):
    """A finished file in the scratch folder."""

    path: Path
    rows: int
    bytes: int
    sha256: str


def write_files(
    tables: Iterable[Any], make_writer: Callable[[Path], Any], rows: int, scratch: Scratch
) -> Iterator[TableFile]:
    """Write Arrow tables to files of `rows` rows each, and yield each file when it is finished.

    Without any row there is one file, which has the columns only.
    """
    path, count = scratch.new_path("table"), 0
    writer = make_writer(path)
    for table in tables:
        start = 0
        while start < len(table):
            if writer is None:
                path, count = scratch.new_path("table"), 0
                writer = make_writer(path)
            part = table.slice(start, rows - count)
            start, count = start + len(part), count + len(part)
            with scratch_errors(scratch.folder):
                writer.write(part)
            if count == rows:
                yield _finished(writer, path, count)
                writer = None
    if writer is not None:
        yield _finished(writer, path, count)


def _finished(writer: Any, path: Path, rows: int) -> TableFile:
    with scratch_errors(path.parent):
        writer.close()
        with path.open("rb") as file:
            return TableFile(path, rows, path.stat().st_size, codec.sha256_file(file))


class ParquetWriter:
    """Writes a parquet file."""

    def __init__(self, path: Path, schema: Any) -> None:
        from pyarrow import parquet

        few = [name for name in _FEW_VALUES if name in schema.names]
        self._file = parquet.ParquetWriter(
            path, schema, compression="zstd", compression_level=1, use_dictionary=few
        )
        self._held: list[Any] = []

    def write(self, table: Any) -> None:
        """Append the rows of an Arrow table."""
        self._held.append(table)
        rows, size = sum(map(len, self._held)), sum(each.nbytes for each in self._held)
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._held:
            table = pa.concat_tables(self._held)
            self._file.write_table(table, row_group_size=max(1, len(table)))
            self._held = []


class LinesWriter:
    """Writes one JSON object a row. A table whose only column is `line` has the lines themselves.

    Args:
        path: The file.
        json_texts: Columns that hold JSON texts. They are written as what they hold.
    """

    def __init__(self, path: Path, json_texts: Collection[str]) -> None:
        self._json_texts = json_texts
        self._file = path.open("wb")

    def write(self, table: Any) -> None:
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

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class CsvWriter:
    """Writes CSV. An empty text is "", a null is nothing; what CSV has no form for is JSON text."""

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow as pa
        from pyarrow import csv, types

        tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string)
        self._schema = pa.schema(
            [
                (field.name, field.type if any(test(field.type) for test in tests) else pa.string())
                for field in schema
            ]
        )
        self._file = csv.CSVWriter(str(path), self._schema)

    def write(self, table: Any) -> None:
        """Append the rows of an Arrow table."""
        import pyarrow as pa

        columns = [
            column if column.type == kind else pa.array(map(_cell, _values(column)), kind)
            for column, kind in zip(table.columns, self._schema.types, strict=True)
        ]
        self._file.write_table(pa.table(columns, schema=self._schema))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


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
