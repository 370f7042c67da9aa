"""Leases and claims: who may work on which chunk, without a coordinator and without a clock that workers share.

* A worker's record (workers/<id>.json) is the worker's lease. The worker takes it at its start, with a nonce of its
  own, and renews it from a thread by if-match. An earlier start of the same worker may still run: it finds another
  nonce in the record, and stops.
* A claim (claims/<chunk>.json) names a worker and the nonce of its start. It is valid as long as that worker's lease. A
  claim lapses in four cases: the worker's record did not change for the length of a lease (by the observer's own
  monotonic clock), the record shows another nonce, the record says that the worker has ended, or the record is gone or
  damaged.
* A worker takes back every claim in its own name, whatever its nonce, unless its record shows that a newer start of the
  same worker exists.

Claims only keep two workers from doing the same work. It is the create-only marker that keeps outputs right.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import (
    AlreadyExists,
    InputError,
    LeaseLapsed,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
    Superseded,
)
from batchinfer.core.events import event
from batchinfer.core.records import Claim, Worker, WorkerLease
from batchinfer.ledger.own_record import OwnRecord
from batchinfer.storage import ObjectInfo, Store
from batchinfer.storage.retrying import WRITES, keeps_refusing

logger = logging.getLogger(__name__)

ENDED_STATES = ("done", "stopped", "failed")
HEARTBEATS_PER_LEASE = 4
"""Heartbeats in one lease: so often a worker renews its record, and so often other workers read it. If three heartbeats
in a row fail, the lease lapses about when the fourth is due."""
LEASES_WITHOUT_STORAGE = 10.0
"""Number of leases without a heartbeat after which a worker ends itself, since it cannot store anything. That is more
than others wait for it, since loading an engine again costs more than waiting some minutes for a bucket."""
LAPSES_WITHOUT_STORAGE = 3
"""Number of late heartbeats in a row that never end a worker, however long they took. A machine that sleeps during
a heartbeat makes that heartbeat late, which is no sign of a slow bucket."""


class Lease:
    """This worker's own record. Call `take` once, then `renew` every `heartbeat_seconds`, from any thread.

    Callers give the worker's statistics, of which the record has state and attempts.
    """

    def __init__(
        self,
        store: Store,
        worker_id: str,
        clock: Clock,
        *,
        lease_seconds: float,
        nonce: str,
    ) -> None:
        self._own = OwnRecord(store, layout.worker_key(worker_id), WorkerLease)
        self._clock = clock
        self._is_closed = False
        self._beat = 0
        self._renewed = float("-inf")
        self._superseded = False
        self.worker_id = worker_id
        self.lease_seconds = lease_seconds
        self.nonce = nonce
        self.numbers = itertools.count(1)
        """Numbers that this start has given nothing yet: with the nonce they make names that nobody else has."""

    @property
    def writer(self) -> str:
        """Name of this process in keys: the worker's id and this start's nonce."""
        return f"{self.worker_id}.{self.nonce}"

    def take(self, describe: Callable[[WorkerLease | None], Worker]) -> WorkerLease | None:
        """Write this worker's record. Return the record that was there before, None if none was.

        A damaged record is replaced, as if there had been none. If an earlier start of this worker still runs, it finds
        another start's record at its next renewal, and stops.
        """
        for _ in range(WRITES):
            before = self._own.read()
            # Other workers may see the record long before its write is answered, so the lease counts from here.
            started = self._clock.monotonic()
            if self._write(describe(before)):
                self._renewed = started
                return before
        raise keeps_refusing(self._own.key)

    def renew(self, record: Worker) -> bool:
        """Write the record again, as a heartbeat. Return whether the lease was renewed; else the next call tries again.

        Raises:
            Superseded: A newer start of this worker exists. Its record is left as it is.
        """
        started = self._clock.monotonic()
        try:
            if not self._persist(record, is_last=False):
                return False  # the record is left as `close` writes it
        except StorageError as error:
            logger.warning("heartbeat not written (%s); trying again", error)
            return False
        # A renewal that a frozen machine has held up may end after one that began later.
        self._renewed = max(self._renewed, started)
        return True

    def close(self, record: Worker) -> None:
        """End the lease, and write the record for the last time. A renewal that another thread has begun then gives up.

        The lease ends first: others may take this worker's chunks as soon as they see the record.

        Raises:
            Superseded: As in `renew`.
        """
        self._is_closed = True
        self._persist(record, is_last=True)

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_seconds / HEARTBEATS_PER_LEASE

    def is_held(self) -> bool:
        """Whether others must still respect this worker's claims."""
        if self._superseded or self._is_closed:
            return False
        return self._clock.monotonic() - self._renewed < self.lease_seconds

    def require(self) -> None:
        """Raise an error unless this worker still holds its lease and has renewed it in time.

        It is called right before each write of a segment, an output or a marker.

        Raises:
            Superseded: A newer start of this worker exists.
            LeaseLapsed: The heartbeat was not renewed in time, as when the machine was frozen or the bucket is away.
                Until the next renewal, other workers may take this worker for gone, and `clean` may take its outputs
                without a marker for orphans. The caller may try again after the next renewal. Or the lease is closed.
        """
        self._refuse_superseded()
        if not self.is_held():
            late = f"its heartbeat was not renewed in {self.lease_seconds:g} s"
            what = "its lease has ended" if self._is_closed else late
            raise LeaseLapsed(f"worker {self.worker_id}: {what}")

    def confirm(self) -> str:
        """Check that no other start of this worker has replaced this worker's record. Sends one request.

        A record that is gone or damaged does not count as replaced. The next renewal writes it again.

        Returns:
            The record's etag; "" if it is gone.

        Raises:
            Superseded: The record is of another start of this worker.
        """
        found, etag = self._own.look()
        if found is not None and found.nonce != self.nonce:
            self._superseded = True
            self._refuse_superseded()
        return etag

    def _refuse_superseded(self) -> None:
        if self._superseded:
            raise Superseded(
                f"worker {self.worker_id}: was superseded by a newer start of the same worker",
                hint="nothing to do: the newer one goes on (several workers on one machine need a --worker-id each)",
            )

    def _persist(self, record: Worker, *, is_last: bool) -> bool:
        """Write the record, again if it was changed meanwhile. Return False if the lease was closed instead."""
        for _ in range(WRITES):
            if self._is_closed and not is_last:
                return False
            if self._write(record):
                return True
            # This process itself may have changed it (in another thread, or by a write whose reply was lost). Only a
            # record that is known to be its own may be replaced: heartbeats of other threads use the etag at once.
            self._own.expect(self.confirm())
        raise keeps_refusing(self._own.key)

    def _write(self, record: Worker) -> bool:
        """Write the record unless it has changed since this lease last read or wrote it. Return whether it was written.

        Raises:
            Superseded: A newer start of this worker was seen before. The record belongs to that start, even if it is
                damaged or gone now. If this start wrote it anew, the newer one would take itself for superseded.
        """
        self._refuse_superseded()
        self._beat += 1
        return self._own.write(
            WorkerLease(
                id=self.worker_id,
                nonce=self.nonce,
                state=record.state,
                heartbeat=self._clock.now(),
                lease_seconds=self.lease_seconds,
                beat=self._beat,
                attempts=record.attempts,
            )
        )


