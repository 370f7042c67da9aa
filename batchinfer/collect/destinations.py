"""The places to which `collect` writes: a folder or one file in any store. The Hub is in hub_destination.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from batchinfer.collect.collect_config import suffix_of
from batchinfer.collect.table_files import TableFile
from batchinfer.core import codec
from batchinfer.core.errors import AlreadyExists, InputError
from batchinfer.core.records import Record
from batchinfer.storage import Store

RECORD_KEY = "_COLLECTED"
"""Key of the record of a collection, which is the last object that is written to a folder.

Many programs that read data sets skip names that begin with an underscore.
"""
OWN_NAME = re.compile(r"^(data/)?part-\d{5,}(\.parquet|\.jsonl|\.csv)$")


class CollectedFile(Record, frozen=True, kw_only=True):
    """One file of a collection."""

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
    """Number of rows of the run that were read, whichever were taken."""
    rows_error: int
    chunks: int
    missing: list[str]
    files: list[CollectedFile]
    broken_answers: int = 0
    """Number of finished answers among the rows taken that break the run's JSON schema."""


def raced(where: str) -> InputError:
    """Return the error for a place that somebody else writes to meanwhile."""
    return InputError(
        f"{where}: somebody else writes there at the same time",
        hint="let one command write to one place",
    )


def read_record(data: bytes, key: str) -> Collected | None:
    """Return the record of a collection; None if it is damaged or has another key."""
    try:
        record = codec.decode(data, Collected, name=RECORD_KEY)
    except InputError:
        return None
    return record if record.key == key else None


def check_free(url: str, names: Iterable[str], *, is_taken: bool) -> None:
    """Raise InputError if a place is taken, or has data files (of these names) that no `collect` wrote."""
    foreign = [name for name in sorted(names) if suffix_of(name) and not OWN_NAME.match(name)]
    if foreign or is_taken:
        what = f"data of something else ({foreign[0]})" if foreign else "other data"
        more = "" if foreign else ", or add --overwrite to replace what an earlier collect left"
        raise InputError(f"{url}: holds {what} already", hint=f"name another DEST{more}")


class StoreDestination:
    """A folder in a store, or one file there. Each file is whole or absent.

    In a folder, `_COLLECTED` is written last: then all files are there. What a killed `collect` left is replaced.

    Args:
        store: The folder.
        name: Name of the one file; empty for a folder of files.
        suffix: Ending of the files' names.
        overwrite: Whether what an earlier `collect` left may be replaced.
    """

    def __init__(self, store: Store, name: str, suffix: str, *, overwrite: bool) -> None:
        self._store = store
        self._name = name
        self._suffix = suffix
        self._overwrite = overwrite
        self._old: set[str] = set()

    def prepare(self, key: str) -> Collected | None:
        """Return the record of the collection with this key that is there already; None if there is none.

        Raises:
            InputError: Other data are there, which must not be replaced.
        """
        if self._name:
            return None
        there = {info.key for info in self._store.list("")}
        is_taken = RECORD_KEY in there
        if is_taken and (record := read_record(self._store.get(RECORD_KEY).data, key)):
            return record
        check_free(self._store.url, there, is_taken=is_taken and not self._overwrite)
        self._store.delete([RECORD_KEY])
        self._old = set(filter(OWN_NAME.match, there))
        return None

    def put(self, file: TableFile, index: int) -> str:
        """Store a file and return the name that it has at the place. The local file is gone afterwards.

        Raises:
            InputError: Another file is there, which must not be replaced.
        """
        name = self._name or f"part-{index:05d}{self._suffix}"
        found = {info.key for info in self._store.list(name)}  # all names that begin like this one
        if self._name and not self._overwrite and name in found:
            there = file.path.with_suffix(".there")
            self._store.download(name, there)
            with there.open("rb") as opened:
                # With the same bytes, a killed `collect` left it.
                is_other = codec.sha256_file(opened) != file.sha256
            check_free(f"{self._store.url}/{name}", (), is_taken=is_other)
        self._store.put_file(name, file.path)
        self._old.discard(name)
        file.path.unlink()
        return name

    def finish(self, record: Collected, card: Callable[[], str]) -> None:  # noqa: ARG002 - only the Hub takes a card
        """End the collection, after all files are stored."""
        if self._name:
            return
        self._store.delete(sorted(self._old))
        try:
            self._store.create(RECORD_KEY, codec.encode_pretty(record))
        except AlreadyExists as error:
            raise raced(self._store.url) from error
