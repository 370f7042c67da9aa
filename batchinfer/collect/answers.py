"""The answers of a run as columns, which DuckDB makes of the output lines within a limit of memory."""

from __future__ import annotations

import importlib.resources
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.collect.outputs import Outputs
from batchinfer.core.errors import InputError, ScratchFull
from batchinfer.core.records import Marker
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.storage.scratch import Scratch, scratch_errors

_MOST_ROWS = 4096
_BLOCK_BYTES = 8 << 20
_MEMORY = "512MB"
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
_ERROR = ("error_code", "error_message")
_OPTIONAL = ("results", "model", *_COUNTS, "reasoning_tokens")


class Answers:
    """The columns of output lines, in their order, in an Arrow file on the scratch disk that DuckDB reads as a table.

    Args:
        sql: Connection of `connect`.
        outputs: The output files, some at a time.
        scratch: Folder for the Arrow file.
        name: Name of the table.
        with_lines: Whether the lines themselves are kept.

    Raises:
        InputError: a line is not JSON.
    """

    def __init__(
        self,
        sql: Any,
        outputs: Iterable[Outputs],
        scratch: Scratch,
        name: str = "answers",
        *,
        with_lines: bool = False,
    ) -> None:
        import pyarrow as pa
        from pyarrow import dataset

        self.sql, self._name = sql, name
        self.found: list[tuple[ChunkRef, Marker]] = []
        """What was read: the chunks, with their markers."""
        self._most = dict.fromkeys(_SEVERAL, 0)
        self._num_values: Counter[str] = Counter()
        text = (importlib.resources.files("batchinfer.collect") / "answers.sql").read_text()
        macro, query = text.split(";\n", 1)
        query = query.replace("KEEPS_LINES", str(with_lines))
        sql.execute(macro)
        path = scratch.new_path(f"{name}.arrow")
        with (
            sql_errors("an output"),
            scratch_errors(scratch.folder),
            pa.OSFile(str(path), "wb") as file,
        ):
            nothing = query.replace("FILES", "(SELECT NULL::JSON AS json WHERE false)")
            schema = sql.cursor().sql(nothing).to_arrow_table().schema
            with pa.ipc.new_file(file, schema) as writer:
                for some in outputs:
                    self.found += some.values()
                    rows = rows_at_once(
                        sum(marker.output_bytes for _, marker in some.values()),
                        sum(marker.rows_ok + marker.rows_error for _, marker in some.values()),
                    )
                    read = sql.cursor().sql(query.replace("FILES", files(list(some))))
                    for batch in read.to_arrow_reader(rows):
                        self._count(batch)
                        writer.write_table(pa.table(batch), max_chunksize=rows)
        self._data = dataset.dataset(path, schema, format="ipc")
        sql.register(name, self._data)

    def _count(self, batch: Any) -> None:
        """Count the values of each column."""
        from pyarrow import compute

        for name in _SEVERAL:
            lists = batch[f"{name}_list"]
            longest = compute.max(compute.list_value_length(lists)).as_py() or 0
            self._most[name] = max(self._most[name], longest)
            values = lists.flatten()
            self._num_values[name] += len(values) - values.null_count
        for name in _OPTIONAL:
            self._num_values[name] += len(batch) - batch[name].null_count

    def one(self, *expressions: str) -> tuple[Any, ...]:
        """Return the values of aggregates over all rows."""
        query = f"SELECT {', '.join(expressions)} FROM {self._name}"
        values: tuple[Any, ...] = self.sql.execute(query).fetchall()[0]
        return values

    def columns(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the columns of the table in order: expressions over `answers`, by their names.

        Columns without any value are left out, but for those that every table has and for `wanted`.
        """
        found = {name: name for name in ("_row", "_id", "status")}
        for name, several in _SEVERAL.items():
            if self._num_values[name] and self._most[name] > 1:
                found[several] = f"{name}_list"
            elif self._num_values[name] or name in wanted:
                found[name] = f"{name}_list[1]"
        found |= {name: name for name in _OPTIONAL if self._num_values[name] or name in _COUNTS}
        return found | {name: name for name in _ERROR}

    def read(self, columns: dict[str, str]) -> Taker:
        """Return a reader of all rows, in order. Columns are expressions by their names."""
        listed = ", ".join(f"{value} AS {quoted(name)}" for name, value in columns.items())
        query = f"SELECT {listed} FROM {self._name}"
        sql = self.sql.cursor()  # so that other queries may run meanwhile
        sql.register(self._name, self._data)
        return Taker(sql.sql(query).to_arrow_reader(_MOST_ROWS))


class Taker:
    """Takes rows from a reader of Arrow batches, in order."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._held = reader.schema.empty_table()

    def take(self, count: int) -> Any:
        """Return the next rows, so many of them or all that are left, as an Arrow table."""
        import pyarrow as pa

        tables = [self._held]
        while sum(map(len, tables)) < count and (batch := next(self._reader, None)) is not None:
            tables.append(pa.table(batch))
        found = pa.concat_tables(tables)
        self._held = found.slice(count)
        return found.slice(0, count)


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
