"""The rows of a collection as Arrow tables: columns of the answers and of the source, of the rows that are taken."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from batchinfer.collect.answers import Answers, connect, rows_at_once
from batchinfer.collect.json_answers import JsonAnswers, schema_of
from batchinfer.collect.line_formats import ENCODERS, NEEDS_SOURCE
from batchinfer.collect.options import TABLES, CollectConfig
from batchinfer.collect.outputs import sound_outputs
from batchinfer.collect.selection import Selection
from batchinfer.collect.source import Chunks, Source, open_lines, open_source
from batchinfer.collect.vectors import VectorColumn
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.core.tasks import GENERATE, is_pooling
from batchinfer.ledger.audit import Finding
from batchinfer.ledger.jobs import OpenStore
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
_ASK_VERIFY = "`batchinfer verify --deep` says how to fix it"


class Collection:
    """The rows of one run. Making it reads all outputs.

    Args:
        config: What to take.
        selection: The chunks.
        store: Store of the run.
        open_store: Opens the stores of the chunks.
        scratch: Folder for copies, and for what does not fit into memory.

    Raises:
        RunUnsound: an output is damaged, and `config.partial` is not set.
        InputError: an output cannot be read.
        ConfigError: the condition is none, or the source has no such column.
    """

    def __init__(
        self,
        config: CollectConfig,
        selection: Selection,
        store: Store,
        open_store: OpenStore,
        scratch: Scratch,
    ) -> None:
        import numpy as np

        self._config = config
        self.damaged: list[Finding] = []
        """Chunks whose output cannot be used."""
        self._is_table = config.kind in TABLES
        outputs = sound_outputs(selection, store, scratch, self.damaged)
        sql, with_lines = connect(scratch.folder), not self._is_table
        self.answers = Answers(sql, outputs, scratch, with_lines=with_lines)
        found = self.answers.found
        if self.damaged and not config.partial:
            raise RunUnsound(
                f"{self.damaged[0].subject}: {self.damaged[0].problem}",
                hint=f"{_ASK_VERIFY}; --partial leaves it out",
            )
        refs = [ref for ref, _ in found]
        self.num_chunks = len(refs)
        self._first_rows = np.array([ref.first_row for ref in refs], "int64")
        self._starts = np.cumsum([0, *(marker.rows_ok + marker.rows_error for _, marker in found)])
        self.num_rows = int(self._starts[-1])
        if self.answers.one("count(*)") != (self.num_rows,):
            raise InputError(
                f"{store.url}: its outputs do not have the {self.num_rows} lines that their markers count",
                hint=_ASK_VERIFY,
            )
        size = sum(marker.output_bytes for _, marker in found)
        self._at_once = rows_at_once(size, self.num_rows)
        prompt = selection.run.config.get("prompt") or {}
        task = prompt.get("task") or GENERATE
        wanted = () if is_pooling(task) else ("text", "finish_reason")
        self._columns = self.answers.columns(wanted) | ({} if self._is_table else {"line": "line"})
        self._made: list[VectorColumn | JsonAnswers] = [
            VectorColumn(self.answers, task, name)
            for name in self._columns.keys() & {"embedding", "embeddings"}
        ]
        self._json: JsonAnswers | None = None
        is_json, schema = schema_of(prompt.get("body") or {})
        if wanted and (is_json if config.answer_json is None else config.answer_json):
            names = [name if name in self._columns else f"{name}s" for name in wanted]
            texts = functools.partial(self._values, names[0])
            self._json = JsonAnswers(texts, schema, names)
            self._made.append(self._json)
        chunks = Chunks(refs, open_store, scratch)
        self._source: Source | None = None
        if config.with_source:
            self._source = open_source(selection.job, chunks, config.columns)
        elif config.kind in NEEDS_SOURCE:
            self._source = open_lines(chunks)
        if self._source and not self._source.schema.names:
            self._source = None
        # A wrong condition is refused before anything is written.
        nothing = self.answers.read(self._columns).take(0)
        source = self._source and self._source.schema.empty_table()
        self.schema = self._fitting(self._joined(nothing, 0, source))[1].schema
        """Names and types of the columns."""

    def _values(self, name: str) -> Iterator[list[Any]]:
        answers = self.answers.read({name: self._columns[name]})
        for _ in range(0, self.num_rows, self._at_once):
            yield answers.take(self._at_once)[name].to_pylist()

    @property
    def broken_answers(self) -> int:
        """Number of finished answers that break the run's schema, among the rows that were read."""
        return self._json.num_broken if self._json else 0

    @property
    def source_texts(self) -> Counter[str]:
        """Number of the source's values that are their JSON text, by column."""
        return +self._source.json.num_texts if self._source and self._source.json else Counter()

    @property
    def json_texts(self) -> set[str]:
        """Names of the columns that hold JSON texts."""
        names = ["tool_calls", "logprobs", *(self._json.json_texts if self._json else ())]
        return set(map(self._apart, names))

    def errors(self) -> dict[str, int]:
        """Return the number of failed rows by error code, the most frequent first."""
        query = (
            "SELECT error_code, count(*) AS n FROM answers WHERE error_code IS NOT NULL GROUP BY 1"
        )
        return dict(self.answers.sql.execute(f"{query} ORDER BY n DESC, 1").fetchall())

    # -- rows

    def tables(self) -> Iterator[Any]:
        """Yield the rows that are taken, in input order, as Arrow tables.

        They have the columns of `schema`; where the form is no table, they have the only column `line`.
        """
        import numpy as np
        import pyarrow as pa

        drawn = None if self._config.sample is None else self._drawn(self._config.sample)
        for rows, table in map(self._fitting, self._all()):
            taken = table if drawn is None else table.filter(pa.array(np.isin(rows, drawn)))
            yield taken if self._is_table else self._encoded(taken)

    def _drawn(self, size: int) -> Any:
        """Return the numbers of the rows that --sample draws of those that fulfil the condition.

        A row's number decides, so that the same rows of several runs over one job are drawn.
        """
        import pyarrow as pa

        sql = self.answers.sql
        sql.execute("CREATE TABLE fitting (row BIGINT)")
        for rows, _ in map(self._fitting, self._all()):
            sql.register("numbers", pa.table({"row": rows}))
            sql.execute("INSERT INTO fitting FROM numbers")
        order = f"md5(concat({self._config.seed}, ' ', row))"
        return sql.execute(f"SELECT row FROM fitting ORDER BY {order} LIMIT {size}").fetchnumpy()[
            "row"
        ]

    def _all(self) -> Iterator[Any]:
        """Yield all rows with the source's columns, in input order.

        Raises:
            InputError: rows are missing, or an answer is of another row than its place says.
        """
        if self._json:
            self._json.num_broken = 0
        answers = self.answers.read(self._columns)
        done, next_log = 0, time.monotonic() + _LOG_SECONDS
        for start, stop, source in self._parts():
            if start != done:
                break
            yield self._joined(answers.take(stop - start), start, source)
            done = stop
            if time.monotonic() > next_log:
                logger.info("%d of %d rows read", done, self.num_rows)
                next_log += _LOG_SECONDS
        if done != self.num_rows:
            raise InputError("the source does not have all rows any more", hint="collect again")

    def _parts(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the places of rows that follow each other, from one up to another, with the source's columns."""
        import numpy as np
        import pyarrow as pa

        if self._source is None:
            for start in range(0, self.num_rows, self._at_once):
                yield start, min(start + self._at_once, self.num_rows), None
            return
        for first_row, source in self._source.read():
            rows = np.arange(first_row, first_row + len(source))
            chunks = self._first_rows.searchsorted(rows, "right") - 1
            places = self._starts[chunks] + rows - self._first_rows[chunks]
            is_wanted = (chunks >= 0) & (places < self._starts[chunks + 1])
            if is_wanted.any():
                first, last = places[is_wanted][[0, -1]].tolist()
                yield first, last + 1, source.filter(pa.array(is_wanted))

    def _joined(self, table: Any, start: int, source: Any) -> Any:
        """Return answers as they are in the table, with the source's columns. The first one has the place `start`.

        Raises:
            InputError: an answer is of another row than its place says.
        """
        import numpy as np

        places = np.arange(start, start + len(table))
        chunks = self._starts.searchsorted(places, "right") - 1
        rows = self._first_rows[chunks] + places - self._starts[chunks]
        wrong = np.flatnonzero(table["_row"].to_numpy() != rows)
        if wrong.size:
            raise InputError(
                f"row {rows[wrong[0]]}: another row is in its place in the output", hint=_ASK_VERIFY
            )
        for columns in self._made:
            table = columns.made(table)
        if source is None:
            return table
        table = table.rename_columns(list(map(self._apart, table.column_names)))
        for field, column in zip(source.schema, source.columns, strict=True):
            table = table.append_column(field, column)
        return table

    def _apart(self, name: str) -> str:
        """Return a name for a column of the answers that no column of the source has."""
        while self._source is not None and name in self._source.schema.names:
            name = f"_{name}"
        return name

    def _fitting(self, table: Any) -> tuple[Any, Any]:
        """Return the rows that fulfil the condition, with their numbers in the job.

        Raises:
            ConfigError: the condition is none.
        """
        import duckdb
        import numpy as np
        import pyarrow as pa

        rows = table["_row"].to_numpy()
        if not self._config.where:
            return rows, table
        try:
            query = f"SELECT coalesce(CAST(({self._config.where}) AS BOOLEAN), false) FROM rows"
            sql = self.answers.sql.cursor()
            sql.register("rows", table)
            mask = np.array(sql.execute(query).fetchall(), bool).reshape(-1)
            return rows[mask], table.filter(pa.array(mask))
        except duckdb.Error as error:
            raise ConfigError(
                f"--where {self._config.where}: {str(error).splitlines()[0]}",
                hint="SQL over the columns "
                f"{', '.join(table.column_names)}; for example --where 'error_code IS NOT NULL'",
            ) from error

    def _encoded(self, table: Any) -> Any:
        """Return the lines of a form that is no table, as the only column."""
        import pyarrow as pa

        lines = table["line"].to_pylist()
        sources = table["source"].to_pylist() if self._source else [b""] * len(lines)
        found = map(ENCODERS[self._config.kind], lines, sources)
        return pa.table({"line": pa.array(found, pa.binary())})
