"""Complete chunks on their way out.

    complete -> waiting -> publishing -> published, by us or by somebody else
                   ^            |
                   +--- failed -+-> given up

Belongs to the main thread; nothing here blocks. What an outcome means to everything else is the shelf's affair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batchinfer.cli.logs import event
from batchinfer.core import layout
from batchinfer.core.clock import iso_utc
from batchinfer.core.errors import LeaseLapsed, ScratchFull, StorageError
from batchinfer.ledger.publishing import Published, build_output
from batchinfer.storage.scratch import remove_quietly
from batchinfer.worker.background import Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.services import Limits, Services

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """A chunk that is published at `due`, or later."""

    chunk: OpenChunk
    due: float
    attempts: int


@dataclass(slots=True)
class _Publishing:
    chunk: OpenChunk
    pending: Pending[Published]
    attempts: int


class PublishQueue:
    """Publishes chunks in the background, as soon as the run is known and the heartbeat is fresh.

    Args:
        services: The publisher, the lease, the scratch folder and the background.
        limits: How often a chunk is tried, and after which time again.
        may_give_up: Whether a chunk that has failed as often as that is to be given up: not while the engine has work.
        must_wait: Whether a chunk is not to be published yet, as while a segment of it is on its way.
        save: Called with a chunk that could not be published.
    """

    def __init__(
        self,
        services: Services,
        limits: Limits,
        *,
        may_give_up: Callable[[], bool],
        must_wait: Callable[[OpenChunk], bool],
        save: Callable[[OpenChunk], None],
    ) -> None:
        self._services = services
        self._limits = limits
        self._may_give_up = may_give_up
        self._must_wait = must_wait
        self._save = save
        self._waiting: list[_Waiting] = []
        self._publishing: list[_Publishing] = []
        self.fingerprint = ""
        """The run's; nothing is published before it is known."""

    @property
    def is_busy(self) -> bool:
        """Whether outputs are on their way. Chunks that wait do not count."""
        return bool(self._publishing)

    def is_publishing(self, chunk: OpenChunk) -> bool:
        """Whether this chunk's output is on its way, so that its files are being read."""
        return any(entry.chunk is chunk for entry in self._publishing)

    def has_failed(self, chunk: OpenChunk) -> bool:
        """Whether this chunk waits because it could not be published."""
        return any(entry.chunk is chunk and entry.attempts for entry in self._waiting)

    def add(self, chunk: OpenChunk) -> None:
        """Publish a complete chunk, at once or when it can be."""
        self._wait(chunk, attempts=0, delay=0.0)

    def drop(self, chunk: OpenChunk) -> None:
        """Forget a chunk that waits. One that is being published goes on."""
        self._waiting = [entry for entry in self._waiting if entry.chunk is not chunk]

    def collect(self) -> Iterator[tuple[OpenChunk, Published | StorageError]]:
        """What became of chunks: their marker, or why they are given up. Others that failed are tried again later.

        Raises:
            BatchinferError: something that ends the worker: a full scratch folder, refused permissions, a newer epoch.
        """
        for entry in [entry for entry in self._publishing if entry.pending.is_done()]:
            self._publishing.remove(entry)
            try:
                ended: Published | StorageError = entry.pending.result()
            except ScratchFull:
                raise
            except StorageError as error:
                if self._tries_again(entry, error):
                    continue
                ended = error
            yield entry.chunk, ended

    def start(self) -> None:
        """Start what is due and can be published now."""
        now = self._services.clock.monotonic()
        for entry in list(self._waiting):
            if entry.due <= now and not self._must_wait(entry.chunk) and self._may_publish():
                self._waiting.remove(entry)
                self._publish(entry.chunk, entry.attempts)

    def _wait(self, chunk: OpenChunk, *, attempts: int, delay: float) -> None:
        due = self._services.clock.monotonic() + delay
        self._waiting.append(_Waiting(chunk, due, attempts))
        self.start()

    def _may_publish(self) -> bool:
        """Without a fresh heartbeat others may have taken our chunks: wait until it is renewed, or refused."""
        return bool(self.fingerprint) and self._services.lease.is_held()

    def _publish(self, chunk: OpenChunk, attempts: int) -> None:
        services = self._services
        marker = chunk.marker(
            fingerprint=self.fingerprint,
            worker=services.lease.worker_id,
            epoch=services.lease.epoch,
            start=iso_utc(chunk.started),
            end=iso_utc(services.clock.now()),
        )
        leftovers = list(chunk.segment_keys)
        if services.claims is not None:
            leftovers.append(layout.claim_key(chunk.name))
        path = services.scratch.new_path(layout.output_file(chunk.name))

        def work() -> Published:
            built = build_output(path, chunk.spool.payloads())
            try:
                return services.publisher.publish(
                    built, marker, chunk=chunk.name, leftovers=leftovers
                )
            finally:
                remove_quietly(path)

        self._publishing.append(_Publishing(chunk, services.background.submit(work), attempts))

    def _tries_again(self, entry: _Publishing, error: StorageError) -> bool:
        """Put a chunk that failed back, unless it has failed too often and nothing is left to do meanwhile."""
        # A late heartbeat is no failure of this chunk's: it waits for the next one (_may_publish).
        attempts = entry.attempts + (not isinstance(error, LeaseLapsed))
        name = entry.chunk.name
        if attempts >= self._limits.storage_attempts and self._may_give_up():
            logger.error(
                "%s: not published (%s); given up",
                name,
                error,
                extra=event("chunk_failed", chunk=name),
            )
            return False
        delay = self._limits.storage_delay_seconds(attempts)
        logger.warning(
            "%s: not published (%s); trying again in %.0f s",
            name,
            error,
            delay,
            extra=event("chunk_retry", chunk=name),
        )
        self._wait(entry.chunk, attempts=attempts, delay=delay)
        self._save(entry.chunk)
        return True
