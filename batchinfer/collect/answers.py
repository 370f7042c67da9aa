"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory. Read-only."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError, ObjectNotFound, ScratchFull
from batchinfer.core.json_text import is_deep
from batchinfer.core.records import Job, Marker, Run
from batchinfer.ledger.audit import CORRUPT, LEFTOVER, Audit, Finding, find_target
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import in_parallel, take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.ledger.runs import refuse_edited
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

logger = logging.getLogger(__name__)

ASK_VERIFY = "`batchinfer verify --deep` says how to fix it"
_MEMORY = "768MB"
"""Memory for DuckDB. What does not fit goes to the scratch folder."""
_FETCHERS = 4
_BLOCK_BYTES, _WINDOW_BYTES = 8 << 20, 16 << 20
"""Bytes of lines that are turned into columns at once, and of which columns are read at once."""
_TRANSACTION_BYTES = 128 << 20
"""Bytes of lines of one transaction: its end copies what it has made, and until then memory holds it."""
_ROW_BYTES = 800
"""Bytes that a row counts for besides its lines."""
_SEVERAL = (
    *("text", "reasoning", "tool_calls", "finish_reason", "logprobs"),
    *("embedding", "label", "probs", "score"),
)
"""Columns of which a row may have several values. Where one has, the column's name ends with an s."""
_COUNTS = ("prompt_tokens", "completion_tokens")
_OPTIONAL = ("results", "model", *_COUNTS, "reasoning_tokens")


# --------------------------------------------------------------------------- which outputs


class Selection(NamedTuple):
    """The sound chunks of a run in input order with their markers, and the gaps: why others cannot be collected."""

    store: Store
    open_store: OpenStore
    run: Run
    job: Job
    job_url: str
    sound: list[tuple[ChunkRef, Marker]]
    gaps: list[Finding]
    """One for each chunk that is missing, corrupt or foreign. Their subjects are the chunks' names."""


def select(
    url: str, open_store: OpenStore, clock: Clock, *, job_url: str | None = None
) -> Selection:
    """Select the chunks of a run that can be collected: those with a sound marker and output.

    Args:
        url: The run.
        open_store: Opens its store and that of the job.
        clock: Tells the time.
        job_url: URL of the job, where run.json and the run's place do not tell.

    Raises:
        InputError: there is no run, the run is of a newer format version, its job cannot be found, the run was made
            from another job.json, or run.json was edited.
    """
    store = open_store(url)
    inventory = take_inventory(store, now=clock.now())
    target = find_target(store, inventory, open_store, job_url=job_url)
    refuse_edited(target.run, url=store.url)
    audit = Audit(target, inventory)
    sound = audit.check_all()
    if any(found.fix == "job" for found in audit.findings):
        raise InputError(
            f"{store.url}: was made from another job.json than the one at {target.job_url}",
            hint="name the run's own job with --job",
        )
    gaps = {
        found.subject: found
        for found in audit.findings
        if found.kind != LEFTOVER and found.subject in target.expected
    }
    where = target.run, target.job, target.job_url
    return Selection(store, open_store, *where, sound, list(gaps.values()))


# --------------------------------------------------------------------------- their columns


