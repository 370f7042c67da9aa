"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory. Read-only."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError, ObjectNotFound, ScratchFull
from batchinfer.core.json_text import flatten_deep
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


def _fetch_output(store: Store, ref: ChunkRef, marker: Marker, scratch: Scratch) -> Path | Finding:
    """Copy a chunk's output to the scratch folder. Returns why not, if it is not what its marker vouches for."""
    path = scratch.new_path(f"{ref.name}.jsonl")
    problem = ""
    try:
        store.download(layout.output_key(marker.output), path)
        with scratch_errors(path.parent), path.open("rb") as file:
            if codec.sha256_file(file) != marker.output_sha256:
                problem = f"the sha256 of {marker.output} is not its marker's"
    except ObjectNotFound:
        problem = f"its output {marker.output} is gone"
    if not problem:
        return path
    remove_quietly(path)
    logger.warning("%s: %s: %s", store.url, ref.name, problem)
    return Finding(kind=CORRUPT, subject=ref.name, problem=problem, fix="redo")


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
        self._sql, self._name = sql, name
        self.found: list[tuple[ChunkRef, Marker]] = []
        """What was read: the chunks, with their markers."""
        self.damaged: list[Finding] = []
        """Chunks whose output cannot be used."""
        self._ends, self._room = [0], 0
        open_store = functools.cache(selection.open_store)

        def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path | Finding, Path]:
            output, ref = _fetch_output(selection.store, *pair, scratch), pair[0]
            if with_sources and isinstance(output, Path):
                return output, fetch(open_store(ref.root), ref, scratch).path
            return output, Path(os.devnull)

        columns = f"FROM columns_of('some_lines', {with_lines})"
        self._insert = f"INSERT INTO {name} {columns}"
        with sql_errors("an output"):
            sql.execute(text_of("answers.sql"))
            self._register(0, [])
            sql.execute(f"CREATE TABLE {name} AS {columns} LIMIT 0")
            brought = in_parallel(bring, selection.sound, _FETCHERS)
            for (output, source), (ref, marker) in zip(brought, selection.sound, strict=True):
                if isinstance(output, Finding):
                    self.damaged.append(output)
                    continue
                with scratch_errors(output.parent):
                    self._read(ref, marker, output, source)
                self.found.append((ref, marker))
                remove_quietly(output)
                if with_sources:
                    remove_quietly(source)
        self.num_rows = sum(marker.rows_done for _, marker in self.found)

    def _read(self, ref: ChunkRef, marker: Marker, output: Path, source: Path) -> None:
        """Add the rows of a chunk to the table."""
        row, end = ref.first_row, ref.first_row + marker.rows_done
        with output.open("rb") as lines, source.open("rb") as sources:
            for pairs, size in _blocks(
                zip(lines, itertools.chain(sources, itertools.repeat(b"")), strict=False)
            ):
                self._register(row, pairs)
                self._sql.execute(self._insert)
                row += len(pairs)
                if size > self._room:
                    self._ends.append(row)
                    self._room = _WINDOW_BYTES
                self._ends[-1] = row
                self._room -= size
        if row != end:
            what = f"its output has {row - ref.first_row} lines, expected {end - ref.first_row}"
            raise InputError(f"{ref.name}: {what}", hint=ASK_VERIFY)

    def _register(self, row: int, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Make output lines with their lines in the chunk, the first of the row `row`, the table `some_lines`."""
        import pyarrow as pa

        texts = [
            flatten_deep(source).decode(errors="replace").removesuffix("\n") if source else None
            for _, source in pairs
        ]
        columns = {
            "wanted": pa.array(range(row, row + len(pairs)), pa.int64()),
            "line": pa.array([line for line, _ in pairs], pa.large_binary()).view(
                pa.large_string()
            ),
            "source": pa.array(texts, pa.large_string()),
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


def _blocks(
    pairs: Iterable[tuple[bytes, bytes]],
) -> Iterator[tuple[list[tuple[bytes, bytes]], int]]:
    """Yield pairs of lines some at a time, with the number of bytes."""
    some, size = list[tuple[bytes, bytes]](), 0
    for pair in pairs:
        some.append(pair)
        size += len(pair[0]) + len(pair[1]) + _ROW_BYTES
        if size >= _BLOCK_BYTES:
            yield some, size
            some, size = [], 0
    if some:
        yield some, size


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
