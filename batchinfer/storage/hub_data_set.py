"""The repository of a data set on the Hub, to which `collect` publishes. Reading the Hub is in hub.py.

huggingface_hub takes its time to load, so only the functions that use it import it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    ConfigError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.storage.hub import ReadOnlyStore, hub_errors
from batchinfer.storage.retrying import RetryPolicy, retried

T = TypeVar("T")

CARD = "README.md"
"""File of a data set's repository that the Hub shows as its page."""

_ADDRESS = re.compile(r"^hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<branch>[^/@]+))?/?$")


class Address(NamedTuple):
    """Repository and branch of a data set; an empty branch means the main one."""

    repo: str
    branch: str


def parse_address(url: str) -> Address:
    """Read hf://datasets/org/name[@branch].

    Raises:
        ConfigError: The URL is not of this form.

    >>> parse_address("hf://datasets/org/name")
    Address(repo='org/name', branch='')
    """
    match = _ADDRESS.match(url)
    if match is None:
        raise ConfigError(
            f"{url}: no place for a data set on the Hub, expected hf://datasets/org/name[@branch]",
            hint="a model's or a space's repository takes no data set, nor does a folder in one",
        )
    return Address(match["repo"], match["branch"] or "")


class HubFile(NamedTuple):
    """A file of a repository."""

    size: int
    digest: str
    """SHA-256 of a large file's bytes. For a small text file, git's hash of it."""
    is_large: bool
    """Whether the Hub stores the file apart from git, as it does with every parquet file."""

    def holds(self, data: bytes) -> bool:
        """Whether the file has these bytes."""
        if self.is_large:
            return self.digest == hashlib.sha256(data).hexdigest()
        header = b"blob %d\0" % len(data)
        return self.digest == hashlib.sha1(header + data, usedforsecurity=False).hexdigest()


class BranchState(NamedTuple):
    """A branch of a repository at one commit: its files by their paths."""

    commit: str
    files: dict[str, HubFile]


