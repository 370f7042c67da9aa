"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory. Read-only."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError, ObjectNotFound, RunUnsound, ScratchFull
from batchinfer.core.json_text import is_deep
from batchinfer.core.records import Marker
from batchinfer.ledger.audit import MISSING, Finding, RunTarget, audit, find_target
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import in_parallel, take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

logger = logging.getLogger(__name__)

ASK_VERIFY = "`batchinfer verify --deep` says how to fix"
_MEMORY = "768MB"
"""Memory for DuckDB. What does not fit goes to the scratch folder."""
_FETCHERS = 4
_SHOWN = 10
_BLOCK_BYTES = 8 << 20
"""Bytes of lines that are turned into columns at once, and of which columns are read at once."""
_ROW_BYTES = 400
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
    target: RunTarget
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
    target = find_target(store, open_store, job_url=job_url)
    sound, findings = audit(target, inventory)
    gaps = [found for found in findings if found.subject in target.expected]
    for gap in [gap for gap in gaps if gap.kind != MISSING][:_SHOWN]:
        logger.warning("%s: %s: %s: %s", url, gap.kind, gap.subject, gap.problem)
    return Selection(store, open_store, target, sound, gaps)


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
        RunUnsound: an output is not what its marker vouches for.
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
        import duckdb
        import pyarrow as pa

        self._sql, self._name = sql, name
        self.ends = [0]
        """Numbers of rows, of which those from one to the next (exclusive) have limited bytes, in order."""
        self._failure: BaseException | None = None
        # Garbage collection would close it at any time, even while a thread starts, and then wait for ever.
        with (
            sql_errors("an output"),
            scratch_errors(scratch.folder),
            closing(self._bring(selection, scratch, with_sources=with_sources)) as brought,
        ):
            sql.execute(text_of("answers.sql"))
            # One statement takes all rows: to plan it takes as long as a thousand of them.
            schema, batches = _table([]).schema, self._batches(brought)
            sql.register("some_lines", pa.RecordBatchReader.from_batches(schema, batches))
            try:
                sql.execute(f"CREATE TABLE {name} AS FROM columns_of('some_lines', {with_lines})")
            except duckdb.Error:
                if self._failure:  # of which DuckDB knows the text only
                    raise self._failure from None
                raise

    def _bring(
        self, selection: Selection, scratch: Scratch, *, with_sources: bool
    ) -> Generator[tuple[ChunkRef, Marker, Path, Path | None]]:
        """Copy all outputs, and their chunks if these are wanted. The copies are removed when they were read."""
        open_store = functools.cache(selection.open_store)

        def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path, Path | None]:
            ref, marker = pair
            output, problem = scratch.new_path(ref.name), ""
            try:
                selection.store.download(layout.output_key(marker.output), output)
                with output.open("rb") as file:
                    if codec.sha256_file(file) != marker.output_sha256:
                        problem = "its sha256 is not its marker's"
            except ObjectNotFound:
                problem = "is gone"
            if problem:
                place = f"{selection.store.url}: {ref.name}: output {marker.output}"
                raise RunUnsound(f"{place}: {problem}", hint=f"{ASK_VERIFY} it")
            return output, fetch(open_store(ref.root), ref, scratch).path if with_sources else None

        copies = in_parallel(bring, selection.sound, _FETCHERS)
        for (ref, marker), paths in zip(selection.sound, copies, strict=True):
            yield ref, marker, *paths
            for path in filter(None, paths):
                remove_quietly(path)

    def _batches(
        self, brought: Iterator[tuple[ChunkRef, Marker, Path, Path | None]]
    ) -> Iterator[Any]:
        """Yield all rows, many at a time: those of many small chunks, too, for each batch takes a while."""
        held, num_bytes, row = list[tuple[int, bytes, bytes]](), 0, 0
        try:
            for ref, marker, output, source in brought:
                row = ref.first_row
                for line, text in _rows(output, source):
                    held.append((row, line, text))
                    row += 1
                    num_bytes += len(line) + len(text) + _ROW_BYTES
                    if num_bytes >= _BLOCK_BYTES:
                        yield from _table(held).to_batches()
                        self.ends.append(row)
                        held, num_bytes = [], 0
                if row != ref.first_row + marker.rows_done:
                    what = f"has {row - ref.first_row} lines, expected {marker.rows_done}"
                    raise InputError(f"{ref.name}: its output {what}", hint=f"{ASK_VERIFY} it")
            if held:
                yield from _table(held).to_batches()
                self.ends.append(row)
        except BaseException as error:
            self._failure = error
            raise

    def in_parts(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield what a query gives that runs several times, each time over rows of limited bytes, named `part`.

        DuckDB takes thousands of rows at once, however large they are, and each expression may copy their texts.
        """
        for start, stop in itertools.pairwise(self.ends):
            part = f"part AS (FROM {self._name} WHERE _row >= {start} AND _row < {stop})"
            yield from self._sql.execute(f"WITH {part} {query}").fetchall()

    def columns(self, *wanted: str) -> dict[str, str]:
        """Return the columns of the table in order: expressions over `answers`, by their names.

        Columns without any value are left out, but for those that every table has and for `wanted`.
        """
        every = {name: f"list_transform(items, lambda i: i.{name})" for name in _SEVERAL}
        first = [f"coalesce(list_any_value({values}), {name})" for name, values in every.items()]
        counted = (f"count({name})" for name in ("items", *first, *_OPTIONAL))
        found_here = self.in_parts(f"SELECT {', '.join(counted)} FROM part")
        counts = [sum(numbers) for numbers in zip(*found_here, strict=True)]
        found = {name: name for name in ("_row", "_id", "status")}
        for name, count in zip((*_SEVERAL, *_OPTIONAL), counts[1:], strict=True):
            if not count and name not in (*wanted, *_COUNTS):
                continue
            if counts[0] and name in every:
                values = f"coalesce({every[name]}, if({name} IS NULL, NULL, [{name}]))"
                found[name.removesuffix("s") + "s"] = values
            else:
                found[name] = name
        return found | {name: name for name in ("error_code", "error_message")}


def _table(rows: list[tuple[int, bytes, bytes]]) -> Any:
    """Return rows as an Arrow table: their numbers, their lines in the output, and in the chunk."""
    import numpy as np
    import pyarrow as pa

    def texts(lines: Sequence[bytes]) -> Any:  # `pa.array` would import pandas
        ends = pa.py_buffer(np.cumsum([0, *map(len, lines)]))
        return pa.LargeStringArray.from_buffers(len(lines), ends, pa.py_buffer(b"".join(lines)))

    numbers, lines, sources = zip(*rows, strict=True) if rows else ((), (), ())
    wanted = [None, pa.py_buffer(np.array(numbers, np.int64))]
    columns = [pa.Array.from_buffers(pa.int64(), len(rows), wanted), texts(lines), texts(sources)]
    return pa.Table.from_arrays(columns, ["wanted", "line", "source"])


def _rows(output: Path, source: Path | None) -> Iterator[tuple[bytes, bytes]]:
    """Yield the lines of an output, each with that of the chunk, which is empty if this was not brought."""
    with ExitStack() as stack:
        lines = stack.enter_context(output.open("rb"))
        sources = map(_source_of, stack.enter_context(source.open("rb"))) if source else ()
        for row in zip(lines, itertools.chain(sources, itertools.repeat(b"")), strict=False):
            if not row[0].endswith(b"\n"):
                break  # it is no row
            yield row


def _source_of(line: bytes) -> bytes:
    """Return a line of a chunk for DuckDB. It may hold bytes that are no UTF-8, or be nested too deep for columns."""
    return b"null" if is_deep(line) else line.decode(errors="replace").removesuffix("\n").encode()


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
    if connection.sql("SELECT current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("SET enable_progress_bar = false")
    return connection


@contextmanager
def sql_errors(what: str) -> Iterator[None]:
    """Turn DuckDB's errors into ScratchFull (the disk is full), KeyboardInterrupt (Ctrl-C) or InputError (others)."""
    import duckdb

    try:
        yield
    except RuntimeError as error:
        if str(error) == "Query interrupted":  # so DuckDB tells of Ctrl-C
            raise KeyboardInterrupt from error
        raise
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException) or "max_temp_directory_size" in str(error):
            hint = "free space in the scratch folder, or name another with --scratch-dir"
            raise ScratchFull(f"{what}: {error}", hint=hint) from error
        hint = f"{ASK_VERIFY} it"
        if isinstance(error, duckdb.OutOfMemoryException):
            hint = "rows are too large to make columns of: use --format openai-batch"
        raise InputError(f"{what}: {str(error).splitlines()[0]}", hint=hint) from error


def quoted(name: str, mark: str = '"') -> str:
    """Return a name as an SQL identifier, or with the mark ' a text."""
    return mark + name.replace(mark, 2 * mark) + mark
