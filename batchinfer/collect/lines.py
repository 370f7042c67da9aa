"""Copy a run's output lines byte for byte, in input order: `collect --format lines`.

The lines are not decoded: markers and checksums prove that the bytes are complete and in order. The lines of a run
with `--output-format openai-batch` are in the format that clients of the OpenAI API read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from batchinfer.collect.destinations import Collected, CollectedFile, Destination, put_all
from batchinfer.collect.files import LINES, ShardWriter, TableFile
from batchinfer.collect.reader import Reader, around_all, cut
from batchinfer.collect.schema import Columns
from batchinfer.collect.table import CollectConfig, make_record, shard_rows_of
from batchinfer.storage.scratch import Scratch


class _LineGroup(NamedTuple):
    """Consecutive output lines, each with its newline at the end. Implements files.Rows."""

    lines: list[bytes]

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    def part(self, start: int, stop: int) -> _LineGroup:
        return _LineGroup(self.lines[start:stop])

    def columns(self) -> Columns:
        return {LINES: self.lines}


class Concatenation:
    """Writes output lines to files unchanged. Implements table.Collecting.

    Args:
        config: Options of `collect`, such as the rows per file.
        readers: Readers of the runs, whose lines are copied one run after the other.
        scratch: Folder for temporary files: the file being written, and a few fetched outputs.
    """

    def __init__(self, config: CollectConfig, readers: list[Reader], scratch: Scratch) -> None:
        self._config = config
        self._readers = readers
        self._scratch = scratch
        self._rows = self._rows_error = 0

    def write(self, dest: Destination, key: str) -> Collected:
        """See Collecting."""
        files = put_all(dest, self._files(None))
        return self.record(files, key, rows=self._rows, rows_error=self._rows_error)

    def write_part(self, rows: range) -> Iterator[tuple[TableFile, int]]:
        """See Collecting. The lines are not read, so the failed rows of a file are not known here."""
        for file in self._files(rows):
            yield file, 0

    def record(
        self, files: list[CollectedFile], key: str, *, rows: int, rows_error: int
    ) -> Collected:
        """See Collecting. If all rows are taken, `rows_error` is not used, since markers tell it."""
        if self._config.picking.is_all:
            rows_error = sum(
                marker.rows_error for reader in self._readers for marker in reader.used()
            )
        return make_record(
            self._readers, files, key=key, kind=LINES, rows=rows, rows_error=rows_error
        )

    def _files(self, wanted: range | None) -> Iterator[TableFile]:
        rows = shard_rows_of(self._config)
        with ShardWriter(LINES, None, self._scratch.folder, rows) as writer:
            yield from writer.files(self._groups(wanted), _LineGroup.columns)

    def _groups(self, wanted: range | None) -> Iterator[_LineGroup]:
        is_all = self._config.picking.is_all
        for reader, rows in around_all(self._readers, wanted):
            groups = map(_LineGroup, reader.raw_lines())
            for group in groups if wanted is None else cut(groups, rows):
                self._rows += group.num_rows
                if not is_all:  # markers tell only the errors of whole chunks
                    found = reader.parse(group.lines)
                    self._rows_error += sum(not line.is_ok for line in found)
                yield group

    def card(self, record: Collected) -> str:
        """Not used: `collect` refuses to put output lines on the Hub, and only the Hub needs a card."""
        raise NotImplementedError
