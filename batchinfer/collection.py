"""One collection under way: from a run's rows to finished files and the record of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from batchinfer.cards import CardFacts, make_card
from batchinfer.collecting import CHUNKS, OUTPUTS, Block, Reader, Selection
from batchinfer.destinations import Collected, CollectedFile, Destination, suffix_of
from batchinfer.errors import InputError, RunUnsound
from batchinfer.formats.columns import shape_of
from batchinfer.hub_upload import parse_address
from batchinfer.manifests import OpenStore
from batchinfer.records import Record
from batchinfer.scratch import Scratch
from batchinfer.shapes import Kind, Observer
from batchinfer.storage import Store
from batchinfer.tables import FORMATS, Columns, Schema, ShardWriter, TableFile, as_column, free_name

logger = logging.getLogger(__name__)

SHARD_ROWS = 100_000
_LOG_SECONDS = 10.0


class CollectConfig(Record, frozen=True, kw_only=True):
    """What to collect, and into what. `format` empty: by DEST's ending, else parquet."""

    run: str
    dest: str
    format: str = ""
    with_source: bool = False
    columns: list[str] | None = None
    explode: bool = False
    shard_rows: int | None = None
    partial: bool = False
    overwrite: bool = False
    is_private: bool = True
    job: str | None = None
    manifests: list[str] = []
    scratch_dir: str | None = None


class _Source(NamedTuple):
    """The source's columns: where they come from, and by their own name what they are called and hold."""

    place: str
    names: dict[str, str]
    kinds: dict[str, Kind]


