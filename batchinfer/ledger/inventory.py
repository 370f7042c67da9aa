"""Lists and reads the objects that are stored under a run, for the commands that look at one. Read-only.

The memory needed grows with the number of chunks, but not with the size of the data. Other processes may create, change
and remove objects while they are read here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Claim, Marker, WorkerLease
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.ledger.silence import seems_gone
from batchinfer.storage import ObjectInfo, Store

T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K")

NUM_READERS = 24
"""Number of objects that are read at the same time."""


class SeenMarker(NamedTuple):
    """The newest marker of a chunk, as far as a listing shows it. `modified` is Unix seconds, 0 if unknown."""

    generation: int
    modified: float


class Found(NamedTuple, Generic[T]):
    """An object that was read. `record` is None if it cannot be read as one; `problem` says why."""

    info: ObjectInfo
    etag: str
    record: T | None
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class Listing:
    """The listed objects of a run, one field for each kind of object.

    The keys of `outputs` are file names. The keys of the other mappings are chunk names or worker ids.
    """

    run: ObjectInfo | None = None
    stop: ObjectInfo | None = None
    outputs: dict[str, ObjectInfo] = field(default_factory=dict)
    marker_infos: dict[str, dict[int, ObjectInfo]] = field(default_factory=dict)
    """Markers by chunk name and then by generation."""
    segments: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    claim_infos: dict[str, ObjectInfo] = field(default_factory=dict)
    worker_infos: dict[str, ObjectInfo] = field(default_factory=dict)
    statistics_infos: dict[str, ObjectInfo] = field(default_factory=dict)
    complete: list[ObjectInfo] = field(default_factory=list)
    probes: list[ObjectInfo] = field(default_factory=list)
    foreign: list[ObjectInfo] = field(default_factory=list)
    """Objects whose keys are not of a kind that batchinfer writes."""

    def add(self, infos: Iterable[ObjectInfo]) -> None:
        """Add listed objects, each to the field for its kind."""
        for info in infos:
            self._sort_in(info)

    def _sort_in(self, info: ObjectInfo) -> None:
        key = info.key
        marker = layout.parse_marker(key) if key.startswith(layout.OUTPUTS) else None
        segment = layout.parse_segment(key) if key.startswith(layout.CHECKPOINTS) else None
        if key == layout.RUN_KEY:
            self.run = info
        elif key == layout.STOP_KEY:
            self.stop = info
        elif marker is not None:
            self.marker_infos.setdefault(marker[0], {})[marker[1]] = info
        elif key.startswith(layout.OUTPUTS) and layout.chunk_of_output(key):
            self.outputs[key.removeprefix(layout.OUTPUTS)] = info
        elif segment is not None:
            self.segments.setdefault(segment[0], []).append(info)
        elif (name := _record_name(key, layout.CLAIMS)) is not None:
            self.claim_infos[name] = info
        elif (name := _record_name(key, layout.WORKERS, layout.STATISTICS_SUFFIX)) is not None:
            self.statistics_infos[name] = info
        elif (name := _record_name(key, layout.WORKERS)) is not None:
            self.worker_infos[name] = info
        elif key.startswith(layout.LAUNCHES):
            pass  # records of `launch`, kept for `status`
        elif key.startswith(layout.COMPLETE):
            self.complete.append(info)
        elif key.startswith(layout.PROBES):
            self.probes.append(info)
        else:
            self.foreign.append(info)


def _record_name(key: str, folder: str, suffix: str = ".json") -> str | None:
    name = key.removeprefix(folder)
    if not key.startswith(folder) or "/" in name or not name.endswith(suffix):
        return None
    return name.removesuffix(suffix)


@dataclass(slots=True, kw_only=True)
class Inventory(Listing):
    """A listing of all objects of a run, and the content of its markers, claims and workers' records."""

    now: float
    """Unix seconds at which the inventory was taken; the ages of heartbeats are counted from it."""
    patience_seconds: float
    """Seconds since its last heartbeat for which a worker counts as alive, even if its lease is shorter."""
    markers: dict[str, dict[int, Found[Marker]]] = field(default_factory=dict)
    claims: dict[str, Found[Claim]] = field(default_factory=dict)
    workers: dict[str, Found[WorkerLease]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether storage holds no run: neither run.json nor a worker's record nor a marker."""
        return self.run is None and not (self.workers or self.markers)

    def newest(self, name: str) -> Found[Marker] | None:
        """Return the marker of a chunk's highest generation; None if it has no marker."""
        generations = self.markers.get(name)
        return generations[max(generations)] if generations else None

    def current(self, name: str) -> Marker | None:
        """Return a chunk's newest marker. Return None if it cannot be read, or if its output is not listed."""
        newest = self.newest(name)
        marker = newest.record if newest else None
        return marker if marker is not None and marker.output in self.outputs else None

    def orphans(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield (chunk, output) for each output that no readable marker of any generation names."""
        every = (found for generations in self.markers.values() for found in generations.values())
        named = {found.record.output for found in every if found.record is not None}
        for file, info in self.outputs.items():
            if file not in named:
                yield layout.chunk_of_output(info.key), info

    def has_damaged_marker(self, name: str) -> bool:
        """Whether a marker of a chunk cannot be read. It may name any output of the chunk."""
        return any(found.record is None for found in self.markers.get(name, {}).values())

    def is_passed_over(self, name: str, left: ObjectInfo) -> bool:
        """Whether an orphan output or a segment is useless for good, even if its worker wakes up after a long sleep.

        `left` is useless if its chunk `name` has a valid marker without error rows, since such a chunk gets no further
        marker. A chunk whose marker counts error rows may be under repair. The objects of a repair are younger than
        that marker, so only an older object is useless there. No object is useless if its chunk has no valid marker.
        """
        marker, newest = self.current(name), self.newest(name)
        if marker is None or newest is None:
            return False
        return not marker.rows_error or 0 < left.modified < newest.info.modified

    def living(self) -> list[str]:
        """Return the ids of the workers that have not ended and whose last heartbeat is recent."""
        return [name for name, found in self.workers.items() if self._beats(found)]

    def _beats(self, found: Found[WorkerLease]) -> bool:
        record = found.record
        if record is None or record.state in ENDED_STATES:
            return False
        silent_seconds = self.now - found.info.modified
        return not seems_gone(
            silent_seconds, record.lease_seconds, patience_seconds=self.patience_seconds
        )

    def owner(self, name: str) -> str:
        """Return the id of the living worker that has claimed a chunk in its present start; empty if there is none."""
        claim = self.claims[name].record if name in self.claims else None
        found = self.workers.get(claim.worker) if claim is not None else None
        if claim is None or found is None or found.record is None:
            return ""
        return claim.worker if found.record.nonce == claim.nonce and self._beats(found) else ""


def take_inventory(store: Store, *, now: float, patience_seconds: float = 0.0) -> Inventory:
    """List all objects of a run, and read its markers, claims and workers' records.

    Args:
        store: The run's store.
        now: The time now, in Unix seconds.
        patience_seconds: Seconds since its last heartbeat for which a worker counts as alive, even if its lease is
            shorter.
    """
    found = Inventory(now=now, patience_seconds=patience_seconds)
    found.add(store.list(""))
    places = {
        (name, generation): info
        for name, generations in found.marker_infos.items()
        for generation, info in generations.items()
    }
    for (name, generation), marker in read_records(store, places, Marker).items():
        found.markers.setdefault(name, {})[generation] = marker
    # A worker writes its record before its first claim. Claims are read first, so that no claim is newer than its
    # owner's record here.
    found.claims.update(read_records(store, found.claim_infos, Claim))
    found.workers.update(read_records(store, found.worker_infos, WorkerLease))
    return found


def in_parallel(
    work: Callable[[S], T], items: Iterable[S], num_threads: int = NUM_READERS
) -> Iterator[T]:
    """Apply `work` to the items on several threads; yield the results in the order of the items.

    At most four items per thread are worked on ahead of the result that the caller takes, so memory stays bounded.

    Raises:
        Exception: `work` failed for an item. The error is raised where the item's result would have been yielded.
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


def read_records(
    store: Store, infos: Mapping[K, ObjectInfo], kind: type[T], num_readers: int = NUM_READERS
) -> dict[K, Found[T]]:
    """Read listed objects as records of a kind, by their names. Objects that are gone meanwhile are left out."""

    def read(info: ObjectInfo) -> Found[T] | None:
        try:
            data, etag = store.get(info.key)
        except ObjectNotFound:
            return None
        try:
            return Found(info, etag, codec.decode(data, kind, name=info.key))
        except InputError as error:
            return Found(info, etag, None, error.message.removeprefix(f"{info.key}: "))

    found = in_parallel(read, infos.values(), num_readers)
    return {name: each for name, each in zip(infos, found, strict=True) if each is not None}


def read_markers(
    store: Store, generations: Mapping[str, int], num_readers: int = NUM_READERS
) -> dict[str, Marker]:
    """Read markers, given by their chunk and generation: one request each.

    Those that are gone, cannot be read or name another chunk are left out; `verify` tells of them.
    """
    infos = {
        name: ObjectInfo(layout.marker_key(name, generation), 0, "")
        for name, generation in generations.items()
    }
    found = read_records(store, infos, Marker, num_readers)
    return {
        name: each.record
        for name, each in found.items()
        if each.record and layout.chunk_of_output(each.record.output) == name
    }
