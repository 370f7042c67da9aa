"""Reads parquet with pyarrow, and writes the rows with polars.

Values keep the types that JSON has; docs/format.md says what becomes text. polars panics on some types, so pyarrow
casts these first, and types without a form in JSON are refused with the column's name.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, cast

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputError
from batchinfer.split.files import Block, DataFile, Wanted, changed, opened

_END_BYTES = 64 << 10
_BATCH_BYTES = 4 << 20
_BATCH_ROWS, _SAMPLE_ROWS = 16_384, 16
_DAY = 86_400 * 10**9
_UUID = (r"^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")


def count_rows(file: DataFile, _wanted: Wanted) -> DataFile:
    """Read the footer of a parquet file."""
    with opened(file.url) as there:
        metadata, digest = read_footer(there)
        names = list(metadata.schema.to_arrow_schema().names)
    return msgspec.structs.replace(file, rows=metadata.num_rows, columns=names, digest=digest)


def read_footer(file: BinaryIO) -> tuple[pq.FileMetaData, str]:
    """Return the metadata of an open parquet file, and the sha256 of its end: the footer, and data before it.

    The footers of files of numbers alone may be equal where the numbers are not.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little") + 8
    file.seek(max(0, size - max(length, _END_BYTES)))
    end = file.read()
    footer = io.BytesIO(b"PAR1" + end[-length:])
    return pq.read_metadata(footer), hashlib.sha256(end).hexdigest()


def batches(file: DataFile, wanted: Wanted) -> Iterator[pl.DataFrame]:
    """Yield the rows of a parquet file. Memory holds at most the columns that are needed of one row group."""
    needed = _needed(file, wanted)
    with opened(file.url) as there:
        metadata, digest = read_footer(there)
        if digest != file.digest:
            raise changed(file.url)
        parquet = pq.ParquetFile(there, metadata=metadata, pre_buffer=False)
        groups = range(parquet.num_row_groups)
        num_bytes = sum(metadata.row_group(group).total_byte_size for group in groups)
        # In the file, a text that repeats counts once. A batch shows how large the rows really are.
        row_bytes = max(1.0, num_bytes / max(1, file.rows))
        buffered = pq.ParquetFile(
            there, metadata=metadata, pre_buffer=False, buffer_size=_END_BYTES
        )
        for sample in itertools.islice(buffered.iter_batches(_SAMPLE_ROWS, [0], columns=needed), 1):
            row_bytes = max(row_bytes, _row_bytes(_frame_of(sample, needed, file)))
        # pyarrow cannot make one batch of several row groups where lists or structs hold dictionaries.
        for group in groups:
            at_once = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / row_bytes)))
            for batch in parquet.iter_batches(at_once, [group], columns=needed):
                frame = _frame_of(batch, needed, file)
                row_bytes = max(row_bytes, _row_bytes(frame))
                yield frame


def _frame_of(batch: pa.RecordBatch, needed: list[str], file: DataFile) -> pl.DataFrame:
    # A name with a dot may bring other columns along, which `select` leaves out.
    return plain_frame(pa.Table.from_batches([batch.select(needed)]), file.url)


def _row_bytes(frame: pl.DataFrame) -> float:
    return frame.estimated_size() / max(1, frame.height)


def encode(frame: pl.DataFrame, file: DataFile, wanted: Wanted, row: int, _first: int) -> Block:
    """Return rows as lines. `row` is the number of the first of them."""
    needed = _needed(file, wanted)
    where = f"{file.url}: rows {row} to {row + frame.height - 1}"
    number = pl.int_range(row, row + frame.height, dtype=pl.Int64)
    own, ids = number.cast(pl.String), pl.Series(dtype=pl.Binary)
    if wanted.id_column:
        column = frame.to_series(needed.index(wanted.id_column))
        if column.dtype.is_temporal() or column.dtype.is_nested():
            # A cast would give other texts than the rows have.
            lines = encoded(column.alias("").to_frame(), where).splitlines()
            texts = (line[len('{"":') : -1].decode(errors="replace") for line in lines)
            column = pl.Series([None if one == "null" else one.strip('"') for one in texts])
        own = pl.coalesce(pl.lit(column.cast(pl.String)), own)
        ids = column.cast(pl.String).cast(pl.Binary)
    names = file.columns if wanted.columns is None else wanted.columns
    kept = [pl.col(str(i)).alias(name) for i, name in enumerate(names)]
    rows = frame.select(*kept, number.alias("_row"), own.alias("_id"))
    return Block(frame.height, encoded(rows, where), ids)


