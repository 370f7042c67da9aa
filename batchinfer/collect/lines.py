"""A run's output lines one after the other, as they are: `collect --format lines`.

Nothing is decoded: that the bytes are the run's, whole and in order, is what markers and checksums say. For a run in a
format of the OpenAI API this makes the one output file that its clients know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from batchinfer.collect.destinations import Collected, Destination, put_all
from batchinfer.collect.files import LINES, Columns, ShardWriter, TableFile
from batchinfer.collect.reader import Reader, Selection
from batchinfer.collect.table import CollectConfig, make_record, shard_rows_of
from batchinfer.ledger.jobs import OpenStore
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch


class _Lines(NamedTuple):
    """Some consecutive output lines, each with its newline."""

    lines: list[bytes]

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    def part(self, start: int, stop: int) -> _Lines:
        return _Lines(self.lines[start:stop])

    def columns(self) -> Columns:
        return {LINES: self.lines}


class Concatenation:
    """Output lines under way into files. Implements collection.Collecting.

    Args:
        config: Where to, and how many rows a file.
        selection: The outputs that count.
        store: The run's.
        open_store: Opens other stores.
        scratch: Room for one file, and a few outputs.
    """

    def __init__(
        self,
        config: CollectConfig,
        selection: Selection,
        store: Store,
        open_store: OpenStore,
        scratch: Scratch,
    ) -> None:
        self._config = config
        self._scratch = scratch
        self._reader = Reader(selection, store, open_store, scratch, is_partial=config.partial)

    @property
    def damaged(self) -> list[str]:
        """See Collecting."""
        return list(self._reader.damaged)

    def write(self, dest: Destination, key: str) -> Collected:
        """See Collecting."""
        files = put_all(dest, self._files())
        rows_error = sum(marker.rows_error for marker in self._reader.used())
        return make_record(self._reader, files, key=key, kind=LINES, rows_error=rows_error)

    def _files(self) -> Iterator[TableFile]:
        rows = shard_rows_of(self._config)
        with ShardWriter(LINES, None, self._scratch.folder, rows) as writer:
            yield from writer.files(map(_Lines, self._reader.raw_lines()), _Lines.columns)

    def card(self, record: Collected) -> str:
        """See Collecting. Lines do not go to the Hub."""
        raise NotImplementedError
