"""The source's columns of rows: read again from parquet files that are unchanged, else from the job's chunks."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from batchinfer.collect.answers import (
    arrow_reader,
    files,
    quoted,
    rows_at_once,
    sql_errors,
)
from batchinfer.collect.structures import Structure, find_structure, merged, settled, spelled
from batchinfer.core.errors import ConfigError, InputError, StorageError, near
from batchinfer.core.json_text import flatten_deep, is_deep
from batchinfer.core.records import Job, SourceFile
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.storage.opening import fsspec_options, local_path, split_url
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

logger = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class Source:
    """Columns of the source, read forwards and, if an earlier row is wanted, again from the start.

    Args:
        schema: Names and types of the columns.
        read: Yields all rows in order, as Arrow tables or record batches that do not take much memory.
        has_all: Whether `read` yields all rows of the job; else it yields those of the collected chunks only.
    """

    def __init__(self, schema: Any, read: Callable[[], Iterator[Any]], *, has_all: bool) -> None:
        self.schema = schema
        self.has_all = has_all
        self._read = read
        self._first = 1 << 62
        self._block: Any = schema.empty_table()
        self._blocks: Iterator[Any] = iter(())

    def rows(self, wanted: Any) -> Any:
        """Return the first of the wanted rows, those that are read together, as an Arrow table.

        `wanted` holds the rows' places among all, a numpy array in ascending order.
        """
        import pyarrow as pa

        if not wanted.size:
            return self.schema.empty_table()
        if wanted[0] < self._first:
            self._blocks, self._first, self._block = self._read(), 0, self.schema.empty_table()
        while wanted[0] >= self._first + len(self._block):
            self._first += len(self._block)
            self._block = next(self._blocks)
        inside = wanted[wanted < self._first + len(self._block)]
        first, last = int(inside[0] - self._first), int(inside[-1] - self._first)
        if last - first < inside.size:  # no row between them is left out
            return pa.table(self._block.slice(first, inside.size))
        return pa.table(self._block.take(pa.array(inside - self._first)))


def open_source(
    sql: Any,
    job: Job | None,
    refs: Sequence[ChunkRef],
    columns: Sequence[str] | None,
    open_store: OpenStore,
    scratch: Scratch,
) -> Source:
    """Return the source's columns.

    Args:
        sql: Connection of `connect`.
        job: The job; None for a run over a list of files.
        refs: The chunks of the rows that are collected.
        columns: Names of the columns; None for all of the job.
        open_store: Opens the stores of the chunks.
        scratch: Folder for copies of chunks.

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
    return found or _Chunks(sql, refs, open_store, scratch).source(columns)


