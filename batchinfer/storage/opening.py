"""Opens the store for a URL, and refuses one that does not honour preconditions.

The adapters, and the packages that they import, load only when their scheme is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from pathlib import Path
from urllib.parse import unquote

from batchinfer.core import layout
from batchinfer.core.errors import AccessDenied, AlreadyExists, ConfigError, PreconditionFailed
from batchinfer.core.redaction import has_user
from batchinfer.storage import Store
from batchinfer.storage.retrying import NotSupported, RetryPolicy

logger = logging.getLogger(__name__)

BUCKET_SCHEMES = ("s3", "r2", "gs", "az", "memory")
SCHEMES = ("file", *BUCKET_SCHEMES, "hf")

_LACKS_A_SLASH = re.compile(rf"(?i)({'|'.join(SCHEMES)}|https?):/?(?!/)")
_UNDERSTOOD = (
    "a plain path, file://, s3:// (also r2:// and other S3 stores by AWS_ENDPOINT_URL), gs://, az://, memory://, "
    "and for reading hf://"
)


def split_url(url: str) -> tuple[str, str]:
    """Return (scheme, rest); the scheme of a plain path is "file".

    >>> split_url("s3://bucket/job"), split_url("runs/a"), split_url("file:///data/job")
    (('s3', 'bucket/job'), ('file', 'runs/a'), ('file', '/data/job'))

    Raises:
        ConfigError: As for `check_url`.
    """
    check_url(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "file", url
    return scheme.lower(), unquote(rest) if scheme.lower() == "file" else rest


def local_path(url: str) -> Path:
    """Return the path that a plain path or a ``file://`` URL names, with a first ``~`` expanded if that is a home.

    >>> local_path("file:///data/a%20b.jsonl"), local_path("./~/a"), local_path("~$a.csv")
    (PosixPath('/data/a b.jsonl'), PosixPath('~/a'), PosixPath('~$a.csv'))

    Raises:
        ConfigError: The path of a file:// URL is not absolute.
    """
    path = split_url(url)[1]
    if "://" in url and not path.startswith("/"):
        raise ConfigError(
            f"{url!r}: a file:// URL needs an absolute path",
            hint=f"write file:///absolute/path, or the plain path {path!r}",
        )
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path drops ./, and refuses what is no user's


def check_url(url: str) -> None:
    """Refuse a bucket's or the Hub's URL with a secret in it, and a text like `s3:/bucket`, which looks like a folder.

    Raises:
        ConfigError: A URL of a bucket or of the Hub has a user or a password in it, or the text starts like a URL but
            has too few slashes to be one.
    """
    scheme = url.partition(":")[0].lower()
    if scheme in (*BUCKET_SCHEMES, "hf") and has_user(url):
        raise ConfigError(
            f"{url}: has a user or a secret before the name, expected {scheme}://name/path",
            hint="leave out all before the @; docs/object-storage.md says where credentials belong",
        )
    match = _LACKS_A_SLASH.match(url)
    if match is None:
        return
    scheme, rest = match[1].lower(), url[match.end() :]
    meant = url.partition(":")[2] if scheme == "file" else f"{scheme}://{rest}"
    raise ConfigError(
        f"{url!r}: lacks a slash, expected {scheme}:// or a plain path",
        hint=f"did you mean {meant}? A folder of that name is ./{url}",
    )


def join_url(base: str, key: str) -> str:
    """Return the URL of `key` below `base`.

    >>> (
    ...     join_url("s3://bucket/job/", "job.json"),
    ...     join_url("/data", "job.json"),
    ...     join_url("s3://bucket", ""),
    ... )
    ('s3://bucket/job/job.json', '/data/job.json', 's3://bucket')
    """
    stripped = base.rstrip("/") or base[:1]
    if not key:
        return stripped
    return stripped + key if stripped == "/" else f"{stripped}/{key}"


def is_inside(url: str, folder: str) -> bool:
    """Whether `url` is `folder` or lies below it, by whole components. Follows links of local paths.

    >>> is_inside("s3://b/data/x", "r2://b/data"), is_inside("s3://b/data2", "s3://b/data")
    (True, False)
    """
    (scheme, inner), (folder_scheme, outer) = split_url(url), split_url(folder)
    scheme, folder_scheme = ("s3" if each == "r2" else each for each in (scheme, folder_scheme))
    if scheme != folder_scheme:
        return False
    if scheme == "file":
        place, outer_place = (os.path.realpath(local_path(each)) for each in (url, folder))
        return Path(place).is_relative_to(outer_place)
    return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")


def open_store(url: str, *, retries: RetryPolicy | None = None) -> Store:
    """Open the store at `url`. Nothing is created, and no request goes to the store itself.

    Args:
        url: A plain path (``~`` is expanded) or a URL of one of `SCHEMES`.
        retries: How each request to remote storage is repeated; by default as `RetryPolicy` says.

    Raises:
        ConfigError: The scheme is unknown, the URL names nothing, or its cloud's configuration cannot be used.
    """
    scheme, rest = split_url(url)
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{url!r}: unknown scheme {scheme!r}, expected {_UNDERSTOOD}",
            hint="download files of other servers first, or name a bucket or hf://; see docs/object-storage.md",
        )
    if not rest.strip("/") and not (scheme == "file" and rest):
        raise ConfigError(f"{url!r}: names nothing, expected {scheme}://name or a path")
    if scheme == "file":
        from batchinfer.storage.local import LocalStore

        return LocalStore(local_path(url))
    if scheme != "hf":
        from batchinfer.storage.clouds import open_bucket

        return open_bucket(scheme, url, retries)
    from batchinfer.storage.hub import ReadOnlyStore

    return ReadOnlyStore(url, retries=retries)


def check_preconditions(store: Store, prefix: str = layout.PROBES) -> None:
    """Refuse a store that does not honour create-only and if-match. Tries both on a test object, in eight requests.

    A process that is killed half way, or whose store fails, leaves one small object below `prefix`.

    Raises:
        ConfigError: A second create or a replace with an outdated etag was not refused, or is not supported.
        AccessDenied: The store is read-only, or its credentials do not allow writing.
        StorageError: The store failed after its retries.
    """
    key = f"{prefix}{secrets.token_hex(8)}"
    try:
        found = _trial(store, key)
    except NotSupported as error:
        found = (
            f"a conditional write was tried, and the store does not support it ({error.message})"
        )
    try:
        store.delete([key])
    except AccessDenied as error:
        logger.warning("cannot remove the probe %s: %s", key, error)
    if found:
        raise ConfigError(
            f"{store.url}: {found}; workers share a run by such writes",
            hint="use a store that honours conditional writes: docs/object-storage.md names some",
        )


def _trial(store: Store, key: str) -> str:
    """Create an object again, replace it by its etag and by the outdated one. Return what went wrong, or nothing."""
    # Each write has other bytes, because equal bytes would count as a repetition of the write before.
    store.create(key, b"probe: first create\n")
    with contextlib.suppress(AlreadyExists):
        store.create(key, b"probe: second create\n")
        return "a second create of one object was tried, and overwrote it; a refusal was expected"
    seen = store.stat(key).etag
    try:
        store.replace(key, b"probe: replaced with the current etag\n", seen)
    except PreconditionFailed:
        return "a replace with the object's current etag was tried, and refused"
    with contextlib.suppress(PreconditionFailed):
        store.replace(key, b"probe: replaced with an outdated etag\n", seen)
        return "a replace with an outdated etag was tried, and overwrote it; a refusal was expected"
    return ""
