"""A store that is only read: a repository of the Hugging Face Hub, or a web server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix
from batchinfer.storage.retrying import NotSupported, RetryPolicy, TransientError, retried
from batchinfer.storage.scratch import scratch_errors

T = TypeVar("T")

_CLIENTS = {"aiohttp", "fsspec", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3"}


class ReadOnlyStore:
    """Objects below an ``hf://`` or ``http(s)://`` URL. Writing verbs raise AccessDenied.

    Safe for threads. ``HF_TOKEN`` and ``HF_ENDPOINT`` are honoured. A web server can be read but not listed.

    Args:
        url: For example ``hf://datasets/org/name@revision``.
        retries: How each request is repeated.
    """

    def __init__(self, url: str, *, retries: RetryPolicy | None = None) -> None:
        self.url = url.rstrip("/")
        self._scheme, _, root = self.url.partition("://")
        self._retries = retries or RetryPolicy()
        self._fs = fsspec.filesystem(
            self._scheme, use_listings_cache=False, skip_instance_cache=True
        )
        self._root = root if self._scheme == "hf" else self.url

    def get(self, key: str) -> Object:
        """See `Store.get`. The etag is asked for by a request of its own."""
        etag = self.stat(key).etag
        return Object(self._ask(key, self._fs.cat_file), etag)

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`."""
        with scratch_errors(path.parent):
            path.write_bytes(b"")
        self._ask(key, lambda url: self._fs.get_file(url, str(path)))

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        self._fs.invalidate_cache()
        found = self._ask(key, self._fs.info)
        if found.get("type") == "directory":
            raise ObjectNotFound(f"{self.url}/{key}: no such object")
        return _info(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Raises NotSupported for a web server."""
        check_prefix(prefix)
        if self._scheme != "hf":
            raise NotSupported(
                f"{self.url}: a web server cannot be listed", hint="name the files one by one"
            )
        self._fs.invalidate_cache()
        found = self._retry("", partial(self._fs.find, self._root, detail=True))
        # The Hub's file system spells the revision in its own way; the keys are what comes after the common root.
        root = self._fs.resolve_path(self._root).unresolve().rstrip("/") + "/"
        named = {name.removeprefix(root): info for name, info in found.items()}
        return iter([_info(key, named[key]) for key in sorted(named) if key.startswith(prefix)])

    def create(self, key: str, data: bytes) -> str:  # noqa: ARG002 - the protocol's arguments
        """Refuse."""
        raise self._read_only()

    def create_file(self, key: str, path: Path, *, is_final: bool = False) -> str:  # noqa: ARG002 - as create
        """Refuse."""
        raise self._read_only()

    def replace(self, key: str, data: bytes, etag: str) -> str:  # noqa: ARG002 - as create
        """Refuse."""
        raise self._read_only()

    def delete(self, keys: Iterable[str]) -> None:  # noqa: ARG002 - as create
        """Refuse."""
        raise self._read_only()

    def _read_only(self) -> AccessDenied:
        return AccessDenied(
            f"{self.url}: is read-only here, expected a store that can be written",
            hint="write to a folder, s3:// or gs://",
        )

    def _ask(self, key: str, action: Callable[[str], T]) -> T:
        url = f"{self._root}/{check_key(key)}"
        return self._retry(key, lambda: action(url))

    def _retry(self, key: str, action: Callable[[], T]) -> T:
        def attempt() -> T:
            with self._errors(key):
                return action()

        return retried(self._retries, attempt)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        url = f"{self.url}/{key}".rstrip("/")
        try:
            yield
        except BatchinferError:
            raise
        except Exception as error:  # three HTTP clients, no common base
            # fsspec's HTTP file system reports an outage as FileNotFoundError too, with the truth as its cause.
            cause = error.__cause__
            if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
                is_absent = _status(cause) is None and not _is_of_client(cause)
                error = cause
            else:
                is_absent = isinstance(error, FileNotFoundError)
            status = _status(error)
            if is_absent or status == 404:
                raise ObjectNotFound(f"{url}: no such object") from error
            if isinstance(error, PermissionError) or status in {401, 403}:
                raise AccessDenied(
                    f"{url}: the server refused access",
                    hint="set HF_TOKEN to a token that may read it, and accept the data set's terms on its page",
                ) from error
            if isinstance(error, ValueError):
                raise InputError(f"{url}: {error}") from error
            if status is None and not _is_of_client(error):
                raise
            if status is None or status in {408, 429} or status >= 500:
                raise TransientError(f"{url}: {type(error).__name__}: {error}") from error
            raise StorageError(f"{url}: the server answered {status}") from error


def _is_of_client(error: Exception) -> bool:
    """Whether an error without a status comes from the network or an HTTP client, and is no bug of ours."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def _status(error: Exception) -> int | None:
    """HTTP status that an error of aiohttp, requests or httpx carries."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def _info(key: str, found: dict[str, Any]) -> ObjectInfo:
    etag = found.get("ETag") or found.get("blob_id") or found.get("Last-Modified") or ""
    commit = found.get("last_commit")
    modified = commit.date.timestamp() if commit is not None and hasattr(commit, "date") else 0.0
    return ObjectInfo(key, int(found.get("size") or 0), str(etag), modified)
