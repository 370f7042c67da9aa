"""A worker's statistics, in an object beside its lease: what `status`, `report` and metrics read."""

from __future__ import annotations

import logging

from batchinfer.core import layout
from batchinfer.core.errors import StorageError
from batchinfer.core.records import Worker
from batchinfer.ledger.own_record import OwnRecord
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_WRITES = 3
"""Attempts to write, when another thread or an earlier start that still runs changes the object meanwhile."""


class Statistics:
    """Reads and writes the statistics of one worker, from any thread. Nothing that the worker does depends on them."""

    def __init__(self, store: Store, worker_id: str) -> None:
        self._own = OwnRecord(store, layout.statistics_key(worker_id), Worker)

    def read(self) -> Worker | None:
        """Read what the worker's last start has left; None if there is nothing, or nothing that can be read."""
        found, etag = self._own.read()
        self._own.expect(etag)
        return found

    def write(self, record: Worker) -> None:
        """Write the statistics, over those that are there. A failure is logged; the next write has newer ones."""
        try:
            for _ in range(_WRITES):
                if self._own.write(record):
                    return
                self.read()
        except StorageError as error:
            logger.warning("statistics not written (%s); trying again", error)