class Answers:
    """The columns of output lines, in their order, as a table of DuckDB.

    Args:
        sql: Connection of `connect`.
        selection: The chunks of a run.
        scratch: Place for copies.
        name: Name of the table.
        with_sources: Whether the lines of the chunks are kept, too, as the column `source`.
        with_lines: Whether the output lines themselves are kept, as the column `line`.

    Raises:
        InputError: a line is not JSON, or is not the one of its row.
    """

    def __init__(
        self,
        sql: Any,
        selection: Selection,
        scratch: Scratch,
        name: str = "answers",
        *,
        with_sources: bool = False,
        with_lines: bool = False,
    ) -> None:
        import numpy as np

        self._sql, self._name = sql, name
        self.found: list[tuple[ChunkRef, Marker]] = []
        """What was read: the chunks, with their markers."""
        self.damaged: list[Finding] = []
        """Chunks whose output cannot be used."""
        self._ends, self._room, self._uncommitted = [0], 0, 0
        self._held, self._held_bytes = list[_Block](), 0
        open_store = functools.cache(selection.open_store)

        def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path, Path | None, str]:
            """Copy an output and its chunk, or say why the output is not what its marker vouches for."""
            ref, marker = pair
            output, source, problem = scratch.new_path(ref.name), None, ""
            try:
                selection.store.download(layout.output_key(marker.output), output)
                with scratch_errors(output.parent), output.open("rb") as file:
                    if codec.sha256_file(file) != marker.output_sha256:
                        problem = f"the sha256 of {marker.output} is not its marker's"
            except ObjectNotFound:
                problem = f"its output {marker.output} is gone"
            if with_sources and not problem:
                source = fetch(open_store(ref.root), ref, scratch).path
            return output, source, problem

        columns = f"FROM columns_of('some_lines', {with_lines})"
        self._insert = f"INSERT INTO {name} {columns}"
        with sql_errors("an output"):
            sql.execute(text_of("answers.sql"))
            self._register([_Block(0, b"", np.array([], int), (), 0)])
            sql.execute(f"CREATE TABLE {name} AS {columns} LIMIT 0")
            brought = in_parallel(bring, selection.sound, _FETCHERS)
            sql.begin()
            for (ref, marker), each in zip(selection.sound, brought, strict=True):
                output, source, problem = each
                if problem:
                    logger.warning("%s: %s: %s", selection.store.url, ref.name, problem)
                    found = Finding(kind=CORRUPT, subject=ref.name, problem=problem, fix="redo")
                    self.damaged.append(found)
                else:
                    with scratch_errors(scratch.folder):
                        self._read(ref, marker, output, source)
                    self.found.append((ref, marker))
                for path in filter(None, (output, source)):
                    remove_quietly(path)
            self._insert_held()
            sql.commit()
        self.num_rows = sum(marker.rows_done for _, marker in self.found)

    def _read(self, ref: ChunkRef, marker: Marker, output: Path, source: Path | None) -> None:
        """Add the rows of a chunk to the table."""
        row, count = ref.first_row, marker.rows_done
        with ExitStack() as stack:
            lines = stack.enter_context(output.open("rb"))
            sources = stack.enter_context(source.open("rb")) if source else None
            for block in _blocks(lines, sources, row):
                if self._held_bytes + block.num_bytes > _BLOCK_BYTES:
                    self._insert_held()
                self._held.append(block)
                self._held_bytes += block.num_bytes
                row = block.row + len(block.ends)
                if block.num_bytes > self._room:
                    self._ends.append(row)
                    self._room = _WINDOW_BYTES
                self._ends[-1] = row
                self._room -= block.num_bytes
        if row != ref.first_row + count:
            what = f"its output has {row - ref.first_row} lines, expected {count}"
            raise InputError(f"{ref.name}: {what}", hint=ASK_VERIFY)

    def _insert_held(self) -> None:
        """Add the rows that are held to the table: those of many small chunks at once, for each time takes a while."""
        if self._held:
            self._register(self._held)
            self._sql.execute(self._insert)
            self._uncommitted += self._held_bytes
            self._held, self._held_bytes = [], 0
        if self._uncommitted > _TRANSACTION_BYTES:
            self._sql.commit()
            self._sql.begin()
            self._uncommitted = 0

    def _register(self, blocks: Sequence[_Block]) -> None:
        """Make output lines, and perhaps lines of their chunks, the table `some_lines`."""
        import numpy as np
        import pyarrow as pa

        # `pa.array` would import pandas.
        def texts_of(data: bytes, ends: Any) -> Any:
            offsets = np.concatenate(([0], ends)).astype(np.int64)
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            return pa.Array.from_buffers(pa.large_string(), len(ends), buffers)

        # A source may hold bytes that are no UTF-8. A line that is nested too deep has no columns.
        texts = [
            b"null" if is_deep(each) else each.decode(errors="replace").removesuffix("\n").encode()
            for block in blocks
            for each in block.sources
        ]
        starts = itertools.accumulate((len(block.lines) for block in blocks), initial=0)
        ends = np.concatenate([x.ends + start for x, start in zip(blocks, starts, strict=False)])
        rows = [np.arange(block.row, block.row + len(block.ends)) for block in blocks]
        wanted = pa.py_buffer(np.concatenate(rows))
        beside = pa.nulls(len(ends), pa.large_string())
        if texts:
            beside = texts_of(b"".join(texts), np.cumsum([*map(len, texts)]))
        columns = {
            "wanted": pa.Array.from_buffers(pa.int64(), len(ends), [None, wanted]),
            "line": texts_of(b"".join(block.lines for block in blocks), ends),
            "source": beside,
        }
        self._sql.register("some_lines", pa.table(columns))

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yield numbers of rows, of which those from one to the other (exclusive) have limited bytes, in order."""
        return itertools.pairwise(self._ends)

    def one(self, *expressions: str) -> tuple[Any, ...]:
        """Return the values of aggregates over all rows."""
        return rows_of(self._sql, f"SELECT {', '.join(expressions)} FROM {self._name}")[0]

    def columns(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the columns of the table in order: expressions over `answers`, by their names.

        Columns without any value are left out, but for those that every table has and for `wanted`.
        """
        lists = {name: f"list_transform(items, lambda i: i.{name})" for name in _SEVERAL}
        several = (f"bool_or(list_any_value({each}) IS NOT NULL)" for each in lists.values())
        is_many = dict(zip(lists, self.one(*several), strict=True))
        names = (*_SEVERAL, *_OPTIONAL)
        count = dict(zip(names, self.one(*(f"count({name})" for name in names)), strict=True))
        found = {name: name for name in ("_row", "_id", "status")}
        for name in _SEVERAL:
            if is_many[name]:
                found[name.removesuffix("s") + "s"] = (
                    f"coalesce({lists[name]}, if({name} IS NULL, NULL, [{name}]))"
                )
            elif count[name] or name in wanted:
                found[name] = name
        found |= {name: name for name in _OPTIONAL if count[name] or name in _COUNTS}
        return found | {name: name for name in ("error_code", "error_message")}


