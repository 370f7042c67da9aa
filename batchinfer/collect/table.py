"""The rows of a collection as Arrow tables: columns of the answers and of the source, of the rows that are taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from batchinfer.collect.answers import Answers, connect, rows_at_once
from batchinfer.collect.json_answers import VALID, JsonAnswers, schema_of
from batchinfer.collect.line_formats import ENCODERS, NEEDS_SOURCE
from batchinfer.collect.options import TABLES, CollectConfig
from batchinfer.collect.outputs import sound_outputs
from batchinfer.collect.selection import Gap, Selection
from batchinfer.collect.source import Source, open_lines, open_source
from batchinfer.collect.vectors import VectorColumn
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.core.records import Marker
from batchinfer.core.tasks import GENERATE, is_pooling
from batchinfer.ledger.jobs import ChunkRef, OpenStore
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

        self._config, self._selection = config, selection
        self.damaged: list[Gap] = []
        """Chunks whose output cannot be used."""
        self._is_table = config.kind in TABLES
        self.answers = Answers(connect(scratch.folder), with_lines=not self._is_table)
        found: list[tuple[ChunkRef, Marker]] = []
        for outputs in sound_outputs(selection, store, scratch, self.damaged):
            self.answers.add(list(outputs))
            found += outputs.values()
        for gap in self.damaged:
            logger.warning("%s: %s", gap.chunk, gap.problem)
        if self.damaged and not config.partial:
            raise RunUnsound(
                f"{self.damaged[0].chunk}: {self.damaged[0].problem}",
                hint=f"{_ASK_VERIFY}; --partial leaves it out",
            )
        refs = [ref for ref, _ in found]
        self.num_chunks = len(refs)
        self._names = np.array([ref.name for ref in refs])
        self._first_rows = np.array([ref.first_row for ref in refs], "int64")
        self._starts = np.cumsum([0, *(marker.rows_ok + marker.rows_error for _, marker in found)])
        self.num_rows = int(self._starts[-1])
        if self.answers.one("count(*)") != self.num_rows:
            raise InputError(
                f"{store.url}: its outputs do not have the {self.num_rows} lines that their markers count",
                hint=_ASK_VERIFY,
            )
        self._vectors: VectorColumn | None = None
        self._json: JsonAnswers | None = None
        self._columns = self._columns_of_answers()
        self._source: Source | None = None
        if config.with_source:
            self._source = open_source(
                self.answers.sql, selection.job, refs, config.columns, open_store, scratch
            )
        elif config.kind in NEEDS_SOURCE:
            self._source = open_lines(self.answers.sql, refs, open_store, scratch)
        num_bytes = sum(marker.output_bytes for _, marker in found)
        self._at_once = rows_at_once(num_bytes, self.num_rows)
        if self._source and not self._source.schema.names:
            self._source = None
        _, empty = next(self._fitting())  # refuses a wrong condition before anything is written
        self.schema = empty.schema
        """Names and types of the columns."""

    def _columns_of_answers(self) -> dict[str, str]:
        """Find the columns of the answers: their expressions by their names."""
        prompt = self._selection.run.config.get("prompt") or {}
        task = prompt.get("task") or GENERATE
        found = self.answers.columns(() if is_pooling(task) else ("text", "finish_reason"))
        vectors = found.keys() & {"embedding", "embeddings"}
        if vectors:
            self._vectors = VectorColumn(self.answers, task, is_list="embeddings" in vectors)
        is_json, schema = schema_of(prompt.get("body") or {})
        is_json = is_json if self._config.answer_json is None else self._config.answer_json
        if is_json and not is_pooling(task):
            self._json = JsonAnswers(self.answers, schema, is_list="texts" in found)
            found |= self._json.columns
        return found if self._is_table else found | {"line": "line"}

    @property
    def broken_answers(self) -> int:
        """Number of finished answers that break the run's schema, among the rows that were read."""
        return self._json.num_broken if self._json else 0

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

        drawn = self._drawn()
        if self._json:
            self._json.num_broken = 0  # drawing may have counted them
        for places, table in self._fitting():
            taken = table if drawn is None else table.filter(pa.array(np.isin(places, drawn)))
            yield taken if self._is_table else self._encoded(taken)

    def _fitting(self) -> Iterator[tuple[Any, Any]]:
        """Yield the rows that fulfil the condition, each table with the places of its rows among all."""
        import numpy as np
        import pyarrow as pa

        start, next_log = 0, time.monotonic() + _LOG_SECONDS
        for answers in self.answers.tables(self._columns, self._at_once):
            stop = start + len(answers)
            while True:
                table = self._shaped(answers.slice(len(answers) - stop + start), start)
                if self._config.where:
                    mask = self._mask(table)
                    yield np.flatnonzero(mask) + start, table.filter(pa.array(mask))
                else:
                    yield np.arange(start, start + len(table)), table
                start += len(table)
                if start == stop:
                    break
            if time.monotonic() > next_log:
                logger.info("%d of %d rows read", start, self.num_rows)
                next_log += _LOG_SECONDS

    def _mask(self, table: Any) -> Any:
        """Return which rows fulfil the condition, as a numpy array.

        Raises:
            ConfigError: the condition is none.
        """
        import duckdb
        import numpy as np

        sql = self.answers.sql.cursor()
        sql.register("rows", table)
        try:
            query = f"SELECT coalesce(CAST(({self._config.where}) AS BOOLEAN), false) FROM rows"
            return np.array(sql.execute(query).fetchall(), bool).reshape(-1)
        except duckdb.Error as error:
            raise ConfigError(
                f"--where {self._config.where}: {str(error).splitlines()[0]}",
                hint="SQL over the columns "
                f"{', '.join(table.column_names)}; for example --where 'error_code IS NOT NULL'",
            ) from error
        finally:
            sql.close()

    def _drawn(self) -> Any:
        """Return the places of the rows that --sample draws, ascending; None if it draws none.

        A row's number decides, so that the same rows of several runs over one job are drawn.
        """
        import numpy as np

        size = self._config.sample
        if size is None:
            return None
        keys, places = np.empty(0, "uint64"), np.empty(0, "int64")
        for more, _ in self._fitting():
            keys = np.concatenate([keys, _mixed(self._rows(more)[1], self._config.seed)])
            places = np.concatenate([places, more])
            best = np.argsort(keys, kind="stable")[:size]
            keys, places = keys[best], places[best]
        return np.sort(places)

    def _rows(self, places: Any) -> tuple[Any, Any]:
        """Return the names of rows' chunks, and the numbers that the rows have in the job."""
        chunks = self._starts.searchsorted(places, "right") - 1
        return self._names[chunks], self._first_rows[chunks] + places - self._starts[chunks]

    def _shaped(self, table: Any, start: int) -> Any:
        """Return the first of these answers as they are in the table, with the source's columns.

        `start` is the place of the first. Without the source's columns, all of them are returned.

        Raises:
            InputError: an answer is of another row than its place says.
        """
        import numpy as np
        import pyarrow as pa

        places = np.arange(start, start + len(table))
        names, rows = self._rows(places)
        wrong = np.flatnonzero(table["_row"].to_numpy() != rows)
        if wrong.size:
            raise InputError(
                f"{names[wrong[0]]}: its output has another row in the place of row {rows[wrong[0]]}",
                hint=_ASK_VERIFY,
            )
        source: Any = None
        if self._source is not None:
            source = self._source.rows(rows if self._source.has_all else places)
        table = table if source is None else table.slice(0, len(source))
        if self._vectors:
            index = next(
                i for i, each in enumerate(table.column_names) if each.startswith("embedding")
            )
            array = self._vectors.array(table.column(index))
            table = table.set_column(index, self._vectors.name, array)
        if self._json and self._json.validator:
            texts, reasons = map(table.column, self._texts(table))
            table = table.append_column(VALID, self._json.valid(texts, reasons))
        if self._selection.job is None:  # rows of several files have the same numbers
            table = table.add_column(0, "chunk", pa.array(names[: len(table)], pa.string()))
        if source is None:
            return table
        table = table.rename_columns(list(map(self._apart, table.column_names)))
        for field, column in zip(source.schema, source.columns, strict=True):
            table = table.append_column(field, column)
        return table

    @staticmethod
    def _texts(table: Any) -> tuple[str, str]:
        has_one = "text" in table.column_names
        return ("text", "finish_reason") if has_one else ("texts", "finish_reasons")

    def _apart(self, name: str) -> str:
        """Return a name for a column of the answers that no column of the source has."""
        while self._source is not None and name in self._source.schema.names:
            name = f"_{name}"
        return name

    def _encoded(self, table: Any) -> Any:
        """Return the lines of a form that is no table, as the only column."""
        import pyarrow as pa

        lines = table["line"].to_pylist()
        sources = table["source"].to_pylist() if self._source else [""] * len(lines)
        found = map(ENCODERS[self._config.kind], lines, sources)
        return pa.table({"line": pa.array(found, pa.binary())})


def _mixed(rows: Any, seed: int) -> Any:
    """Return a number for each row that looks random, as a numpy array (splitmix64)."""
    import numpy as np

    with np.errstate(over="ignore"):
        mixed = (rows.astype("uint64") + np.uint64(seed % 2**32 + 1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))
