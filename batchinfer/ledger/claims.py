"""Leases and claims: who may work on which chunk, without clocks or a coordinator.

* A worker's record (workers/<id>.json) is its one lease: taken at the start with the next epoch, renewed by
  if-match from a thread. A worker that finds a newer epoch of itself is a ghost and stops.
* A claim (claims/<chunk>.json) names a worker and its epoch, and is valid as long as that worker's lease. A claim
  lapses when the owner's record did not change for the length of a lease (by the observer's own monotonic clock), shows
  another epoch, or says that the owner has ended.

Claims only save work. Outputs are kept right by the create-only marker, not by claims.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

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
from batchinfer.core.records import Claim, Worker
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_WRITES = 5
"""Tries of one heartbeat while another thread or process writes the same record."""

ENDED_STATES = ("done", "stopped", "failed")

# --------------------------------------------------------------------------- when a worker is gone
#
# Every limit that decides this stands here, as a number of the other worker's leases.

HEARTBEATS_PER_LEASE = 4
"""Renewals of a worker's record in one lease, and looks of the others at it: three in a row may fail or be late."""
LEASES_WITHOUT_STORAGE = 10.0
"""Leases without a heartbeat after which a worker ends itself, since it cannot store anything. The limit is longer than
others wait before they take over, because a bucket that was away for some minutes is no reason to load an engine
again."""
LAPSES_WITHOUT_STORAGE = 3
"""Late heartbeats in a row that a worker survives however long they take: a machine that sleeps in the middle of a
heartbeat makes that one late."""
LEASES_UNTIL_GONE = 1.0
"""Leases without a heartbeat after which others may take a worker's chunks, by the watching process's clock."""
LEASES_UNTIL_HELPED = 1.0
"""Leases without a finished row after which others help a live worker with its chunks (docs/decisions/0005)."""
_LEASES_FOR_ONE_LOOK = LEASES_UNTIL_GONE + 1.0
"""Leases without a heartbeat after which a worker counts as gone for a reader that looks only once, like `clean`. The
limit is higher than LEASES_UNTIL_GONE, because such a reader has not watched the worker's record: it may have to
compare storage's clock with its own, and the two may differ."""
_LEASES_OF_A_STALL = 0.6
"""Share of a lease without a heartbeat that is worth a warning: two heartbeats in a row are missing."""


def has_lapsed(silent_seconds: float, *lease_seconds: float) -> bool:
    """Whether a silence is long enough for others to take a worker's chunks. Of several leases the longest counts."""
    return silent_seconds >= LEASES_UNTIL_GONE * max(lease_seconds)


def stands_still(rowless_seconds: float, *lease_seconds: float) -> bool:
    """Whether a live worker has finished no row for long enough to be helped. Of several leases the longest counts."""
    return rowless_seconds >= LEASES_UNTIL_HELPED * max(lease_seconds)


def seems_gone(silent_seconds: float, lease_seconds: float, *, patience_seconds: float) -> bool:
    """Whether a worker is gone for a reader that looks only once and waits for `patience_seconds` at least."""
    return silent_seconds > max(patience_seconds, _LEASES_FOR_ONE_LOOK * lease_seconds)


def seems_stalled(silent_seconds: float, lease_seconds: float) -> bool:
    """Whether heartbeats are missing, though others still respect the worker's claims."""
    return silent_seconds >= _LEASES_OF_A_STALL * lease_seconds


