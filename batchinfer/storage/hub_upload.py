"""A data set to the Hugging Face Hub in one commit: the adapter around huggingface_hub's upload."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    ConfigError,
    InputError,
    StorageError,
)

logger = logging.getLogger(__name__)

CARD = "README.md"
_HTTP_CLIENTS = {"httpx", "httpcore", "httpx2", "httpcore2", "requests", "urllib3"}
"""Packages that the Hub's client may send requests with, each with errors of its own."""
_ADDRESS = re.compile(r"^hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<branch>[^/@]+))?/?$")


class Address(NamedTuple):
    """Where to upload; `branch` empty means the main one."""

    repo: str
    branch: str


def parse_address(url: str) -> Address:
    """Read hf://datasets/org/name[@branch].

    Raises:
        ConfigError: it is none.

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


class HubDataset:
    """A repository on the Hub. Endpoint and token come from the environment (HF_ENDPOINT, HF_TOKEN)."""

    def __init__(self, address: Address, *, is_private: bool) -> None:
        self._address = address
        self._is_private = is_private

    @property
    def url(self) -> str:
        """The address."""
        branch = f"@{self._address.branch}" if self._address.branch else ""
        return f"hf://datasets/{self._address.repo}{branch}"

    def files(self) -> list[str]:
        """Files that are there; [] also where there is no repository. Read-only.

        Raises:
            AccessDenied: the token is missing or refused.
        """
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with self._errors():
            try:
                return list(
                    _api().list_repo_files(
                        self._address.repo,
                        repo_type="dataset",
                        revision=self._address.branch or None,
                    )
                )
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return []

    def upload(self, folder: Path, *, message: str, delete: list[str]) -> str:
        """Make the repository if need be and put a folder there, all in one commit.

        Args:
            folder: What to upload.
            message: Of the commit.
            delete: Patterns of files to remove in the same commit.

        Returns:
            The commit.

        Raises:
            AccessDenied: the token may not write there.
            StorageError: the Hub failed.
        """
        repo, branch = self._address
        with self._errors():
            api = _api()
            api.create_repo(repo, repo_type="dataset", private=self._is_private, exist_ok=True)
            if branch:
                api.create_branch(repo, repo_type="dataset", branch=branch, exist_ok=True)
            info = api.upload_folder(
                repo_id=repo,
                repo_type="dataset",
                revision=branch or None,
                folder_path=str(folder),
                commit_message=message,
                delete_patterns=delete or None,
            )
        return str(getattr(info, "oid", "") or "")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from huggingface_hub import errors

        hint = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
        try:
            yield
        except BatchinferError:
            raise
        except errors.GatedRepoError as error:
            raise AccessDenied(f"{self.url}: is gated", hint=hint) from error
        except errors.HFValidationError as error:
            raise ConfigError(f"{self.url}: {error}") from error
        except errors.RepositoryNotFoundError as error:
            # So the Hub answers who may not see it, too.
            raise AccessDenied(
                f"{self.url}: not there, or not for this token", hint=hint
            ) from error
        except errors.BadRequestError as error:
            raise InputError(f"{self.url}: the Hub refuses the upload ({error})") from error
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            if status in (401, 403):
                raise AccessDenied(f"{self.url}: writing was refused", hint=hint) from error
            raise StorageError(
                f"{self.url}: the Hub answered {status}", hint="run the same command again"
            ) from error
        except errors.LocalTokenNotFoundError as error:
            raise AccessDenied(f"{self.url}: no token", hint=hint) from error
        except Exception as error:
            if type(error).__module__.split(".")[0] not in _HTTP_CLIENTS:
                raise
            raise StorageError(
                f"{self.url}: the Hub cannot be reached ({type(error).__name__})",
                hint="run the same command again",
            ) from error


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
