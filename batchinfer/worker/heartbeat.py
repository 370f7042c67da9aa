"""A worker's heartbeat: a separate thread regularly renews the worker's record and looks for stop requests.

The heart is honest: it beats only while the worker's main loop turns. So the lease of a worker that hangs lapses, and
others take its chunks, as if its machine had vanished. If the loop turns again, the lease is renewed.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial

from batchinfer.core import layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import (
    BatchinferError,
    NoProgress,
    ObjectNotFound,
    StopRequested,
    StorageError,
)
from batchinfer.core.events import tell
from batchinfer.core.records import Worker, WorkerLease
from batchinfer.core.shell import quote
from batchinfer.ledger.claims import LAPSES_WITHOUT_STORAGE, LEASES_WITHOUT_STORAGE, Lease
from batchinfer.ledger.own_record import OwnRecord
from batchinfer.storage import Store
from batchinfer.worker.background import Background, Stopper, unless_stopped
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0
_POLL_SECONDS = 0.2


def check_stop_request(store: Store) -> None:
    """Raise StopRequested if `batchinfer stop` has stopped the run. Sends one request to storage."""
    try:
        store.stat(layout.STOP_KEY)
    except ObjectNotFound:
        return
    raise StopRequested(
        f"{store.url}: the run was stopped",
        hint=f"to go on: batchinfer stop --resume {quote(store.url)}",
    )


class Heartbeat:
    """Renews the worker's lease regularly, and requests a stop when the worker must end.

    What `telemetry` has counted is written beside the lease, with each heartbeat and at the end. Stop requests
    go to `stopper`.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        telemetry: Telemetry,
        stopper: Stopper,
        clock: Clock,
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._stopper = stopper
        self._clock = clock
        self._num_lapses, self._lapsed_at = 0, 0.0
        """Heartbeats in a row at whose end the lease had lapsed, and the monotonic seconds of the first."""
        self._turned_at = clock.monotonic()
        self._statistics = OwnRecord(store, layout.statistics_key(lease.worker_id), Worker)
        self.lease = lease

    def turned(self) -> None:
        """Note that the worker's main loop has turned. Without it the record is renewed for one lease at most."""
        self._turned_at = self._clock.monotonic()

    def start(
        self, background: Background, stack: contextlib.ExitStack, *, max_attempts: int
    ) -> None:
        """Take this worker's lease and begin the regular heartbeats.

        When `stack` unwinds, the heartbeats end and the record is written for the last time.

        Raises:
            NoProgress: the last `max_attempts` starts of this worker, or more, finished no new row.
            BatchinferError: the lease could not be taken, or the worker had to stop before it was taken.
        """
        telemetry = self._telemetry
        self._stopper.raise_if_requested()
        taking = background.submit(self._take)
        before, earlier = unless_stopped(background, self._stopper, taking, may_finish=True)
        telemetry.log_start(before)
        background.submit(partial(self._statistics.overwrite, telemetry.latest))
        stack.callback(self._end, background)
        if before is not None and before.state != "done" and before.attempts >= max_attempts:
            last = "" if earlier is None else earlier.reason
            reason = f" (the last one: {last})" if last else ""
            is_told = last.startswith("NoProgress")
            telemetry.end_untried(before, last if is_told else f"NoProgress{reason}")
            raise NoProgress(
                f"worker {self.lease.worker_id}: {before.attempts} starts in a row finished no new row{reason}",
                hint="fix the cause, then start it with a higher --max-attempts",
            )
        stack.callback(background.every(self.lease.heartbeat_seconds, self.beat))

    def _take(self) -> tuple[WorkerLease | None, Worker | None]:
        """Take the lease, and begin the statistics where the last start left them. Return what it left of both."""
        earlier = self._statistics.read()
        before = self.lease.take(lambda before: self._telemetry.begin(before, earlier))
        return before, earlier

    def beat(self) -> None:
        """Write the record once and look for a stop request. Any thread may call it.

        A storage error is only logged, unless heartbeats have failed for too long. Any other BatchinferError becomes a
        stop request.
        """
        lease = self.lease
        still_seconds = self._clock.monotonic() - self._turned_at
        if still_seconds >= lease.lease_seconds:
            logger.warning(
                "the worker's main loop has not turned for %.0f s, so its lease is not renewed",
                still_seconds,
            )
            return
        try:
            # The statistics are still this start's, if the machine was not frozen meanwhile.
            if lease.renew(self._telemetry.latest) and lease.is_held():
                self._statistics.overwrite(self._telemetry.up_to_date())
            check_stop_request(self._store)
        except StorageError as error:
            tell(logger, "heartbeat_failed", "heartbeat: {}", error, level=logging.WARNING)
        except BatchinferError as error:
            self._stopper.request(error)
        self._check_held()

    def _check_held(self) -> None:
        """Request a stop if, for long enough, the lease had lapsed at the end of every heartbeat.

        So it is with a bucket that is away, and with one that takes a heartbeat later than the lease lasts: the worker
        can publish nothing.
        """
        lease, now = self.lease, self._clock.monotonic()
        if lease.is_held():
            self._num_lapses = 0
            return
        self._lapsed_at = self._lapsed_at if self._num_lapses else now
        self._num_lapses += 1
        seconds = now - self._lapsed_at + lease.lease_seconds
        is_long = seconds >= LEASES_WITHOUT_STORAGE * lease.lease_seconds
        if is_long and self._num_lapses > LAPSES_WITHOUT_STORAGE:
            reason = f"{self._store.url}: for {seconds:.0f} s no heartbeat of {lease.worker_id} was written in time"
            hint = "start the same command again once the bucket can be written, or with more --lease-seconds"
            self._stopper.request(StorageError(reason, hint=hint))

    def _end(self, background: Background) -> None:
        """Write the record for the last time. Waits a few seconds at most, as the machine may soon be taken away."""
        record = self._telemetry.snapshot()

        def close() -> None:
            self.lease.close(record)
            self._statistics.overwrite(record)

        closing = background.submit(close)
        deadline = self._clock.monotonic() + _END_SECONDS
        while not closing.done() and self._clock.monotonic() < deadline:
            background.wait(_POLL_SECONDS)
        if closing.done():
            with contextlib.suppress(BatchinferError):
                closing.result()
        self._telemetry.log_end()
