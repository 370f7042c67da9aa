"""Object storage as a few verbs, which are the same for buckets, local folders and memory.

A store is rooted at a URL. Keys are relative, use "/", and cannot leave the root. No verb shows or leaves a part of
an object: each write makes one whole object visible, or nothing. Failures of remote storage that may pass are retried
inside. What still fails raises a subclass of `BatchinferError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from batchinfer.core.errors import InputError


class ObjectInfo(NamedTuple):
    """One object. `etag` changes with the content (empty if unknown); `modified` is Unix seconds (0 if unknown)."""

    key: str
    bytes: int
    etag: str
    modified: float = 0.0

    def is_version(self, etag: str) -> bool:
        """Whether another verb's etag is of this version. Listings of GCS show a part of it."""
        return etag == self.etag or etag.startswith(f"{self.etag};")


class Object(NamedTuple):
    """A whole object and the etag of the version that was read."""

    data: bytes
    etag: str


class Store(Protocol):
    """The operations on objects below one URL.

    Each of them raises StorageError if it still fails after its retries, and AccessDenied if access is refused.
    """

    url: str

    def get(self, key: str) -> Object:
        """Read a whole object. Raises ObjectNotFound."""

    def download(self, key: str, path: Path) -> None:
        """Copy a whole object to a local file (overwritten), in bounded memory. Raises ObjectNotFound, ScratchFull."""

    def stat(self, key: str) -> ObjectInfo:
        """Return one object's size and etag. Raises ObjectNotFound."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the objects whose keys start with `prefix`, in key order, never from a cache."""

    def create(self, key: str, data: bytes) -> str:
        """Create an object that must not exist and return its etag. Raises AlreadyExists. `data` is not empty.

        If the object exists and holds exactly `data`, the call succeeds, because an earlier attempt may have succeeded
        and only its reply was lost. A caller that must tell its own create from another's puts a nonce into `data`.
        If the object was in the way and has been deleted since, AlreadyExists is raised, too, even if it held `data`.
        """

    def put_file(self, key: str, path: Path) -> None:
        """Put an object from a local file, in bounded memory, over any that is there.

        Callers that must not overwrite each other's objects give them different names. Afterwards the caller may remove
        the file, but must not change it: a local store may share its bytes.
        """

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """Overwrite an object if it still has `etag`; return the new etag. Raises PreconditionFailed (also if absent).

        A listing's etag may not do. As with `create`, the call succeeds if the object holds exactly `data` already.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Absent objects are no error. After a failure some of the objects may be removed already."""


def split_bucket(url: str) -> tuple[str, str]:
    """Return the bucket of a URL, and what all keys below the URL start with: nothing, or a prefix with a final slash.

    >>> split_bucket("s3://bucket/some/job/"), split_bucket("gs://bucket")
    (('bucket', 'some/job/'), ('bucket', ''))
    """
    bucket, _, root = url.partition("://")[2].strip("/").partition("/")
    return bucket, f"{root}/" if root else ""


def check_key(key: str) -> str:
    """Return `key` if it names one object below a store's root.

    Raises:
        InputError: The key is empty or absolute, a component is empty, "." or "..", or it has a control character.

    >>> check_key("outputs/part-00000.jsonl")
    'outputs/part-00000.jsonl'
    """
    if not {"", ".", ".."}.isdisjoint(key.split("/")) or min(key) < " ":
        raise InputError(
            f"key {key!r}: leaves the storage root or is no plain path, "
            "expected names joined by single slashes",
            hint="leave out '..', empty names, control characters, and a slash at its start",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it can be the start of a key. Raises as `check_key`."""
    return check_key(f"{prefix}x").removesuffix("x")
