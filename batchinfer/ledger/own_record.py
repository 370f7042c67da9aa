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
)
from batchinfer.storage import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)


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

    def read(self) -> tuple[T | None, str]:
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

    def write(self, record: object) -> bool:
        """Write the object if it is the version that was last written or expected. Return whether it was written."""
        data = codec.encode(record)
        try:
            if self._etag:
                self._etag = self._store.replace(self.key, data, self._etag)
            else:
                self._etag = self._store.create(self.key, data)
        except (PreconditionFailed, AlreadyExists):
            return False
        return True
