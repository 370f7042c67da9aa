"""A data set on the Hub as the place to which `collect` writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from batchinfer.collect.destinations import (
    OWN_NAME,
    Collected,
    file_name,
    raced,
    suffix_of,
)
from batchinfer.collect.files import TableFile
from batchinfer.core import codec
from batchinfer.core.errors import BatchinferError, InputError, ObjectNotFound
from batchinfer.storage.hub_data_set import CARD, BranchState, HubFile, HubRepository

logger = logging.getLogger(__name__)

HUB_RECORD = ".collected.json"
"""Name of the record of a collection on the Hub. Programs that read data sets skip names that begin with a dot."""
COMMIT_FILES = 50
"""Most files of one upload to the Hub. A commit with many more may take longer than the Hub waits for it."""
COMMIT_BYTES = 1 << 30
"""Bytes of waiting files at which an upload to the Hub begins. They take less than that, plus one file's size."""
SMALL_BYTES = 256 << 20
"""Most bytes of a collection's small text files, which the Hub stores in git. The last commit holds them in memory."""


class HubDestination:
    """A data set on the Hub, which readers see before or after the collection, and never in between.

    Files are uploaded as they are built, and are removed from the disk then: each time `COMMIT_FILES` or `COMMIT_BYTES`
    have gathered, one commit puts them on a branch of their own, which readers of the data set do not look at. A last
    commit to the branch that they read brings all files at once, without another upload, and removes the old ones. A
    collection that fits into one commit needs no other branch.

    A killed `collect` leaves that branch. The same command finds the files there and does not upload them again, except
    small text files.

    Args:
        dataset: The repository.
        folder: Local folder for files that wait for the next commit. It must not exist.
        suffix: Ending of the files' names.
        overwrite: Whether what an earlier `collect` left may be replaced.
    """

    def __init__(
        self, dataset: HubRepository, folder: Path, suffix: str, *, overwrite: bool
    ) -> None:
        self._dataset = dataset
        self._folder = folder
        self._suffix = suffix
        self._overwrite = overwrite
        self._before = BranchState("", {})
        self._side_branch = ""
        self._has_side_branch = False
        self._uploaded: dict[str, HubFile] = {}
        """Data files on the side branch."""
        self._waiting: dict[str, Path] = {}
        self._waiting_bytes = 0
        self.commit = ""

    def prepare(self, key: str) -> Collected | None:
        """See Destination. Repository and branch are made if they are missing.

        A repository that holds data files is refused. With `overwrite`, it may hold files that an earlier `collect`
        wrote. They are replaced.

        Raises:
            AccessDenied: The token is missing, or may not write there.
        """
        self._before = self._dataset.prepare()
        self._side_branch = f"batchinfer-{self._dataset.branch}-{key[:16]}"
        found = self._dataset.look(self._side_branch)
        record = self._read_record()
        if record is not None and record.key == key:
            self.commit = self._before.commit
            if found is not None:
                self._delete_side_branch()
            return record
        data = data_files(self._before)
        foreign = [name for name in data if not _is_ours(name)]
        if foreign or (data and not self._overwrite):
            raise InputError(
                f"{self._dataset.url}: holds data already ({(foreign or list(data))[0]})",
                hint="name another data set"
                + ("" if foreign else ", or add --overwrite to replace what was collected before"),
            )
        if found is not None:
            self._has_side_branch = True
            self._uploaded = data_files(found)
            logger.info("%s: goes on with the files that are uploaded", self._dataset.url)
        (self._folder / "data").mkdir(parents=True)
        return None

    def _read_record(self) -> Collected | None:
        """Return the record of the collection that readers see; None if they see none, or an incomplete one."""
        if HUB_RECORD not in self._before.files:
            return None
        try:
            data = self._dataset.read(HUB_RECORD, self._before.commit)
            record = codec.decode(data, Collected, name=HUB_RECORD)
        except (ObjectNotFound, InputError):
            return None
        return record if _has_all(self._before, record) else None

    def put(self, file: TableFile, index: int) -> str:
        """See Destination."""
        name = f"data/{file_name(index, self._suffix)}"
        there = self._uploaded.get(name)
        if there is not None and there.is_large and there.digest == file.sha256:
            file.path.unlink()
            return name
        self._waiting[name] = file.path.rename(self._folder / name)
        self._waiting_bytes += file.bytes
        if len(self._waiting) >= COMMIT_FILES or self._waiting_bytes >= COMMIT_BYTES:
            self._upload()
        return name

    def _upload(self) -> None:
        """Put the waiting files on the side branch in one commit, and remove them from the disk."""
        if not self._has_side_branch:
            self._dataset.make_branch(self._side_branch, self._before.commit)
            self._has_side_branch = True
        names = list(self._waiting)
        logger.info("%s: uploading %s to %s", self._dataset.url, names[0], names[-1])
        message = f"{names[0]} to {names[-1]}, not published yet"
        try:
            self._dataset.add(self._side_branch, self._waiting, message=message)
        except InputError as error:
            if self._dataset.look(self._side_branch) is None:
                raise raced(self._dataset.url) from error
            raise
        found = self._dataset.look(self._side_branch)
        self._uploaded = data_files(found) if found is not None else {}
        small = sum(info.size for info in self._uploaded.values() if not info.is_large)
        if small > SMALL_BYTES:
            raise InputError(
                f"{self._dataset.url}: files of a few MB of text take more than {SMALL_BYTES >> 20} MiB together",
                hint="collect with --format parquet, or with more rows a file (--shard-rows)",
            )
        for path in self._waiting.values():
            path.unlink()
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self, record: Collected, card: Callable[[], str]) -> None:
        """See Destination."""
        if self._has_side_branch:
            if self._waiting:
                self._upload()
            if not _has_all(BranchState("", self._uploaded), record):
                raise raced(self._dataset.url)
        text = card().encode()
        logger.info("%s: publishing %d files", self._dataset.url, len(record.files))
        self.commit = self._dataset.retried(lambda: self._try_publish(record, text))
        if self._has_side_branch:
            self._delete_side_branch()

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
        added: dict[str, Path | bytes] = {**self._waiting, HUB_RECORD: encoded}
        if CARD not in seen.files or self._overwrite:
            added[CARD] = card
        else:
            logger.info("%s: its card stays as it is", self._dataset.url)
        names = [file.name for file in record.files]
        return self._dataset.try_publish(
            seen,
            add=added,
            copy=names if self._has_side_branch else (),
            source=self._side_branch,
            delete=sorted(data.keys() - set(names)),
            message=f"{record.rows:,} rows of the run {record.fingerprint}",
        )

    def _delete_side_branch(self) -> None:
        try:
            self._dataset.delete_branch(self._side_branch)
        except BatchinferError as error:
            logger.warning(
                "%s: is published; its branch %s can be deleted (%s)",
                self._dataset.url,
                self._side_branch,
                error.message,
            )


def _is_ours(name: str) -> bool:
    return name.startswith("data/") and OWN_NAME.match(name.removeprefix("data/")) is not None


def _has_all(state: BranchState, record: Collected) -> bool:
    """Whether a branch has the files of a collection, as far as sizes and the checksums of large files tell."""
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