class HubRepository:
    """The repository of a data set on the Hub. Endpoint and token come from the environment (HF_ENDPOINT, HF_TOKEN).

    Every method except `try_publish` asks again after a failure that may pass.

    Args:
        address: The repository, and the branch that readers will read.
        is_private: Whether only its owners see a repository that `prepare` makes.
        retries: How requests are repeated.
    """

    def __init__(
        self, address: Address, *, is_private: bool, retries: RetryPolicy | None = None
    ) -> None:
        self.branch = address.branch or "main"
        self._repo = address.repo
        self._is_private = is_private
        self._retries = retries or RetryPolicy()
        self.url = f"hf://datasets/{address.repo}" + (
            f"@{address.branch}" if address.branch else ""
        )

    def look(self, branch: str = "") -> BranchState | None:
        """Return the present state of a branch, by default the one that readers read. Read-only.

        Returns:
            None if there is no such repository or branch, or the token may not see it.

        Raises:
            AccessDenied: The token is missing or refused.
        """
        return retried(self._retries, lambda: self._look(branch or self.branch))

    def _look(self, branch: str) -> BranchState | None:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with self._asking() as api:
            try:
                info = api.dataset_info(self._repo, revision=branch)
                found = api.list_repo_tree(
                    self._repo, repo_type="dataset", revision=info.sha, recursive=True
                )
                return BranchState(str(info.sha), dict(_described(found)))
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None

    def read(self, path: str, commit: str) -> bytes:
        """Return the content of a file at a commit.

        Raises:
            ObjectNotFound: There is no such file.
        """
        url = f"hf://datasets/{self._repo}@{commit}"
        return ReadOnlyStore(url, retries=self._retries).get(path).data

    def prepare(self) -> BranchState:
        """Make repository and branch if they are missing, and return the branch's state. Otherwise changes nothing.

        Raises:
            AccessDenied: The token is missing, or may not write there.
            InputError: The name is invalid.
        """
        found = self.look()
        if found is None:
            retried(self._retries, self._make)
            found = self.look()
        if found is None:
            raise StorageError(
                f"{self.url}: cannot be read although it was made", hint="try again in a minute"
            )
        retried(self._retries, self._check_may_write)
        return found

    def _make(self) -> None:
        try:
            with self._asking() as api:
                api.create_repo(
                    self._repo, repo_type="dataset", private=self._is_private, exist_ok=True
                )
                if self.branch != "main":
                    api.create_branch(
                        self._repo, repo_type="dataset", branch=self.branch, exist_ok=True
                    )
        except (AccessDenied, InputError, ObjectNotFound) as error:
            raise self._no_rights(error, "make a data set there") from error

    def _check_may_write(self) -> None:
        """Announce an upload, which the Hub refuses if the token may not write. Nothing is uploaded.

        Raises:
            AccessDenied: The token may not write there.
        """
        from huggingface_hub import CommitOperationAdd

        try:
            with self._asking() as api:
                api.preupload_lfs_files(
                    self._repo,
                    repo_type="dataset",
                    revision=self.branch,
                    additions=[CommitOperationAdd(CARD, b"#")],
                )
        except (AccessDenied, InputError) as error:
            raise self._no_rights(error, "write to this data set") from error

    def _no_rights(self, error: BatchinferError, what: str) -> AccessDenied:
        owner = self._repo.partition("/")[0]
        reason = error.message.removeprefix(f"{self.url}: ")
        if isinstance(error, ObjectNotFound):
            reason = f"it knows no {owner!r}"
        return AccessDenied(
            f"{self.url}: the Hub does not let this token {what} ({reason})",
            hint=f"is {owner!r} your name or an organisation of yours? HF_TOKEN, or `hf auth login`, "
            "must give a token with the right to write there",
        )

    def upload(self, name: str, content: Path | bytes) -> Any:
        """Send a file to the Hub, which shows it to nobody before a commit does. Bytes that it has are not sent again.

        Returns:
            The addition for `try_publish`. A large file can be removed then; see `is_large`.
        """

        def attempt() -> Any:
            from huggingface_hub import CommitOperationAdd

            addition = CommitOperationAdd(name, content)
            with self._asking() as api:
                api.preupload_lfs_files(
                    self._repo, [addition], repo_type="dataset", revision=self.branch
                )
            return addition

        return retried(self._retries, attempt)

    def retried(self, action: Callable[[], T]) -> T:
        """Run `action` until it succeeds, fails for good, or has failed too often."""
        return retried(self._retries, action)

    def try_publish(
        self, seen: BranchState, *, add: Iterable[Any], delete: Iterable[str] = (), message: str
    ) -> str:
        """Change the branch that readers read, in one commit, and return the commit's hash. Not tried again.

        Args:
            seen: State of the branch that the change is made for.
            add: What `upload` has returned.
            delete: Paths of files to remove.
            message: Message of the commit.

        Raises:
            TransientError: The Hub failed, or somebody else has committed since `seen`. The commit may have been made
                all the same, and only its reply was lost.
        """
        from huggingface_hub import CommitOperationDelete

        operations: list[Any] = [CommitOperationDelete(path) for path in delete]
        with self._asking() as api:
            info = api.create_commit(
                self._repo,
                [*operations, *add],
                repo_type="dataset",
                revision=self.branch,
                commit_message=message,
                parent_commit=seen.commit,
            )
        return str(info.oid)

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()  # a log would get a line for every step of every file
        with hub_errors(self.url):
            yield HfApi()


def open_hub(url: str, *, is_private: bool) -> HubRepository:
    """Return the repository of hf://datasets/org/name[@branch]. Asks nothing yet.

    Raises:
        ConfigError: The URL is not of this form.
    """
    return HubRepository(parse_address(url), is_private=is_private)


def is_large(addition: Any) -> bool:
    """Whether the Hub has a file of `upload` apart from git. Other files are sent with the commit."""
    return bool(addition._upload_mode == "lfs")  # noqa: SLF001 - huggingface_hub tells it nowhere else


def _described(entries: Iterable[Any]) -> Iterator[tuple[str, HubFile]]:
    """Yield path and description of each file among the entries of a repository's tree."""
    for entry in entries:
        blob = getattr(entry, "blob_id", None)
        if blob is None:
            continue  # a folder
        large = entry.lfs
        digest = str(large.sha256 if large else blob)
        yield entry.path, HubFile(int(entry.size), digest, large is not None)
