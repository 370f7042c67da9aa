"""A data set on the Hub as the place to which `collect` writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from batchinfer.collect.destinations import OWN_NAME, Collected, raced, read_record
from batchinfer.collect.files import TableFile
from batchinfer.collect.options import suffix_of
from batchinfer.core import codec
from batchinfer.core.errors import InputError
from batchinfer.storage.hub_data_set import CARD, BranchState, HubFile, HubRepository, is_large

logger = logging.getLogger(__name__)

HUB_RECORD = ".collected.json"
"""Name of the record of a collection on the Hub. Programs that read data sets skip names that begin with a dot."""


class HubDestination:
    """A data set on the Hub, which readers see before or after the collection, and never in between.

    Files are uploaded as they are built, and are removed from the disk then. One commit at the end brings them all, and
    removes the old ones. The Hub takes no file twice, so a `collect` that was killed sends only the rest next time.

    Args:
        dataset: The repository.
        suffix: Ending of the files' names.
        overwrite: Whether what an earlier `collect` left may be replaced.
    """

    def __init__(self, dataset: HubRepository, suffix: str, *, overwrite: bool) -> None:
        self._dataset = dataset
        self._suffix = suffix
        self._overwrite = overwrite
        self._before = BranchState("", {})
        self._uploaded: list[Any] = []
        self.commit = ""

    def prepare(self, key: str) -> Collected | None:
        """See StoreDestination. Repository and branch are made if they are missing.

        A repository that holds data files is refused. With `overwrite`, it may hold files that an earlier `collect`
        wrote. They are replaced.

        Raises:
            AccessDenied: The token is missing, or may not write there.
        """
        self._before = self._dataset.prepare()
        if HUB_RECORD in self._before.files:
            record = read_record(self._dataset.read(HUB_RECORD, self._before.commit), key)
            if record is not None and _has_all(self._before, record):
                self.commit = self._before.commit
                return record
        data = sorted(data_files(self._before))
        foreign = [name for name in data if not OWN_NAME.match(name)]
        if foreign or (data and not self._overwrite):
            more = "" if foreign else ", or add --overwrite to replace what was collected before"
            raise InputError(
                f"{self._dataset.url}: holds data already ({(foreign or data)[0]})",
                hint=f"name another data set{more}",
            )
        return None

    def put(self, file: TableFile, index: int) -> str:
        """Upload a file and return its name. A large file is gone from the disk afterwards."""
        name = f"data/part-{index:05d}{self._suffix}"
        logger.info("%s: uploading %s", self._dataset.url, name)
        self._uploaded.append(self._dataset.upload(name, file.path))
        if is_large(self._uploaded[-1]):
            file.path.unlink()
        return name

    def finish(self, record: Collected, card: Callable[[], str]) -> None:
        """Publish the files that were uploaded, with a card if there is none."""
        text = card().encode()
        self.commit = self._dataset.retried(lambda: self._try_publish(record, text))

    def _try_publish(self, record: Collected, card: bytes) -> str:
        """Make the commit that brings the collection to the readers, and return its hash."""
        seen = self._dataset.look()
        encoded = codec.encode_pretty(record)
        if seen is None:
            raise raced(self._dataset.url)
        there = seen.files.get(HUB_RECORD)
        if there is not None and there.holds(encoded) and _has_all(seen, record):
            return seen.commit  # an attempt before has made the commit, and only its reply was lost
        data = data_files(seen)
        if data != data_files(self._before):
            raise raced(self._dataset.url)
        added = {HUB_RECORD: encoded}
        if CARD not in seen.files or self._overwrite:
            added[CARD] = card
        else:
            logger.info("%s: its card stays as it is", self._dataset.url)
        return self._dataset.try_publish(
            seen,
            add=[*self._uploaded, *(self._dataset.upload(*item) for item in added.items())],
            delete=sorted(data.keys() - {file.name for file in record.files}),
            message=f"{record.rows:,} rows of the run {record.fingerprint}",
        )


def _has_all(state: BranchState, record: Collected) -> bool:
    """Whether the files of a collection are there, as far as sizes and the checksums of large files tell."""
    found = [state.files.get(file.name) for file in record.files]
    return all(
        there is not None
        and there.size == file.bytes
        and (not there.is_large or there.digest == file.sha256)
        for there, file in zip(found, record.files, strict=True)
    )


def data_files(state: BranchState) -> dict[str, HubFile]:
    """Return the files of a data set's repository that hold its rows, by their paths."""
    return {
        name: file
        for name, file in state.files.items()
        if suffix_of(name) and not name.startswith(".")
    }
