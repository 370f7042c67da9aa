"""Looks at a run again and again without a request for each chunk, for `status`, `report` and `check`. Read-only.

outputs/, checkpoints/ and workers/ are listed at each look. Of the records only those of workers are read, and only if
they have changed; `report` adds `read_newest_markers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, InputError, NewerVersion, ObjectNotFound
from batchinfer.core.records import Job, Marker, Run, Worker, WorkerLease
from batchinfer.ledger.inventory import Listing, SeenMarker, read_records
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.runs import find_job, job_sha256_of, no_run, read_run
from batchinfer.storage import ObjectInfo, Store

_SHOWN = 3
"""Largest number of foreign files that a note names."""


class SeenWorker(NamedTuple):
    """A worker's record.

    `modified`: Unix seconds at which the record was last written, by storage's clock; 0 if unknown. If the record was
    rewritten between the listing and the reading, this process's clock may give the time instead. `age_seconds`:
    Seconds since this process saw the record change; None if this process has not seen it change.
    """

    record: Worker
    modified: float
    age_seconds: float | None = None


def read_newest_markers(store: Store, markers: Mapping[str, SeenMarker]) -> Iterator[Marker]:
    """Yield each marker that a listing has shown. Sends one request for each.

    Markers that are gone meanwhile or cannot be read are left out; `verify` tells of these.
    """
    infos = {
        name: ObjectInfo(layout.marker_key(name, seen.generation), 0, "")
        for name, seen in markers.items()
    }
    for found in read_records(store, infos, Marker).values():
        if found.record is not None:
            yield found.record


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
        if not (self._run or markers or workers or any(self._store.list(layout.LAUNCHES))):
            raise no_run(self._store)
        job, job_url = self._find_job(notes)
        if foreign:
            shown = ", ".join(sorted(foreign)[:_SHOWN]) + (", …" if len(foreign) > _SHOWN else "")
            notes.append(f"{len(foreign)} foreign files, left alone: {shown}")
        return Snapshot(
            url=self._store.url,
            taken=self._clock.now(),
            run=self._run,
            job=job,
            job_url=job_url,
            is_stop_asked=self._exists(layout.STOP_KEY),
            markers=markers,
            checkpointed=_checkpointed(listing, markers),
            workers=workers,
            notes=notes,
        )

    # -- parts

    def _exists(self, key: str) -> bool:
        try:
            self._store.stat(key)
        except ObjectNotFound:
            return False
        return True

    def _read_workers(self, listing: Listing, notes: list[str]) -> list[SeenWorker]:
        """Read the leases and the statistics that have changed since the last look."""
        leases = self._look_at(listing.worker_infos, WorkerLease, notes)
        statistics = self._look_at(listing.statistics_infos, Worker, notes)
        now = self._clock.monotonic()
        workers = []
        for name, seen in leases.items():
            lease, info = seen.record, listing.worker_infos[name]
            if not isinstance(lease, WorkerLease):
                continue
            age = None if seen.changed is None else now - seen.changed
            modified = info.modified
            if seen.etag != info.etag and modified:  # renewed between the listing and now
                age, modified = 0.0, max(modified, self._clock.now())
            counted = statistics[name].record if name in statistics else None
            if not isinstance(counted, Worker):  # one that has counted nothing
                begun = lease.heartbeat
                counted = Worker(
                    id=lease.id, nonce="", state=lease.state, started=begun, heartbeat=begun
                )
            workers.append(SeenWorker(counted.with_lease(lease), modified, age))
        return workers

    def _look_at(
        self, infos: Mapping[str, ObjectInfo], kind: type[WorkerLease | Worker], notes: list[str]
    ) -> dict[str, _Seen]:
        """Return the objects that are there, by name. Those that have not changed are not read again."""
        known = {name: self._seen.get(info.key) for name, info in infos.items()}
        stale = {
            name: info
            for name, info in infos.items()
            if (before := known[name]) is None or before.etag != info.etag
        }
        fresh = read_records(self._store, stale, kind)
        for name, info in stale.items():
            self._seen.pop(info.key, None)
            if (found := fresh.get(name)) is None:
                continue
            if found.record is None:
                notes.append(f"left out: {self._store.url}/{info.key}: {found.problem}")
            before = known[name]
            has_changed = before is not None and before.etag != found.etag
            changed = self._clock.monotonic() if has_changed else None
            self._seen[info.key] = _Seen(found.etag, found.record, changed)
        return {
            name: self._seen[info.key] for name, info in infos.items() if info.key in self._seen
        }

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
            self._job = (found.job, found.url)
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
