"""The places to which `collect` writes: a folder or one file in any store, or a data set on the Hub.

huggingface_hub takes its time to load, so only the functions that use it import it.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from batchinfer.collect.collect_config import FORMATS, CollectConfig, suffix_of
from batchinfer.collect.table_files import TableFile
from batchinfer.core import codec
from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    InputError,
    ObjectNotFound,
)
from batchinfer.core.records import Record
from batchinfer.ledger.jobs import OpenStore, split_name
from batchinfer.storage.hub import ReadOnlyStore, hub_errors
from batchinfer.storage.retrying import RetryPolicy, retried

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECORD_KEY, HUB_RECORD = "_COLLECTED", ".collected.json"
"""Keys of the record of a collection, in a folder and on the Hub. In a folder it is the last object that is written.

Programs that read data sets skip names that begin with an underscore or a dot.
"""
STARTED_KEY = "_COLLECTING"
"""Key of the object that a folder has until its collection is complete. It holds the collection's key."""
CARD = "README.md"
"""File of a data set's repository that the Hub shows as its page."""
OWN_NAME = re.compile(r"^part-\d{5,}(\.parquet|\.jsonl|\.csv)$")
_ADDRESS = re.compile(r"^hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<branch>[^/@]+))?/?$")


class Collected(Record, frozen=True, kw_only=True):
    """Content of the record: which run was collected, and into which files.

    It holds no time, so that the same collection gives the same bytes.
    """

    key: str
    """Hash of what decides the files' bytes: the outputs, the options and batchinfer's version."""
    result: dict[str, Any]
    """What the command said of the collection."""
    files: dict[str, int]
    """Bytes of the files, by their names."""
    card_sha256: str = ""
    """Hash of the card, on the Hub."""


def _read_record(data: bytes) -> Collected | None:
    """Return the record of a collection; None if it is damaged."""
    with contextlib.suppress(InputError, msgspec.ValidationError):
        return codec.decode(data, Collected, name=RECORD_KEY)
    return None


def part_name(config: CollectConfig, index: int) -> str:
    """Return the name of one of the files of a table."""
    return f"part-{index:05d}{FORMATS[config.kind]}"


