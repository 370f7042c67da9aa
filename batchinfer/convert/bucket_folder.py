"""The folder DEST of a conversion in a bucket, where files appear one after the other.

The object `UNFINISHED` stands in DEST from the beginning of a conversion to its end. It lists the files, so that the
next conversion there can remove what a killed one has left. Programs of batchinfer load no model beside it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchinfer.core import codec
from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    BatchinferError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.core.records import Record
from batchinfer.engines.buckets import UNFINISHED
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_LOADED_FIRST = ("config.json", "adapter_config.json", "config.ini")
"""Names of the files that programs read first when they load a result. They are uploaded last."""


class _Unfinished(Record, frozen=True, kw_only=True):
    """Content of the object `UNFINISHED`. `files` are those that may be in DEST without the conversion being done."""

    nonce: str
    files: list[str] = []


class BucketFolder:
    """The folder DEST in a bucket, which one conversion at a time fills.

    Args:
        store: Store whose root is DEST.

    Raises:
        InputError: DEST holds something, and no conversion is unfinished there.
        AccessDenied: The bucket may not be listed or written to, or nothing may be removed there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_uploading = False
        with _access_errors(store.url):
            there = {info.key for info in store.list("")}
            if there and UNFINISHED not in there:
                raise taken(store.url)
            # Removing an object that is not there shows whether objects may be removed.
            store.delete([f"{UNFINISHED}.{secrets.token_hex(8)}"])
            self._left = self._left_files(there)
            self._etag = self._begin()

    def _left_files(self, there: Collection[str]) -> list[str]:
        """Return the files that an unfinished conversion may have left."""
        if UNFINISHED not in there:
            return []
        try:
            found = codec.decode(self._store.get(UNFINISHED).data, _Unfinished, name=UNFINISHED)
        except (ObjectNotFound, InputError):
            return []
        return [name for name in found.files if name in there]

    def _begin(self) -> str:
        """Write `UNFINISHED`, with the files of an unfinished conversion, and return its etag."""
        try:
            etag = self._store.stat(UNFINISHED).etag
        except ObjectNotFound:
            with _others_refused(self._store.url):
                return self._store.create(UNFINISHED, _unfinished(self._left))
        with _others_refused(self._store.url):
            return self._store.replace(UNFINISHED, _unfinished(self._left), etag)

    def upload(self, folder: Path, names: list[str]) -> None:
        """Upload files below `folder`, and remove `UNFINISHED` when all are there.

        Files of an unfinished conversion are removed first.
        """
        store = self._store
        with _access_errors(store.url):
            for is_loaded_first in (
                True,
                False,
            ):  # without the former, no program takes the rest for a model
                store.delete(
                    [name for name in self._left if (name in _LOADED_FIRST) == is_loaded_first]
                )
            with _others_refused(store.url):
                self._etag = store.replace(UNFINISHED, _unfinished(names), self._etag)
            self._is_uploading = True
            for name in sorted(names, key=lambda name: (name in _LOADED_FIRST, name)):
                logger.info("uploading %s", name)
                try:
                    store.create_file(name, folder / name)
                except AlreadyExists:  # left by a conversion that did not list its files
                    store.delete([name])
                    store.create_file(name, folder / name)
            with _others_refused(store.url):
                if store.stat(UNFINISHED).etag != self._etag:
                    raise PreconditionFailed(f"{store.url}/{UNFINISHED}: has changed")
            store.delete([UNFINISHED])

    def release(self) -> None:
        """Remove `UNFINISHED` after a failure, if no file of a conversion is in DEST."""
        if self._is_uploading or self._left:
            return
        with suppress(BatchinferError):
            if self._store.stat(UNFINISHED).etag == self._etag:
                self._store.delete([UNFINISHED])


def _unfinished(files: list[str]) -> bytes:
    return codec.encode_pretty(_Unfinished(nonce=secrets.token_hex(8), files=files))


@contextmanager
def _access_errors(url: str) -> Iterator[None]:
    """Say of a refused request that it is about DEST, and which rights are needed."""
    try:
        yield
    except AccessDenied as error:
        raise AccessDenied(
            f"DEST {url}: may not be written to ({error.message})",
            hint="the conversion lists DEST, and reads, creates and deletes objects there (on S3: ListBucket, "
            "GetObject, PutObject, DeleteObject); give these rights, or name another DEST",
        ) from error


@contextmanager
def _others_refused(url: str) -> Iterator[None]:
    """Refuse a DEST in which another conversion has begun."""
    try:
        yield
    except (AlreadyExists, PreconditionFailed, ObjectNotFound) as error:
        raise InputError(
            f"{url}: another conversion writes there at the same time",
            hint="let one command write to one place",
        ) from error


def taken(dest: str) -> InputError:
    """Return the error for a DEST that holds something."""
    return InputError(f"{dest}: holds something already", hint="name another DEST, or remove it")
