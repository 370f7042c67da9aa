"""Objects that one worker alone writes, over and over again."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from batchinfer.core import codec
from batchinfer.core.errors import (
    AlreadyExists,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from batchinfer.storage import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_WRITES = 3
"""Attempts to write, when another thread or an earlier start that still runs changes the object meanwhile."""


class OwnRecord(Generic[T]):
    """One such object. It may change all the same: another thread, or an earlier start of the worker, writes it, too.

    Args:
        store: The run's store.
        key: The object's key.
        kind: Class of its content.
    """

    def __init__(self, store: Store, key: str, kind: type[T]) -> None:
        self._store = store
        self._kind = kind
        self.key = key
        self._etag = ""

    def look(self) -> tuple[T | None, str]:
        """Read the object and its etag. The content is None if it is gone or damaged, the etag "" if it is gone."""
        try:
            data, etag = self._store.get(self.key)
        except ObjectNotFound:
            return None, ""
        try:
            return codec.decode(data, self._kind, name=self.key), etag
        except InputError as error:
            logger.warning("%s; it is written anew", error)
            return None, etag

    def expect(self, etag: str) -> None:
        """Let the next write replace the version with this etag; with "" there must be none."""
        self._etag = etag

    def read(self) -> T | None:
        """Read the object; None if it is gone or damaged. The next write replaces the version that was read."""
        found, self._etag = self.look()
        return found

    def write(self, record: T) -> bool:
        """Write the object if it is the version that was last written or read. Return whether it was written."""
        data = codec.encode(record)
        try:
            if self._etag:
                self._etag = self._store.replace(self.key, data, self._etag)
            else:
                self._etag = self._store.create(self.key, data)
        except (PreconditionFailed, AlreadyExists):
            return False
        return True

    def overwrite(self, record: T) -> None:
        """Write the object, over the one that is there. A failure is logged; the next write has newer content."""
        problem: object = "something else writes it, too"
        try:
            for _ in range(_WRITES):
                if self.write(record):
                    return
                self.read()
        except StorageError as error:
            problem = error
        logger.warning("%s: not written (%s); trying again", self.key, problem)
