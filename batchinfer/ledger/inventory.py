"""Lists and reads the objects that are stored under a run, for the commands that look at one. Read-only.

The memory needed grows with the number of chunks, but not with the size of the data. Other processes may create, change
and remove objects while they are read here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Claim, Marker, WorkerLease
from batchinfer.ledger.claims import ENDED_STATES
from batchinfer.storage import ObjectInfo, Store

T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K")

_LEASES_FOR_ONE_LOOK = 2.0
"""Number of leases without a heartbeat after which a command that looks only once, like `clean`, takes a worker for
gone. It is more than one, because the command compares storage's clock with its own, and the two may differ."""
NUM_READERS = 24
"""Number of objects that are read at the same time."""


class Found(NamedTuple, Generic[T]):
    """An object that was read. `record` is None if it cannot be read as one; `problem` says why."""

    info: ObjectInfo
    record: T | None
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class Inventory:
    """The objects of a run, and the content of its markers, claims and workers' records.

    The keys of `outputs` are file names. The keys of the other mappings are chunk names or worker ids.
    """

    now: float
    """Unix seconds at which the inventory was taken; the ages of heartbeats are counted from it."""
    patience_seconds: float
    """Seconds since its last heartbeat for which a worker counts as alive, even if its lease is shorter."""
    is_stopped: bool
    """Whether there is a stop request."""
    outputs: dict[str, ObjectInfo]
    segments: dict[str, list[ObjectInfo]]
    complete: list[ObjectInfo]
    """The notes that all chunks of a block are done."""
    markers: dict[str, dict[int, Found[Marker]]]
    """Markers by chunk name and then by generation."""
    claims: dict[str, Found[Claim]]
    workers: dict[str, Found[WorkerLease]]

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

    def useless(self, *, is_at_rest: bool = False) -> Iterator[tuple[str, str, ObjectInfo]]:
        """Yield what neither workers nor readers need: the name of its kind, its chunk, and the object.

        What is of a chunk that a living worker has claimed is left out.

        Args:
            is_at_rest: Whether no worker runs. Segments that are newer than the marker of a chunk with error rows may
                else belong to a repair that has not ended.
        """
        for name, info in self.orphans():
            # An unreadable marker of the chunk may name this output, and so may one of a generation without a marker.
            markers = self.markers.get(name, {})
            may_be_named = self.has_damaged_marker(name) or max(markers, default=0) >= len(markers)
            is_in_use = may_be_named or self.owner(name)
            if self.is_passed_over(name, info) and not is_in_use:
                yield "orphan outputs", name, info
        for name in {**self.segments, **self.claims}:
            if self.current(name) is None or self.owner(name):
                continue
            for info in self.segments.get(name, ()):
                if is_at_rest or self.is_passed_over(name, info):
                    yield "segments of done chunks", name, info
            if name in self.claims:
                yield "claims of done chunks", name, self.claims[name].info

    def living(self) -> list[str]:
        """Return the ids of the workers that have not ended and whose last heartbeat is recent."""
        return [name for name, found in self.workers.items() if self._beats(found)]

    def _beats(self, found: Found[WorkerLease]) -> bool:
        record = found.record
        if record is None or record.state in ENDED_STATES:
            return False
        patience_seconds = max(self.patience_seconds, _LEASES_FOR_ONE_LOOK * record.lease_seconds)
        return self.now - found.info.modified <= patience_seconds

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
    is_stopped, complete = False, list[ObjectInfo]()
    outputs, segments = dict[str, ObjectInfo](), defaultdict[str, list[ObjectInfo]](list)
    markers = defaultdict[str, dict[int, Found[Marker]]](dict)
    marker_infos = dict[tuple[str, int], ObjectInfo]()
    claim_infos, worker_infos = dict[str, ObjectInfo](), dict[str, ObjectInfo]()
    for info in store.list(""):
        top, slash, name = info.key.partition("/")
        folder, record = top + slash, name.removesuffix(".json")
        if info.key == layout.STOP_KEY:
            is_stopped = True
        elif folder == layout.OUTPUTS and (marker := layout.parse_marker(info.key)):
            marker_infos[marker] = info
        elif folder == layout.OUTPUTS and layout.chunk_of_output(info.key):
            outputs[name] = info
        elif folder == layout.CHECKPOINTS and (segment := layout.parse_segment(info.key)):
            segments[segment.chunk].append(info)
        elif folder == layout.CLAIMS and record != name:
            claim_infos[record] = info
        elif folder == layout.WORKERS and record != name:
            if not name.endswith(layout.STATISTICS_SUFFIX):
                worker_infos[record] = info
        elif folder == layout.COMPLETE:
            complete.append(info)
    for (name, generation), read in read_records(store, marker_infos, Marker).items():
        markers[name][generation] = read
    return Inventory(
        now=now,
        patience_seconds=patience_seconds,
        is_stopped=is_stopped,
        outputs=outputs,
        segments=dict(segments),
        complete=complete,
        markers=dict(markers),
        # A worker writes its record before its first claim. Claims are read first, so that no claim is newer than its
        # owner's record here.
        claims=read_records(store, claim_infos, Claim),
        workers=read_records(store, worker_infos, WorkerLease),
    )


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
            data = store.get(info.key).data
        except ObjectNotFound:
            return None
        try:
            return Found(info, codec.decode(data, kind, name=info.key))
        except InputError as error:
            return Found(info, None, error.message.removeprefix(f"{info.key}: "))

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
