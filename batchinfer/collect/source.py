"""The source's columns of rows: read again from parquet files that are unchanged, else from the job's chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from batchinfer.collect.table_files import grouped
from batchinfer.core.errors import ConfigError, InputError, near
from batchinfer.core.records import Job, SourceFile
from batchinfer.split.files import opened

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20
_BATCH_ROWS = 4096


def chosen(columns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names of the columns that are asked for, of all without any.

    Raises:
        ConfigError: one of them is not known.
    """
    for name in columns:
        if name not in known:
            names = ", ".join(known[:30])
            raise ConfigError(
                f"--columns: the source has no column {name!r}, expected some of {names}{near(name, known)}",
                hint="check the spelling",
            )
    return list(dict.fromkeys(columns or known))


class ParquetSource:
    """The columns of a job's parquet files, which must be those that the job was made of.

    Raises:
        ConfigError: the source has no such column.
        Exception: a file is gone, has changed or cannot be read; a column has several types in the files, or one of
            which Arrow takes no rows.
    """

    def __init__(self, job: Job, columns: Sequence[str]) -> None:
        import pyarrow as pa

        self._files = job.files
        footers = list(map(_footer_of, self._files))
        schemas = [footer.schema.to_arrow_schema().remove_metadata() for footer in footers]
        self._types = pa.unify_schemas(schemas)
        names = chosen(columns, [name for name in job.columns if name in self._types.names])
        self.schema = pa.schema([self._types.field(name) for name in names])
        self.schema.empty_table().take(pa.array([], pa.int64()))
        groups = (each.row_group(index) for each in footers for index in range(each.num_row_groups))
        parts = (group.column(index) for group in groups for index in range(group.num_columns))
        own = tuple(f"{name}." for name in names)
        size = sum(
            x.total_uncompressed_size for x in parts if f"{x.path_in_schema}.".startswith(own)
        )
        num_rows = sum(footer.num_rows for footer in footers)
        self._at_once = min(_BATCH_ROWS, max(1, _BLOCK_BYTES * num_rows // max(1, size)))
        """Number of rows whose columns have limited bytes, by the mean. Texts that repeat count as one."""

    def tables(self) -> Iterator[tuple[int, Any]]:
        """Yield all rows in order, as Arrow tables of limited bytes, each with the number of its first row."""
        first = 0
        for table in grouped(self._batches(), self._at_once):
            yield first, table
            first += len(table)

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import dataset

        kind = dataset.ParquetFileFormat()
        for file in self._files:
            with opened(file.url) as there:
                rows = dataset.FileSystemDataset([kind.make_fragment(there)], self._types, kind)
                for batch in rows.to_batches(
                    columns=self.schema.names,
                    batch_size=self._at_once,
                    batch_readahead=1,
                    use_threads=False,
                ):
                    yield pa.table(batch)


def open_parquet(job: Job, columns: Sequence[str]) -> ParquetSource | None:
    """Return the columns of the job's parquet files; None if these are gone, have changed, or are not all it has.

    Raises:
        ConfigError: the source has no such column.
    """
    if not job.files or any(each.format != "parquet" for each in job.sources):
        return None
    try:
        return ParquetSource(job, columns)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the source, the chunks have its rows
        logger.info("the source cannot be read again (%s)", error)
        return None


def _footer_of(file: SourceFile) -> Any:
    """Return the metadata of a parquet file.

    Raises:
        InputError: its footer is not the one that it had when the job was made.
    """
    from batchinfer.split.parquet_rows import read_footer

    with opened(file.url) as there:
        metadata, digest = read_footer(there)
    if digest != file.digest:
        raise InputError(f"{file.url}: has changed since the split")
    return metadata