def _check_free(url: str, names: Iterable[str], *, is_taken: bool) -> None:
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
        config: What is collected, in which form.
        open_store: Opens the folder.
    """

    def __init__(self, config: CollectConfig, open_store: OpenStore) -> None:
        dest = config.dest
        folder, self._name = split_name(dest) if suffix_of(dest) else (dest, "")
        self._config, self._store = config, open_store(folder)
        self._old: set[str] = set()
        self._key, self._is_begun = "", False

    def prepare(self, key: str) -> Collected | None:
        """Return the record of the collection with this key that is there already; None if there is none, or not whole.

        No data are changed: what is there stays until the first `put`.

        Raises:
            InputError: Other data are there, which must not be replaced.
        """
        self._key = key
        if self._name:
            return None
        there = {info.key: info.bytes for info in self._store.list("")}
        is_taken = RECORD_KEY in there
        record = _read_record(self._store.get(RECORD_KEY).data) if is_taken else None
        self._old = set(filter(OWN_NAME.match, there))
        if record and record.key == key and record.files.items() <= there.items():
            self._store.delete([STARTED_KEY] if STARTED_KEY in there else [])
            return record
        is_taken |= bool(self._old) and STARTED_KEY not in there
        _check_free(self._store.url, there, is_taken=is_taken and not self._config.overwrite)
        return None

    def put(self, file: TableFile, index: int) -> str:
        """Store a file and return the name that it has at the place. The local file is gone afterwards.

        Raises:
            InputError: Another file is there, which must not be replaced. Or another command writes to the folder, or
                has completed it meanwhile.
        """
        name = self._name or part_name(self._config, index)
        if not self._name:
            self._begin()
        elif not self._config.overwrite and any(
            info.key == name for info in self._store.list(name)
        ):
            there = file.path.with_suffix(".there")
            self._store.download(name, there)
            # With the same bytes, a killed `collect` left it.
            is_other = not filecmp.cmp(there, file.path, shallow=False)
            _check_free(f"{self._store.url}/{name}", (), is_taken=is_other)
        self._store.put_file(name, file.path)
        self._old.discard(name)
        file.path.unlink()
        return name

    def _begin(self) -> None:
        """Let the folder say that this collection is under way, or see that it still says so.

        Raises:
            InputError: It does not: another command writes there. Or one has completed the folder since `prepare`.
        """
        started = None
        with contextlib.suppress(ObjectNotFound):
            started = self._store.get(STARTED_KEY)
        is_ours = started is not None and started.data == self._key.encode()
        if self._is_begun and is_ours:
            return
        if self._is_begun or self.prepare(self._key):
            hint = "let one command write to one place; this one again says whether the data there are whole"
            raise InputError(f"{self._store.url}: somebody else writes there, too", hint=hint)
        if started is None:
            self._store.create(STARTED_KEY, self._key.encode())
        elif not is_ours:  # a killed command left it
            self._store.replace(STARTED_KEY, self._key.encode(), etag=started.etag)
        self._store.delete([RECORD_KEY])
        self._is_begun = True

    def finish(self, record: Collected, card: Callable[[], str]) -> None:  # noqa: ARG002 - only the Hub takes a card
        """End the collection, after all files are stored."""
        if not self._name:
            self._begin()
            self._store.delete(sorted(self._old))
            with contextlib.suppress(AlreadyExists):  # the same command is as far as this one
                self._store.create(RECORD_KEY, codec.encode_pretty(record))
            self._store.delete([STARTED_KEY])


# --------------------------------------------------------------------------- the Hub


class HubDestination:
    """A data set on the Hub, which readers see before or after the collection, and never in between.

    Files are uploaded as they are built, which the Hub shows to nobody, and are removed from the disk then. One commit
    at the end brings them all, and removes the old ones. The Hub takes no file twice, so a `collect` that was killed
    sends only the rest next time. Endpoint and token come from the environment (HF_ENDPOINT, HF_TOKEN).

    Args:
        config: What is collected, in which form, to hf://datasets/org/name[@branch].

    Raises:
        ConfigError: the URL is not of this form.
    """

    def __init__(self, config: CollectConfig) -> None:
        url = config.dest
        match = _ADDRESS.match(url)
        if match is None:
            raise ConfigError(
                f"{url}: no place for a data set on the Hub, expected hf://datasets/org/name[@branch]",
                hint="a model's or a space's repository takes no data set, nor does a folder in one",
            )
        self._config, self.url, self.commit = config, url, ""
        self._repo, self._branch = match["repo"], match["branch"] or "main"
        self._where = {"repo_id": self._repo, "repo_type": "dataset"}
        self._old: set[str] = set()
        self._keeps_card = False
        self._uploaded: list[Any] = []

    def make(self) -> None:
        """Make repository and branch if they are missing, and announce an upload: the Hub refuses who may not write.

        Raises:
            AccessDenied: the token is missing, or may not write there.
        """
        from huggingface_hub import CommitOperationAdd

        def steps(api: Any) -> None:
            api.create_repo(**self._where, private=not self._config.is_public, exist_ok=True)
            if self._branch != "main":
                api.create_branch(**self._where, branch=self._branch, exist_ok=True)
            probe = CommitOperationAdd(CARD, b"#")
            api.preupload_lfs_files(**self._where, additions=[probe], revision=self._branch)

        try:
            self._ask(steps)
        except (AccessDenied, InputError, ObjectNotFound) as error:
            owner = self._repo.partition("/")[0]
            raise AccessDenied(
                f"{self.url}: the Hub does not let this token write there ({error.message})",
                hint=f"is {owner!r} your name or an organisation of yours? HF_TOKEN, or `hf auth login`, "
                "must give a token with the right to write there",
            ) from error

    def prepare(self, key: str) -> Collected | None:
        """See StoreDestination. Repository and branch are made if they are missing.

        Raises:
            AccessDenied: the token is missing, or may not write there.
        """
        self.make()
        self.commit, files = self._ask(self._look)
        record = _read_record(self._read(HUB_RECORD)) if HUB_RECORD in files else None
        if record and record.key == key and record.files.keys() <= files:
            return record
        self._old = {name for name in files if suffix_of(name) and not name.startswith(".")}
        names = (name.removeprefix("data/") for name in self._old)
        _check_free(self.url, names, is_taken=bool(self._old) and not self._config.overwrite)
        own = record.card_sha256 if record else ""
        self._keeps_card = CARD in files and codec.sha256(self._read(CARD)) != own
        return None

    def put(self, file: TableFile, index: int) -> str:
        """Upload a file and return its name. A large file is gone from the disk afterwards."""
        from huggingface_hub import CommitOperationAdd

        addition = CommitOperationAdd(f"data/{part_name(self._config, index)}", file.path)
        logger.info("%s: uploading %s", self.url, addition.path_in_repo)
        where: dict[str, Any] = {**self._where, "revision": self._branch}
        self._ask(lambda api: api.preupload_lfs_files(**where, additions=[addition]))
        self._uploaded.append(addition)
        if addition._upload_mode == "lfs":  # noqa: SLF001 - huggingface_hub tells it nowhere else
            file.path.unlink()  # the others travel with the commit
        return str(addition.path_in_repo)

    def finish(self, record: Collected, card: Callable[[], str]) -> None:
        """Publish the files that were uploaded in one commit, with a card unless somebody has written one.

        Raises:
            StorageError: Somebody has committed since `prepare`. Or only the reply was lost: then the same command
                finds the collection there.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        text = card().encode()
        whole = msgspec.structs.replace(record, card_sha256=codec.sha256(text))
        added = {HUB_RECORD: codec.encode_pretty(whole), CARD: text}
        if self._keeps_card:
            del added[CARD]
            logger.info("%s: its card stays as it is", self.url)
        operations = [
            *map(CommitOperationDelete, sorted(self._old - record.files.keys())),
            *self._uploaded,
            *(CommitOperationAdd(name, data) for name, data in added.items()),
        ]
        info = self._ask(
            lambda api: api.create_commit(
                **self._where,
                operations=operations,
                commit_message=f"{record.result['rows']:,} rows of the run {record.result['fingerprint']}",
                parent_commit=self.commit,
                revision=self._branch,
            )
        )
        self.commit = str(info.oid)

    def _look(self, api: Any) -> tuple[str, set[str]]:
        commit = str(api.dataset_info(self._repo, revision=self._branch).sha)
        return commit, set(api.list_repo_files(**self._where, revision=commit))

    def _read(self, name: str) -> bytes:
        url = f"hf://datasets/{self._repo}@{self.commit}"
        return ReadOnlyStore(url, retries=RetryPolicy()).get(name).data

    def _ask(self, action: Callable[[Any], T]) -> T:
        """Run `action` on the Hub's client until it succeeds, fails for good, or has failed too often."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()  # a log would get a line for every step of every file

        def attempt() -> T:
            with hub_errors(self.url):
                return action(HfApi())

        return retried(RetryPolicy(), attempt)
