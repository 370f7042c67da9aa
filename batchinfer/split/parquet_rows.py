"""Reads parquet with pyarrow, and writes the rows with polars.

Values keep the types that JSON has; docs/format.md says what becomes text. polars panics on some types, so pyarrow
casts these first, and types without a form in JSON are refused with the column's name.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from typing import BinaryIO, cast

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import raw_members
from batchinfer.split.blocks import Block, Wanted
from batchinfer.split.files import DataFile, opened

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 16_384
_UUID = (r"^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")
_LISTS = (
    pa.ListType,
    pa.LargeListType,
    pa.FixedSizeListType,
    pa.ListViewType,
    pa.LargeListViewType,
)


def count_parquet(file: DataFile, _wanted: Wanted) -> DataFile:
    """Read the footer of a parquet file."""
    with opened(file.url) as there:
        metadata, digest = read_footer(there)
    names = list(metadata.schema.to_arrow_schema().names)
    return msgspec.structs.replace(file, rows=metadata.num_rows, columns=names, digest=digest)


def read_footer(file: BinaryIO) -> tuple[pq.FileMetaData, str]:
    """Return the metadata of an open parquet file, and the sha256 of its footer."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little") + 8
    file.seek(max(0, size - length))
    digest = hashlib.sha256(b"PAR1" + file.read()).hexdigest()
    return pq.read_metadata(file), digest


def read_parquet(file: DataFile, wanted: Wanted, row: int) -> Iterator[Block]:
    """Yield the rows of a parquet file. Memory holds at most the columns that are needed of one row group."""
    names = file.columns if wanted.columns is None else wanted.columns
    needed = list(dict.fromkeys([*names, *filter(None, [wanted.id_column])]))
    with opened(file.url) as there, pq.ParquetFile(there, pre_buffer=False) as parquet:
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        row_bytes = sum(group.total_byte_size for group in groups) / file.rows
        kinds = [parquet.schema_arrow.field(name).type for name in needed]
        # The names in polars are numbers, because it gives some names, such as * and ^a$, a meaning.
        schema = pa.schema(
            (str(i), _plain(kind, file.url, name))
            for i, (name, kind) in enumerate(zip(needed, kinds, strict=True))
        )
        values = [_as_text(kind, pl.col(str(i))).alias(str(i)) for i, kind in enumerate(kinds)]
        # A name with a dot may bring other columns along, which `select` leaves out.
        for batch in parquet.iter_batches(
            batch_size=max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / (row_bytes or 1)))),
            columns=needed,
        ):
            table = pa.Table.from_batches([batch.select(needed)]).rename_columns(schema.names)
            frame = cast("pl.DataFrame", pl.from_arrow(table.cast(schema))).select(values)
            number = pl.int_range(row, row + frame.height, dtype=pl.Int64)
            own, ids = number.cast(pl.String), pl.Series(dtype=pl.Binary)
            if wanted.id_column:
                column = frame.to_series(needed.index(wanted.id_column))
                if column.dtype.is_nested():
                    what = f"holds {column.dtype}, expected texts or numbers for _id"
                    raise InputError(
                        f"{file.url}: column {wanted.id_column!r} {what}",
                        hint="name another --id-column, or --id-column _row for row numbers",
                    )
                own = pl.coalesce(pl.col(column.name).cast(pl.String), own)
                ids = column.cast(pl.String).cast(pl.Binary).drop_nulls()
            kept = [pl.col(str(i)).alias(name) for i, name in enumerate(names)]
            lines = io.BytesIO()
            try:
                frame.select(*kept, number.alias("_row"), own.alias("_id")).write_ndjson(lines)
            except pl.exceptions.PanicException as error:
                raise InputError(
                    f"{file.url}: rows {row} to {row + frame.height - 1} hold dates or times out of range",
                    hint="leave their column out: --columns A,B,…",
                ) from error
            found = lines.getvalue()
            yield Block(frame.height, found, ids, 0 if _is_text(table) else _num_broken(found))
            row += frame.height


def _is_text(table: pa.Table) -> bool:
    """Whether all texts are UTF-8, which Arrow does not check when it reads them."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _num_broken(lines: bytes) -> int:
    """Return the number of rows that are no UTF-8, of which the worker makes error rows."""
    return sum(raw_members(line) is None for line in lines.split(b"\n")[:-1])


def _simple(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries, extensions but UUIDs, and other containers than lists and structs."""
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        return _simple(kind.storage_type)
    if isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType):
        return _simple(kind.value_type)
    if isinstance(kind, pa.MapType):
        return pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
    return pa.list_(kind.value_type) if isinstance(kind, _LISTS) else kind


def _plain(kind: pa.DataType, url: str, name: str) -> pa.DataType:
    """Return the Arrow type that a column is cast to: one that polars can write, but for bytes.

    Raises:
        InputError: There is none.
    """
    kind = _simple(kind)
    if isinstance(kind, pa.UuidType):
        return kind.storage_type
    if isinstance(kind, pa.ListType):
        return pa.list_(_plain(kind.value_type, url, name))
    if isinstance(kind, pa.StructType):
        return pa.struct([(field.name, _plain(field.type, url, name)) for field in kind])
    if pa.types.is_floating(kind):  # polars would shorten those of 32 bits
        return pa.float64()
    # pyarrow cannot cast nulls within a part of a struct.
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_timestamp(kind):  # polars knows no time zones that are offsets
        return pa.timestamp(kind.unit, "UTC" if kind.tz else None)
    if pa.types.is_nested(kind) or pa.types.is_interval(kind):
        raise InputError(
            f"{url}: column {name!r} holds {kind}, which has no form in JSON here",
            hint="leave it out: --columns A,B,…",
        )
    return kind


def _as_text(kind: pa.DataType, value: pl.Expr) -> pl.Expr:
    """Make base64 of bytes and texts of UUIDs, at any depth. `kind` is the type before the cast by `_plain`."""
    kind = _simple(kind)
    if not re.search("binary|uuid", str(kind)):
        return value
    if isinstance(kind, pa.ListType):
        return value.list.eval(_as_text(kind.value_type, pl.element()))
    if isinstance(kind, pa.StructType):
        fields = [
            _as_text(each.type, value.struct.field(each.name)).alias(each.name) for each in kind
        ]
        return pl.when(value.is_not_null()).then(pl.struct(fields))
    if isinstance(kind, pa.UuidType):
        return value.bin.encode("hex").str.replace(*_UUID)
    return value.bin.encode("base64")
