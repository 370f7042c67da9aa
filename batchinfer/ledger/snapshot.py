"""What a run's bucket says right now: run.json, job.json, the workers' records and the names of markers. Read-only.

Never opens an output or a marker, so it costs O(listing pages + workers) requests, whatever the run's size. Objects may
come, change and go while it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import BatchinferError, InputError, NewerVersion, ObjectNotFound
from batchinfer.core.records import Job, Run, Worker
from batchinfer.ledger.jobs import load_job
from batchinfer.ledger.runs import no_run, read_run
from batchinfer.ledger.scope import job_places, job_sha256_of
from batchinfer.storage import ObjectInfo, Store

_READERS = 16
_SHOWN = 3


class SeenMarker(NamedTuple):
    """The newest marker of a chunk, by its listing. `modified` is Unix seconds, 0 if unknown."""

    generation: int
    modified: float


class SeenWorker(NamedTuple):
    """A worker's record.

    `modified`: when storage took it in, by storage's clock; 0 if unknown. `age_seconds`: how long ago we ourselves saw
    it change, None if we have not.
    """

    record: Worker
    modified: float
    age_seconds: float | None = None


class Snapshot(NamedTuple):
    """One look at a run. `notes` are sentences about what is odd in it."""

    url: str
    taken: float
    run: Run | None
    job: Job | None
    job_url: str
    is_stop_asked: bool
    markers: dict[str, SeenMarker]
    output_bytes: int
    workers: list[SeenWorker]
    notes: list[str]


class _Read(NamedTuple):
    """A record as last read: `changed` is our monotonic time of a change that we witnessed."""

    etag: str
    record: Worker | None
    changed: float | None


class RunReader:
    """Looks at one run, again and again if asked. What cannot change is read once.

    Args:
        store: The run's.
        open_store: Opens the job's.
        clock: Time now, against which records are fresh or old.
        job_url: Where the job lies; by default where the run lies below it, or as run.json says.
    """

    def __init__(
        self, store: Store, open_store: Callable[[str], Store], clock: Clock, job_url: str = ""
    ) -> None:
        self._store = store
        self._open_store = open_store
        self._clock = clock
        self._asked_job_url = job_url
        self._run: Run | None = None
        self._job: tuple[Job, str] | None = None
        self._seen: dict[str, _Read] = {}

    def read(self) -> Snapshot:
        """Look at the run.

        Raises:
            InputError: there is no run, it or its job is of a newer format version, or --job is another run's.
        """
        notes: list[str] = []
        if self._run is None:
            self._run = read_run(self._store)
        markers, output_bytes, foreign = self._list_outputs()
        workers = self._read_workers(notes, foreign)
        if self._run is None and not markers and not workers:
            raise no_run(self._store)
        job, job_url = self._find_job(notes)
        if foreign:
            shown = ", ".join(foreign[:_SHOWN]) + (", …" if len(foreign) > _SHOWN else "")
            notes.append(f"{len(foreign)} foreign files, left alone: {shown}")
        return Snapshot(
            url=self._store.url,
            taken=self._clock.now(),
            run=self._run,
            job=job,
            job_url=job_url,
            is_stop_asked=self._exists(layout.STOP_KEY),
            markers=markers,
            output_bytes=output_bytes,
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

    def _list_outputs(self) -> tuple[dict[str, SeenMarker], int, list[str]]:
        """Markers by chunk name, bytes of all outputs, and what is neither."""
        markers: dict[str, SeenMarker] = {}
        foreign: list[str] = []
        output_bytes = 0
        for info in self._store.list(layout.OUTPUTS):
            marker = layout.parse_marker(info.key)
            if marker is not None and info.bytes > 0:
                name, generation = marker
                if name not in markers or generation > markers[name].generation:
                    markers[name] = SeenMarker(generation, info.modified)
            elif marker is None and info.key.endswith(".jsonl"):
                output_bytes += info.bytes
            else:
                foreign.append(info.key)
        return markers, output_bytes, foreign

    def _read_workers(self, notes: list[str], foreign: list[str]) -> list[SeenWorker]:
        listed = []
        for info in self._store.list(layout.WORKERS):
            if info.key.endswith(".json") and "/" not in info.key.removeprefix(layout.WORKERS):
                listed.append(info)
            else:
                foreign.append(info.key)
        stale = [info for info in listed if not self._is_current(info)]
        with ThreadPoolExecutor(_READERS) as pool:
            for info, found in zip(stale, pool.map(self._get, stale), strict=True):
                self._remember(info, found, notes)
        now = self._clock.monotonic()
        workers = []
        for info in listed:
            seen = self._seen.get(info.key)
            if seen is None or seen.record is None:
                continue
            is_listed_version = seen.etag == info.etag
            age = None if seen.changed is None else now - seen.changed
            modified = info.modified
            if not is_listed_version and modified:  # renewed between the listing and now
                age, modified = 0.0, max(modified, self._clock.now())
            workers.append(SeenWorker(seen.record, modified, age))
        return workers

    def _is_current(self, info: ObjectInfo) -> bool:
        seen = self._seen.get(info.key)
        return seen is not None and seen.etag == info.etag

    def _get(self, info: ObjectInfo) -> tuple[bytes, str] | None:
        try:
            return self._store.get(info.key)
        except ObjectNotFound:
            return None  # removed meanwhile

    def _remember(
        self, info: ObjectInfo, found: tuple[bytes, str] | None, notes: list[str]
    ) -> None:
        before = self._seen.pop(info.key, None)
        if found is None:
            return
        data, etag = found
        record: Worker | None
        try:
            record = codec.decode(data, Worker, name=f"{self._store.url}/{info.key}")
        except InputError as error:
            notes.append(f"left out: {error.message}")
            record = None
        has_changed = before is not None and before.etag != etag
        changed = self._clock.monotonic() if has_changed else None
        self._seen[info.key] = _Read(etag, record, changed)

    def _find_job(self, notes: list[str]) -> tuple[Job | None, str]:
        if self._job is None and self._asked_job_url:
            self._job = self._asked_job()
        if self._job is not None:
            return self._job
        job, url = self._guess_job(notes)
        if job is None:
            notes.append("its job.json was not found, so totals are not known; pass --job URL")
        elif self._run is not None:
            self._job = job, url  # what run.json says does not change any more
        return job, url

    def _asked_job(self) -> tuple[Job, str]:
        url = self._asked_job_url
        found = load_job(url, self._open_store)
        if found is None:
            raise InputError(f"{url}: no job.json there", hint="pass the URL that `split` wrote to")
        wanted = job_sha256_of(self._run)
        if wanted and wanted != found[1]:
            raise InputError(
                f"{url}: is another job than the run's (its job.json has the sha256 {found[1][:12]}…, "
                f"run.json says {wanted[:12]}…)",
                hint="pass the --job that the run was made from",
            )
        return found[0], url

    def _guess_job(self, notes: list[str]) -> tuple[Job | None, str]:
        """The job that the run lies in, or that run.json names; only if its checksum is the run's.

        One that is there and cannot be read is noted.
        """
        wanted = job_sha256_of(self._run)
        for url in job_places(self._run, self._store.url):
            try:
                found = load_job(url, self._open_store)
            except NewerVersion:
                raise
            except BatchinferError as error:
                notes.append(error.message)
                continue
            if found is not None and wanted in ("", found[1]):
                return found[0], url
        return None, ""