class Collection:
    """One collection under way."""

    def __init__(
        self,
        config: CollectConfig,
        kind: str,
        selection: Selection,
        store: Store,
        open_store: OpenStore,
        scratch: Scratch,
    ) -> None:
        self._config = config
        self._kind = kind
        self._selection = selection
        self._scratch = scratch
        self._shape = shape_of(selection.run.config, explode=config.explode)
        self._reader = Reader(selection, store, open_store, self._shape, scratch)
        self._rows = sum(marker.rows_ok + marker.rows_error for _, marker in selection.sound)
        self._unshown = 0
        self._schema = Schema(self._shape, {})
        self._counts = {"rows": 0, "rows_error": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self._errors: Counter[str] = Counter()

    @property
    def damaged(self) -> list[str]:
        """Chunks that turned out to be damaged when they were read."""
        return list(self._reader.damaged)

    def write(self, dest: Destination, key: str) -> Collected:
        """Write every row and return the record of it."""
        source = self._find_source()
        self._schema = Schema(
            self._shape,
            {source.names[name]: kind for name, kind in source.kinds.items()},
            dimension=self._dimension() if self._shape.has_embedding else 0,
            has_chunk=self._selection.job is None,
        )
        files: list[CollectedFile] = []
        for file in self._files(source):
            name = dest.put(file, len(files))
            files.append(
                CollectedFile(name=name, rows=file.rows, bytes=file.bytes, sha256=file.sha256)
            )
        if self._unshown:
            logger.warning("%d rows have reasoning, which this table leaves out", self._unshown)
        damaged = self._reader.damaged
        for gap in damaged.values():
            logger.warning("%s: %s: %s", gap.kind, gap.chunk, gap.problem)
        return Collected(
            key=key,
            fingerprint=self._selection.run.fingerprint,
            format=self._kind,
            rows=self._counts["rows"],
            rows_error=self._counts["rows_error"],
            chunks=len(self._selection.sound) - len(damaged),
            missing=[*(gap.chunk for gap in self._selection.gaps), *damaged],
            files=files,
        )

    # -- what is known before the first row

    def _find_source(self) -> _Source:
        """Look at every value of the source's columns once, so that all files have the same types."""
        kept = (self._selection.run.config.get("prompt") or {}).get("keep")
        place = CHUNKS if self._config.with_source else OUTPUTS if kept else ""
        if not place:
            return _Source("", {}, {})
        logger.info("looking at the types of the source's columns")
        observer = Observer()
        for block in self._blocks(place, self._config.columns, "looked at"):
            for row in block.source or ():
                observer.see(row)
        kinds = observer.kinds()
        for name in self._config.columns or ():
            if name not in kinds:
                raise InputError(
                    f"--columns: no row has a column {name!r}, they have {', '.join(list(kinds)[:20])}",
                    hint="check the spelling",
                )
        taken = {*self._shape.names, "chunk"}
        names = {name: free_name(name, taken) for name in kinds}
        return _Source(place, names, kinds)

    def _dimension(self) -> int:
        """Length of the run's embeddings: that of the first."""
        for block in self._reader.blocks():
            if block.lines.dimension:
                return block.lines.dimension
        raise InputError(
            f"{self._config.run}: not one row has an embedding",
            hint=f"see what failed: batchinfer status {self._config.run}",
        )

    # -- rows

    def _blocks(self, place: str, columns: list[str] | None, doing: str) -> Iterator[Block]:
        """Blocks of rows; a damaged chunk ends it, unless a part is enough. Says now and then how far it is."""
        shown, seen = time.monotonic(), 0
        for block in self._reader.blocks(place, columns):
            self._refuse_damage()
            yield block
            seen += block.num_rows
            if time.monotonic() - shown >= _LOG_SECONDS:
                shown = time.monotonic()
                logger.info("%d of %d rows %s", seen, self._rows, doing)
        self._refuse_damage()

    def _refuse_damage(self) -> None:
        damaged = self._reader.damaged
        if damaged and not self._config.partial:
            gap = next(iter(damaged.values()))
            raise RunUnsound(
                f"{gap.chunk}: {gap.problem}",
                hint="`batchinfer verify --deep` says what mends it; --partial leaves it out",
            )

    def _files(self, source: _Source) -> Iterator[TableFile]:
        shard_rows = None if suffix_of(self._config.dest) else self._config.shard_rows or SHARD_ROWS
        with ShardWriter(self._kind, self._schema, self._scratch.folder, shard_rows) as writer:
            for block in self._blocks(source.place, list(source.names) or None, "written"):
                start = 0
                while start < block.num_rows:
                    room = writer.room()
                    stop = block.num_rows if room is None else min(block.num_rows, start + room)
                    part = block.part(start, stop)
                    file = writer.write(self._columns(part, source), stop - start)
                    if file is not None:
                        yield file
                    start = stop
            last = writer.finish()
            if last is not None:
                yield last

    def _columns(self, block: Block, source: _Source) -> Columns:
        columns, indices = block.lines.columns()
        self._count(block)
        rows = block.source
        if rows is not None and indices is not None:
            rows = [rows[index] for index in indices]
        for name, kind in source.kinds.items():
            values = [row.get(name) for row in rows or ()]
            columns[source.names[name]] = as_column(values, kind)
        if self._selection.job is None:
            columns["chunk"] = [block.chunk] * len(columns["row"])
        return columns

    def _count(self, block: Block) -> None:
        found = block.lines.counts()
        self._unshown += block.lines.num_unshown()
        self._errors.update(found.errors)
        counts = self._counts
        counts["rows"] += block.num_rows
        counts["rows_error"] += found.errors.total()
        counts["prompt_tokens"] += found.prompt_tokens
        counts["completion_tokens"] += found.completion_tokens

    def card(self, record: Collected) -> str:
        """The card of what was written."""
        job = self._selection.job
        total = sum(chunk.rows for chunk in job.chunks) if job is not None else record.rows
        limit = self._selection.run.config.get("limit")
        return make_card(
            self._selection.run,
            CardFacts(
                name=parse_address(self._config.dest).repo,
                columns={field.name: str(field.type) for field in self._schema.arrow()},
                lines=sum(file.rows for file in record.files),
                rows=record.rows,
                rows_error=record.rows_error,
                rows_missing=min(total, limit or total) - record.rows,
                errors=dict(sorted(self._errors.items(), key=lambda item: (-item[1], item[0]))),
                prompt_tokens=self._counts["prompt_tokens"],
                completion_tokens=self._counts["completion_tokens"],
                sources=[_public(source.url) for source in job.sources] if job is not None else [],
                path=f"data/part-*{FORMATS[self._kind]}",
            ),
        )


def _public(url: str) -> str:
    """A source as strangers may read it: of paths and private buckets only the last name."""
    return url if url.startswith(("hf://", "https://")) else url.rstrip("/").rpartition("/")[2]
