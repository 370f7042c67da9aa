"""Select the chunks of a run that can be collected, and bring their outputs to the scratch folder. Read-only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Job, Marker, Run
from batchinfer.ledger.audit import CORRUPT, FOREIGN, MISSING, Audit, Finding, find_target
from batchinfer.ledger.inventory import in_parallel, take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.ledger.runs import refuse_edited
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, scratch_errors

logger = logging.getLogger(__name__)

_FETCHERS = 4
_GROUP_BYTES = 64 << 20
_GROUP_FILES = 64

Outputs = dict[Path, tuple[ChunkRef, Marker]]
"""Local copies of outputs."""


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


def sound_outputs(
    selection: Selection, store: Store, scratch: Scratch, damaged: list[Finding]
) -> Iterator[Outputs]:
    """Yield the sound outputs of a run in input order, some at a time. Copies go when the next ones are asked for.

    An output whose bytes have not its marker's checksum is added to `damaged` in its place.
    """

    def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path, str]:
        ref, marker = pair
        path = scratch.new_path(f"{ref.name}.jsonl")
        try:
            store.download(layout.output_key(marker.output), path)
        except ObjectNotFound:
            return path, f"its output {marker.output} is gone"
        with scratch_errors(path.parent), path.open("rb") as file:
            is_sound = codec.sha256_file(file) == marker.output_sha256
        return path, "" if is_sound else f"the sha256 of {marker.output} is not its marker's"

    found: Outputs = {}
    brought = in_parallel(bring, selection.sound, _FETCHERS)
    for index, ((path, problem), (ref, marker)) in enumerate(
        zip(brought, selection.sound, strict=True), 1
    ):
        if problem:
            path.unlink(missing_ok=True)
            damaged.append(Finding(kind=CORRUPT, subject=ref.name, problem=problem, fix="redo"))
            logger.warning("%s: %s: %s", store.url, ref.name, problem)
        else:
            found[path] = ref, marker
        size = sum(marker.output_bytes for _, marker in found.values())
        is_last = index == len(selection.sound)
        if found and (is_last or size >= _GROUP_BYTES or len(found) >= _GROUP_FILES):
            yield found
            for copy in found:
                copy.unlink()
            found = {}
