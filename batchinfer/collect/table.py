"""The rows of a collection as Arrow tables: columns of the answers and of the source, of the rows that are taken."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from batchinfer.collect.answers import Answers, Selection, connect, quoted
from batchinfer.collect.collect_config import TABLES, CollectConfig
from batchinfer.collect.columns import (
    MAX_NAMES,
    JsonColumns,
    chosen,
    example_of,
    floats_of,
    open_parquet,
    schema_of,
    vector_column,
)
from batchinfer.collect.table_files import ENCODERS, NEEDS_SOURCE
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.tasks import GENERATE, is_pooling
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


class Collection:
    """The rows of one run. Making it reads all outputs.

    Args:
        config: What to take.
        selection: The chunks.
        scratch: Folder for copies, and for what does not fit into memory.

    Raises:
        InputError: an output cannot be read, or has other rows than it should.
        ConfigError: the condition is none, or the source has no such column.
    """

    def __init__(self, config: CollectConfig, selection: Selection, scratch: Scratch) -> None:
        self._config = config
        self._is_table = config.kind in TABLES
        self._sql = connect(scratch.folder)
        self._parquet = (
            open_parquet(selection.target.job, config.columns) if config.with_source else None
        )
        needs_chunks = (config.with_source and not self._parquet) or config.kind in NEEDS_SOURCE
        self.answers = Answers(
            self._sql,
            selection,
            scratch,
            with_sources=needs_chunks,
            with_lines=not self._is_table,
        )
        self._relation = "answers"
        source = self._columns_of_chunks() if config.with_source and not self._parquet else {}
        names = self._parquet.schema.names if self._parquet else source
        self._taken = {name.casefold() for name in names}
        self._json_texts = {"tool_calls", "logprobs"}
        own = self._own_columns(selection.target.run.config.get("prompt") or {})
        if not self._is_table:
            own |= {"line": "line", "source": "source"}
        self._columns = {self._apart(name): value for name, value in own.items()} | source
        """SQL of the columns, but of those that are read from parquet files."""
        # A wrong condition is refused before anything is written.
        self.schema = self._fitting(self._window(0, 0)).schema
        """Names and types of the columns."""

    # -- columns

    def _own_columns(self, prompt: dict[str, Any]) -> dict[str, str]:
        """Return the columns of the answers to prompts of a run."""
        task = prompt.get("task") or GENERATE
        texts = () if is_pooling(task) else ("text", "finish_reason")
        own = self.answers.columns(*texts)
        # Batch requests may ask for vectors, whatever the run's task is.
        vectors = own.keys() & {"embedding", "embeddings"}
        if vectors:
            kinds: Any = (["VARCHAR"], "FLOAT[]")
            has_nulls = {"null_handling": "special"}
            self._sql.create_function("floats_of", floats_of, *kinds, type="arrow", **has_nulls)
        own = dict(
            vector_column(self.answers, task, *pair) if pair[0] in vectors else pair
            for pair in own.items()
        )
        is_json, schema = schema_of(prompt.get("body") or {})
        is_json = is_json if self._config.answer_json is None else self._config.answer_json
        if is_json and texts and "text" in own:
            own |= self._json_columns(schema)
        return own

    def _json_columns(self, schema: Any) -> dict[str, str]:
        """Return the columns of answers that are JSON objects, beside those of all answers."""
        value, example = "TRY_CAST(text AS JSON)", example_of(schema)
        members = JsonColumns(self._sql, self.answers, value, example, most_names=MAX_NAMES)
        self._relation = f"(SELECT *, {members.struct} AS members FROM {self._relation})"
        self._json_texts.update(f"answer_{name}" for name in members.json_texts)
        columns = members.columns("members")
        return {f"answer_{name}": column for name, column in columns.items()}

    def _columns_of_chunks(self) -> dict[str, str]:
        """Return the source's columns in the chunks, whose types are found from all values."""
        value = "TRY_CAST(source AS JSON)"
        odd = f"json_type({value}) IS DISTINCT FROM 'OBJECT'"
        if num_odd := sum(
            n for [n] in self.answers.in_parts(f"SELECT count(*) FROM part WHERE {odd}")
        ):
            logger.warning("%d lines of the source are no JSON objects", num_odd)
        found = JsonColumns(self._sql, self.answers, value)
        names = chosen(self._config.columns, [n for n in found.kinds if n not in ("_row", "_id")])
        found.kinds = {name: found.kinds[name] for name in names}
        if texts := found.json_texts:
            text = "columns of the source whose values share no type are JSON text: %s"
            logger.warning(text, ", ".join(texts))
        self._relation = f"(SELECT *, {found.struct} AS fields FROM answers)"
        return found.columns("fields")

    def _apart(self, name: str) -> str:
        """Return a name for a column of the answers that no column of the source has, for SQL in whatever case."""
        while name.casefold() in self._taken:
            name = f"_{name}"
        return name

    @property
    def json_texts(self) -> set[str]:
        """Names of the columns that hold JSON texts."""
        return set(map(self._apart, self._json_texts))

    # -- rows

    def tables(self) -> Iterator[Any]:
        """Yield the rows that are taken, in input order, as Arrow tables. The same run is always cut in the same way.

        They have the columns of `schema`; where the form is no table, they have the only column `line`.
        """
        import pyarrow as pa

        drawn = None if self._config.sample is None else self._drawn(self._config.sample)
        for table in self._windows():
            taken = table if drawn is None else _only(table, drawn)
            yield taken if self._is_table else pa.table({"line": self._encoded(taken)})

    def _drawn(self, size: int) -> Any:
        """Return the numbers of the rows that --sample draws of those that fulfil the condition.

        A row's number decides, so that the same rows of several runs over one job are drawn.
        """
        import pyarrow as pa

        seed = self._config.seed
        rows = (row for table in self._windows() for row in table[0].to_pylist())
        drawn = heapq.nsmallest(size, rows, lambda row: blake2b(b"%d %d" % (seed, row)).digest())
        return pa.array(drawn, pa.int64())

    def _windows(self) -> Iterator[Any]:
        """Yield all rows that fulfil the condition, in input order: in each table rows of limited bytes.

        Raises:
            InputError: the source has not all rows any more.
        """
        ends, next_log = self.answers.ends, time.monotonic() + _LOG_SECONDS
        for first, rows in self._parquet.tables() if self._parquet else [(0, None)]:
            stop = ends[-1] if rows is None else min(first + len(rows), ends[-1])
            for borders in itertools.pairwise(
                [first, *ends[bisect_right(ends, first) : bisect_left(ends, stop)], stop]
            ):
                yield self._fitting(self._window(*borders, first, rows))
                if time.monotonic() > next_log:
                    logger.info("row %d is read", borders[1])
                    next_log += _LOG_SECONDS
            if stop == ends[-1]:
                return
        raise InputError("the source has not all rows any more", hint="collect again")

    def _window(self, start: int, stop: int, first: int = 0, source: Any = None) -> Any:
        """Return the rows from one number to another (exclusive), with their columns as they are in the table.

        Args:
            start: Number of the first row.
            stop: Number behind the last one.
            first: Number of the first row of `source`.
            source: Rows of parquet files; without any, the table has no rows of them.
        """
        named = ", ".join(f"{value} AS c{n}" for n, value in enumerate(self._columns.values()))
        rows = f"FROM {self._relation} WHERE _row >= {start} AND _row < {stop}"
        table = self._sql.sql(f"SELECT {named} {rows}").to_arrow_table()
        table = table.rename_columns(list(self._columns))
        if self._parquet:
            from pyarrow import compute

            source = self._parquet.schema.empty_table() if source is None else source
            source = source.take(compute.subtract(table[0], first).combine_chunks())
            for field, column in zip(source.schema, source.columns, strict=True):
                table = table.append_column(field, column)
        return table

    def _fitting(self, table: Any) -> Any:
        """Return the rows that fulfil the condition.

        Raises:
            ConfigError: the condition is none.
        """
        import duckdb

        if not self._config.where:
            return table
        unknown = ("halffloat", "decimal256")  # to DuckDB, which would refuse the whole table
        # In SQL, names that differ in case alone are one name, so it would take the first column for both.
        count = Counter(map(str.casefold, table.column_names))
        known = [
            field.name
            for field in table.schema
            if not str(field.type).startswith(unknown) and count[field.name.casefold()] == 1
        ]
        try:
            sql = self._sql.cursor()
            sql.register("rows", table.select(known))
            # WHERE refuses functions of several rows: of the rows at hand they would be wrong.
            query = f"SELECT {quoted(known[0])} FROM rows WHERE CAST(({self._config.where}\n) AS BOOLEAN)"
            found = sql.sql(query).to_arrow_table()[0]
        except duckdb.Error as error:
            more = "" if self._config.with_source else ", and the source's with --with-source"
            raise ConfigError(
                f"--where {self._config.where}: {str(error).splitlines()[0]}",
                hint="SQL over the columns "
                f"{', '.join(known)}{more}; for example --where 'error_code IS NOT NULL'",
            ) from error
        return _only(table, found)

    def _encoded(self, table: Any) -> Any:
        """Return the lines of a form that is no table."""
        import pyarrow as pa

        encode = ENCODERS[self._config.kind]
        lines, sources = table["line"].to_pylist(), table["source"].to_pylist()
        return pa.array(map(encode, lines, sources), pa.binary())


def _only(table: Any, rows: Any) -> Any:
    """Return the rows of a table whose numbers are among these."""
    from pyarrow import compute  # it takes its time to load

    return table.filter(compute.is_in(table[0], rows))
