"""The rows of a collection as Arrow tables: columns of the answers and of the source, of the rows that are taken."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from batchinfer.collect.answers import Answers, Selection, connect, quoted
from batchinfer.collect.collect_config import TABLES, CollectConfig
from batchinfer.collect.columns import (
    MAX_NAMES,
    AnswerSchema,
    JsonColumns,
    VectorColumn,
    num_broken,
    schema_of,
    shape_of,
    transform,
    types_of,
)
from batchinfer.collect.source import chosen, open_parquet
from batchinfer.collect.table_files import ENCODERS, NEEDS_SOURCE
from batchinfer.core.errors import ConfigError
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
        self._json_texts = {"tool_calls", "logprobs"}
        self._made: dict[str, Callable[[Any], Any]] = {}
        """Columns of the answers that SQL does not make, each of the table of the others."""
        self._relation = "answers"
        self._valid = ""
        """Name of the column that says whether answers keep the run's schema; empty if there is none."""
        self.num_broken = 0
        """Number of finished answers that break it, among the rows that were taken so far."""
        prompt = selection.target.run.config.get("prompt") or {}
        task = prompt.get("task") or GENERATE
        wanted = () if is_pooling(task) else ("text", "finish_reason")
        own = self.answers.columns(wanted)
        if not self._is_table:
            own |= {"line": "line"} | ({"source": "source"} if needs_chunks else {})
        for name in own.keys() & {"embedding", "embeddings"}:
            vectors = VectorColumn(self.answers, task, name)
            own = {vectors.name if each == name else each: value for each, value in own.items()}
            self._made[vectors.name] = vectors.array
        is_json, schema = schema_of(prompt.get("body") or {})
        if wanted and (is_json if config.answer_json is None else config.answer_json):
            own |= self._json_columns(own, schema)
        self._own = own
        self._source: dict[str, str] = {}
        if config.with_source and self._parquet is None:
            self._source = self._columns_of_chunks()
        self._source_names = self._parquet.schema.names if self._parquet else list(self._source)
        # A wrong condition is refused before anything is written.
        self.schema = self._fitting(self._window(0, 0)).schema
        """Names and types of the columns."""

    # -- columns

    def _json_columns(self, own: dict[str, str], schema: Any) -> dict[str, str]:
        """Return the columns of answers that are JSON, beside those of all answers."""
        is_one, found = "text" in own, dict[str, str]()
        texts = own["text" if is_one else "texts"]
        if is_one:
            relation, value = "answers", "TRY_CAST(text AS JSON)"
            members = JsonColumns(
                self._sql, relation, value, types_of(schema), most_names=MAX_NAMES
            )
            if members.is_flat:
                self._relation = f"(SELECT *, {members.struct} AS members FROM answers)"
                columns = members.columns("members")
                found = {f"answer_{name}": column for name, column in columns.items()}
                self._json_texts.update(f"answer_{name}" for name in members.json_texts)
                value = f"CASE WHEN json_type({value}) <> 'OBJECT' THEN {value} END"
        else:
            relation, value = f"(SELECT unnest({texts}) AS t FROM answers)", "TRY_CAST(t AS JSON)"
        shape = shape_of(self._sql, relation, value)
        if shape != "NULL":
            other = transform(value, shape)
            found["answer"] = other if is_one else f"list_transform({texts}, lambda t: {other})"
            self._json_texts.update({"answer"} if shape == "JSON" else ())
        validated = AnswerSchema(schema)
        if validated.is_usable:
            answers = "text" if is_one else "texts"
            reasons = "finish_reason" if "finish_reason" in own else "finish_reasons"
            self._valid = "answer_valid" if "answer_valid" not in found else "_answer_valid"
            found[self._valid] = "NULL"
            self._made[self._valid] = lambda table: validated.array(table[answers], table[reasons])
        return found

    def _columns_of_chunks(self) -> dict[str, str]:
        """Return the source's columns in the chunks, whose types are found from all values."""
        value = "TRY_CAST(source AS JSON)"
        [num_odd] = self.answers.one(
            f"count(*) FILTER (json_type({value}) IS DISTINCT FROM 'OBJECT')"
        )
        if num_odd:
            logger.warning("%d lines of the source are no JSON objects", num_odd)
        found = JsonColumns(self._sql, "answers", value)
        names = chosen(self._config.columns, [n for n in found.kinds if n not in ("_row", "_id")])
        found.kinds = {name: found.kinds[name] for name in names}
        if texts := found.json_texts:
            text = "columns of the source whose values share no type are JSON text: %s"
            logger.warning(text, ", ".join(texts))
        self._relation = f"(SELECT *, {found.struct} AS fields FROM {self._relation})"
        return found.columns("fields")

    def _apart(self, name: str) -> str:
        """Return a name for a column of the answers that no column of the source has, for SQL in whatever case."""
        taken = {each.casefold() for each in self._source_names}
        while name.casefold() in taken:
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
            taken = table if drawn is None else self._taken(table, drawn)
            if self._valid:
                self.num_broken += num_broken(taken[self._apart(self._valid)])
            yield taken if self._is_table else pa.table({"line": self._encoded(taken)})

    def _drawn(self, size: int) -> Any:
        """Return the numbers of the rows that --sample draws of those that fulfil the condition.

        A row's number decides, so that the same rows of several runs over one job are drawn.
        """
        import pyarrow as pa

        name, seed = self._apart("_row"), self._config.seed
        rows = (row for table in self._windows() for row in table[name].to_pylist())
        drawn = heapq.nsmallest(size, rows, lambda row: blake2b(b"%d %d" % (seed, row)).digest())
        return pa.array(drawn, pa.int64())

    def _windows(self) -> Iterator[Any]:
        """Yield all rows that fulfil the condition, in input order.

        Raises:
            InputError: the source has not all rows any more.
        """
        next_log = time.monotonic() + _LOG_SECONDS
        for start, stop in itertools.pairwise(self.answers.ends):
            step = self._parquet.at_once if self._parquet else max(1, stop - start)
            for first in range(start, stop, step):
                yield self._fitting(self._window(first, min(first + step, stop)))
            if time.monotonic() > next_log:
                logger.info("row %d is read", stop)
                next_log += _LOG_SECONDS

    def _window(self, start: int, stop: int) -> Any:
        """Return the rows from one number to another (exclusive), with their columns as they are in the table."""
        columns = [*self._own.values(), *self._source.values()]
        named = ", ".join(f"{value} AS c{index}" for index, value in enumerate(columns))
        rows = f"FROM {self._relation} WHERE _row >= {start} AND _row < {stop}"
        read = self._sql.sql(f"SELECT {named} {rows}").to_arrow_table()
        own = len(self._own)
        table = read.select(range(own)).rename_columns(list(self._own))
        for name, make in self._made.items():
            table = table.set_column(table.column_names.index(name), name, make(table))
        table = table.rename_columns(list(map(self._apart, self._own)))
        if self._parquet:
            source = self._parquet.take(table[0].to_numpy())
        else:
            source = read.select(range(own, len(columns))).rename_columns(self._source_names)
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
            name, sql = quoted(self._apart("_row")), self._sql.cursor()
            sql.register("rows", table.select(known))
            # WHERE refuses functions of several rows: of the rows at hand they would be wrong.
            query = f"SELECT {name} FROM rows WHERE CAST(({self._config.where}) AS BOOLEAN)"
            return self._taken(table, sql.sql(query).to_arrow_table()[0])
        except duckdb.Error as error:
            more = "" if self._config.with_source else ", and the source's with --with-source"
            raise ConfigError(
                f"--where {self._config.where}: {str(error).splitlines()[0]}",
                hint="SQL over the columns "
                f"{', '.join(known)}{more}; for example --where 'error_code IS NOT NULL'",
            ) from error

    def _taken(self, table: Any, rows: Any) -> Any:
        """Return those of some rows whose numbers are in an Arrow array."""
        from pyarrow import compute

        return table.filter(compute.is_in(table[self._apart("_row")], rows))

    def _encoded(self, table: Any) -> Any:
        """Return the lines of a form that is no table."""
        import pyarrow as pa

        lines = table["line"].to_pylist()
        sources = table["source"].to_pylist() if "source" in self._own else [""] * len(lines)
        return pa.array(map(ENCODERS[self._config.kind], lines, sources), pa.binary())
