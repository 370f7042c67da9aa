"""Lists and reads the objects that are stored under a run, for the commands that look at runs. Read-only.

`take_inventory` lists everything and reads each marker, claim and worker's record. `verify`, `clean` and `collect` use
it. `RunReader` lists outputs/, checkpoints/ and workers/ at each look, but reads few markers and no claims. `status`
and `check` use it, because they must not send a request for each chunk; `report` adds `read_newest_markers`.

The memory needed grows with the number of chunks, but not with the size of the data. Other processes may create, change
and remove objects while they are read here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, InputError, NewerVersion, ObjectNotFound
from batchinfer.core.records import Claim, Job, Marker, Run, Worker, WorkerLease
from batchinfer.ledger.claims import ENDED_STATES, seems_gone
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.publishing import find_marker
from batchinfer.ledger.runs import find_job, job_sha256_of, no_run, read_run
from batchinfer.storage import ObjectInfo, Store

T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K")

NUM_READERS = 24
"""Number of objects that are read at the same time."""
_SHOWN = 3
"""Largest number of foreign files, or of chunks, that a note names."""
_MOST_COMPARED = 200
"""Largest number of markers that `RunReader` reads to compare them with run.json."""


class Damaged(NamedTuple):
    """An object that should be a record and cannot be read as one."""

    info: ObjectInfo
    problem: str


class Owner(NamedTuple):
    """A stored claim, and whether the worker that it names is alive and made it in its present start."""

    info: ObjectInfo
    claim: Claim
    is_alive: bool


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
    markers: dict[str, dict[int, Marker]] = field(default_factory=dict)
    damaged_markers: dict[str, dict[int, Damaged]] = field(default_factory=dict)
    claims: dict[str, Owner] = field(default_factory=dict)
    damaged_claims: dict[str, Damaged] = field(default_factory=dict)
    workers: dict[str, tuple[ObjectInfo, WorkerLease]] = field(default_factory=dict)
    damaged_workers: dict[str, Damaged] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether storage holds no run: neither run.json nor a worker's record nor a marker."""
        return self.run is None and not (self.workers or self.damaged_workers or self.marker_infos)

    def newest(self, name: str) -> int | None:
        """Return the highest generation of a chunk's markers, damaged ones included."""
        return max(self.marker_infos.get(name, ()), default=None)

    def current(self, name: str) -> Marker | None:
        """Return a chunk's newest marker. Return None if it cannot be read, or if its output is not listed."""
        newest = self.newest(name)
        marker = None if newest is None else self.markers.get(name, {}).get(newest)
        return marker if marker is not None and marker.output in self.outputs else None

    def orphans(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield (chunk, output) for each output that no readable marker of any generation names."""
        named = {
            marker.output
            for generations in self.markers.values()
            for marker in generations.values()
        }
        for file, info in self.outputs.items():
            if file not in named:
                yield layout.chunk_of_output(info.key), info

    def is_passed_over(self, name: str, left: ObjectInfo) -> bool:
        """Whether an orphan output or a segment is useless for good, even if its worker wakes up after a long sleep.

        `left` is useless if its chunk `name` has a valid marker without error rows, since such a chunk gets no further
        marker. A chunk whose marker counts error rows may be under repair. The objects of a repair are younger than
        that marker, so only an older object is useless there. No object is useless if its chunk has no valid marker.
        """
        marker, newest = self.current(name), self.newest(name)
        if marker is None or newest is None:
            return False
        return not marker.rows_error or 0 < left.modified < self.marker_infos[name][newest].modified

    def living(self) -> list[str]:
        """Return the ids of the workers that have not ended and whose last heartbeat is recent."""
        return [name for name, (info, record) in self.workers.items() if self._beats(info, record)]

    def _beats(self, info: ObjectInfo, record: WorkerLease) -> bool:
        if record.state in ENDED_STATES:
            return False
        # If the store gives no time for the record, the time in the record is used, which is by the worker's own clock.
        silent_seconds = self.now - (info.modified or record.heartbeat)
        return not seems_gone(
            silent_seconds, record.lease_seconds, patience_seconds=self.patience_seconds
        )

    def look_again(self, store: Store, worker: str) -> None:
        """Read a worker's record again, and keep its new content. A record that is gone or damaged is dropped."""
        key = layout.worker_key(worker)
        try:
            self.workers[worker] = (
                store.stat(key),
                codec.decode(store.get(key).data, WorkerLease, name=key),
            )
        except (ObjectNotFound, InputError):
            self.workers.pop(worker, None)

    def look_again_at_damaged(self, store: Store) -> None:
        """Read the damaged claims and workers' records again, and drop those that are gone or mended."""
        self.damaged_claims = _still_damaged(store, self.damaged_claims, Claim)
        self.damaged_workers = _still_damaged(store, self.damaged_workers, WorkerLease)

    def is_claim_alive(self, claim: Claim) -> bool:
        """Whether the worker that a claim names is alive, and made the claim in its present start.

        The worker's record must have been read after the claim.
        """
        found = self.workers.get(claim.worker)
        return found is not None and found[1].nonce == claim.nonce and self._beats(*found)


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
    _read_markers(store, found)
    # A worker writes its record before its first claim. Claims are read first, so that no claim is newer than its
    # owner's record here.
    claims = list(_read_records(store, found.claim_infos, Claim))
    for name, info, worker in _read_records(store, found.worker_infos, WorkerLease):
        if isinstance(worker, WorkerLease):
            found.workers[name] = (info, worker)
        else:
            found.damaged_workers[name] = Damaged(info, worker)
    for name, info, claim in claims:
        if isinstance(claim, Claim):
            found.claims[name] = Owner(info, claim, found.is_claim_alive(claim))
        else:
            found.damaged_claims[name] = Damaged(info, claim)
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


def _read_markers(store: Store, found: Inventory) -> None:
    places = {
        (name, generation): info
        for name, generations in found.marker_infos.items()
        for generation, info in generations.items()
    }
    for (name, generation), info, marker in _read_records(store, places, Marker):
        if isinstance(marker, Marker):
            found.markers.setdefault(name, {})[generation] = marker
        else:
            found.damaged_markers.setdefault(name, {})[generation] = Damaged(info, marker)
        del places[name, generation]
    for name, generation in places:  # These markers were removed after they had been listed.
        del found.marker_infos[name][generation]


def _read_records(
    store: Store, infos: Mapping[K, ObjectInfo], kind: type[T]
) -> Iterator[tuple[K, ObjectInfo, T | str]]:
    """Yield (name, listed object, record) for every object that still exists.

    If the object cannot be read as a record, a text that says what is wrong with it takes the record's place.
    """
    items = list(infos.items())
    found = in_parallel(lambda item: _read(store, item[1].key, kind), items)
    for (name, info), read in zip(items, found, strict=True):
        if read is not None:
            yield name, info, read[0]


def _still_damaged(
    store: Store, damaged: Mapping[str, Damaged], kind: type[T]
) -> dict[str, Damaged]:
    infos = {name: entry.info for name, entry in damaged.items()}
    return {
        name: Damaged(info, found)
        for name, info, found in _read_records(store, infos, kind)
        if isinstance(found, str)
    }


def _read(store: Store, key: str, kind: type[T]) -> tuple[T | str, str] | None:
    """Return a record and its etag. Return None if the object is gone.

    If the object cannot be read as a record, a text that says what is wrong with it takes the record's place.
    """
    try:
        data, etag = store.get(key)
    except ObjectNotFound:
        return None
    try:
        return codec.decode(data, kind, name=key), etag
    except InputError as error:
        return error.message.removeprefix(f"{key}: "), etag


# --------------------------------------------------------------------------- looks that do not read every marker


class SeenMarker(NamedTuple):
    """The newest marker of a chunk, as far as a listing shows it. `modified` is Unix seconds, 0 if unknown."""

    generation: int
    modified: float


def suspect_markers(store: Store, markers: Mapping[str, SeenMarker]) -> dict[str, int]:
    """Return the markers that may be of another configuration than run.json: their generations, by chunk.

    Workers write run.json before the first marker. So a marker that is older than run.json was written while another
    run.json stood there, if the run was not copied. A marker of the same time is suspect too, since buckets may cut
    times to whole seconds. Without run.json, and in a store that gives no times, all markers are suspect. Costs one
    request.
    """
    try:
        made = store.stat(layout.RUN_KEY).modified or float("inf")
    except ObjectNotFound:
        made = float("inf")
    return {name: marker.generation for name, marker in markers.items() if marker.modified <= made}


class SeenWorker(NamedTuple):
    """A worker's record.

    `modified`: Unix seconds at which the record was last written, by storage's clock; 0 if unknown. If the record was
    rewritten between the listing and the reading, this process's clock may give the time instead. `age_seconds`:
    Seconds since this process saw the record change; None if this process has not seen it change.
    """

    record: Worker
    modified: float
    age_seconds: float | None = None


def read_newest_markers(
    store: Store, markers: Mapping[str, SeenMarker]
) -> Iterator[tuple[str, Marker]]:
    """Yield (chunk, marker) for each marker that a listing has shown. Sends one request for each.

    Markers that are gone meanwhile or cannot be read are left out; `verify` tells of these.
    """
    items = list(markers.items())

    def read(item: tuple[str, SeenMarker]) -> tuple[Marker | str, str] | None:
        name, seen = item
        return _read(store, layout.marker_key(name, seen.generation), Marker)

    for (name, _), found in zip(items, in_parallel(read, items), strict=True):
        if found is not None and isinstance(found[0], Marker):
            yield name, found[0]


class Snapshot(NamedTuple):
    """One look at a run. `notes` are sentences about what is unusual in it."""

    url: str
    taken: float
    run: Run | None
    job: Job | None
    job_url: str
    is_stop_asked: bool
    markers: dict[str, SeenMarker]
    checkpointed: dict[str, int]
    """Number of finished rows in the segments of each chunk without a marker. A row that is in two segments counts
    twice."""
    output_bytes: int
    workers: list[SeenWorker]
    notes: list[str]


class _Seen(NamedTuple):
    """A worker's record as last read; `record` is None if the record is damaged.

    `changed`: Monotonic time at which this process saw the record change; None if it has not seen it change.
    """

    etag: str
    record: WorkerLease | Worker | None
    changed: float | None


class RunReader:
    """Looks at one run each time that `read` is called. Objects that never change are read only once.

    Args:
        store: The run's store.
        open_store: Opens the job's store from a URL.
        clock: Tells the time of each look.
        job_url: URL of the job; by default the folder above the run, or the URL that run.json records.
    """

    def __init__(
        self, store: Store, open_store: OpenStore, clock: Clock, job_url: str = ""
    ) -> None:
        self._store = store
        self._open_store = open_store
        self._clock = clock
        self._asked_job_url = job_url
        self._run: Run | None = None
        self._job: tuple[Job, str] | None = None
        self._job_etag = ""
        """Etag that job.json had before `_job` was read; empty if it is not known."""
        self._seen: dict[str, _Seen] = {}
        self._fingerprints: dict[tuple[str, int], str] = {}
        """Fingerprints in those markers that were compared with run.json, by chunk and generation."""

    def read(self) -> Snapshot:
        """Look at the run.

        Raises:
            InputError: There is no run, run.json is damaged or was edited, the run or its job has a newer format
                version, or the job that --job names cannot be read or is not the run's.
        """
        notes: list[str] = []
        if self._run is None:
            self._run = read_run(self._store)
        listing = Listing()
        for folder in (layout.OUTPUTS, layout.CHECKPOINTS, layout.WORKERS):
            listing.add(self._store.list(folder))
        foreign = [info.key for info in listing.foreign]
        markers = _newest_markers(listing, foreign)
        workers = self._read_workers(listing, notes)
        if self._run is None and not markers and not workers and not self._was_launched():
            raise no_run(self._store)
        job, job_url = self._find_job(notes)
        if foreign:
            shown = ", ".join(sorted(foreign)[:_SHOWN]) + (", …" if len(foreign) > _SHOWN else "")
            notes.append(f"{len(foreign)} foreign files, left alone: {shown}")
        if self._run is not None:
            notes += self._compare(markers, self._run.fingerprint)
        return Snapshot(
            url=self._store.url,
            taken=self._clock.now(),
            run=self._run,
            job=job,
            job_url=job_url,
            is_stop_asked=self._exists(layout.STOP_KEY),
            markers=markers,
            checkpointed=_checkpointed(listing, markers),
            output_bytes=sum(info.bytes for info in listing.outputs.values()),
            workers=workers,
            notes=notes,
        )

    # -- parts

    def _was_launched(self) -> bool:
        return next(iter(self._store.list(layout.LAUNCHES)), None) is not None

    def _exists(self, key: str) -> bool:
        try:
            self._store.stat(key)
        except ObjectNotFound:
            return False
        return True

    def _compare(self, markers: dict[str, SeenMarker], fingerprint: str) -> list[str]:
        """Return a list with one note if chunks were done with another configuration than that of run.json."""
        suspects = list(suspect_markers(self._store, markers).items())[:_MOST_COMPARED]
        unread = [each for each in suspects if each not in self._fingerprints]
        found = in_parallel(lambda each: find_marker(self._store, *each), unread)
        for each, marker in zip(unread, found, strict=True):
            self._fingerprints[each] = "" if marker is None else marker.fingerprint
        foreign = [
            each[0] for each in suspects if self._fingerprints[each] not in ("", fingerprint)
        ]
        if not foreign:
            return []
        shown = ", ".join(foreign[:_SHOWN]) + (", …" if len(foreign) > _SHOWN else "")
        note = (
            f"made with two configurations: at least {len(foreign)} chunks were done before run.json was replaced, "
            f"with other options ({shown}); workers refuse to go on, and `batchinfer verify` says how to fix it"
        )
        return [note]

    def _read_workers(self, listing: Listing, notes: list[str]) -> list[SeenWorker]:
        """Read the leases and the statistics that have changed since the last look."""
        leases, statistics = listing.worker_infos, listing.statistics_infos
        kinds: list[tuple[ObjectInfo, type[WorkerLease | Worker]]] = [
            *((info, WorkerLease) for info in leases.values()),
            *((info, Worker) for info in statistics.values()),
        ]
        stale = [each for each in kinds if not self._is_current(each[0])]
        found = in_parallel(lambda each: _read(self._store, each[0].key, each[1]), stale)
        for (info, _), read in zip(stale, found, strict=True):
            self._remember(info, read, notes)
        now = self._clock.monotonic()
        workers = []
        for name, info in leases.items():
            seen = self._seen.get(info.key)
            if seen is None or not isinstance(seen.record, WorkerLease):
                continue
            is_listed_version = seen.etag == info.etag
            age = None if seen.changed is None else now - seen.changed
            modified = info.modified
            if not is_listed_version and modified:  # renewed between the listing and now
                age, modified = 0.0, max(modified, self._clock.now())
            record = self._statistics_of(statistics.get(name), seen.record)
            workers.append(SeenWorker(record, modified, age))
        return workers

    def _statistics_of(self, info: ObjectInfo | None, lease: WorkerLease) -> Worker:
        """Return a worker's statistics; those of one that has counted nothing if there are none that can be read."""
        seen = None if info is None else self._seen.get(info.key)
        if seen is not None and isinstance(seen.record, Worker):
            return seen.record.with_lease(lease)
        begun = Worker(
            id=lease.id,
            nonce=lease.nonce,
            state=lease.state,
            started=lease.heartbeat,
            heartbeat=lease.heartbeat,
        )
        return begun.with_lease(lease)

    def _is_current(self, info: ObjectInfo) -> bool:
        seen = self._seen.get(info.key)
        return seen is not None and seen.etag == info.etag

    def _remember(
        self,
        info: ObjectInfo,
        found: tuple[WorkerLease | Worker | str, str] | None,
        notes: list[str],
    ) -> None:
        before = self._seen.pop(info.key, None)
        if found is None:
            return
        record, etag = found
        if isinstance(record, str):
            notes.append(f"left out: {self._store.url}/{info.key}: {record}")
        has_changed = before is not None and before.etag != etag
        changed = self._clock.monotonic() if has_changed else None
        self._seen[info.key] = _Seen(etag, None if isinstance(record, str) else record, changed)

    def _find_job(self, notes: list[str]) -> tuple[Job | None, str]:
        """Return the job and its URL. Return None and "" if the job is not found.

        The user may have named the job's URL. Otherwise the job is searched for, and each job.json that cannot be read
        adds a sentence to `notes`. A job.json is refused if it lacks the checksum that run.json records, if any.

        Raises:
            InputError: The job that the user named cannot be read or is not the run's, or a job.json has a newer format
                version.
        """
        if self._job is not None:
            etag = self._etag_of_job(self._job[1])
            if etag in ("", self._job_etag):
                return self._job
            self._job_etag = etag  # data were appended, perhaps
        wanted = job_sha256_of(self._run)

        def note(error: BatchinferError) -> None:
            if isinstance(error, NewerVersion):
                raise error
            notes.append(error.message)

        asked = self._asked_job_url
        found = find_job(
            self._run,
            self._store.url,
            self._open_store,
            asked_url=asked,
            on_error=None if asked else note,
        )
        if found is None or (wanted and found.sha256 != wanted):
            if asked and found is not None:
                raise InputError(
                    f"{asked}: is another job than the run's (its job.json has the sha256 {found.sha256[:12]}…, "
                    f"run.json says {wanted[:12]}…)",
                    hint="pass the --job that the run was made from",
                )
            notes.append("its job.json was not found, so totals are not known; pass --job URL")
            return None, ""
        if asked or self._run is not None:
            # This object reads run.json only once, so the run's job stays the same, but it may grow.
            self._job = (
                found.job,
                found.url,
            )
        return found.job, found.url

    def _etag_of_job(self, url: str) -> str:
        try:
            return self._open_store(url).stat(layout.JOB_KEY).etag
        except BatchinferError:
            return ""


def _checkpointed(listing: Listing, markers: Mapping[str, SeenMarker]) -> dict[str, int]:
    """Return the number of finished rows in the segments of each chunk without a marker."""
    found: dict[str, int] = {}
    for name, infos in listing.segments.items():
        if name not in markers:
            segments = [layout.parse_segment(info.key) for info in infos]
            found[name] = sum(segment.rows for segment in segments if segment is not None)
    return found


def _newest_markers(listing: Listing, foreign: list[str]) -> dict[str, SeenMarker]:
    """Return each chunk's newest marker. An empty object is no marker, so its key is added to `foreign`."""
    markers: dict[str, SeenMarker] = {}
    for name, generations in listing.marker_infos.items():
        whole = {each: info for each, info in generations.items() if info.bytes > 0}
        foreign += [info.key for info in generations.values() if not info.bytes]
        if whole:
            newest = max(whole)
            markers[name] = SeenMarker(newest, whole[newest].modified)
    return markers
