"""A look at a run without a request for each chunk, for `status`, `report` and `check`. Read-only.

outputs/, checkpoints/ and workers/ are listed, and the workers' records are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from batchinfer.core import layout
from batchinfer.core.clock import Clock
from batchinfer.core.records import Job, Run, Worker, WorkerLease
from batchinfer.ledger.inventory import Found, read_records
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.runs import find_job, no_run, read_run
from batchinfer.ledger.survey import chunks_with_checkpoints, newest_markers
from batchinfer.storage import Store


class SeenWorker(NamedTuple):
    """A worker's record. `modified`: time of its last heartbeat, in Unix seconds by storage's clock; 0 if unknown."""

    record: Worker
    modified: float


class Snapshot(NamedTuple):
    """One look at a run. `notes` are sentences about what is left out of it."""

    url: str
    taken: float
    run: Run | None
    """None before the first worker's engine has loaded."""
    job: Job
    job_url: str
    is_stop_asked: bool
    markers: dict[str, int]
    """Generation of the newest marker of each chunk of the job that has one."""
    checkpointed: dict[str, int]
    """Number of finished rows in the segments of each chunk. A row that is in two segments counts twice."""
    workers: list[SeenWorker]
    notes: list[str]


def look_at(store: Store, open_store: OpenStore, clock: Clock, job_url: str = "") -> Snapshot:
    """Look at a run.

    Args:
        store: The run's store.
        open_store: Opens the job's store from a URL.
        clock: Tells the time of the look.
        job_url: URL of the job; by default the folder above the run, or the URL that run.json records.

    Raises:
        InputError: There is no run, or its job is not found or is another; run.json or job.json is damaged, was edited,
            or has a newer format version.
    """
    run = read_run(store)
    workers, notes = read_workers(store)
    checkpointed = chunks_with_checkpoints(store)
    markers = newest_markers(store)  # last: a chunk that is done meanwhile is in one of both
    if not (run or markers or workers or any(store.list(layout.LAUNCHES))):
        raise no_run(store)
    job, url = find_job(run, store.url, open_store, asked_url=job_url)
    known = {chunk.name for chunk in job.chunks}
    if strange := markers.keys() - known:
        notes.append(f"{len(strange)} markers are of no chunk of the job ({min(strange)})")
    return Snapshot(
        url=store.url,
        taken=clock.now(),
        run=run,
        job=job,
        job_url=url,
        is_stop_asked=any(info.key == layout.STOP_KEY for info in store.list(layout.STOP_KEY)),
        markers={name: marker for name, marker in markers.items() if name in known},
        checkpointed=checkpointed,
        workers=workers,
        notes=notes,
    )


def read_workers(store: Store) -> tuple[list[SeenWorker], list[str]]:
    """Read the leases and statistics of a run's workers. Return also a sentence for each that cannot be read."""
    infos = {info.key: info for info in store.list(layout.WORKERS) if info.key.endswith(".json")}
    of_counts = {key: infos[key] for key in infos if key.endswith(layout.STATISTICS_SUFFIX)}
    of_leases = {key: info for key, info in infos.items() if key not in of_counts}
    leases = read_records(store, of_leases, WorkerLease)
    # At its end, a worker closes its lease and then writes why it ends.
    counted = read_records(store, of_counts, Worker)
    workers = []
    for key, found in leases.items():
        if (lease := found.record) is not None:
            beside = counted.get(key.removesuffix(".json") + layout.STATISTICS_SUFFIX)
            record = (beside.record if beside else None) or Worker(
                id=lease.id,
                nonce="",
                state="",
                started=lease.heartbeat,
                heartbeat=lease.heartbeat,
            )
            workers.append(SeenWorker(record.with_lease(lease), found.info.modified))
    read: list[Found[Any]] = [*leases.values(), *counted.values()]
    return workers, [
        f"left out: {store.url}/{one.info.key}: {one.problem}" for one in read if one.record is None
    ]
