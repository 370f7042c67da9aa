"""What a run is of: its job or list, and the chunks that it must have done. Read-only."""

from __future__ import annotations

from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import Job, Run
from batchinfer.ledger.audit import Audit
from batchinfer.ledger.inventory import Inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore, job_chunks, load_job, read_assignment
from batchinfer.ledger.runs import no_run, read_run
from batchinfer.storage import Store
from batchinfer.storage.opening import split_url

_ALIASES = {"s3a": "s3", "r2": "s3", "gcs": "gs"}


class Scope(NamedTuple):
    """A run and what it is of. `job` is None, and `job_url` and `job_sha256` are empty, for a list from elsewhere."""

    run: Run
    job: Job | None
    job_url: str
    job_sha256: str
    expected: dict[str, ChunkRef]
    """The chunks that must be done, by name in input order, cut to the run's --limit."""

    def audit(self, inventory: Inventory) -> Audit:
        """The checks of this run against what lies there."""
        return Audit(
            run=self.run,
            job_sha256=self.job_sha256,
            expected=self.expected,
            known=None if self.job is None else [chunk.name for chunk in self.job.chunks],
            inventory=inventory,
        )


def find_scope(
    store: Store,
    inventory: Inventory,
    open_store: OpenStore,
    *,
    usage: str,
    job_url: str | None = None,
    manifests: list[str] | None = None,
) -> Scope:
    """Find out what a run is of.

    Args:
        store: The run's.
        inventory: What lies there.
        open_store: Opens the job's.
        usage: The command that asks, with {} where an option and the run go; for hints.
        job_url: Where the job lies; by default where the run lies below it, or as run.json says.
        manifests: The chunks, for a run that was made from a list without a job.json.

    Raises:
        InputError: no run there, one of a newer format version, or its job cannot be found. A job.json that is not the
            run's is no error here: the audit finds it.
    """
    run = _read_run(store, inventory)
    limit = run.config.get("limit")
    if manifests:
        found = read_assignment(
            manifests, job_url=job_url, allow_absolute=True, limit=limit, open_store=open_store
        )
        expected = {ref.name: ref for ref in found.chunks}
        return Scope(run, found.job, found.job_url, found.job_sha256, expected)
    if not job_sha256_of(run):
        raise InputError(
            f"{store.url}: made from a list of chunks without a job.json, which must be given",
            hint=usage.format(f"--manifest LIST {store.url}"),
        )
    found_job = _find_job(run, store.url, job_url, open_store)
    if found_job is None:
        elsewhere = _recorded_job(run)
        raise InputError(
            f"{store.url}: run.json names the job {elsewhere!r}, which is not where the run is, "
            "so it is read only when asked for"
            if elsewhere and not _is_beside(elsewhere, store.url)
            else f"{store.url}: neither run.json nor its place tells where its job lies",
            hint=usage.format(f"--job JOB {store.url}"),
        )
    job, url, sha256 = found_job
    return Scope(run, job, url, sha256, job_chunks(job, url, limit))


def job_sha256_of(run: Run | None) -> str:
    """Checksum of the job.json that a run is of; empty where it is not known, or of none."""
    return "" if run is None else str(run.config.get("job_sha256") or "")


def job_places(run: Run | None, run_url: str) -> list[str]:
    """Where a run's job may lie, the surest first: a job that was moved has its runs with it.

    Who can write run.json must not choose to whom requests go, so it is followed within the run's own bucket, and from
    one local folder to another.
    """
    recorded = _recorded_job(run)
    beside = recorded if _is_beside(recorded, run_url) else ""
    return list(dict.fromkeys(filter(None, (layout.job_above(run_url), beside))))


def _recorded_job(run: Run | None) -> str:
    return "" if run is None else str(run.recorded.get("job") or "").rstrip("/")


def _is_beside(url: str, run_url: str) -> bool:
    """Whether two URLs are of one bucket, or both of local folders."""
    return _bucket(url) == _bucket(run_url)


def _bucket(url: str) -> tuple[str, str]:
    scheme, rest = split_url(url)
    if scheme == "file":
        return scheme, ""
    depth = 3 if scheme == "hf" else 1  # datasets/org/name
    return _ALIASES.get(scheme, scheme), "/".join(rest.split("/")[:depth])


def _read_run(store: Store, inventory: Inventory) -> Run:
    run = read_run(store, may_be_edited=True)  # the audit finds it
    if run is not None:
        return run
    if inventory.is_empty:
        raise no_run(store)
    if inventory.marker_infos:
        raise InputError(
            f"{store.url}: has markers but no run.json, which says what they are of",
            hint="restore run.json; without it nothing tells these outputs from another run's",
        )
    raise InputError(
        f"{store.url}: nothing is done yet; no worker's engine has been ready so far",
        hint=f"see how it goes: batchinfer status {store.url}",
    )


def _find_job(
    run: Run, run_url: str, asked_url: str | None, open_store: OpenStore
) -> tuple[Job, str, str] | None:
    """The job, where it lies and its checksum. One that is the run's comes before one that is not."""
    others: list[tuple[Job, str, str]] = []
    for url in [asked_url.rstrip("/")] if asked_url else job_places(run, run_url):
        loaded = load_job(url, open_store)
        if loaded is None:
            continue
        job, sha256 = loaded
        if sha256 == job_sha256_of(run):
            return job, url, sha256
        others.append((job, url, sha256))
    if others:
        return others[0]
    if asked_url:
        raise InputError(
            f"{asked_url}: no job.json there", hint="pass the --job that `split` wrote to"
        )
    return None
