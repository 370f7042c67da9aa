"""Write a run's rows as a table in files, and make the record that lists the files."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from batchinfer.collect.answer_json import COLUMN, parser_for
from batchinfer.collect.card import CardFacts, make_card
from batchinfer.collect.destinations import (
    Collected,
    CollectedFile,
    Destination,
    put_all,
    suffix_of,
)
from batchinfer.collect.files import FORMATS, ShardWriter, TableFile
from batchinfer.collect.kinds import JSON, Kind, KindObserver
from batchinfer.collect.picking import Picking, parse_condition
from batchinfer.collect.reader import CHUNKS, OUTPUTS, Block, Reader, around_all, cut
from batchinfer.collect.schema import LINE_COLUMN, Columns, Schema, as_column, table_names
from batchinfer.collect.source_rows import LINE
from batchinfer.collect.source_types import read_schema
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Record
from batchinfer.formats.columns import joined, shape_of
from batchinfer.storage.hub_data_set import parse_address
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

SHARD_ROWS = 100_000
HALF = "float16"


class CollectConfig(Record, frozen=True, kw_only=True):
    """Options of `collect`. If `format` is empty, DEST's ending decides; without an ending the format is parquet."""

    run: str
    dest: str
    format: str = ""
    with_source: bool = False
    columns: list[str] | None = None
    explode: bool = False
    shard_rows: int | None = None
    csv_safe: bool = False
    answer_json: bool | None = None
    embedding_dtype: str | None = None
    """Type of the numbers of vectors: float32 or float16; None for float32."""
    partial: bool = False
    overwrite: bool = False
    is_private: bool = True
    job: str | None = None
    manifests: list[str] = []
    scratch_dir: str | None = None
    more_runs: list[str] = []
    """URLs of further runs over the same job. Their rows follow those of `run`."""
    where: list[str] = []
    """Conditions of --where. Rows that do not fulfil all of them are left out."""
    sample: int | None = None
    """Number of rows of each run to draw from those that fulfil the conditions; None takes them all."""
    seed: int | None = None
    """Number that decides which rows are drawn; None is 0. Only for `sample`."""
    rank: int | None = None
    """Index of this process among `num_ranks` that write the files together. None: it writes them alone."""
    num_ranks: int | None = None

    @property
    def runs(self) -> list[str]:
        """URLs of all runs, in the order of the table."""
        return [self.run, *self.more_runs]

    @property
    def picking(self) -> Picking:
        """The rows to take.

        Raises:
            ConfigError: a condition of `where` cannot be read.
        """
        conditions = list(map(parse_condition, self.where))
        return Picking(conditions=conditions, sample=self.sample, seed=self.seed or 0)


class Collecting(Protocol):
    """Writes one collection: a table, or unchanged output lines."""

    def write(self, dest: Destination, key: str) -> Collected:
        """Write every row to `dest`, and return the record of the files. `key` is stored in the record."""
        ...

    def write_part(self, rows: range) -> Iterator[tuple[TableFile, int]]:
        """Write these rows, from the first row of a file, and yield each file with its number of failed rows."""
        ...

    def record(
        self, files: list[CollectedFile], key: str, *, rows: int, rows_error: int
    ) -> Collected:
        """Return the record of all files."""
        ...

    def card(self, record: Collected) -> str:
        """Return the data set card for the Hub. It describes the rows that `write` has written."""
        ...


def shard_rows_of(config: CollectConfig) -> int | None:
    """Return the number of rows of the job in each file; None if DEST is one file, which holds all rows."""
    return None if suffix_of(config.dest) else config.shard_rows or SHARD_ROWS


def make_record(
    readers: list[Reader],
    files: list[CollectedFile],
    *,
    key: str,
    kind: str,
    rows: int,
    rows_error: int,
    kept_as_text: dict[str, int] | None = None,
) -> Collected:
    """Return the record of a collection whose rows `readers` have read. Log a warning for each damaged chunk."""
    for reader in readers:
        for gap in reader.damaged.values():
            logger.warning("%s: %s: %s", gap.kind, reader.name_of(gap.chunk), gap.problem)
    return Collected(
        key=key,
        fingerprint=",".join(reader.selection.run.fingerprint for reader in readers),
        format=kind,
        rows=rows,
        rows_error=rows_error,
        chunks=sum(len(reader.used()) for reader in readers),
        missing=[name for reader in readers for name in reader.missing()],
        files=files,
        kept_as_text=kept_as_text or {},
    )


