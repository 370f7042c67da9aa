"""Write rows to files: typed parquet, JSON Lines, CSV, or output lines as they are.

The same rows give the same bytes. Columns come in as lists of Python values or as pyarrow arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec

from batchinfer.collect.schema import Columns, Schema, json_text
from batchinfer.collect.source_types import build_array, cell_type
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.storage.scratch import scratch_errors

LINES = "lines"
"""Name of the format that is not a table: the run's output lines, copied byte for byte."""
FORMATS = {"parquet": ".parquet", "jsonl": ".jsonl", "csv": ".csv", LINES: ".jsonl"}
_GROUP_ROWS = 20_000
_GROUP_BYTES = 64 << 20
"""Size in bytes, in memory, at which a row group of a parquet file is written.

A group is written earlier if it has _GROUP_ROWS rows before it reaches this size.
"""
_FEW_VALUES = ("status", "finish_reason", "error_code", "chunk")
_FORMULA = re.compile("\\A([=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20])")
"""Beginning of a text that spreadsheets may run as a formula. The last four signs are =, +, - and @ in full width."""
_HASH_BLOCK_BYTES = 1 << 20
_encoder = msgspec.json.Encoder()


class Rows(Protocol):
    """Consecutive rows of the job, which can be cut into parts."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    def part(self, start: int, stop: int) -> Self:
        """Return the rows from `start` up to `stop`, exclusive."""
        ...


R = TypeVar("R", bound=Rows)


class TableFile(NamedTuple):
    """A finished file in the scratch folder."""

    path: Path
    rows: int
    bytes: int
    sha256: str


class Writer(Protocol):
    """Writes one file."""

    def write(self, columns: Columns) -> None:
        """Append rows, given as the values of each column."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


# --------------------------------------------------------------------------- writers


class ShardWriter:
    """Cuts a stream of rows into files of `shard_rows` rows each. The last file may have fewer.

    Args:
        kind: Format of the files: parquet, jsonl, csv or lines. With lines, the only column is LINES: output lines.
        schema: Names and types of the columns; None if `kind` is lines.
        folder: Local folder in which the files are written.
        shard_rows: Number of rows of the job in each file. None puts all rows into one file.
        is_csv_safe: Whether CSV files hold no cell that a spreadsheet would run as a formula.
    """

    def __init__(
        self,
        kind: str,
        schema: Schema | None,
        folder: Path,
        shard_rows: int | None,
        *,
        is_csv_safe: bool = False,
    ) -> None:
        if kind not in FORMATS:
            raise ConfigError(f"--format {kind}: expected one of {', '.join(FORMATS)}")
        self._kind = kind
        self._schema = schema
        self._folder = folder
        self._shard_rows = shard_rows
        self._is_csv_safe = is_csv_safe
        self._writer: Writer | None = None
        self._path = folder
        self._count = 0
        self._rows = 0
        self._lines = 0

    def files(self, blocks: Iterable[R], columns_of: Callable[[R], Columns]) -> Iterator[TableFile]:
        """Write blocks of rows one after the other, and yield each file when it is finished.

        `columns_of` makes the columns of a block.
        """
        for block in blocks:
            start = 0
            while start < block.num_rows:
                stop = block.num_rows
                if self._shard_rows is not None:
                    stop = min(stop, start + self._shard_rows - self._rows)
                self._write(columns_of(block.part(start, stop)), stop - start)
                if self._rows == self._shard_rows:
                    yield self._finish()
                start = stop
        if self._count == 0:  # no row at all: a file that only has the columns
            self._start()
        if self._writer is not None:
            yield self._finish()

    def _start(self) -> None:
        """Open a new file."""
        self._path = self._folder / f"table-{self._count:05d}{FORMATS[self._kind]}"
        self._count += 1
        self._writer = self._open()

    def _write(self, columns: Columns, num_rows: int) -> None:
        """Append columns to the open file, or open a new file first.

        `num_rows` counts rows of the job. With --explode, one row of the job becomes several lines of the file.
        """
        if self._writer is None:
            self._start()
        assert self._writer is not None
        with scratch_errors(self._folder):
            self._writer.write(columns)
        self._rows += num_rows
        self._lines += len(next(iter(columns.values())))

    def _open(self) -> Writer:
        path, schema = self._path, self._schema
        with scratch_errors(self._folder):
            if schema is None:
                return _LinesWriter(path)
            if self._kind == "parquet":
                return _ParquetWriter(path, schema)
            if self._kind == "jsonl":
                return _JsonLinesWriter(path, schema)
            return _CsvWriter(path, schema, is_safe=self._is_csv_safe)

    def _finish(self) -> TableFile:
        """Close the open file and return its description."""
        assert self._writer is not None
        with scratch_errors(self._folder):
            self._writer.close()
            size, digest = _measure(self._path)
        self._writer = None
        lines, self._rows, self._lines = self._lines, 0, 0
        return TableFile(self._path, lines, size, digest)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the open file, if there is one. It stays in the scratch folder and is removed together with that."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        # On a full disk, writing fails first and closing fails again. The first error is on its way to the user, so the
        # second one is suppressed.
        with scratch_errors(self._folder) if error is None else contextlib.suppress(OSError):
            writer.close()


