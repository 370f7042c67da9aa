"""The answers of a run as columns: DuckDB reads the output lines, and holds their columns within a limit of memory."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputError, ScratchFull

_MOST_ROWS = 16_384
_BLOCK_BYTES = 16 << 20
_MEMORY = "512MB"
"""Memory for the columns of answers. What does not fit goes to the scratch folder."""
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
_ERROR = ("error_code", "error_message")
_OPTIONAL = ("results", "model", *_COUNTS, "reasoning_tokens")


class Answers:
    """The columns of the output lines that were added, in the order of adding.

    Args:
        sql: Connection of `connect`.
        name: Name of the table.
        with_lines: Whether the lines themselves are kept.
    """

    def __init__(self, sql: Any, name: str = "answers", *, with_lines: bool = False) -> None:
        self.sql, self._name = sql, name
        text = (importlib.resources.files("batchinfer.collect") / "answers.sql").read_text()
        macro, query = text.split(";\n", 1)
        self._query = query.replace("KEEPS_LINES", str(with_lines))
        self.sql.execute(macro)
        nothing = self._query.replace("FILES", "(SELECT NULL::JSON AS json WHERE false)")
        self.sql.execute(f"CREATE TABLE {name} AS {nothing}")

    def add(self, paths: Sequence[Path]) -> None:
        """Add the lines of output files.

        Raises:
            InputError: a line is not JSON.
        """
        with sql_errors("an output"):
            self.sql.execute(
                f"INSERT INTO {self._name} {self._query.replace('FILES', files(paths))}"
            )

    def one(self, expression: str) -> Any:
        """Return the value of an aggregate over all rows."""
        return self.sql.execute(f"SELECT {expression} FROM {self._name}").fetchall()[0][0]

    def columns(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the columns of the table in order: expressions over `answers`, by their names.

        Columns without any value are left out, but for those that every table has and for `wanted`.
        """
        found = {name: name for name in ("_row", "_id", "status")}
        for name, several in _SEVERAL.items():
            most, count = self.one(f"(max(len({name}_list)), sum(list_count({name}_list)))")
            if (most or 0) > 1 and count:
                found[several] = f"{name}_list"
            elif count or name in wanted:
                found[name] = f"{name}_list[1]"
        found |= {name: name for name in _OPTIONAL if name in _COUNTS or self.one(f"count({name})")}
        return found | {name: name for name in _ERROR}

    def table(self, columns: dict[str, str], first: int, stop: int) -> Any:
        """Return the rows from place `first` up to, not including, `stop` as an Arrow table.

        Columns are expressions by their names.
        """
        listed = ", ".join(f"{value} AS {quoted(name)}" for name, value in columns.items())
        query = f"SELECT {listed} FROM {self._name} WHERE rowid >= {first} AND rowid < {stop}"
        return self.sql.cursor().sql(query).to_arrow_table()


def rows_at_once(num_bytes: int, num_rows: int) -> int:
    """Return how many rows to hold at a time, if so many rows have so many bytes."""
    return max(1, min(_MOST_ROWS, _BLOCK_BYTES * num_rows // max(1, num_bytes)))


def connect(scratch: Path) -> Any:
    """Return a connection to a DuckDB of its own, whose memory is limited. It fetches no extensions."""
    import duckdb

    return duckdb.connect(
        config={
            "memory_limit": _MEMORY,
            "temp_directory": str(scratch / "duckdb"),
            "threads": min(os.cpu_count() or 1, _MAX_THREADS),
            "autoinstall_known_extensions": False,
        }
    )


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
        hint = "`batchinfer verify --deep` says how to fix it"
        raise InputError(f"{what}: {str(error).splitlines()[0]}", hint=hint) from error


def files(paths: Sequence[Path]) -> str:
    """Return the SQL that reads JSON Lines files in order, each line as `json`. Blank lines are passed over."""
    listed = ", ".join(quoted(str(path), "'") for path in paths)
    longest = max(_LEAST_LINE_BYTES, *(_longest_line(path) for path in paths))
    return f"read_ndjson_objects([{listed}], maximum_object_size = {longest})"


def _longest_line(path: Path) -> int:
    """Return a number of bytes that is not less than the longest line's."""
    size = path.stat().st_size
    if size <= _LEAST_LINE_BYTES:
        return size
    with path.open("rb") as file:
        return max(map(len, file)) + 1


def quoted(name: str, mark: str = '"') -> str:
    """Return a name as an SQL identifier, or with the mark ' a text."""
    return mark + name.replace(mark, 2 * mark) + mark