class _SourceColumns(NamedTuple):
    """The source's columns that the table gets.

    `place` says where they are read from: CHUNKS, OUTPUTS, or "" if the table gets none. `names` (in the table) and
    `kinds` are dictionaries by the name that a column has in the rows.
    """

    place: str
    names: dict[str, str]
    kinds: dict[str, Kind]
    kept_as_text: dict[str, int] = {}
    """See `Collected.kept_as_text`."""


class Collection:
    """Writes the answers of one run, or of several over one job, as a table. Implements Collecting."""

    def __init__(
        self,
        config: CollectConfig,
        kind: str,
        readers: list[Reader],
        scratch: Scratch,
    ) -> None:
        self._config = config
        self._kind = kind
        self._readers = readers
        self._job = readers[0].selection.job
        self._scratch = scratch
        configs = [reader.selection.run.config for reader in readers]
        self._shapes = joined([shape_of(one, explode=config.explode) for one in configs])
        self._shape = self._shapes[0]
        if config.answer_json and self._shape.is_pooling:
            raise ConfigError(
                f"--answer-json: the run has no texts (--task {self._shape.task})",
                hint="leave it out",
            )
        if config.embedding_dtype and not self._shape.has_vectors:
            raise ConfigError(
                f"--embedding-dtype {config.embedding_dtype}: the run has no vectors (--task {self._shape.task})",
                hint="leave it out",
            )
        self._rows = self._unshown = self._num_lines = 0
        self._parser = parser_for(configs, is_wanted=config.answer_json)
        self._schema = Schema(self._shape, {})
        self._counts = {"prompt_tokens": 0, "completion_tokens": 0}
        self._errors: Counter[str] = Counter()
        self._source: _SourceColumns | None = None

    def write(self, dest: Destination, key: str) -> Collected:
        """See Collecting."""
        files = put_all(dest, self._files(None))
        self._tell()
        return self.record(files, key, rows=self._rows, rows_error=self._errors.total())

    def write_part(self, rows: range) -> Iterator[tuple[TableFile, int]]:
        """See Collecting."""
        before = self._errors.total()
        for file in self._files(rows):
            yield file, self._errors.total() - before
            before = self._errors.total()

    def record(
        self, files: list[CollectedFile], key: str, *, rows: int, rows_error: int
    ) -> Collected:
        """See Collecting."""
        return make_record(
            self._readers,
            files,
            key=key,
            kind=self._kind,
            rows=rows,
            rows_error=rows_error,
            kept_as_text=self._columns_of_source().kept_as_text,
        )

    def _columns_of_source(self) -> _SourceColumns:
        """Return the source's columns. Finds them, and the schema, when it is called first."""
        if self._source is not None:
            return self._source
        self._source = source = self._find_source()
        self._schema = Schema(
            self._shape,
            {source.names[name]: kind for name, kind in source.kinds.items()},
            dimension=self._dimension() if self._shape.has_vectors else 0,
            is_half=self._config.embedding_dtype == HALF,
            has_chunk=self._job is None,
            has_run=len(self._readers) > 1,
            parsed={COLUMN: self._parser.kind} if self._parser is not None else {},
        )
        return source

    def _tell(self) -> None:
        """Log what the table does not show."""
        if self._num_lines:
            logger.warning(
                "%d lines of the source are no JSON objects; their columns are null",
                self._num_lines,
            )
        samplings = [reader.selection.run.config.get("sampling") or {} for reader in self._readers]
        if any(sampling.get("prompt_logprobs") is not None for sampling in samplings):
            logger.warning("log-probabilities of prompts are left out; --format lines has them")
        if self._parser is not None:
            self._parser.tell()
        if self._unshown:
            logger.warning("%d rows have reasoning, which this table leaves out", self._unshown)

    # -- columns, types and the length of embeddings

    def _find_source(self) -> _SourceColumns:
        """Find the source's columns and their types, which all files then have.

        The types are those in job.json. Where it has none, they are found from the values.
        """
        prompts = [reader.selection.run.config.get("prompt") or {} for reader in self._readers]
        kept = [name for prompt in prompts for name in prompt.get("keep") or []]
        place = CHUNKS if self._config.with_source else OUTPUTS if kept else ""
        if not place:
            return _SourceColumns("", {}, {})
        job, types = self._job, self._types_of_job()
        wanted, source_names = self._asked(), self._source_names()
        if wanted is None and types and job is not None:
            has_all = place == CHUNKS or "*" in kept
            wanted = [name for name in job.columns if has_all or name in kept]
        unknown = None if wanted is None else [name for name in wanted if name not in types]
        observer = self._observe(place, unknown)
        kinds = observer.kinds()
        if wanted is not None:
            found = types | kinds
            kinds = {name: found[name] for name in wanted if name in found}
        for name, asked in zip(self._config.columns or (), self._asked() or (), strict=True):
            if asked not in kinds:
                known = [source_names.get(one, one) for one in job.columns] if job else []
                near = difflib.get_close_matches(name, known, n=1)
                raise InputError(
                    f"--columns: no row has a column {name!r}"
                    + (f", expected some of: {', '.join(known[:30])}" if known else ""),
                    hint=f"did you mean {near[0]}?" if near else "check the spelling",
                )
        own_names = {name: source_names.get(name, name) for name in kinds}
        if LINE in kinds:
            own_names[LINE] = LINE_COLUMN
        own_columns = [*self._shape.names, "chunk", *(["run"] if len(self._readers) > 1 else [])]
        own_columns += [COLUMN] if self._parser is not None else []
        names = table_names(own_names, own_columns)
        return _SourceColumns(place, names, kinds, _say_kept_as_text(observer, names, kinds))

    def _types_of_job(self) -> dict[str, Kind]:
        """Return the types of columns that job.json holds, by the name in the rows; none if they cannot be read."""
        job = self._job
        if job is None or isinstance(job.schema, msgspec.UnsetType):
            return {}
        try:
            return read_schema(job.schema)
        except InputError as error:
            logger.warning("%s; the types are found from the values instead", error)
            return {}

    def _observe(self, place: str, columns: list[str] | None) -> KindObserver:
        """Find the types of `columns`, or of all columns if it is None, by looking at every value.

        Unless `columns` is empty, this reads all rows once.
        """
        observer = KindObserver()
        if columns is not None and not columns:
            return observer
        logger.info("looking at the types of the source's columns")
        for reader, shape in zip(self._readers, self._shapes, strict=True):
            for block in reader.blocks(shape, place, columns, doing="looked at"):
                for row in block.source or ():
                    observer.see(row)
        return observer

    def _source_names(self) -> dict[str, str]:
        """Return the names in the source of columns that `split` renamed, by their names in the rows."""
        return self._job.source_names if self._job is not None else {}

    def _asked(self) -> list[str] | None:
        """Return the names in the rows of the columns that `--columns` names; None for all columns."""
        if self._config.columns is None:
            return None
        names_in_rows = {source: name for name, source in self._source_names().items()}
        return [names_in_rows.get(name, name) for name in self._config.columns]

    def _dimension(self) -> int:
        """Return the length of the runs' vectors. It is 0 for runs of requests, if none asked for a vector.

        Raises:
            InputError: a run has no vector, or the lengths differ.
        """
        found = {}
        for url, reader, shape in zip(self._config.runs, self._readers, self._shapes, strict=True):
            found[url] = reader.dimension(shape)
            if not found[url] and not shape.is_of_requests:
                raise InputError(
                    f"{url}: not one row has an embedding",
                    hint=f"see what failed: batchinfer status {url}",
                )
        if len(set(filter(None, found.values()))) > 1:
            lengths = ", ".join(f"{url}: {length}" for url, length in found.items())
            raise InputError(
                f"the runs' embeddings have different lengths ({lengths}), which no column can hold",
                hint="collect each run into a DEST of its own",
            )
        return max(found.values())

    # -- rows

    def _files(self, wanted: range | None) -> Iterator[TableFile]:
        """Write the files of these rows; of all rows if `wanted` is None."""
        source = self._columns_of_source()
        rows = shard_rows_of(self._config)
        with ShardWriter(
            self._kind,
            self._schema,
            self._scratch.folder,
            rows,
            is_csv_safe=self._config.csv_safe,
        ) as writer:
            yield from writer.files(
                self._blocks(source, wanted), partial(self._columns, source=source)
            )

    def _blocks(self, source: _SourceColumns, wanted: range | None) -> Iterator[Block]:
        shapes = dict(zip((reader.name for reader in self._readers), self._shapes, strict=True))
        for reader, rows in around_all(self._readers, wanted):
            blocks = reader.blocks(
                shapes[reader.name],
                source.place,
                [name for name in source.names if name != LINE] or None,
                as_text={name for name, kind in source.kinds.items() if kind == JSON},
                doing="written",
            )
            yield from blocks if wanted is None else cut(blocks, rows)

    def _columns(self, block: Block, source: _SourceColumns) -> Columns:
        columns, indices = block.lines.columns()
        self._count(block)
        rows = block.source
        if rows is not None and indices is not None:
            rows = [rows[index] for index in indices]
        if rows is not None and LINE not in source.names:
            self._num_lines += sum(LINE in row for row in rows)
        for name, kind in source.kinds.items():
            values = [row.get(name) for row in rows or ()]
            columns[source.names[name]] = as_column(values, kind)
        if self._parser is not None:
            texts = columns["texts" if "texts" in columns else "text"]
            columns[COLUMN] = self._parser.column(texts)
        if self._job is None:
            columns["chunk"] = [block.chunk] * len(columns["row"])
        if len(self._readers) > 1:
            columns["run"] = [block.run] * len(columns["row"])
        return columns

    def _count(self, block: Block) -> None:
        found = block.lines.counts()
        self._rows += block.num_rows
        self._unshown += block.lines.num_unshown()
        self._errors.update(found.errors)
        counts = self._counts
        counts["prompt_tokens"] += found.prompt_tokens
        counts["completion_tokens"] += found.completion_tokens

    def card(self, record: Collected) -> str:
        """See Collecting."""
        job = self._job
        return make_card(
            {reader.name: reader.selection.run for reader in self._readers},
            CardFacts(
                name=parse_address(self._config.dest).repo,
                columns={field.name: str(field.type) for field in self._schema.arrow()},
                lines=sum(file.rows for file in record.files),
                rows=record.rows,
                rows_error=record.rows_error,
                rows_missing=sum(reader.num_missing() for reader in self._readers),
                errors=dict(sorted(self._errors.items(), key=lambda item: (-item[1], item[0]))),
                prompt_tokens=self._counts["prompt_tokens"],
                completion_tokens=self._counts["completion_tokens"],
                sources=[_public(source.url) for source in job.sources] if job is not None else [],
                path=f"data/part-*{FORMATS[self._kind]}",
                picked=self._config.picking.describe(),
            ),
        )