class _Block(NamedTuple):
    """Some output lines of a chunk."""

    row: int
    """Number of the first one's row."""
    lines: bytes
    ends: Any
    """Where each of them ends."""
    sources: Sequence[bytes]
    """Lines of the chunk beside them, if these are wanted."""
    num_bytes: int
    """Bytes for which they count."""


def _blocks(lines: BinaryIO, sources: BinaryIO | None, row: int) -> Iterator[_Block]:
    """Yield some lines of a file, of which the first is that of a row, with those of the chunk beside them.

    Each line of the outputs has an end of line. Lines of one row at most exceed `_BLOCK_BYTES`.
    """
    import numpy as np

    below, data = itertools.chain(sources or (), itertools.repeat(b"")), b""
    while data := data or lines.read(_BLOCK_BYTES) + lines.readline():
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
        if not ends.size:
            return  # a line without its end is no row
        ends = ends[: max(1, _BLOCK_BYTES // _ROW_BYTES)]
        beside, size = list[bytes](), 0
        while sources and len(beside) < len(ends) and size < _BLOCK_BYTES:
            beside.append(next(below))
            size += len(beside[-1])
        ends = ends[: len(beside)] if sources else ends
        end = int(ends[-1])
        yield _Block(row, data[:end], ends, beside, end + size + len(ends) * _ROW_BYTES)
        data, row = data[end:], row + len(ends)


def text_of(name: str) -> str:
    """Return the text of a file beside this module."""
    return (importlib.resources.files("batchinfer.collect") / name).read_text()


def connect(scratch: Path) -> Any:
    """Return a connection to a DuckDB of its own, whose memory is limited. It fetches no extensions."""
    import duckdb

    connection = duckdb.connect(
        config={
            "memory_limit": _MEMORY,
            "temp_directory": str(scratch / "duckdb"),
            "threads": 1,  # blocks of lines come one at a time: several would wait for each other
            "autoinstall_known_extensions": False,
        }
    )
    # The bar would go to stdout where the program is no file, as the Python interface's command. In a notebook without
    # ipywidgets there is none, and to switch it off is an error.
    if rows_of(connection, "SELECT current_setting('enable_progress_bar')")[0][0]:
        connection.execute("SET enable_progress_bar = false")
    return connection


def rows_of(sql: Any, query: str) -> list[tuple[Any, ...]]:
    """Return all rows of a query."""
    return list(sql.execute(query).fetchall())


@contextmanager
def sql_errors(what: str) -> Iterator[None]:
    """Turn DuckDB's errors into ScratchFull if the disk does not suffice, else into InputError."""
    import duckdb

    try:
        yield
    except duckdb.IOException as error:
        hint = "free space in the scratch folder, or name another with --scratch-dir"
        raise ScratchFull(f"{what}: {error}", hint=hint) from error
    except duckdb.Error as error:
        hint = ASK_VERIFY
        if isinstance(error, duckdb.OutOfMemoryException):
            hint = "rows are too large to make columns of: name columns or rows, or use --format openai-batch"
        raise InputError(f"{what}: {str(error).splitlines()[0]}", hint=hint) from error


def quoted(name: str, mark: str = '"') -> str:
    """Return a name as an SQL identifier, or with the mark ' a text."""
    return mark + name.replace(mark, 2 * mark) + mark