def _measure(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return path.stat().st_size, digest.hexdigest()


def _to_batch(columns: Columns, schema: Any, typed: Container[str] = ()) -> Any:
    """Return columns as a pyarrow record batch. `typed` names the columns whose types job.json holds.

    Raises:
        InputError: a value does not fit the type of its column.
    """
    import pyarrow as pa

    arrays = []
    for field in schema:
        values = columns[field.name]
        try:
            if field.name in typed:
                arrays.append(build_array(values, field.type))
            elif isinstance(values, pa.Array):
                arrays.append(values.cast(field.type))
            else:
                arrays.append(pa.array(values, field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            if field.name in typed:
                hint = (
                    "collect with --format jsonl, which keeps the values as they are in the chunks"
                )
            else:
                hint = "did two configurations write to one run? `batchinfer verify --deep` tells"
            raise InputError(
                f"column {field.name!r}: a value is no {field.type} ({error})", hint=hint
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _ParquetWriter:
    """Writes a parquet file. A thread compresses and writes one row group while the next group is gathered."""

    def __init__(self, path: Path, schema: Schema) -> None:
        from pyarrow import parquet

        self._schema = schema.arrow()
        self._typed = schema.typed
        few = [name for name in _FEW_VALUES if name in schema.names]
        self._file = parquet.ParquetWriter(
            path, self._schema, compression="zstd", compression_level=1, use_dictionary=few
        )
        self._held: list[Any] = []
        self._held_rows = self._held_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parquet")
        self._under_way: Future[None] | None = None

    def write(self, columns: Columns) -> None:
        batch = _to_batch(columns, self._schema, self._typed)
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows >= _GROUP_ROWS or self._held_bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
            self._wait()
        finally:
            self._thread.shutdown()
            self._file.close()

    def _flush(self) -> None:
        self._wait()
        if self._held:
            held, self._held, self._held_rows, self._held_bytes = self._held, [], 0, 0
            self._under_way = self._thread.submit(self._write_group, held)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write_group(self, batches: list[Any]) -> None:
        import pyarrow as pa

        table = pa.Table.from_batches(batches, schema=self._schema)
        self._file.write_table(table, row_group_size=table.num_rows)


class _LinesWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, columns: Columns) -> None:
        self._file.writelines(columns[LINES])

    def close(self) -> None:
        self._file.close()


class _JsonLinesWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        self._names = schema.names
        self._file = path.open("wb")

    def write(self, columns: Columns) -> None:
        names = self._names
        rows = zip(*(_plain(columns[name]) for name in names), strict=True)
        self._file.write(
            _encoder.encode_lines([dict(zip(names, row, strict=True)) for row in rows])
        )

    def close(self) -> None:
        self._file.close()


class _CsvWriter:
    """Writes a CSV file.

    An empty text is written as "" and a null as nothing, so that a reader can tell an empty answer from a missing one.
    If `is_safe` is set, texts and column names that a spreadsheet would run as a formula begin with an apostrophe.
    """

    def __init__(self, path: Path, schema: Schema, *, is_safe: bool) -> None:
        import pyarrow as pa
        from pyarrow import csv

        types = {
            field.name: cell_type(field.type) if field.name in schema.typed else field.type
            for field in schema.arrow()
        }
        nested = {name for name, kind in types.items() if pa.types.is_nested(kind)}
        self._schema = pa.schema(
            [(name, pa.string() if name in nested else kind) for name, kind in types.items()]
        )
        self._may_nest = [
            *nested,
            *(name for name in schema.typed if pa.types.is_string(types[name])),
        ]
        self._is_safe = is_safe
        header = [_FORMULA.sub(r"'\1", name) if is_safe else name for name in types]
        self._written = pa.schema(list(zip(header, self._schema.types, strict=True)))
        self._file = csv.CSVWriter(str(path), self._written)

    def write(self, columns: Columns) -> None:
        import pyarrow as pa

        columns = columns | {
            name: list(map(_cell_text, _plain(columns[name]))) for name in self._may_nest
        }
        batch = _to_batch(columns, self._schema)
        if self._is_safe:
            batch = pa.RecordBatch.from_arrays(list(map(_safe_cells, batch)), schema=self._written)
        self._file.write_batch(batch)

    def close(self) -> None:
        self._file.close()


def _safe_cells(cells: Any) -> Any:
    import pyarrow as pa
    from pyarrow import compute

    if not pa.types.is_string(cells.type):
        return cells
    return compute.replace_substring_regex(cells, _FORMULA.pattern, r"'\1")


def _cell_text(value: Any) -> str | None:
    return value if isinstance(value, str) else json_text(value)


def _plain(values: Any) -> list[Any]:
    """Return a column, which may be a pyarrow array, as a list of Python values."""
    return values if isinstance(values, list) else list(values.to_pylist())