def _say_kept_as_text(
    observer: KindObserver, names: dict[str, str], kinds: dict[str, Kind]
) -> dict[str, int]:
    """Log which columns of the source become JSON text or hold escapes.

    Returns the number of values that no column type can hold as they are, by column of the table.

    `names` and `kinds` are the names in the table and the types, by a column's name in the rows.
    """
    counts = {}
    if LINE in names:
        counts[names[LINE]] = observer.num_lines
        logger.warning(
            "%d lines of the source are no JSON objects; their text is in the column %r",
            observer.num_lines,
            names[LINE],
        )
    for column, count in observer.num_unfit.items():
        counts[names[column]] = count
        if kinds[column] == JSON:
            what = "numbers too large, nested too deep or half a surrogate pair, so it is JSON text"
        else:
            what = "half a surrogate pair, which is now an escape"
        example = observer.examples[column]
        logger.warning(
            "column %r: %d values have %s; the first is %s", names[column], count, what, example
        )
    for column in observer.without_common_type():
        logger.info("column %r is JSON text: its values have no type in common", names[column])
    return counts


def _public(url: str) -> str:
    """Return a source's URL if it begins with hf:// or https://, else only its last part.

    Strangers may read the card, and other URLs may tell them about the user's machines or buckets.
    """
    return url if url.startswith(("hf://", "https://")) else url.rstrip("/").rpartition("/")[2]
