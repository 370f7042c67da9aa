"""`collect --rank I --of N`: several processes, on any machines, each write a range of the files of one folder.

A rank creates its files, and below ``_parts/`` a record of each. The rank that finds the records of all files there
creates `_COLLECTED`, as a single process would, and removes the records. Nothing is overwritten: all ranks write the
same bytes, so ranks may be killed and repeated, and several of them may finish at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from batchinfer.cli.ranks import check_rank
from batchinfer.collect.destinations import Collected, CollectedFile, FolderDestination
from batchinfer.collect.table import CollectConfig, Collecting, shard_rows_of
from batchinfer.core import codec, units
from batchinfer.core.errors import ConfigError, ObjectNotFound
from batchinfer.core.records import Record
from batchinfer.ledger.inventory import in_parallel
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_PARTS = "_parts/"
"""Prefix of the records. Many programs that read data sets skip names that begin with an underscore."""


class FileRecord(Record, frozen=True, kw_only=True):
    """Content of a file's record."""

    file: CollectedFile
    rows_error: int


def check_ranks(config: CollectConfig, *, is_folder: bool) -> None:
    """Refuse options with which ranks cannot tell by the markers alone which rows are in which file.

    Raises:
        ConfigError: Such an option is given, or DEST is no folder.
    """
    check_rank(
        config.rank,
        config.num_ranks,
        refused={
            "--partial": config.partial,
            "--overwrite": config.overwrite,
            "--where": config.where,
            "--sample": config.sample,
        },
        hint="collect in one process, without --rank and --of",
    )
    if config.rank is not None and not is_folder:
        raise ConfigError(
            f"--rank: {config.dest} is no folder of a disk or bucket, which ranks fill together",
            hint="name a folder, or collect in one process, without --rank and --of",
        )


class RankFiles:
    """The files of one collection, and this rank's part of writing them.

    Args:
        config: Options of `collect`.
        store: The store at DEST.
        dest: The same place as a destination of files.
        collection: Makes the files.
        rows: Number of rows of all runs.
        key: Key of the collection; see `Collected`.
    """

    def __init__(
        self,
        config: CollectConfig,
        store: Store,
        dest: FolderDestination,
        collection: Collecting,
        *,
        rows: int,
        key: str,
    ) -> None:
        self._config = config
        self._store = store
        self._dest = dest
        self._collection = collection
        self._rows = rows
        self._key = key
        self._prefix = f"{_PARTS}{key[:16]}/"
        self._file_rows = shard_rows_of(config) or rows
        self._num_files = max(1, -(-rows // self._file_rows))

    def write(self) -> Collected | None:
        """Write this rank's files that are not there. Return the record of all files if all are there, else None."""
        rank, num_ranks = self._config.rank or 0, self._config.num_ranks or 1
        own = range(*(self._num_files * each // num_ranks for each in (rank, rank + 1)))
        there = self._there()
        lacking = [index for index in own if index not in there]
        for _, group in groupby(enumerate(lacking), key=lambda pair: pair[1] - pair[0]):
            self._write_files([index for _, index in group])
        left = self._num_files - len(self._there())
        record = None if left else self._finish()
        if record is None:
            record = self._dest.prepare(self._key)  # another rank may just have finished
        if record is None:
            self._warn_of_others()
            logger.info(
                "rank %d of %d: its %s are there; other ranks lack %d of %d",
                *(rank, num_ranks, units.many(len(own), "file"), left, self._num_files),
            )
            return None
        self._store.delete([item.key for item in self._store.list(_PARTS)])
        return record

    def _there(self) -> set[int]:
        return {int(Path(item.key).stem) for item in self._store.list(self._prefix)}

    def _warn_of_others(self) -> None:
        """Warn of records of ranks that write another collection, which this rank and they would wait for in vain."""
        keys = (item.key for item in self._store.list(_PARTS))
        if other := next((key for key in keys if not key.startswith(self._prefix)), ""):
            logger.warning(
                "%s/%s: is of ranks with other options, another run or another version; all ranks must have the same",
                *(self._store.url, other),
            )

    def _write_files(self, indices: Sequence[int]) -> None:
        """Write consecutive files, and record each."""
        first = indices[0] * self._file_rows
        stop = min(self._rows, (indices[-1] + 1) * self._file_rows)
        part = self._collection.write_part(range(first, stop))
        for index, (file, rows_error) in zip(indices, part, strict=True):
            name = self._dest.put_shared(file, index)
            record = FileRecord(
                file=CollectedFile(name=name, rows=file.rows, bytes=file.bytes, sha256=file.sha256),
                rows_error=rows_error,
            )
            self._store.create(self._record_key(index), codec.encode(record))

    def _record_key(self, index: int) -> str:
        return f"{self._prefix}{index:05d}.json"

    def _finish(self) -> Collected | None:
        """Create `_COLLECTED`. Returns None if another rank is removing the records, because it has finished."""
        try:
            records = list(in_parallel(self._read, range(self._num_files)))
        except ObjectNotFound:
            return None
        record = self._collection.record(
            [one.file for one in records],
            self._key,
            rows=self._rows,
            rows_error=sum(one.rows_error for one in records),
        )
        self._dest.finish_shared(record)
        return record

    def _read(self, index: int) -> FileRecord:
        key = self._record_key(index)
        return codec.decode(self._store.get(key).data, FileRecord, name=key)
