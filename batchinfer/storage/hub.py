"""The Hugging Face Hub: a read-only store, and the translation of errors.

huggingface_hub and fsspec take their time to load, so only the functions that use them import them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    InputError,
    ObjectNotFound,
    ScratchFull,
    StorageError,
)
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix
from batchinfer.storage.error_rules import Rule, by_rules
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried
from batchinfer.storage.scratch import scratch_errors

T = TypeVar("T")

_FULL, _REFUSED = (errno.ENOSPC, errno.EDQUOT), (errno.EACCES, errno.EPERM, errno.EROFS)
_DISK = "see to the disk, or name other folders with HF_HOME (what is kept of the Hub) and TMPDIR or --scratch-dir"
_CLIENTS = {
    *("fsspec", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "requests"),
    "urllib3",
}
"""Packages whose errors may come from a request to the Hub."""
_ACCESS = (
    "log in with `hf auth login`, or set HF_TOKEN to a token with the rights; "
    "a gated repository also wants its terms accepted on its page"
)
_NETWORK = (
    "check the network, HTTPS_PROXY and HF_ENDPOINT, then run the same command again{otherwise}"
)
_RULES = [
    Rule(
        "GatedRepoError LocalTokenNotFoundError",
        AccessDenied,
        "needs a token with access",
        _ACCESS,
    ),
    # The Hub gives the same answer if the repository exists but the token may not see it.
    Rule(
        "RepositoryNotFoundError",
        InputError,
        "no such repository on the Hub, or a private one",
        f"check the name; for a private one {_ACCESS}",
    ),
    Rule("RevisionNotFoundError", InputError, "no such revision", "name a branch, tag or commit"),
    Rule(
        "OfflineModeIsEnabled",
        InputError,
        "the Hub may not be asked, as HF_HUB_OFFLINE is set",
        "unset HF_HUB_OFFLINE{otherwise}",
    ),
    Rule("LocalEntryNotFoundError", TransientError, "cannot be reached, nor is cached", _NETWORK),
    Rule("FileNotFoundError 404", ObjectNotFound, "no such file"),
    Rule("HFValidationError BadRequestError ValueError", InputError, "{said}"),
    Rule("PermissionError 401 403", AccessDenied, "the server refused access", _ACCESS),
    Rule("409 412", TransientError, "another commit came in between", _NETWORK),
    Rule("408 429 5xx", TransientError, "the server answered {status}", _NETWORK),
    Rule("status", StorageError, "the server answered {status}"),
    Rule("client", TransientError, "cannot be reached ({said})", _NETWORK),
]


# --------------------------------------------------------------------------- errors


@contextmanager
def hub_errors(subject: str, *, otherwise: str = "") -> Iterator[None]:
    """Turn what the Hub's client or an HTTP client raises into one of our errors.

    An OSError counts as an error of the network or the server, and a ValueError as wrong input. Other errors that do
    not come from a client pass as they are.

    Args:
        subject: What is read or written; messages start with it.
        otherwise: What the hint suggests if the server cannot be reached.

    Raises:
        AccessDenied: The repository is gated, or the token is missing, refused or lacks the rights.
        InputError: There is no such repository or revision, the name is invalid, HF_HUB_OFFLINE forbids to ask, or
            the Hub refuses what was sent.
        ObjectNotFound: There is no such file.
        TransientError: The server cannot be reached, is overloaded or fails, or somebody else has committed meanwhile.
        StorageError: The server answered with another error.
    """
    try:
        yield
    except BatchinferError:
        raise
    except Exception as error:  # four HTTP clients, no common base
        translated = _translate(error, subject, otherwise)
        if translated is None:
            raise
        raise translated from error


def _translate(error: Exception, subject: str, otherwise: str) -> BatchinferError | None:
    """Return our error for an error that `hub_errors` translates; None for an error that passes."""
    cause = error.__cause__
    # fsspec and the Hub's cache also raise FileNotFoundError if the Hub cannot be reached. Its cause is the real error.
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        return _translate(cause, subject, otherwise) or ObjectNotFound(f"{subject}: no such file")
    # An upload that fails is a RuntimeError, whose cause is the real error.
    if type(error) is RuntimeError and isinstance(cause, Exception):
        return _translate(cause, subject, otherwise)
    status = _status(error)
    if isinstance(error, OSError) and status is None and error.errno in (*_FULL, *_REFUSED):
        what = f"{subject}: cannot be kept on this machine ({error})"
        # A server's refusal may be a PermissionError, too; it names no file.
        if error.errno in _FULL:
            return ScratchFull(what, hint=_DISK)
        if error.filename is not None:
            return AccessDenied(what, hint=_DISK)
    facts = {each.__name__ for each in type(error).__mro__}
    if status is not None:
        facts |= {str(status), f"{status // 100}xx", "status"}
    elif (
        isinstance(error, OSError)
        or type(error) is RuntimeError  # of the Hub's own protocol for large files
        or type(error).__module__.partition(".")[0] in _CLIENTS
    ):
        facts.add("client")
    return by_rules(
        _RULES,
        facts,
        subject,
        said=(str(error).strip() or type(error).__name__).splitlines()[0],
        status=status,
        otherwise=f"; or {otherwise}" if otherwise else "",
    )


def _status(error: Exception) -> int | None:
    """Return the HTTP status that an error of requests or httpx carries; None if it carries no status."""
    for holder in (error, getattr(error, "response", None)):
        value = getattr(holder, "status_code", None)
        if isinstance(value, int):
            return value
    return None


# --------------------------------------------------------------------------- reading


class ReadOnlyStore:
    """Objects below an ``hf://`` URL. Writing verbs raise AccessDenied.

    Safe for threads. ``HF_TOKEN`` and ``HF_ENDPOINT`` are honoured.

    Args:
        url: For example ``hf://datasets/org/name@revision``.
        retries: How each request is repeated.
    """

    def __init__(self, url: str, *, retries: RetryPolicy | None = None) -> None:
        self.url = url.rstrip("/")
        self._root = self.url.partition("://")[2]
        self._retries = retries or RetryPolicy()
        import fsspec

        self._fs = fsspec.filesystem("hf", use_listings_cache=False, skip_instance_cache=True)

    def get(self, key: str) -> Object:
        """See `Store.get`. The etag and the bytes are asked for one after the other."""
        return Object(etag=self.stat(key).etag, data=self._ask(key, self._fs.cat_file))

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
        """See `Store.list`."""
        check_prefix(prefix)
        self._fs.invalidate_cache()
        found = self._retry("", partial(self._fs.find, self._root, detail=True))
        # The names found start with the root. fsspec may spell the root's revision in another way than `_root` does, so
        # the root is first brought into fsspec's spelling, and then removed from the names.
        root = self._fs.resolve_path(self._root).unresolve().rstrip("/") + "/"
        named = {name.removeprefix(root): info for name, info in found.items()}
        return iter([_info(key, named[key]) for key in sorted(named) if key.startswith(prefix)])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Raise AccessDenied."""
        raise AccessDenied(
            f"{self.url}: is read-only here, expected a store that can be written",
            hint="write to a folder, s3:// or gs://",
        )

    create = put_file = replace = delete = _refuse

    def _ask(self, key: str, action: Callable[[str], T]) -> T:
        url = f"{self._root}/{check_key(key)}"
        return self._retry(key, lambda: action(url))

    def _retry(self, key: str, action: Callable[[], T]) -> T:
        url = f"{self.url}/{key}".rstrip("/")

        def attempt() -> T:
            with hub_errors(url):
                return action()

        return retried(self._retries, attempt)


def _info(key: str, found: dict[str, Any]) -> ObjectInfo:
    etag = found.get("blob_id") or ""
    commit = found.get("last_commit")
    modified = commit.date.timestamp() if commit is not None and hasattr(commit, "date") else 0.0
    return ObjectInfo(key, int(found.get("size") or 0), str(etag), modified)
