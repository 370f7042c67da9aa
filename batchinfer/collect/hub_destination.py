"""A data set on the Hub as the place to which `collect` writes.

huggingface_hub takes its time to load, so only the functions that use it import it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from batchinfer.collect.collect_config import suffix_of
from batchinfer.collect.destinations import Collected, check_free, raced, read_record
from batchinfer.collect.table_files import TableFile
from batchinfer.core import codec
from batchinfer.core.errors import AccessDenied, ConfigError, InputError, ObjectNotFound
from batchinfer.storage.hub import ReadOnlyStore, hub_errors
from batchinfer.storage.retrying import RetryPolicy, retried

logger = logging.getLogger(__name__)

T = TypeVar("T")

HUB_RECORD = ".collected.json"
"""Name of the record of a collection on the Hub. Programs that read data sets skip names that begin with a dot."""
CARD = "README.md"
"""File of a data set's repository that the Hub shows as its page."""
_ADDRESS = re.compile(r"^hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<branch>[^/@]+))?/?$")


Files = dict[str, Any]
"""The Hub's descriptions of a branch's files, by their paths."""


def _data_of(files: Files) -> dict[str, str]:
    """Return the hashes of the files that hold the data set's rows, by their paths."""
    found = {name for name in files if suffix_of(name) and not name.startswith(".")}
    return {name: files[name].blob_id for name in found}


class HubDestination:
    """A data set on the Hub, which readers see before or after the collection, and never in between.

    Files are uploaded as they are built, which the Hub shows to nobody, and are removed from the disk then. One commit
    at the end brings them all, and removes the old ones. The Hub takes no file twice, so a `collect` that was killed
    sends only the rest next time. Endpoint and token come from the environment (HF_ENDPOINT, HF_TOKEN).

    Args:
        url: hf://datasets/org/name[@branch].
        suffix: Ending of the files' names.
        overwrite: Whether what an earlier `collect` left may be replaced.
        is_private: Whether only its owners see a repository that is made.

    Raises:
        ConfigError: the URL is not of this form.
    """

    def __init__(
        self, url: str, suffix: str = "", *, overwrite: bool = False, is_private: bool = True
    ) -> None:
        match = _ADDRESS.match(url)
        if match is None:
            raise ConfigError(
                f"{url}: no place for a data set on the Hub, expected hf://datasets/org/name[@branch]",
                hint="a model's or a space's repository takes no data set, nor does a folder in one",
            )
        self.url = url
        self.commit = ""
        self._repo, self._branch = match["repo"], match["branch"] or "main"
        self._suffix = suffix
        self._overwrite = overwrite
        self._is_private = is_private
        self._retries = RetryPolicy()
        self._before: dict[str, str] = {}
        self._uploaded: list[Any] = []

    def make(self) -> None:
        """Make repository and branch if they are missing, and announce an upload: the Hub refuses who may not write.

        Raises:
            AccessDenied: the token is missing, or may not write there.
        """
        from huggingface_hub import CommitOperationAdd

        def steps(api: Any) -> None:
            api.create_repo(
                self._repo, private=self._is_private, exist_ok=True, repo_type="dataset"
            )
            if self._branch != "main":
                api.create_branch(
                    self._repo, branch=self._branch, exist_ok=True, repo_type="dataset"
                )
            self._preupload(api, CommitOperationAdd(CARD, b"#"))

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

        A repository that holds data files is refused. With `overwrite`, it may hold files that an earlier `collect`
        wrote. They are replaced.

        Raises:
            AccessDenied: the token is missing, or may not write there.
        """
        self.make()
        self.commit, files = self._ask(self._look)
        if record := self._collected(self.commit, files, key):
            return record
        self._before = _data_of(files)
        check_free(self.url, self._before, is_taken=bool(self._before) and not self._overwrite)
        return None

    def put(self, file: TableFile, index: int) -> str:
        """Upload a file and return its name. A large file is gone from the disk afterwards."""
        from huggingface_hub import CommitOperationAdd

        addition = CommitOperationAdd(f"data/part-{index:05d}{self._suffix}", file.path)
        logger.info("%s: uploading %s", self.url, addition.path_in_repo)
        self._ask(lambda api: self._preupload(api, addition))
        self._uploaded.append(addition)
        if addition._upload_mode == "lfs":  # noqa: SLF001 - huggingface_hub tells it nowhere else
            file.path.unlink()  # the others travel with the commit
        return str(addition.path_in_repo)

    def finish(self, record: Collected, card: Callable[[], str]) -> None:
        """Publish the files that were uploaded in one commit, with a card if there is none."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        added = {HUB_RECORD: codec.encode_pretty(record), CARD: card().encode()}

        def publish(api: Any) -> str:
            commit, files = self._look(api)
            if self._collected(commit, files, record.key):
                return commit  # an attempt before has made the commit, and only its reply was lost
            if _data_of(files) != self._before:
                raise raced(self.url)
            if CARD in files and not self._overwrite and added.pop(CARD, b""):
                logger.info("%s: its card stays as it is", self.url)
            gone = sorted(self._before.keys() - {file.name for file in record.files})
            info = api.create_commit(
                self._repo,
                [
                    *map(CommitOperationDelete, gone),
                    *self._uploaded,
                    *(CommitOperationAdd(name, data) for name, data in added.items()),
                ],
                commit_message=f"{record.rows:,} rows of the run {record.fingerprint}",
                parent_commit=commit,
                revision=self._branch,
                repo_type="dataset",
            )
            return str(info.oid)

        self.commit = self._ask(publish)

    def _look(self, api: Any) -> tuple[str, Files]:
        commit = str(api.dataset_info(self._repo, revision=self._branch).sha)
        found = api.list_repo_tree(self._repo, revision=commit, recursive=True, repo_type="dataset")
        return commit, {entry.path: entry for entry in found if hasattr(entry, "blob_id")}

    def _collected(self, commit: str, files: Files, key: str) -> Collected | None:
        """Return the record of the collection with this key, if a commit brought it."""
        if HUB_RECORD not in files:
            return None
        store = ReadOnlyStore(f"hf://datasets/{self._repo}@{commit}", retries=self._retries)
        return read_record(store.get(HUB_RECORD).data, key)

    def _preupload(self, api: Any, addition: Any) -> None:
        api.preupload_lfs_files(self._repo, [addition], revision=self._branch, repo_type="dataset")

    def _ask(self, action: Callable[[Any], T]) -> T:
        """Run `action` on the Hub's client until it succeeds, fails for good, or has failed too often."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()  # a log would get a line for every step of every file

        def attempt() -> T:
            with hub_errors(self.url):
                return action(HfApi())

        return retried(self._retries, attempt)
