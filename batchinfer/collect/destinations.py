"""The places to which `collect` writes: a folder or one file in any store. The Hub is in hub_destination.py."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from batchinfer.collect.files import FORMATS, TableFile
from batchinfer.core import codec
from batchinfer.core.errors import AlreadyExists, InputError, ObjectNotFound
from batchinfer.core.records import Record
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

RECORD_KEY = "_COLLECTED"
"""Key of the record of a collection, which is the last object that is written to a folder.

Many programs that read data sets skip names that begin with an underscore.
"""
OWN_NAME = re.compile(r"^part-\d{5,}(\.parquet|\.jsonl|\.csv)$")


class CollectedFile(Record, frozen=True, kw_only=True):
    """One file of a collected table."""

    name: str
    rows: int
    bytes: int
    sha256: str


class Collected(Record, frozen=True, kw_only=True):
    """Content of `_COLLECTED`: which run was collected, and into which files.

    It holds no time, so that the same collection gives the same bytes.
    """

    key: str
    """Hash of what decides the files' bytes: the outputs, the options and batchinfer's version."""
    fingerprint: str
    format: str
    rows: int
    rows_error: int
    chunks: int
    missing: list[str]
    files: list[CollectedFile]
    kept_as_text: dict[str, int] = {}
    """Number of the source's values that no type can hold as they are, by column of the table."""


class Destination(Protocol):
    """A place that stores the files of a collection one after the other, and then a record of them."""

    def prepare(self, key: str) -> Collected | None:
        """Raise InputError unless the place may be written to.

        If the place holds a collection with the same key, the record of that collection is returned, else None.
        """
        ...

    def put(self, file: TableFile, index: int) -> str:
        """Store a file and return the name that it has at the place. The local file may be gone afterwards."""
        ...

    def finish(self, record: Collected, card: Callable[[], str]) -> None:
        """End the collection, after all files are stored. `card` makes the data set card; only the Hub needs it."""
        ...


def put_all(dest: Destination, files: Iterable[TableFile]) -> list[CollectedFile]:
    """Store files, each as soon as it has been written, and return their names, sizes and checksums."""
    return [
        CollectedFile(
            name=dest.put(file, index), rows=file.rows, bytes=file.bytes, sha256=file.sha256
        )
        for index, file in enumerate(files)
    ]


def file_name(index: int, suffix: str) -> str:
    """Name of a file in a collection of several files.

    >>> file_name(3, ".parquet")
    'part-00003.parquet'
    """
    return f"part-{index:05d}{suffix}"


def suffix_of(dest: str) -> str:
    """The file ending of a destination that is one file; empty if the destination is a folder.

    >>> suffix_of("out/answers.csv"), suffix_of("s3://bucket/answers")
    ('.csv', '')
    """
    return next((suffix for suffix in FORMATS.values() if dest.lower().endswith(suffix)), "")


class FolderDestination:
    """A folder in a store. Each file is whole or absent. `_COLLECTED` is written last: then all files are there."""

    def __init__(self, store: Store, suffix: str, *, overwrite: bool) -> None:
        self._store = store
        self._suffix = suffix
        self._overwrite = overwrite
        self._leftovers: set[str] = set()

    def prepare(self, key: str) -> Collected | None:
        """See Destination. A folder with data files of something else is refused.

        Files that an unfinished collection has left are replaced.
        """
        there = [info.key for info in self._store.list("")]
        if RECORD_KEY in there:
            record = self._read_record()
            if record is not None and record.key == key:
                return record
            if not self._overwrite:
                raise InputError(
                    f"{self._store.url}: holds another collection",
                    hint="name another DEST, or add --overwrite to replace it",
                )
            self._store.delete([RECORD_KEY])
        foreign = [name for name in there if suffix_of(name) and not OWN_NAME.match(name)]
        if foreign:
            raise InputError(
                f"{self._store.url}: holds data of something else ({foreign[0]}), expected an empty folder",
                hint="name another DEST",
            )
        self._leftovers = {name for name in there if OWN_NAME.match(name)}
        return None

    def _read_record(self) -> Collected | None:
        try:
            data = self._store.get(RECORD_KEY).data
            return codec.decode(data, Collected, name=RECORD_KEY)
        except (ObjectNotFound, InputError):
            return None

    def put_shared(self, file: TableFile, index: int) -> str:
        """Store a file that other processes may store, too. Nothing is replaced.

        Raises:
            InputError: A file of this name is there with other bytes.
        """
        name = file_name(index, self._suffix)
        try:
            self._store.create_file(name, file.path)
        except AlreadyExists as error:
            raise InputError(
                f"{self._store.url}/{name}: is there with other bytes, from another collection",
                hint="name another DEST, or remove what is there and start all ranks again",
            ) from error
        file.path.unlink()
        return name

    def finish_shared(self, record: Collected) -> None:
        """End a collection of several processes. Files of the folder that are not in the record are removed."""
        own = {file.name for file in record.files}
        stale = [item.key for item in self._store.list("") if OWN_NAME.match(item.key)]
        self._store.delete([name for name in stale if name not in own])
        try:
            self._store.create(RECORD_KEY, codec.encode_pretty(record))
        except AlreadyExists as error:
            raise raced(self._store.url) from error

    def put(self, file: TableFile, index: int) -> str:
        """See Destination."""
        name = file_name(index, self._suffix)
        try:
            self._store.create_file(name, file.path)
        except AlreadyExists:
            if name not in self._leftovers:
                raise raced(self._store.url) from None
            self._store.delete([name])
            self._store.create_file(name, file.path)
        self._leftovers.discard(name)
        file.path.unlink()
        return name

    def finish(self, record: Collected, card: Callable[[], str]) -> None:  # noqa: ARG002 - only the Hub takes a card
        """See Destination."""
        self._store.delete(sorted(self._leftovers))
        try:
            self._store.create(RECORD_KEY, codec.encode_pretty(record))
        except AlreadyExists as error:
            raise raced(self._store.url) from error


class FileDestination:
    """One file in a store. The user gives its name."""

    def __init__(self, store: Store, name: str, *, overwrite: bool) -> None:
        self._store = store
        self._name = name
        self._overwrite = overwrite

    def prepare(self, key: str) -> Collected | None:  # noqa: ARG002 - a single file has no record whose key could be compared
        """See Destination."""
        try:
            self._store.stat(self._name)
        except ObjectNotFound:
            return None
        if not self._overwrite:
            raise InputError(
                f"{self._store.url}/{self._name}: is there already",
                hint="name another DEST, or add --overwrite to replace it",
            )
        return None

    def put(self, file: TableFile, index: int) -> str:
        """See Destination."""
        assert index == 0
        if self._overwrite:
            self._store.delete([self._name])
        try:
            self._store.create_file(self._name, file.path)
        except AlreadyExists as error:
            raise raced(f"{self._store.url}/{self._name}") from error
        file.path.unlink()
        return self._name

    def finish(self, record: Collected, card: Callable[[], str]) -> None:
        """See Destination."""


def raced(where: str) -> InputError:
    """Return the error for a place that somebody else writes to meanwhile."""
    return InputError(
        f"{where}: somebody else writes there at the same time",
        hint="let one command write to one place",
    )
