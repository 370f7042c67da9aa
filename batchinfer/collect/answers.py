"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory."""

from __future__ import annotations

import importlib.resources
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.collect.selection import Outputs
from batchinfer.core.errors import InputError, ScratchFull
from batchinfer.core.records import Marker
from batchinfer.ledger.jobs import ChunkRef

ASK_VERIFY = "`batchinfer verify --deep` says how to fix it"
_MEMORY = "768MB"
"""Memory for DuckDB. What does not fit goes to the scratch folder."""
_MAX_THREADS = 8
_LEAST_LINE_BYTES = 16 << 20
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
_MISPLACED = """
SELECT wanted FROM {0} POSITIONAL JOIN (SELECT unnest(range(first_row, first_row + num_rows)) AS wanted FROM chunks)
WHERE _row IS DISTINCT FROM wanted LIMIT 1
"""


class Answers:
    """The columns of output lines, in their order, as a table of DuckDB.

    Args:
        sql: Connection of `connect`.
        outputs: The output files, some at a time.
        name: Name of the table.
        with_lines: Whether the lines themselves are kept.

    Raises:
        InputError: a line is not JSON, or is not the one of its row.
    """

    def __init__(
        self,
        sql: Any,
        outputs: Iterable[Outputs],
        name: str = "answers",
        *,
        with_lines: bool = False,
    ) -> None:
        import pyarrow as pa

        self.sql, self._name = sql, name
        self.found: list[tuple[ChunkRef, Marker]] = []
        """What was read: the chunks, with their markers."""
        text = (importlib.resources.files("batchinfer.collect") / "answers.sql").read_text()
        macro, query = text.split(";\n", 1)
        query = query.replace("KEEPS_LINES", str(with_lines))
        with sql_errors("an output"):
            sql.execute(macro)
            nothing = "(SELECT NULL::JSON AS json WHERE false)"
            sql.execute(f"CREATE TABLE {name} AS {query.replace('FILES', nothing)}")
            for some in outputs:
                self.found += some.values()
                sql.execute(f"INSERT INTO {name} {query.replace('FILES', _files(list(some)))}")
            first_rows = [ref.first_row for ref, _ in self.found]
            num_rows = [marker.rows_ok + marker.rows_error for _, marker in self.found]
            self.num_rows = sum(num_rows)
            sql.register("chunks", pa.table({"first_row": first_rows, "num_rows": num_rows}))
            if misplaced := rows_of(sql, _MISPLACED.format(name)):
                what = f"row {misplaced[0][0]} is not in its place in the outputs"
                raise InputError(f"{self.found[0][0].root}: {what}", hint=ASK_VERIFY)

    def one(self, *expressions: str) -> tuple[Any, ...]:
        """Return the values of aggregates over all rows."""
        return rows_of(self.sql, f"SELECT {', '.join(expressions)} FROM {self._name}")[0]

    def columns(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the columns of the table in order: expressions over `answers`, by their names.

        Columns without any value are left out, but for those that every table has and for `wanted`.
        """
        several = (
            f"coalesce(max(len({name}_list)) FILTER (list_any_value({name}_list) IS NOT NULL), 0)"
            for name in _SEVERAL
        )
        counts = self.one(*several, *(f"count({name})" for name in _OPTIONAL))
        count = dict(zip((*_SEVERAL, *_OPTIONAL), counts, strict=True))
        found = {name: name for name in ("_row", "_id", "status")}
        for name, many in _SEVERAL.items():
            if count[name] > 1:
                found[many] = f"{name}_list"
            elif count[name] or name in wanted:
                found[name] = f"{name}_list[1]"
        found |= {name: name for name in _OPTIONAL if count[name] or name in _COUNTS}
        return found | {name: name for name in ("error_code", "error_message")}


def connect(scratch: Path) -> Any:
    """Return a connection to a DuckDB of its own, whose memory is limited. It fetches no extensions."""
    import duckdb

    connection = duckdb.connect(
        config={
            "memory_limit": _MEMORY,
            "temp_directory": str(scratch / "duckdb"),
            "threads": min(os.cpu_count() or 1, _MAX_THREADS),
            "autoinstall_known_extensions": False,
        }
    )
    # The bar would go to stdout where the program is no file, as the Python interface's command.
    connection.execute("SET enable_progress_bar = false")
    return connection


def rows_of(sql: Any, query: str) -> list[tuple[Any, ...]]:
    """Return all rows of a query."""
    return list(sql.execute(query).fetchall())


@contextmanager
def sql_errors(what: str) -> Iterator[None]:
    """Turn DuckDB's errors into ScratchFull if the disk or the memory do not suffice, else into InputError."""
    import duckdb

    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
        hint = "free space in the scratch folder, or name another with --scratch-dir"
        raise ScratchFull(f"{what}: {error}", hint=hint) from error
    except duckdb.Error as error:
        raise InputError(f"{what}: {str(error).splitlines()[0]}", hint=ASK_VERIFY) from error


def _files(paths: Sequence[Path]) -> str:
    """Return the SQL that reads JSON Lines files in order, each line as `json`. Blank lines are passed over."""
    listed = ", ".join(quoted(str(path), "'") for path in paths)
    longest = max(map(_longest_line, paths))
    return f"read_ndjson_objects([{listed}], maximum_object_size = {longest})"


def _longest_line(path: Path) -> int:
    """Return a number of bytes that is not less than the longest line's."""
    longest, start, size = _LEAST_LINE_BYTES, 0, path.stat().st_size
    if size > longest:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while size - start > longest:  # the lines that end within these bytes are not longer
                end = data.rfind(b"\n", start, start + longest)
                if end < 0:
                    end = data.find(b"\n", start)
                    longest = (size if end < 0 else end + 1) - start
                start += longest if end < 0 else end + 1 - start
    return longest


def quoted(name: str, mark: str = '"') -> str:
    """Return a name as an SQL identifier, or with the mark ' a text."""
    return mark + name.replace(mark, 2 * mark) + mark