def _chosen(columns: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the names of the columns that are asked for.

    Raises:
        ConfigError: one of them is not known.
    """
    for name in columns or ():
        if name not in known:
            names = ", ".join(known[:30])
            raise ConfigError(
                f"--columns: the source has no column {name!r}, expected some of {names}{near(name, known)}",
                hint="check the spelling",
            )
    return list(columns or known)


def open_lines(
    sql: Any, refs: Sequence[ChunkRef], open_store: OpenStore, scratch: Scratch
) -> Source:
    """Return the lines of chunks, as the only column `source`."""
    import pyarrow as pa

    chunks = _Chunks(sql, refs, open_store, scratch)
    schema = pa.schema([("source", pa.string())])
    return Source(schema, lambda: chunks.read("json::VARCHAR AS source"), has_all=False)


# --------------------------------------------------------------------------- parquet


def _from_parquet(job: Job | None, columns: Sequence[str] | None) -> Source | None:
    """Return the columns of the job's parquet files; None if other files are among them, or one has changed.

    Raises:
        Exception: a file is gone or cannot be read, or the files' columns have no types in common.
    """
    import pyarrow as pa
    from pyarrow import dataset

    if job is None or any(each.format != "parquet" for each in job.sources):
        return None
    found = job.files
    footers = list(map(_footer_of, found))
    schemas = [footer.schema.to_arrow_schema().remove_metadata() for footer in footers]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    names = _chosen(columns, [name for name in job.columns if name in schema.names])

    def read() -> Iterator[Any]:
        kind = dataset.ParquetFileFormat()
        for file, footer in zip(found, footers, strict=True):
            groups = map(footer.row_group, range(footer.num_row_groups))
            size = rows_at_once(sum(group.total_byte_size for group in groups), file.rows)
            try:
                with _open(file.url) as opened:
                    rows = dataset.FileSystemDataset([kind.make_fragment(opened)], schema, kind)
                    yield from rows.to_batches(
                        columns=names, batch_size=size, batch_readahead=1, use_threads=False
                    )
            except (OSError, pa.ArrowException) as error:
                raise StorageError(f"{file.url}: cannot be read ({error})") from error

    return Source(pa.schema([schema.field(name) for name in names]), read, has_all=True)


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


# --------------------------------------------------------------------------- chunks


class _Chunks:
    """Reads the lines of chunks, some MB at a time."""

    def __init__(
        self, sql: Any, refs: Sequence[ChunkRef], open_store: OpenStore, scratch: Scratch
    ) -> None:
        self._sql = sql
        self._refs = refs
        self._open_store = functools.cache(open_store)
        self._scratch = scratch

    def read(self, columns: str) -> Iterator[Any]:
        """Yield the rows of all chunks that are to be done: SQL expressions over `json`, a line."""
        for lines in self._pieces():
            yield from arrow_reader(self._sql, f"SELECT {columns} FROM {lines}")

    def _pieces(self) -> Iterator[str]:
        """Yield the SQL that reads the next lines of the chunks: a valid JSON value for each row."""
        for ref in self._refs:
            local = fetch(self._open_store(ref.root), ref, self._scratch)
            left = local.num_lines if ref.row_limit is None else ref.row_limit
            with scratch_errors(local.path.parent), local.path.open("rb") as file:
                while left and (data := file.read(_PIECE_BYTES) + file.readline()):
                    lines = data.removesuffix(b"\n").split(b"\n")[:left]
                    left -= len(lines)
                    # Each piece has a name of its own, because DuckDB remembers what it has read of a file, and ends
                    # with a newline, because DuckDB 2.0 may read past the end of a file that does not.
                    piece = self._scratch.new_path("piece.jsonl")
                    piece.write_bytes(b"".join(line + b"\n" for line in lines))
                    if is_deep(data) or self._count(piece) != len(lines):
                        piece.unlink()
                        piece = self._scratch.new_path("mended.jsonl")
                        piece.write_bytes(b"".join(_mended(line) + b"\n" for line in lines))
                    yield files([piece])
                    piece.unlink()
            remove_quietly(local.path)

    def _count(self, piece: Path) -> int:
        """Return the number of lines that DuckDB finds in a file, blank ones left out; -1 if it refuses one."""
        try:
            with sql_errors(""):
                return int(
                    self._sql.execute(f"SELECT count(*) FROM {files([piece])}").fetchall()[0][0]
                )
        except InputError:
            return -1

    def source(self, wanted: Sequence[str] | None) -> Source:
        """Return columns whose types are found from all values, which reads every chunk once."""
        import pyarrow as pa

        found: Structure = {}
        for lines in self._pieces():
            rows = f"(SELECT json FROM {lines} WHERE json_type(json) = 'OBJECT')"
            more = find_structure(self._sql, rows)
            found = merged(found, more) if isinstance(more, dict) else found
        names = _chosen(wanted, [name for name in found if name not in ("_row", "_id")])
        paths = [quoted("/" + name.replace("~", "~0").replace("/", "~1"), "'") for name in names]
        values = [
            f"json_transform(json_extract(json, [{', '.join(paths)}])[{index}], "
            f"{spelled(settled(found[name]))}) AS c{index}"
            for index, name in enumerate(names, 1)
        ]
        query = ", ".join(values)

        def read() -> Iterator[Any]:
            for batch in self.read(query):
                yield batch.rename_columns(names)

        nothing = f"SELECT {query or 1} FROM (SELECT NULL::JSON AS json)"
        types = arrow_reader(self._sql, nothing).schema.types
        return Source(pa.schema(list(zip(names, types, strict=False))), read, has_all=False)


def _mended(line: bytes) -> bytes:
    """Return a line as DuckDB takes it.

    Bytes that are no UTF-8 and surrogates without a partner become escapes, members that are nested too deep their JSON
    text. What is no JSON becomes null.
    """
    try:
        line = flatten_deep(line)
        if is_deep(line):
            return b"null"
        value = json.loads(line.decode(errors="surrogateescape"))
    except ValueError:
        return b"null"
    text = json.dumps(value, ensure_ascii=False)
    return _SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):x}", text).encode()