class Lease:
    """This worker's own record. `take` once, then `renew` every quarter of the lease, from any thread.

    Callers give the record's content; identity, epoch and beat are filled in here.
    """

    def __init__(
        self,
        store: Store,
        worker_id: str,
        clock: Clock,
        *,
        lease_seconds: float,
        nonce: str,
        is_safe: bool = True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._is_safe = is_safe
        self._is_closed = False
        self._key = layout.worker_key(worker_id)
        self._etag = ""
        self._beat = 0
        self._renewed = float("-inf")
        self._superseded = False
        self.worker_id = worker_id
        self.lease_seconds = lease_seconds
        self.nonce = nonce
        self.epoch = 0
        self.error: StorageError | None = None

    @property
    def writer(self) -> str:
        """Name of this process in keys. Without preconditions two processes may share an epoch, but not the nonce."""
        return self.worker_id if self._is_safe else f"{self.worker_id}.{self.nonce}"

    def take(self, describe: Callable[[Worker | None], Worker]) -> Worker | None:
        """Take the record with the next epoch. Return the record it replaces, if there was one.

        Effect: the earlier epoch of this worker, if it still runs, finds out at its next renewal.
        """
        while True:
            try:
                data, etag = self._store.get(self._key)
            except ObjectNotFound:
                self.epoch = 1
                try:
                    self._etag = self._store.create(self._key, self._body(describe(None)))
                except AlreadyExists:
                    continue
                self._renewed = self._clock.monotonic()
                return None
            before = codec.decode(data, Worker, name=self._key)
            self.epoch = before.epoch + 1
            self._etag = etag
            if self._write(describe(before)):
                self._renewed = self._clock.monotonic()
                return before

    def renew(self, record: Worker) -> None:
        """Write the record once more. A storage failure is kept in `error`, and tried again at the next renewal.

        Raises:
            Superseded: a newer epoch of this worker exists. Never takes it back.
        """
        started = self._clock.monotonic()
        try:
            for _ in range(_WRITES):
                if self._is_closed or self._write(record):
                    break
                self._settle()
            else:
                raise StorageError(f"{self._key}: the store keeps refusing its own etag")
        except StorageError as error:
            self.error = error
            logger.warning("heartbeat not written (%s); trying again", error)
            return
        self.error = None
        self._renewed = started

    def close(self, record: Worker) -> None:
        """Write the record for the last time: a renewal of another thread that is under way then gives up."""
        self._is_closed = True
        for _ in range(_WRITES):
            if self._write(record):
                return
            self._settle()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the start of the last heartbeat that was written."""
        return self._clock.monotonic() - self._renewed

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_seconds / HEARTBEATS_PER_LEASE

    @property
    def give_up_seconds(self) -> float:
        """Seconds without storage after which the worker is to end."""
        return LEASES_WITHOUT_STORAGE * self.lease_seconds

    def is_held(self) -> bool:
        """Whether others must still respect this worker's claims."""
        return not self._superseded and not has_lapsed(self.silent_seconds, self.lease_seconds)

    def require(self) -> None:
        """Raise unless this worker still holds its lease and has renewed it in time.

        Called right before anything is published.

        Raises:
            Superseded: a newer epoch of this worker exists.
            LeaseLapsed: the heartbeat was not renewed in time, because the machine was frozen or the bucket is away.
                Until the next renewal others may count this worker as gone, and `clean` its unpublished outputs as
                orphans; try again afterwards.
        """
        if self._superseded:
            raise Superseded(
                f"worker {self.worker_id}: epoch {self.epoch} was superseded by a newer start of the same worker",
                hint="nothing to do: the newer one goes on (several workers on one machine need a --worker-id each)",
            )
        if not self.is_held():
            raise LeaseLapsed(
                f"worker {self.worker_id}: its heartbeat was not renewed in {self.lease_seconds:g} s"
            )

    def _write(self, record: Worker) -> bool:
        """Write the record unless somebody else has changed it; return whether it was written."""
        try:
            if not self._is_safe:
                # A store without preconditions refuses nothing, or refuses the right etag too. On such a store there
                # are no claims, and the record only shows that the worker is alive.
                try:
                    self._etag = self._store.create(self._key, self._body(record))
                except AlreadyExists:
                    self._store.delete([self._key])
                    self._etag = self._store.create(self._key, self._body(record))
            elif self._etag:
                self._etag = self._store.replace(self._key, self._body(record), self._etag)
            else:
                self._etag = self._store.create(self._key, self._body(record))
        except (PreconditionFailed, AlreadyExists):
            return False
        return True

    def _settle(self) -> None:
        """Find out who changed the record: this process (a lost reply, or another thread), nobody, or a newer epoch."""
        try:
            data, etag = self._store.get(self._key)
        except ObjectNotFound:
            self._etag = ""  # removed by hand or by `clean`, so create it again
            return
        found = codec.decode(data, Worker, name=self._key)
        if found.nonce != self.nonce or found.epoch != self.epoch:
            self._superseded = True
            self.require()
        self._etag = etag

    def _body(self, record: Worker) -> bytes:
        self._beat += 1
        return codec.encode(
            msgspec.structs.replace(
                record,
                id=self.worker_id,
                epoch=self.epoch,
                nonce=self.nonce,
                beat=self._beat,
                heartbeat=self._clock.now(),
                lease_seconds=self.lease_seconds,
            )
        )


def decode_claim(data: bytes, key: str) -> Claim:
    """Decode a claim. A damaged claim counts as released, so that it does not block its chunk for ever."""
    try:
        claim = codec.decode(data, Claim, name=key)
        if claim.worker:
            layout.worker_key(claim.worker)
    except InputError as error:
        logger.warning("%s; it counts as released", error)
        return Claim(worker="", epoch=0, nonce="")
    return claim


class Taken(NamedTuple):
    """A claim that this worker has taken. `etag` is needed to release it; `is_new`: the chunk had no claim before."""

    etag: str
    is_new: bool = False


class Held(NamedTuple):
    """Another worker's claim, as it was read."""

    claim: Claim
    etag: str


class _Sighting(NamedTuple):
    etag: str
    since: float
    record: Worker


class Claims:
    """Takes, watches and releases claims in one worker's name, from any thread.

    When two threads look at one owner at once, they may see its record in the wrong order. The claim then lapses later,
    never sooner.
    """

    def __init__(
        self, store: Store, lease: Lease, clock: Clock, *, new_nonce: Callable[[], str]
    ) -> None:
        self._store = store
        self._lease = lease
        self._clock = clock
        self._new_nonce = new_nonce
        self._sightings: dict[str, _Sighting] = {}

    def take(self, name: str) -> Taken | Held:
        """Take a chunk's claim if nobody has it, or if it is this worker's own of an earlier epoch."""
        key = layout.claim_key(name)
        while True:
            try:
                return Taken(self._store.create(key, self._body()), is_new=True)
            except AlreadyExists:
                pass
            try:
                data, etag = self._store.get(key)
            except ObjectNotFound:
                continue  # the claim was removed in between
            claim = decode_claim(data, key)
            if claim.worker not in ("", self._lease.worker_id):
                return Held(claim, etag)
            if claim.worker and claim.epoch > self._lease.epoch:
                return Held(claim, etag)  # the claim of a newer epoch of this worker
            taken = self.take_over(name, etag)
            if taken is not None:
                return taken

    def take_over(self, name: str, etag: str) -> Taken | None:
        """Take a lapsed claim that was seen with `etag`; None if somebody was faster."""
        try:
            return Taken(self._store.replace(layout.claim_key(name), self._body(), etag))
        except PreconditionFailed:
            return None

    def is_mine(self, name: str) -> bool:
        """Whether the stored claim still names this worker at this epoch. Costs one request."""
        try:
            data = self._store.get(layout.claim_key(name)).data
        except ObjectNotFound:
            return False
        return self.is_ours(decode_claim(data, layout.claim_key(name)))

    def is_ours(self, claim: Claim) -> bool:
        """Whether a claim names this worker at this epoch. Pure."""
        return claim.worker == self._lease.worker_id and claim.epoch == self._lease.epoch

    def release(self, name: str, etag: str) -> None:
        """Give an unfinished chunk back, unless somebody took it over meanwhile."""
        body = codec.encode(Claim(worker="", epoch=0, nonce=self._new_nonce()))
        try:
            self._store.replace(layout.claim_key(name), body, etag)
        except PreconditionFailed:
            logger.info("%s: its claim is somebody else's by now", name)

    def look(self, held: Held) -> Worker | None:
        """Look at a claim's owner once. Return its record while the claim is alive, None once it has lapsed.

        Call it about `HEARTBEATS_PER_LEASE` times a lease: an owner is gone when its record did not change for a lease,
        by this machine's clock.
        """
        key = layout.worker_key(held.claim.worker)
        # The answer shows the record at some moment between the request and now, and this machine may have slept in
        # between. To be careful, a new version counts as seen now, and an unchanged version as seen at the time of the
        # request.
        asked = self._clock.monotonic()
        try:
            data, etag = self._store.get(key)
        except ObjectNotFound:
            return None
        seen = self._sightings.get(key)
        if seen is None or seen.etag != etag:
            try:
                record = codec.decode(data, Worker, name=key)
            except InputError as error:
                logger.warning("%s; its claims count as lapsed", error)
                return None
            seen = _Sighting(etag, self._clock.monotonic(), record)
            self._sightings[key] = seen
        record = seen.record
        if record.epoch > held.claim.epoch:
            return None
        if record.epoch == held.claim.epoch and record.state in ENDED_STATES:
            return None
        is_gone = has_lapsed(asked - seen.since, record.lease_seconds, self._lease.lease_seconds)
        return None if is_gone else record

    def _body(self) -> bytes:
        return codec.encode(
            Claim(worker=self._lease.worker_id, epoch=self._lease.epoch, nonce=self._new_nonce())
        )
