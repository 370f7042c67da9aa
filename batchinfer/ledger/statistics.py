"""A worker's statistics, in an object beside its lease: what `status`, `report` and metrics read."""

from __future__ import annotations

import logging

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    AlreadyExists,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from batchinfer.core.records import Worker
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_WRITES = 3
"""Attempts to write, when another thread or an earlier start that still runs changes the object meanwhile."""


class Statistics:
    """Reads and writes the statistics of one worker, from any thread. Nothing that the worker does depends on them."""

    def __init__(self, store: Store, worker_id: str) -> None:
        self._store = store
        self._key = layout.statistics_key(worker_id)
        self._etag = ""

    def read(self) -> Worker | None:
        """Read what the worker's last start has left; None if there is nothing, or nothing that can be read."""
        try:
            data, self._etag = self._store.get(self._key)
            return codec.decode(data, Worker, name=self._key)
        except ObjectNotFound:
            return None
        except InputError as error:
            logger.warning("%s; it is written anew", error)
            return None

    def write(self, record: Worker) -> None:
        """Write the statistics, over those that are there. A failure is logged; the next write has newer ones."""
        data = codec.encode(record)
        try:
            for _ in range(_WRITES):
                if self._has_written(data):
                    return
        except StorageError as error:
            logger.warning("statistics not written (%s); trying again", error)

    def _has_written(self, data: bytes) -> bool:
        try:
            if self._etag:
                self._etag = self._store.replace(self._key, data, self._etag)
            else:
                self._etag = self._store.create(self._key, data)
        except (PreconditionFailed, AlreadyExists):
            try:
                self._etag = self._store.stat(self._key).etag
            except ObjectNotFound:
                self._etag = ""
            return False
        return True
