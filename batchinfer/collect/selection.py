"""Select the chunks of a run that can be collected: those with a sound marker and output. Read-only."""

from __future__ import annotations

from typing import NamedTuple

from batchinfer.core.errors import InputError
from batchinfer.core.records import Job, Marker, Run
from batchinfer.ledger.audit import CORRUPT, FOREIGN, MISSING, find_target
from batchinfer.ledger.inventory import take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.ledger.runs import refuse_edited
from batchinfer.storage import Store


class Gap(NamedTuple):
    """A chunk that cannot be collected. `kind` is missing, corrupt or foreign; `problem` says why."""

    chunk: str
    kind: str
    problem: str


class Selection(NamedTuple):
    """The sound chunks of a run in input order with their markers, and the gaps: chunks that cannot be collected."""

    run: Run
    job: Job
    job_url: str
    sound: list[tuple[ChunkRef, Marker]]
    gaps: list[Gap]
    num_foreign: int
    """Number of objects in the run's folder that batchinfer did not write."""


def select(
    store: Store,
    open_store: OpenStore,
    *,
    now: float,
    job_url: str | None = None,
) -> Selection:
    """Select the chunks of a run that can be collected: those with a sound marker and output.

    Args:
        store: Store of the run.
        open_store: Opens the store of the job.
        now: The present time in Unix seconds.
        job_url: URL of the job. Default: see `job_places`.

    Raises:
        InputError: there is no run, the run is of a newer format version, its job cannot be found, the run was made
            from another job.json, or run.json was edited.
    """
    inventory = take_inventory(store, now=now)
    usage = "batchinfer collect {} DEST"
    target = find_target(store, inventory, open_store, usage=usage, job_url=job_url)
    assert target.job is not None  # it has been found
    refuse_edited(target.run, url=store.url)
    audit = target.audit(inventory)
    sound = audit.check_all()
    if any(found.fix == "job" for found in audit.findings):
        raise InputError(
            f"{store.url}: was made from another job.json than the one at {target.job_url}",
            hint="name the run's own job with --job",
        )
    gaps = {
        found.subject: Gap(found.subject, found.kind, found.problem)
        for found in audit.findings
        if found.kind in (MISSING, CORRUPT, FOREIGN) and found.subject in target.expected
    }
    num_foreign = len(inventory.foreign)
    return Selection(
        target.run, target.job, target.job_url, sound, list(gaps.values()), num_foreign
    )
