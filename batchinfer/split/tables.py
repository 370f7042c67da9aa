"""Reads parquet with pyarrow and CSV with Python's csv module, and writes the rows with polars and msgspec.

Values keep the types that JSON has; docs/format.md says what becomes text. polars panics on some types, so pyarrow
casts these first, and types without a form in JSON are refused with the column's name.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import re
from collections.abc import Iterator
from typing import BinaryIO, cast

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputError
from batchinfer.core.json_text import raw_members
from batchinfer.split.files import FoundFile, damaged, ending, opened
from batchinfer.split.own_fields import Block, Counted, Part

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 16_384
_CSV_ROWS = 1024
_FIELD_BYTES = 64 << 20
"""Longest value of CSV: a quote that is not closed makes one value of the rest of the file."""
_UUID = (r"^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")
_LISTS = (
    pa.ListType,
    pa.LargeListType,
    pa.FixedSizeListType,
    pa.ListViewType,
    pa.LargeListViewType,
)


def _refuse_repeats(url: str, names: list[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"{url}: column {repeated[0]!r} is there twice, expected unique names",
            hint="rename one of them and write the file again",
        )


# --------------------------------------------------------------------------- parquet


def count_parquet(found: FoundFile, _delimiter: str) -> Counted:
    """Read the footer of a parquet file."""
    with opened(found.url) as file:
        metadata, digest = read_footer(file)
    names = list(metadata.schema.to_arrow_schema().names)
    _refuse_repeats(found.url, names)
    return Counted(rows=metadata.num_rows, columns=names, digest=digest)


def read_footer(file: BinaryIO) -> tuple[pq.FileMetaData, str]:
    """Return the metadata of an open parquet file, and the sha256 of its footer."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little") + 8
    file.seek(max(0, size - length))
    digest = hashlib.sha256(b"PAR1" + file.read()).hexdigest()
    return pq.read_metadata(file), digest


def read_parquet(part: Part) -> Iterator[Block]:
    """Yield the rows of a parquet file. Memory holds at most the columns that are needed of one row group."""
    url, row = part.found.url, part.first_row
    needed = list(dict.fromkeys([*part.names, *filter(None, [part.id_column])]))
    with opened(url) as file, pq.ParquetFile(file, pre_buffer=False) as parquet:
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        row_bytes = sum(group.total_byte_size for group in groups) / part.counted.rows
        kinds = {name: parquet.schema_arrow.field(name).type for name in needed}
        # The names in polars are numbers, because it gives some names, such as * and ^a$, a meaning.
        schema = pa.schema(
            [(str(i), _plain(kinds[name], url, name)) for i, name in enumerate(needed)]
        )
        values = [
            _as_text(kinds[name], pl.col(str(i))).alias(str(i)) for i, name in enumerate(needed)
        ]
        # A name with a dot may bring other columns along, which `select` leaves out.
        for batch in parquet.iter_batches(
            batch_size=max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / (row_bytes or 1)))),
            columns=needed,
        ):
            table = pa.Table.from_batches([batch.select(needed)]).rename_columns(schema.names)
            table = table.cast(schema)
            frame = cast("pl.DataFrame", pl.from_arrow(table)).select(values)
            block = _frame_block(frame, needed, part, row)
            yield block if _is_text(table) else block._replace(num_broken=_num_broken(block))
            row += frame.height


def _is_text(table: pa.Table) -> bool:
    """Whether all texts are UTF-8, which Arrow does not check when it reads them."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _num_broken(block: Block) -> int:
    """Return the number of rows that are no UTF-8, of which the worker makes error rows."""
    lines = block.encode(0, block.num_rows).split(b"\n")[:-1]
    return sum(raw_members(line) is None for line in lines)


def _frame_block(frame: pl.DataFrame, names: list[str], part: Part, first_row: int) -> Block:
    row = pl.int_range(first_row, first_row + frame.height, dtype=pl.Int64)
    own, ids = pl.lit(None, pl.String), pl.Series(dtype=pl.Binary)
    if part.id_column:
        column = frame.to_series(names.index(part.id_column))
        if column.dtype.is_nested():
            raise InputError(
                f"{part.found.url}: column {part.id_column!r} holds {column.dtype}, expected texts or numbers for _id",
                hint="name another --id-column, or --id-column _row for row numbers",
            )
        own = pl.col(column.name).cast(pl.String)
        ids = column.cast(pl.String).cast(pl.Binary).drop_nulls()
    kept = [pl.col(str(names.index(name))).alias(name) for name in part.names]
    own_id = pl.coalesce(own, row.cast(pl.String))
    rows = frame.select(*kept, row.alias("_row"), own_id.alias("_id"))

    def encode(start: int, stop: int) -> bytes:
        lines = io.BytesIO()
        rows.slice(start, stop - start).write_ndjson(lines)
        return lines.getvalue()

    return Block(rows.height, encode, ids)


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
    if pa.types.is_decimal(kind) or pa.types.is_null(
        kind
    ):  # pyarrow cannot cast nulls within a part of a struct
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


# --------------------------------------------------------------------------- CSV


def count_csv(found: FoundFile, delimiter: str) -> Counted:
    """Read a whole CSV file, to find the number of records, the columns and the sha256."""
    digest = hashlib.sha256()
    records = _records(found, delimiter, digest)
    names = next(records, [])
    _refuse_repeats(found.url, names)
    return Counted(rows=sum(1 for _ in records), columns=names, digest=digest.hexdigest())


def read_csv(part: Part) -> Iterator[Block]:
    """Yield the records of a CSV file. Every value is text."""
    records, row = _records(part.found, part.delimiter, hashlib.sha256()), part.first_row
    names = next(records, [])
    schema = dict.fromkeys(map(str, range(len(names))), pl.String)
    while some := list(itertools.islice(records, _CSV_ROWS)):
        yield _frame_block(pl.DataFrame(some, schema, orient="row"), names, part, row)
        row += len(some)


def _records(found: FoundFile, delimiter: str, digest: hashlib._Hash) -> Iterator[list[str]]:
    """Yield the header and the records, all of one length. Blank lines are no records."""
    csv.field_size_limit(_FIELD_BYTES)
    with opened(found.url) as file:

        def texts() -> Iterator[str]:
            for number, line in enumerate(file):
                digest.update(line)
                yield line.decode("utf-8" if number else "utf-8-sig")

        delimiter = delimiter or ("\t" if ending(found.url) == ".tsv" else ",")
        reader, header = csv.reader(texts(), delimiter=delimiter, strict=True), None
        try:
            for record in filter(None, reader):
                header = header or record
                if len(record) != len(header):
                    what = f"{len(record)} values, expected the header's {len(header)}"
                    raise InputError(
                        f"{found.url}, line {reader.line_num}: {what}",
                        hint="quote values with a delimiter or a newline in them, or see --delimiter",
                    )
                yield record
        except csv.Error as error:
            raise InputError(
                f"{found.url}: is no CSV at line {reader.line_num} ({error}), perhaps a quote is not closed",
                hint='close it, and write quotes within quoted values twice: ""',
            ) from error
        except UnicodeDecodeError as error:
            raise damaged(
                found.url, f"line {reader.line_num + 1} is not UTF-8: {error.reason}"
            ) from error
