"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory. Read-only."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError, ObjectNotFound, ScratchFull
from batchinfer.core.json_text import is_deep
from batchinfer.core.records import Marker
from batchinfer.ledger.audit import CORRUPT, LEFTOVER, Audit, Finding, RunTarget, find_target
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
_BLOCK_BYTES = 8 << 20
"""Bytes of lines that are turned into columns at once, and of which columns are read at once."""
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
    return Selection(store, open_store, target, sound, list(gaps.values()))


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
        self._sql, self._name, self._with_lines = sql, name, with_lines
        self.found: list[tuple[ChunkRef, Marker]] = []
        """What was read: the chunks, with their markers."""
        self.damaged: list[Finding] = []
        """Chunks whose output cannot be used."""
        self.ends: list[int] = []
        """Numbers of rows, of which those from one to the next (exclusive) have limited bytes, in order."""
        self._row = 0
        self._held, self._held_bytes = list[tuple[int, bytes, bytes]](), 0
        open_store = functools.cache(selection.open_store)

        def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path, Path | None, str]:
            """Copy an output and its chunk, or say why the output is not what its marker vouches for."""
            ref, marker = pair
            output, source, problem = scratch.new_path(ref.name), None, ""
            try:
                selection.store.download(layout.output_key(marker.output), output)
                with output.open("rb") as file:
                    if codec.sha256_file(file) != marker.output_sha256:
                        problem = f"the sha256 of {marker.output} is not its marker's"
            except ObjectNotFound:
                problem = f"its output {marker.output} is gone"
            if with_sources and not problem:
                source = fetch(open_store(ref.root), ref, scratch).path
            return output, source, problem

        with sql_errors("an output"), scratch_errors(scratch.folder):
            sql.execute(text_of("answers.sql"))
            self._take_held(f"CREATE TABLE {name} AS")
            brought = in_parallel(bring, selection.sound, _FETCHERS)
            for (ref, marker), each in zip(selection.sound, brought, strict=True):
                output, source, problem = each
                if problem:
                    logger.warning("%s: %s: %s", selection.store.url, ref.name, problem)
                    found = Finding(kind=CORRUPT, subject=ref.name, problem=problem, fix="redo")
                    self.damaged.append(found)
                else:
                    self._read(ref, marker, output, source)
                    self.found.append((ref, marker))
                for path in filter(None, (output, source)):
                    remove_quietly(path)
            self._take_held(f"INSERT INTO {name}")
        self.num_rows = sum(marker.rows_done for _, marker in self.found)

    def _read(self, ref: ChunkRef, marker: Marker, output: Path, source: Path | None) -> None:
        """Hold the rows of a chunk. They are added to the table when there are many."""
        self._row = ref.first_row
        with ExitStack() as stack:
            lines = stack.enter_context(output.open("rb"))
            sources = map(_source_of, stack.enter_context(source.open("rb"))) if source else ()
            beside = itertools.chain(sources, itertools.repeat(b""))
            for line, text in zip(lines, beside, strict=False):
                if not line.endswith(b"\n"):
                    break  # it is no row
                size = len(line) + len(text) + _ROW_BYTES
                if self._held_bytes + size > _BLOCK_BYTES:
                    self._take_held(f"INSERT INTO {self._name}")
                self._held.append((self._row, line, text))
                self._held_bytes += size
                self._row += 1
        if self._row != ref.first_row + marker.rows_done:
            what = f"its output has {self._row - ref.first_row} lines, expected {marker.rows_done}"
            raise InputError(f"{ref.name}: {what}", hint=ASK_VERIFY)

    def _take_held(self, statement: str) -> None:
        """Let a statement take the rows that are held: those of many small chunks at once, for each takes a while."""
        import numpy as np
        import pyarrow as pa

        # `pa.array` would import pandas.
        def texts_of(lines: list[Any]) -> Any:
            ends = np.cumsum([0, *map(len, lines)])
            buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(lines))]
            return pa.Array.from_buffers(pa.large_string(), len(lines), buffers)

        rows, lines, sources = ([each[index] for each in self._held] for index in range(3))
        wanted = pa.py_buffer(np.array(rows, np.int64))
        columns = {
            "wanted": pa.Array.from_buffers(pa.int64(), len(rows), [None, wanted]),
            "line": texts_of(lines),
            "source": texts_of(sources),
        }
        self._sql.register("some_lines", pa.table(columns))
        self._sql.execute(f"{statement} FROM columns_of('some_lines', {self._with_lines})")
        self.ends.append(self._row)
        self._held, self._held_bytes = [], 0

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
