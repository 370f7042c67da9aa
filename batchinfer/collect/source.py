"""The source's columns of rows: read again from parquet files that are unchanged, else from the job's chunks."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from batchinfer.collect.answers import rows_at_once
from batchinfer.collect.json_columns import JsonColumns
from batchinfer.core.errors import ConfigError, InputError, StorageError, near
from batchinfer.core.json_text import read_object
from batchinfer.core.records import Job, SourceFile
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.storage.opening import fsspec_options, local_path, split_url
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20
_OWN = ("_row", "_id")


class Source(NamedTuple):
    """Columns of the source.

    `read` yields all rows that are wanted, in input order, and maybe others: Arrow tables of rows that follow each
    other, each with the number that its first row has in the job. `json` has made columns of JSON values.
    """

    schema: Any
    read: Callable[[], Iterator[tuple[int, Any]]]
    json: JsonColumns | None = None


class Chunks(NamedTuple):
    """The chunks of the rows that are wanted."""

    refs: Sequence[ChunkRef]
    open_store: OpenStore
    scratch: Scratch

    def lines(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield some MB of lines at a time, with the number of the first one's row."""
        open_store = functools.cache(self.open_store)
        for ref in self.refs:
            local = fetch(open_store(ref.root), ref, self.scratch)
            row = ref.first_row
            with scratch_errors(local.path.parent), local.path.open("rb") as file:
                while data := file.read(_BLOCK_BYTES) + file.readline():
                    lines = data.removesuffix(b"\n").split(b"\n")
                    yield row, lines
                    row += len(lines)
            remove_quietly(local.path)


def open_source(job: Job, chunks: Chunks, columns: Sequence[str]) -> Source:
    """Return the source's columns.

    Args:
        job: The job.
        chunks: Its chunks.
        columns: Names of the columns; none for all of the job.

    Raises:
        ConfigError: the source has no such column.
    """
    try:
        found = _from_parquet(job, columns)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the source, the chunks have its rows
        logger.info("the source cannot be read again (%s)", error)
        found = None
    return found or _from_chunks(chunks, columns)


def open_lines(chunks: Chunks) -> Source:
    """Return the lines of chunks, as the only column `source`."""
    import pyarrow as pa

    schema = pa.schema([("source", pa.binary())])

    def read() -> Iterator[tuple[int, Any]]:
        for row, lines in chunks.lines():
            yield row, pa.table([lines], schema)

    return Source(schema, read)


def _chosen(columns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names of the columns that are asked for.

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
    return list(columns or known)


# --------------------------------------------------------------------------- chunks


def _from_chunks(chunks: Chunks, wanted: Sequence[str]) -> Source:
    """Return columns whose types are found from all values, which reads every chunk once or more."""
    import pyarrow as pa

    broken: set[int] = set()

    def blocks() -> Iterator[list[dict[str, Any]]]:
        for row, lines in chunks.lines():
            rows = list(map(read_object, lines))
            broken.update(row + index for index, each in enumerate(rows) if each is None)
            yield [
                _mended(line) if each is None else each
                for line, each in zip(lines, rows, strict=True)
            ]

    found = JsonColumns(blocks)
    names = _chosen(wanted, [name for name in found.names if name not in _OWN])
    if broken:
        logger.warning(
            "%d lines of the source are no JSON objects in UTF-8, the first is row %d",
            len(broken),
            min(broken),
        )

    def read() -> Iterator[tuple[int, Any]]:
        found.num_texts.clear()
        for row, lines in chunks.lines():
            rows = [read_object(line) or _mended(line) for line in lines]
            yield row, pa.table(found.arrays(rows, names))

    return Source(pa.table(found.arrays([], names)).schema, read, found)


def _mended(line: bytes) -> dict[str, Any]:
    """Return what can be read of a line that is no JSON object in UTF-8: other bytes become U+FFFD."""
    return read_object(line.decode(errors="replace").encode()) or {}


# --------------------------------------------------------------------------- parquet


def _from_parquet(job: Job, columns: Sequence[str]) -> Source | None:
    """Return the columns of the job's parquet files; None if other files are among them, or one has changed.

    Raises:
        Exception: a file is gone or cannot be read, or the files' columns have no types in common.
    """
    import pyarrow as pa
    from pyarrow import dataset

    if any(each.format != "parquet" for each in job.sources) or not job.files:
        return None
    files = job.files
    footers = list(map(_footer_of, files))
    schemas = [footer.schema.to_arrow_schema().remove_metadata() for footer in footers]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    names = _chosen(columns, [name for name in job.columns if name in schema.names])

    def read() -> Iterator[tuple[int, Any]]:
        kind, row = dataset.ParquetFileFormat(), 0
        for file, footer in zip(files, footers, strict=True):
            groups = map(footer.row_group, range(footer.num_row_groups))
            size = rows_at_once(sum(group.total_byte_size for group in groups), file.rows)
            try:
                with _open(file.url) as opened:
                    rows = dataset.FileSystemDataset([kind.make_fragment(opened)], schema, kind)
                    for batch in rows.to_batches(
                        columns=names, batch_size=size, batch_readahead=1, use_threads=False
                    ):
                        yield row, pa.table(batch)
                        row += len(batch)
            except (OSError, pa.ArrowException) as error:
                raise StorageError(f"{file.url}: cannot be read ({error})") from error

    return Source(pa.schema([schema.field(name) for name in names]), read)


def _open(url: str) -> Any:
    import fsspec

    scheme, path = split_url(url)
    if scheme == "file":
        return local_path(url).open("rb")
    return fsspec.filesystem(scheme, **fsspec_options(scheme)).open(path)


def _footer_of(file: SourceFile) -> Any:
    """Return the metadata of a parquet file.

    Raises:
        InputError: it has not the size and the footer that it had when the job was made.
    """
    from pyarrow import parquet

    with _open(file.url) as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - 8))
        length = int.from_bytes(opened.read(4), "little") + 8
        opened.seek(max(0, size - length))
        digest = hashlib.sha256(b"PAR1" + opened.read()).hexdigest()
        if (size, digest) != (file.bytes, file.digest):
            raise InputError(f"{file.url}: has changed since the split")
        return parquet.read_metadata(opened)
