"""What lies under a run, sorted by what it is: one listing, and the markers, claims and workers read in parallel.

Read-only. Memory grows with the number of chunks, as job.json does, never with the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Claim, Marker, Worker
from batchinfer.ledger.claims import ENDED_STATES, seems_gone
from batchinfer.storage import ObjectInfo, Store

T = TypeVar("T")
S = TypeVar("S")

NUM_READERS = 24


class Damaged(NamedTuple):
    """An object that should be a record and cannot be read as one."""

    info: ObjectInfo
    problem: str


class Owner(NamedTuple):
    """A claim as it lies there, and whether somebody alive stands behind it."""

    info: ObjectInfo
    claim: Claim
    is_alive: bool


@dataclass(slots=True)
class Inventory:
    """Every object below a run. Keys of `outputs` are file names, of the other mappings chunks (or worker ids)."""

    now: float
    patience_seconds: float
    run: ObjectInfo | None = None
    stop: ObjectInfo | None = None
    outputs: dict[str, ObjectInfo] = field(default_factory=dict)
    marker_infos: dict[str, dict[int, ObjectInfo]] = field(default_factory=dict)
    markers: dict[str, dict[int, Marker]] = field(default_factory=dict)
    damaged_markers: dict[str, dict[int, Damaged]] = field(default_factory=dict)
    segments: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    claims: dict[str, Owner] = field(default_factory=dict)
    damaged_claims: dict[str, Damaged] = field(default_factory=dict)
    workers: dict[str, tuple[ObjectInfo, Worker]] = field(default_factory=dict)
    damaged_workers: dict[str, Damaged] = field(default_factory=dict)
    probes: list[ObjectInfo] = field(default_factory=list)
    unknown: list[ObjectInfo] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a run is there."""
        return self.run is None and not (self.workers or self.damaged_workers or self.marker_infos)

    def newest(self, name: str) -> int | None:
        """The highest generation of a chunk's markers, damaged ones included."""
        return max(self.marker_infos.get(name, ()), default=None)

    def standing(self, name: str) -> Marker | None:
        """The marker that counts: the newest, if it can be read and its output is listed."""
        newest = self.newest(name)
        marker = None if newest is None else self.markers.get(name, {}).get(newest)
        return marker if marker is not None and marker.output in self.outputs else None

    def orphans(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Outputs that no marker of any generation names, with the chunk that each belongs to."""
        named = {
            marker.output
            for generations in self.markers.values()
            for marker in generations.values()
        }
        for file, info in self.outputs.items():
            if file not in named:
                candidates = layout.chunks_of_output(info.key)
                known = [name for name in candidates if name in self.marker_infos]
                yield known[0] if known else candidates[-1], info

    def is_passed_over(self, name: str, left: ObjectInfo) -> bool:
        """Whether no marker can come to vouch for an orphan or a segment any more, however long its worker sleeps.

        Markers are create-only, and a chunk without one may still get it. So may one with error rows, of the next
        generation; what is made for that is younger than the marker that was read before.
        """
        marker, newest = self.standing(name), self.newest(name)
        if marker is None or newest is None:
            return False
        return not marker.rows_error or 0 < left.modified < self.marker_infos[name][newest].modified

    def living(self) -> list[str]:
        """Ids of the workers whose heart still beat a short while ago."""
        return [name for name, (info, record) in self.workers.items() if self._beats(info, record)]

    def _beats(self, info: ObjectInfo, record: Worker) -> bool:
        if record.state in ENDED_STATES:
            return False
        # A store that gives no times leaves the worker's own clock.
        silent_seconds = self.now - (info.modified or record.heartbeat)
        return not seems_gone(
            silent_seconds, record.lease_seconds, patience_seconds=self.patience_seconds
        )

    def look_again(self, store: Store, worker: str) -> None:
        """Read a worker's record as it is by now."""
        key = layout.worker_key(worker)
        try:
            self.workers[worker] = (
                store.stat(key),
                codec.decode(store.get(key).data, Worker, name=key),
            )
        except (ObjectNotFound, InputError):
            self.workers.pop(worker, None)

    def is_claim_alive(self, claim: Claim) -> bool:
        """Whether a claim's worker lives, at the claim's epoch."""
        found = self.workers.get(claim.worker)
        return found is not None and found[1].epoch <= claim.epoch and self._beats(*found)


def take_inventory(store: Store, *, now: float, patience_seconds: float = 0.0) -> Inventory:
    """List a run and read its markers, claims and workers.

    Args:
        store: The run.
        now: Unix seconds.
        patience_seconds: A worker whose record is younger than this, or than two leases, counts as alive.
    """
    found = Inventory(now=now, patience_seconds=patience_seconds)
    claims: dict[str, ObjectInfo] = {}
    workers: dict[str, ObjectInfo] = {}
    for info in store.list(""):
        _sort_in(found, claims, workers, info)
    _read_markers(store, found)
    for name, info, worker in _read_records(store, workers, Worker):
        if isinstance(worker, Worker):
            found.workers[name] = (info, worker)
        else:
            found.damaged_workers[name] = Damaged(info, worker)
    for name, info, claim in _read_records(store, claims, Claim):
        if isinstance(claim, Claim):
            found.claims[name] = Owner(info, claim, found.is_claim_alive(claim))
        else:
            found.damaged_claims[name] = Damaged(info, claim)
    return found


def in_parallel(
    work: Callable[[S], T], items: Iterable[S], num_threads: int = NUM_READERS
) -> Iterator[T]:
    """`map` over threads, in order, with at most a few items per thread under way: results never pile up.

    Raises:
        Exception: whatever `work` raised, when its turn comes.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="batchinfer-read") as pool:
        waiting = iter(items)
        pending: deque[Future[T]] = deque(
            pool.submit(work, item) for item in islice(waiting, 4 * num_threads)
        )
        try:
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(work, item) for item in islice(waiting, 1))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


def _sort_in(
    found: Inventory,
    claims: dict[str, ObjectInfo],
    workers: dict[str, ObjectInfo],
    info: ObjectInfo,
) -> None:
    key = info.key
    marker = layout.parse_marker(key) if key.startswith(layout.OUTPUTS) else None
    segment = layout.parse_segment(key) if key.startswith(layout.CHECKPOINTS) else None
    if key == layout.RUN_KEY:
        found.run = info
    elif key == layout.STOP_KEY:
        found.stop = info
    elif marker is not None:
        found.marker_infos.setdefault(marker[0], {})[marker[1]] = info
    elif key.startswith(layout.OUTPUTS) and layout.chunks_of_output(key):
        found.outputs[key.removeprefix(layout.OUTPUTS)] = info
    elif segment is not None:
        found.segments.setdefault(segment[0], []).append(info)
    elif (name := _record_name(key, layout.CLAIMS)) is not None:
        claims[name] = info
    elif (name := _record_name(key, layout.WORKERS)) is not None:
        workers[name] = info
    elif key.startswith(layout.PROBES):
        found.probes.append(info)
    else:
        found.unknown.append(info)


def _record_name(key: str, folder: str) -> str | None:
    name = key.removeprefix(folder)
    if not key.startswith(folder) or "/" in name or not name.endswith(".json"):
        return None
    return name.removesuffix(".json")


def _read_markers(store: Store, found: Inventory) -> None:
    places = [
        (name, generation, info)
        for name, generations in found.marker_infos.items()
        for generation, info in generations.items()
    ]

    def read(place: tuple[str, int, ObjectInfo]) -> Marker | str | None:
        return _read(store, place[2].key, Marker)

    for (name, generation, info), marker in zip(places, in_parallel(read, places), strict=True):
        if marker is None:  # removed since it was listed
            del found.marker_infos[name][generation]
        elif isinstance(marker, Marker):
            found.markers.setdefault(name, {})[generation] = marker
        else:
            found.damaged_markers.setdefault(name, {})[generation] = Damaged(info, marker)


def _read_records(
    store: Store, infos: dict[str, ObjectInfo], kind: type[T]
) -> Iterator[tuple[str, ObjectInfo, T | str]]:
    def read(info: ObjectInfo) -> T | str | None:
        return _read(store, info.key, kind)

    for (name, info), record in zip(infos.items(), in_parallel(read, infos.values()), strict=True):
        if record is not None:
            yield name, info, record


def _read(store: Store, key: str, kind: type[T]) -> T | str | None:
    """A record; None if it is gone; what is wrong with it, if it cannot be read."""
    try:
        return codec.decode(store.get(key).data, kind, name=key)
    except ObjectNotFound:
        return None
    except InputError as error:
        return error.message.removeprefix(f"{key}: ")
