"""Object storage as few verbs: what every module that touches a bucket, a disk or memory goes through.

A store is rooted at a URL; keys are relative, use "/", and never leave the root. No verb ever shows or leaves a part
of an object: each put is one whole object, visible at once or not at all. Transient failures are retried inside;
what comes out is from `batchinfer.core.errors` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from batchinfer.core.errors import InputError


class ObjectInfo(NamedTuple):
    """One listed object. `etag` changes whenever the object is replaced; `modified` is Unix seconds (0 if unknown)."""

    key: str
    bytes: int
    etag: str
    modified: float = 0.0


class Object(NamedTuple):
    """A whole object and the etag it was read at."""

    data: bytes
    etag: str


class Store(Protocol):
    """Few verbs over one root URL.

    All raise StorageError after retries, AccessDenied where permissions are refused.
    """

    url: str

    def get(self, key: str) -> Object:
        """Read a whole object. Raises ObjectNotFound."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Copy a whole object to a local file (overwritten), in bounded memory. Raises ObjectNotFound, ScratchFull."""
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Size and etag of one object. Raises ObjectNotFound."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object below `prefix` (a string prefix of keys), recursive, in key order, never from a cache."""
        ...

    def create(self, key: str, data: bytes) -> str:
        """Create an object that must not exist and return its etag. Raises AlreadyExists. `data` is not empty.

        If an earlier try of this very call got through and only its reply was lost, the object's bytes equal `data`
        and the call succeeds: so whoever must tell its own create from another's puts a nonce into `data`.
        """
        ...

    def create_file(self, key: str, path: Path, *, is_final: bool = False) -> str:
        """`create` from a local file, in bounded memory (multipart where large). Same lost-reply rule, by sha256.

        `is_final`: nobody writes to the file any more (removing it is fine), so a local store need not copy it.
        """
        ...

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """Overwrite an object if it still has `etag`; return the new etag. Raises PreconditionFailed (also if absent).

        Same lost-reply rule as `create`.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, many at a time. An absent one is no error. Not atomic."""
        ...


class Preconditions(NamedTuple):
    """What `probe` found: whether the store really refuses a second create, and a replace with a wrong etag."""

    create: bool
    replace: bool

    @property
    def is_safe(self) -> bool:
        """Claims and create-only publishing can be relied on."""
        return self.create and self.replace


def check_key(key: str) -> str:
    """Return `key` if it names one object below a store's root.

    Raises:
        InputError: The key is empty or absolute, or a component is empty, "." or "..".

    >>> check_key("outputs/part-00000.jsonl")
    'outputs/part-00000.jsonl'
    """
    _refuse_unless(bool(key), key)
    _check_components(key, key.split("/"))
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it can be the start of a key. The empty prefix means every key.

    Raises:
        InputError: As for `check_key`; the last component may be incomplete or empty.

    >>> check_prefix("outputs/")
    'outputs/'
    """
    folder, _, rest = prefix.rpartition("/")
    if "/" in prefix:
        _check_components(prefix, folder.split("/"))
    _refuse_unless(rest != ".." and "\0" not in rest, prefix)
    return prefix


def _check_components(key: str, components: list[str]) -> None:
    _refuse_unless("\0" not in key and all(part not in {"", ".", ".."} for part in components), key)


def _refuse_unless(condition: bool, key: str) -> None:
    if not condition:
        raise InputError(
            f"key {key!r}: leaves the storage root or is no plain path, "
            "expected names joined by single slashes",
            hint="use a path relative to the root, without '..', and without a slash at its start",
        )