def _needed(file: DataFile, wanted: Wanted) -> list[str]:
    """Return the columns to read, those of the rows first."""
    names = file.columns if wanted.columns is None else wanted.columns
    return list(dict.fromkeys([*names, *filter(None, [wanted.id_column])]))


def plain_frame(table: pa.Table, where: str) -> pl.DataFrame:
    """Return columns with the values that they have in JSON.

    Their names are numbers, because polars gives some names, such as * and ^a$, a meaning.

    Raises:
        InputError: There is no form of a type in JSON.
    """
    forms = [_form(field.type, f"{where}: column {field.name!r}") for field in table.schema]
    texts = [text(pl.col(str(i))).alias(str(i)) for i, (_, text) in enumerate(forms) if text]
    # A cast to the same type would import pyarrow's compute functions, which takes a tenth of a second.
    plain = [
        column if column.type == kind else column.cast(kind)
        for column, (kind, _) in zip(table.columns, forms, strict=True)
    ]
    named = pa.table(plain, list(map(str, range(len(plain)))))
    return cast("pl.DataFrame", pl.from_arrow(named)).with_columns(texts)


def encoded(frame: pl.DataFrame, where: str) -> bytes:
    """Return rows as JSON Lines.

    Raises:
        InputError: polars cannot write a date or time.
    """
    lines = io.BytesIO()
    try:
        frame.write_ndjson(lines)
    except pl.exceptions.PanicException as error:
        raise InputError(
            f"{where} hold dates or times out of range",
            hint="leave their column out: --columns A,B,…",
        ) from error
    return lines.getvalue()


def _form(kind: pa.DataType, where: str) -> tuple[pa.DataType, Callable[[pl.Expr], pl.Expr] | None]:
    """Return the type that a column is cast to, and what then makes texts of its bytes, if it has any, at any depth.

    Raises:
        InputError: There is no form of this type in JSON.
    """
    if isinstance(kind, pa.UuidType):
        return kind.storage_type, lambda value: value.bin.encode("hex").str.replace(*_UUID)
    if isinstance(kind, pa.BaseExtensionType):
        return _form(kind.storage_type, where)
    if isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType):
        return _form(kind.value_type, where)
    if isinstance(kind, pa.MapType):
        entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        return _form(pa.list_(entry), where)
    if hasattr(kind, "value_type"):  # lists of every kind
        inner, text = _form(kind.value_type, where)
        return pa.list_(inner), text and (lambda value: value.list.eval(text(pl.element())))
    if isinstance(kind, pa.StructType) and len({field.name for field in kind}) == kind.num_fields:
        forms = {field.name: _form(field.type, where) for field in kind}
        plain = pa.struct([(name, inner) for name, (inner, _) in forms.items()])
        texts = [text(pl.field(name)) for name, (_, text) in forms.items() if text]
        return plain, (lambda value: value.struct.with_fields(texts)) if texts else None
    if pa.types.is_floating(kind):  # polars would shorten those of 32 bits
        return pa.float64(), None
    # pyarrow cannot cast nulls within a part of a struct.
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pa.string(), None
    if pa.types.is_time(kind):  # polars would make null of 24:00
        return (pa.int32() if kind.bit_width == 32 else pa.int64()), partial(_time, kind.unit)
    if pa.types.is_duration(kind) and kind.unit == "s":  # polars would not notice an overflow
        return pa.duration("ms"), None
    if pa.types.is_timestamp(kind):  # polars knows no time zones that are offsets
        return pa.timestamp(kind.unit, "UTC" if kind.tz else None), None
    if pa.types.is_nested(kind) or pa.types.is_interval(kind):
        raise InputError(
            f"{where} holds {kind}, which has no form in JSON here",
            hint="leave it out: --columns A,B,…",
        )
    return kind, (lambda value: value.bin.encode("base64")) if "binary" in str(kind) else None


def _time(unit: str, value: pl.Expr) -> pl.Expr:
    """Return the text of a time of day, which is counted in units; outside of a day its nanoseconds."""
    nanoseconds = value.cast(pl.Int64) * {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}[unit]
    inside = pl.when(nanoseconds.is_between(0, _DAY, closed="left")).then(nanoseconds)
    return pl.coalesce(inside.cast(pl.Time).dt.to_string("%T%.f"), pl.format("{} ns", nanoseconds))
