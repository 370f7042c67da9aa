"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory."""

from __future__ import annotations

import functools
import importlib.resources
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from batchinfer.collect.selection import Selection, fetch_output
from batchinfer.core.errors import InputError, ScratchFull
from batchinfer.core.json_text import flatten_deep
from batchinfer.core.records import Marker
from batchinfer.ledger.audit import Finding
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import in_parallel
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

ASK_VERIFY = "`batchinfer verify --deep` says how to fix it"
_MEMORY = "768MB"
"""Memory for DuckDB. What does not fit goes to the scratch folder."""
_FETCHERS = 4
_BLOCK_BYTES = 8 << 20
_SEVERAL = {
    "text": "texts",
    "reasoning": "reasonings",
    "tool_calls": "tool_calls",
    "finish_reason": "finish_reasons",
    "logprobs": "logprobs",
    "embedding": "embeddings",
    "label": "labels",
    "probs": "probs",
    "score": "scores",
}
"""Columns of which a row may have several values, each with the column's name where one has."""
_COUNTS = ("prompt_tokens", "completion_tokens")
_OPTIONAL = ("results", "model", *_COUNTS, "reasoning_tokens")


class Answers:
    """The columns of output lines, in their order, as a table of DuckDB.

    Args:
        sql: Connection of `connect`.
        selection: The chunks of a run.
        store: Store of the run.
        scratch: Place for copies.
        name: Name of the table.
        open_sources: Opens the stores of the chunks, if the lines of these are wanted, too, as the column `source`.
        with_lines: Whether the output lines themselves are kept, as the column `line`.

    Raises:
        InputError: a line is not JSON, or is not the one of its row.
    """

    def __init__(
        self,
        sql: Any,
        selection: Selection,
        store: Store,
        scratch: Scratch,
        name: str = "answers",
        *,
        open_sources: OpenStore | None = None,
        with_lines: bool = False,
    ) -> None:
        self._sql, self._name = sql, name
        self.found: list[tuple[ChunkRef, Marker]] = []
        """What was read: the chunks, with their markers."""
        self.damaged: list[Finding] = []
        """Chunks whose output cannot be used."""
        open_sources = functools.cache(open_sources) if open_sources else None

        def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path | Finding, Path]:
            ref = pair[0]
            output, source = fetch_output(store, *pair, scratch), Path(os.devnull)
            if open_sources and isinstance(output, Path):
                source = fetch(open_sources(ref.root), ref, scratch).path
            return output, source

        columns = f"FROM columns_of('some_lines', {with_lines})"
        self._insert = f"INSERT INTO {name} {columns}"
        with sql_errors("an output"):
            sql.execute(
                (importlib.resources.files("batchinfer.collect") / "answers.sql").read_text()
            )
            self._register(0, [], [])
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
                if open_sources:
                    remove_quietly(source)
        self.num_rows = sum(marker.rows_ok + marker.rows_error for _, marker in self.found)

    def _read(self, ref: ChunkRef, marker: Marker, output: Path, source: Path) -> None:
        """Add the rows of a chunk to the table."""
        row, end = ref.first_row, ref.first_row + marker.rows_ok + marker.rows_error
        with output.open("rb") as lines, source.open("rb") as sources:
            while some := lines.readlines(_BLOCK_BYTES):
                self._register(row, some, list(islice(sources, len(some))))
                self._sql.execute(self._insert)
                row += len(some)
        if row != end:
            what = f"its output has {row - ref.first_row} lines, expected {end - ref.first_row}"
            raise InputError(f"{ref.name}: {what}", hint=ASK_VERIFY)

    def _register(self, row: int, lines: list[bytes], sources: list[bytes]) -> None:
        """Make output lines, the first of them of the row `row`, the table `some_lines`."""
        import numpy as np
        import pyarrow as pa

        count = len(lines)
        places = np.cumsum([0, *map(len, lines)], dtype=np.int64)
        buffers: list[Any] = [None, pa.py_buffer(places), pa.py_buffer(b"".join(lines))]
        texts: list[Any] = [
            flatten_deep(line).decode(errors="replace").removesuffix("\n") for line in sources
        ]
        columns = {
            "wanted": pa.array(np.arange(row, row + count)),
            "line": pa.Array.from_buffers(pa.large_string(), count, buffers),
            "source": pa.array(texts or [None] * count, pa.string()),
        }
        self._sql.register("some_lines", pa.table(columns))

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
        for name, many in _SEVERAL.items():
            if is_many[name]:
                found[many] = f"coalesce({lists[name]}, if({name} IS NULL, NULL, [{name}]))"
            elif count[name] or name in wanted:
                found[name] = name
        found |= {name: name for name in _OPTIONAL if count[name] or name in _COUNTS}
        return found | {name: name for name in ("error_code", "error_message")}


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
    except duckdb.OutOfMemoryException as error:
        hint = "rows are too large to make columns of: name columns or rows, or use --format openai-batch"
        raise InputError(f"{what}: {str(error).splitlines()[0]}", hint=hint) from error
    except duckdb.Error as error:
        raise InputError(f"{what}: {str(error).splitlines()[0]}", hint=ASK_VERIFY) from error


def quoted(name: str, mark: str = '"') -> str:
    """Return a name as an SQL identifier, or with the mark ' a text."""
    return mark + name.replace(mark, 2 * mark) + mark
