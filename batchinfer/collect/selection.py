"""Select the chunks of a run that can be collected, and fetch their outputs. Read-only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Job, Marker, Run
from batchinfer.ledger.audit import CORRUPT, FOREIGN, MISSING, Audit, Finding, find_target
from batchinfer.ledger.inventory import take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.ledger.runs import refuse_edited
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

logger = logging.getLogger(__name__)


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
    target = find_target(store, inventory, open_store, job_url=job_url)
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


def fetch_output(store: Store, ref: ChunkRef, marker: Marker, scratch: Scratch) -> Path | Finding:
    """Copy a chunk's output to the scratch folder. Returns why not, if it is not what its marker vouches for."""
    path = scratch.new_path(f"{ref.name}.jsonl")
    problem = ""
    try:
        store.download(layout.output_key(marker.output), path)
        with scratch_errors(path.parent), path.open("rb") as file:
            if codec.sha256_file(file) != marker.output_sha256:
                problem = f"the sha256 of {marker.output} is not its marker's"
    except ObjectNotFound:
        problem = f"its output {marker.output} is gone"
    if not problem:
        return path
    remove_quietly(path)
    logger.warning("%s: %s: %s", store.url, ref.name, problem)
    return Finding(kind=CORRUPT, subject=ref.name, problem=problem, fix="redo")
