"""Write rows to files: typed parquet, JSON Lines, CSV, or output lines as they are.

The same rows give the same bytes. Columns come in as lists of Python values or as pyarrow arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec

from batchinfer.collect.kinds import JSON, Kind
from batchinfer.collect.source_types import build_array, cell_type
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.formats.columns import LISTS, Shape
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
LINE_COLUMN = "source_line"
"""Name of the column with the text of lines of the source that are no JSON object."""
_HASH_BLOCK_BYTES = 1 << 20

Columns = dict[str, Any]
"""Values of each column, by the column's name: a list or a pyarrow array. All are equally long."""
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


class Schema:
    """Names and types of a table's columns, which are fixed before its first row is written.

    Args:
        shape: Columns of the answers.
        source: Kind of each of the source's columns, by the name that the column has in the table.
        dimension: Length of every embedding; 0 if the table has no embeddings.
        has_chunk: Whether the table's first column is the name of the row's chunk.
    """

    def __init__(
        self, shape: Shape, source: dict[str, Kind], *, dimension: int = 0, has_chunk: bool = False
    ) -> None:
        self.source = source
        self.names = [*(["chunk"] if has_chunk else []), *shape.names, *source]
        self.typed = {name for name, kind in source.items() if not isinstance(kind, str | tuple)}
        """Columns whose types job.json holds."""
        self._shape = shape
        self.dimension = dimension

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
            "embedding": pa.list_(pa.float32(), self.dimension),
        }
        if self._shape.answers == LISTS:
            types |= dict.fromkeys(("reasoning", "tool_calls", "logprobs"), pa.list_(pa.string()))
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
    """The pyarrow type for a kind of a source's column, whose values have all been seen."""
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


# --------------------------------------------------------------------------- writers


class ShardWriter:
    """Cuts a stream of columns into files of `shard_rows` rows each.

    Args:
        kind: Format of the files: parquet, jsonl, csv or lines. With lines, the only column is LINES: output lines.
        schema: Names and types of the columns; None if `kind` is lines.
        folder: Local folder in which the files are written.
        shard_rows: Number of rows of the job in each file. None puts all rows into one file.
    """

    def __init__(
        self, kind: str, schema: Schema | None, folder: Path, shard_rows: int | None
    ) -> None:
        if kind not in FORMATS:
            raise ConfigError(f"--format {kind}: expected one of {', '.join(FORMATS)}")
        self._kind = kind
        self._schema = schema
        self._folder = folder
        self._shard_rows = shard_rows
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
        if self._writer is not None:
            yield self._finish()

    def _write(self, columns: Columns, num_rows: int) -> None:
        """Append columns to the open file, or open a new file first.

        `num_rows` counts rows of the job. With --explode, one row of the job becomes several lines of the file.
        """
        if self._writer is None:
            self._path = self._folder / f"table-{self._count:05d}{FORMATS[self._kind]}"
            self._count += 1
            self._writer = _open_writer(self._kind, self._path, self._schema)
        with scratch_errors(self._folder):
            self._writer.write(columns)
        self._rows += num_rows
        self._lines += len(next(iter(columns.values())))

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


def _open_writer(kind: str, path: Path, schema: Schema | None) -> Writer:
    with scratch_errors(path.parent):
        if schema is None:
            return _LinesWriter(path)
        if kind == "parquet":
            return _ParquetWriter(path, schema)
        return _JsonLinesWriter(path, schema) if kind == "jsonl" else _CsvWriter(path, schema)


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
    """

    def __init__(self, path: Path, schema: Schema) -> None:
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
        self._file = csv.CSVWriter(str(path), self._schema)

    def write(self, columns: Columns) -> None:
        columns = columns | {
            name: list(map(_cell_text, _plain(columns[name]))) for name in self._may_nest
        }
        self._file.write_batch(_to_batch(columns, self._schema))

    def close(self) -> None:
        self._file.close()


def _cell_text(value: Any) -> str | None:
    return value if isinstance(value, str) else json_text(value)


def _plain(values: Any) -> list[Any]:
    """Return a column, which may be a pyarrow array, as a list of Python values."""
    return values if isinstance(values, list) else list(values.to_pylist())


def as_column(values: list[Any], kind: Kind) -> list[Any]:
    """Return the values of a source's column, encoded as JSON text if the column's kind is JSON."""
    return list(map(json_text, values)) if kind == JSON else values