def decode_claim(data: bytes, key: str) -> Claim:
    """Decode a claim. A damaged claim counts as released, since it would otherwise block its chunk for ever."""
    try:
        claim = codec.decode(data, Claim, name=key)
        if claim.worker:
            layout.worker_key(claim.worker)
    except InputError as error:
        logger.warning("%s; it counts as released", error)
        return Claim(worker="", nonce="")
    return claim


class Taken(NamedTuple):
    """A claim that this worker has taken. `etag` is needed to release it."""

    etag: str


class Held(NamedTuple):
    """A stored claim that was read, with its etag. It may name another worker, this worker, or nobody if released."""

    claim: Claim
    etag: str


def read_claim(store: Store, name: str) -> Held | None:
    """Read a chunk's claim. Return None if the chunk has no claim."""
    key = layout.claim_key(name)
    try:
        data, etag = store.get(key)
    except ObjectNotFound:
        return None
    return Held(decode_claim(data, key), etag)


class Claims:
    """Takes, watches and releases claims in one worker's name, from any thread.

    Two threads that look at one owner at the same time may see its record's versions in the wrong order. The owner's
    claims then lapse too late for this worker, but not too early.
    """

    def __init__(self, store: Store, lease: Lease, clock: Clock) -> None:
        self._store = store
        self._lease = lease
        self._clock = clock
        self._sightings: dict[str, tuple[str, float]] = {}
        self._listed: dict[str, tuple[ObjectInfo, float]] = {}
        self._next_watch = float("-inf")

    def take(self, name: str) -> Taken | Held:
        """Take a chunk's claim if it is free, released, lapsed, or in this worker's own name.

        Any other claim is left as it is, and is returned as `Held`. Call this only for a chunk that this process has
        not opened.

        Raises:
            Superseded: The claim is in this worker's name, and a newer start of this worker exists.
        """
        key = layout.claim_key(name)
        for _ in range(WRITES):
            with contextlib.suppress(AlreadyExists):
                etag = self._store.create(key, self._body(self._lease.worker_id))
                return Taken(etag)
            held = read_claim(self._store, name)
            if held is None:
                continue  # The claim was removed between the two requests.
            owner = held.claim.worker
            if owner == self._lease.worker_id:
                # It is of an earlier start, or of a newer one, which writes its record before its first claim.
                self._lease.confirm()
            elif owner and self.look(held) is not None:
                return held
            with contextlib.suppress(PreconditionFailed):
                etag = self._store.replace(key, self._body(self._lease.worker_id), held.etag)
                logger.info(
                    "%s: taken over%s",
                    *(name, f" from worker {owner}" if owner else ""),
                    extra=event("chunk_taken_over", chunk=name, worker=owner),
                )
                return Taken(etag)
        raise keeps_refusing(key)

    def release(self, name: str, etag: str) -> bool:
        """Release a chunk's claim, so that any worker may take it.

        Returns False for a claim that was taken over meanwhile, or that is gone. It is left as it is.
        """
        try:
            self._store.replace(layout.claim_key(name), self._body(""), etag)
        except PreconditionFailed:
            logger.info("%s: its claim is somebody else's by now", name)
            return False
        return True

    def watch(self) -> None:
        """See which versions all workers' records have, in one listing, unless that was seen a heartbeat ago or less.

        So a claim that this worker has never read is known to have lapsed at the first look.
        """
        if self._clock.monotonic() < self._next_watch:
            return
        infos = list(self._store.list(layout.WORKERS))
        now = self._clock.monotonic()
        self._next_watch = now + self._lease.heartbeat_seconds
        for info in infos:
            if self._listed.setdefault(info.key, (info, now))[0].etag != info.etag:
                self._listed[info.key] = info, now

    def look(self, held: Held) -> WorkerLease | None:
        """Read the record of a claim's owner. Return the record if the claim is valid, None if it has lapsed.

        Callers look only at claims of chunks that this process has not opened. Such a claim in this worker's own name
        is of another start, or of a write that seemed to fail. It counts as lapsed, without a request.

        Callers repeat this about `HEARTBEATS_PER_LEASE` times a lease. An owner counts as gone once these calls have
        seen no change of its record for the length of a lease, by this machine's clock.
        """
        if held.claim.worker == self._lease.worker_id:
            return None
        key = layout.worker_key(held.claim.worker)
        # The store's answer shows the record as it was at some moment between the request and the answer. This machine
        # may have slept between the two. So the silence is measured as short as it can have been: a new version counts
        # as seen when the answer came, an unchanged version as seen when the request was sent.
        asked = self._clock.monotonic()
        try:
            data, etag = self._store.get(key)
        except ObjectNotFound:
            return None
        try:
            record = codec.decode(data, WorkerLease, name=key)
        except InputError as error:
            logger.warning("%s; its claims count as lapsed", error)
            return None
        seen, since = self._sightings.get(key, ("", 0.0))
        if seen != etag:
            since = self._clock.monotonic()
            self._sightings[key] = etag, since
        info, listed = self._listed.get(key, (None, 0.0))
        since = min(since, listed) if info and info.is_version(etag) else since
        if record.nonce != held.claim.nonce or record.state in ENDED_STATES:
            return None
        lease_seconds = max(record.lease_seconds, self._lease.lease_seconds)
        return record if asked - since < lease_seconds else None

    def _body(self, worker: str) -> bytes:
        """Return a claim with this text as its worker, which no other claim equals."""
        claim = Claim(worker=worker, nonce=self._lease.nonce, number=next(self._lease.numbers))
        return codec.encode(claim)
