"""Select the chunks of a run that can be collected: those with a sound marker and output. Read-only."""

from __future__ import annotations

from typing import NamedTuple

from batchinfer.core.errors import InputError
from batchinfer.core.records import Job, Marker, Run
from batchinfer.ledger.audit import CORRUPT, FOREIGN, MISSING, Audit, Finding, find_target
from batchinfer.ledger.inventory import take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.ledger.runs import refuse_edited
from batchinfer.storage import Store


class Selection(NamedTuple):
    """The sound chunks of a run in input order with their markers, and the gaps: why others cannot be collected."""

    run: Run
    job: Job
    job_url: str
    sound: list[tuple[ChunkRef, Marker]]
    gaps: list[Finding]
    """One for each chunk that is missing, corrupt or foreign. Their subjects are the chunks' names."""


def select(
    store: Store, open_store: OpenStore, *, now: float, job_url: str | None = None
) -> Selection:
    """Select the chunks of a run that can be collected: those with a sound marker and output.

    Args:
        store: Store of the run.
        open_store: Opens the store of the job.
        now: The present time in Unix seconds.
        job_url: URL of the job, where run.json and the run's place do not tell.

    Raises:
        InputError: there is no run, the run is of a newer format version, its job cannot be found, the run was made
            from another job.json, or run.json was edited.
    """
    inventory = take_inventory(store, now=now)
    usage = "batchinfer collect {} DEST"
    target = find_target(store, inventory, open_store, usage=usage, job_url=job_url)
    refuse_edited(target.run, url=store.url)
    audit = Audit(target, inventory)
    sound = audit.check_all()
    if any(found.fix == "job" for found in audit.findings):
        raise InputError(
            f"{store.url}: was made from another job.json than the one at {target.job_url}",
            hint="name the run's own job with --job",
        )
    kinds = (MISSING, CORRUPT, FOREIGN)
    gaps = {
        found.subject: found
        for found in audit.findings
        if found.kind in kinds and found.subject in target.expected
    }
    return Selection(target.run, target.job, target.job_url, sound, list(gaps.values()))
