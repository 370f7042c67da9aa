"""Counts parquet files by their footers, and reads them by row group. Only the columns that are needed are read."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputError
from batchinfer.split import first_bytes, source_files
from batchinfer.split.arrow_values import (
    ColumnError,
    NullFloats,
    holds_bytes,
    make_converter,
    make_nullable,
    make_record_type,
)
from batchinfer.split.blocks import (
    ID_FIELD,
    OWN_FIELDS,
    ROW_FIELD,
    ColumnChoice,
    CountedFile,
    Oddities,
    PythonBlock,
    RowBlock,
    id_text,
    is_batch_request,
    kept_columns,
    no_such_column,
)
from batchinfer.split.source_files import FoundFile
from batchinfer.storage.opening import local_path

_TAIL_BYTES = 64 << 10
_BATCH_BYTES = 512 << 10
"""About the most uncompressed bytes of a batch, which is the rows that are decoded together. Larger batches were not
faster overall, because page faults cost what decoding saved, and they need more memory.
"""
_BATCH_ROWS = 1000
_WHOLE_GROUP_BYTES = 32 << 20
"""Compressed bytes of a row group up to which each of its columns is read in one piece. If a larger row group is to be
read, columns are read through buffers, to limit memory."""
_BUFFERS_BYTES = 64 << 20
"""Bytes that the buffers of all columns share. Each gets at least 64 KiB."""


def count(found: FoundFile) -> CountedFile:
    """Read the file's footer, to find the number of rows, the columns and the first row of each row group.

    Raises:
        OtherFormat: The file is JSON Lines.
        InputError: The file is not parquet, is damaged or cut short, or has two columns of one name.
    """
    with source_files.reading(found.url), source_files.open_binary(found) as file:
        tail = _read_tail(found, file)
        try:
            metadata = pq.read_metadata(pa.BufferReader(tail))
            schema = metadata.schema.to_arrow_schema()
            names = list(schema.names)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{found.url}: the name of a column is not UTF-8 ({error.object!r})",
                hint="rename the column and write the file again",
            ) from error
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"{found.url}: column {twice!r} is there twice, expected unique names",
            hint="rename one of them and write the file again",
        )
    marks, row = [], 0
    for index in range(metadata.num_row_groups):
        marks.append((row, 0))
        row += metadata.row_group(index).num_rows
    return CountedFile(
        found=found,
        format="parquet",
        rows=metadata.num_rows,
        columns=names,
        marks=marks,
        digest=hashlib.sha256(tail).hexdigest(),
        byte_columns=[field.name for field in schema if holds_bytes(field.type)],
        schema=pa.schema([pa.field(field.name, make_nullable(field.type)) for field in schema])
        .serialize()
        .to_pybytes(),
    )


def common_schema(
    files: Sequence[CountedFile], choice: ColumnChoice, columns: Sequence[str]
) -> str:
    """Return the schema of the columns that have one type in all files that hold them: its IPC form as base64.

    A column of nulls has the type that it has in the other files.
    """
    types: dict[str, list[Any]] = {name: [] for name in columns}
    for schema in {item.schema: None for item in files}:
        for field in pa.ipc.read_schema(pa.py_buffer(schema)):
            found = types.get(choice.name_in_rows(field.name))
            if found is None or field.type in found:
                continue
            if pa.types.is_null(field.type) and found:
                continue
            if found and pa.types.is_null(found[0]):
                found.clear()
            found.append(field.type)
    fields = [pa.field(name, found[0]) for name, found in types.items() if len(found) == 1]
    return base64.b64encode(pa.schema(fields).serialize()).decode()


def merge_schemas(first: str, second: str) -> str:
    """Return the schema of the columns that have one type in two parts of a job, from the parts' common schemas.

    Both arguments and the result are as `common_schema` returns them, for the same columns.
    """
    before, after = (
        pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in (first, second)
    )
    fields = []
    for field in before:
        index = after.get_field_index(field.name)
        kind = after.field(index).type if index >= 0 else None
        if kind is not None and pa.types.is_null(field.type):
            fields.append(field.with_type(kind))
        elif kind is not None and (kind == field.type or pa.types.is_null(kind)):
            fields.append(field)
    return base64.b64encode(pa.schema(fields).serialize()).decode()


def _read_tail(found: FoundFile, file: Any) -> bytes:
    """Return the magic at the start of the file, followed by the footer, its length and the magic at the end."""
    size = found.bytes
    head = file.read(first_bytes.HEAD_BYTES)
    first_bytes.check_start(found, head, "parquet")
    start = max(0, size - _TAIL_BYTES)
    file.seek(start)
    tail: bytes = file.read(size - start)
    magic = head[:4]
    if magic != source_files.MAGIC_PARQUET or tail[-4:] != source_files.MAGIC_PARQUET or size < 12:
        raise source_files.damaged(found.url, "no parquet magic at its start and end")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size - 4:
        raise source_files.damaged(found.url, "the footer is longer than the file")
    if length > len(tail):
        file.seek(size - length)
        tail = file.read(length)
    footer: bytes = magic + tail[-length:]
    return footer


def read(
    item: CountedFile, rows: range, first_row: int, choice: ColumnChoice, odd: Oddities
) -> Iterator[RowBlock]:
    """Yield the rows of one file in order.

    Args:
        item: The file.
        rows: Consecutive indices of rows in the file.
        first_row: Number in the job of the first of these rows.
        choice: The columns to keep, and the column whose values become `_id`.
        odd: Counts to which the NaN and infinite values found here are added.

    Raises:
        InputError: A column is missing or has no exact JSON form; the file is damaged, or changed since its count.
    """
    source_files.check_unchanged(item.found)
    groups = _groups(item, rows)
    skip = rows.start - item.marks[groups[0]][0] if groups else 0
    row, left = first_row, len(rows)
    with source_files.reading(item.found.url), _open(item, groups) as file:
        decode = _Decoder(item, file.schema_arrow, choice, odd)
        for batch in _batches(file, groups, decode.columns):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            part = batch.slice(skip, left)
            skip = 0
            if part.num_rows:
                yield decode.block(part, row)
            row += part.num_rows
            left -= part.num_rows
            if not left:
                break
    if left:
        raise source_files.changed(item.found.url)
    source_files.check_unchanged(item.found)


@contextlib.contextmanager
def _open(item: CountedFile, groups: list[int]) -> Iterator[Any]:
    """Open the file as a `pyarrow.parquet.ParquetFile`, with read buffers if the largest of `groups` needs them."""
    with contextlib.ExitStack() as stack:
        where: Any
        if source_files.is_local(item.found.url):
            where = str(local_path(item.found.url))
        else:
            where = stack.enter_context(source_files.open_binary(item.found))
        metadata = pq.read_metadata(where)
        if metadata.num_rows != item.rows or metadata.num_row_groups != len(item.marks):
            raise source_files.changed(item.found.url)
        largest = max((_group_bytes(metadata, index) for index in groups), default=0)
        buffer_bytes = 0
        if largest > _WHOLE_GROUP_BYTES:
            share = _BUFFERS_BYTES // max(1, metadata.num_columns)
            buffer_bytes = max(64 << 10, min(4 << 20, share))
        file = pq.ParquetFile(where, metadata=metadata, buffer_size=buffer_bytes)
        stack.callback(file.close)
        yield file


def _groups(item: CountedFile, rows: range) -> list[int]:
    """Return the indices of the row groups that hold these rows of the file."""
    starts = [start for start, _ in item.marks]
    ends = [*starts[1:], item.rows]
    return [
        index
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < rows.stop and end > rows.start
    ]


def _group_bytes(metadata: Any, index: int) -> int:
    group = metadata.row_group(index)
    return sum(group.column(column).total_compressed_size for column in range(group.num_columns))


def _batches(file: Any, groups: list[int], columns: list[str]) -> Iterator[Any]:
    for index in groups:
        group = file.metadata.row_group(index)
        roots = set(columns)
        size = sum(
            chunk.total_uncompressed_size
            for chunk in map(group.column, range(group.num_columns))
            if chunk.path_in_schema in roots or chunk.path_in_schema.partition(".")[0] in roots
        )
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // max(1, size)))
        yield from file.iter_batches(
            batch_size=rows, row_groups=[index], columns=columns, use_threads=False
        )


class _Decoder:
    """Converts record batches of one file to blocks of rows. `columns` are the columns to read from the file."""

    def __init__(self, item: CountedFile, schema: Any, choice: ColumnChoice, odd: Oddities) -> None:
        url = item.found.url
        keep = kept_columns(item.columns, choice)
        id_column = choice.id_column or ("custom_id" if is_batch_request(item.columns) else "")
        for option, names in (
            ("--columns", keep),
            ("--id-column", [id_column] if id_column else []),
        ):
            for name in names:
                if name not in schema.names:
                    raise no_such_column(name, item.columns, where=url, option=option)
        self._url, self._odd, self._keep, self._id_column = url, odd, keep, id_column
        self.columns = [*keep, id_column] if id_column and id_column not in keep else keep
        self._floats = {name: NullFloats() for name in self.columns}
        self._converters = {}
        for name in self.columns:
            try:
                kind = schema.field(name).type
                self._converters[name] = make_converter(kind, self._floats[name])
            except ColumnError as error:
                raise self._refusal(name, error) from error
        odd.renamed |= OWN_FIELDS.intersection(keep)
        names = [choice.name_in_rows(name) for name in keep]
        self._record = make_record_type([*names, ROW_FIELD, ID_FIELD])

    def block(self, batch: Any, first_row: int) -> RowBlock:
        """Convert one record batch. `first_row` is the row number in the job of the batch's first row."""
        numbers = range(first_row, first_row + batch.num_rows)
        values = {name: self._convert(name, batch.column(name)) for name in self.columns}
        ids: list[str] = list(map(str, numbers))
        if self._id_column:
            ids = list(map(id_text, values[self._id_column], numbers))
        for name, floats in self._floats.items():
            if floats.count:
                if name in self._keep:
                    self._odd.nulls[name] += floats.count
                floats.count = 0
        kept = [values[name] for name in self._keep]
        rows = list(map(self._record, *kept, numbers, ids))
        return PythonBlock(rows, ids if self._id_column else None)

    def _convert(self, name: str, array: Any) -> list[Any]:
        try:
            return self._converters[name](array)
        except ColumnError as error:
            raise self._refusal(name, error) from error
        except UnicodeDecodeError as error:
            raise self._refusal(name, ColumnError("text that is not UTF-8")) from error

    def _refusal(self, name: str, error: ColumnError) -> InputError:
        return InputError(
            f"{self._url}: column {name!r}: {error}, expected what JSON can hold exactly",
            hint="leave it out with --columns, or store it as another type",
        )
