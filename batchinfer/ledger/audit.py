"""Proof that a run is complete and sound: job.json, markers and outputs are compared with each other. Read-only.

A sound run keeps promises P1 to P4 and P6. Every chunk to do then has a marker. The marker can be read, belongs to this
run and this chunk, counts exactly the rows to do, and names an output of the right size. `verify --deep` also
reads the outputs: it compares their sha256, and checks that the lines answer the right rows in order, with the right
ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.records import Job, Marker, Record, Run
from batchinfer.ledger.inventory import Found, Inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore, job_chunks
from batchinfer.ledger.runs import find_job, no_run, read_run
from batchinfer.storage import Store

MISSING = "missing"
CORRUPT = "corrupt"
FOREIGN = "foreign"
LEFTOVER = "leftover"
KINDS = (MISSING, CORRUPT, FOREIGN, LEFTOVER)


class Finding(Record, frozen=True, rename={"fix": "mend"}):
    """One problem that the audit found in a run. A run is unsound if it has a finding of any kind but LEFTOVER."""

    kind: str
    subject: str
    """Name of the chunk that has the problem, or key of the object that has it."""
    problem: str
    fix: str
    """Word for the way to fix the problem, such as "redo"; `verify` turns it into a command. JSON calls it "mend"."""


def audit(
    target: RunTarget, inventory: Inventory
) -> tuple[list[tuple[ChunkRef, Marker]], list[Finding]]:
    """Make every check that does not read an output.

    Args:
        target: The run, its job, and the chunks that must be done.
        inventory: The objects that are stored under the run.

    Returns:
        The chunks that passed, with their markers, and what was found.
    """
    sound, findings = list[tuple[ChunkRef, Marker]](), list[Finding]()
    for name, ref in target.expected.items():
        newest = inventory.newest(name)
        if newest is None:
            findings.append(Finding(MISSING, name, _where(inventory, name), "worker"))
            continue
        for kind, problem in _problems(target.run, inventory, ref, newest):
            findings.append(Finding(kind, name, problem, "redo"))
            break
        else:
            assert newest.record is not None
            sound.append((ref, newest.record))
    for name in sorted(inventory.markers.keys() - {chunk.name for chunk in target.job.chunks}):
        what = "has a marker, but the job has no such chunk"
        findings.append(Finding(FOREIGN, name, what, "redo"))
    for kind, _, info in inventory.useless():
        findings.append(Finding(LEFTOVER, info.key, f"one of the {kind}", "clean"))
    if inventory.is_stopped:
        what = "the run is stopped: workers exit"
        findings.append(Finding(LEFTOVER, layout.STOP_KEY, what, "resume"))
    return sound, findings


def _where(inventory: Inventory, name: str) -> str:
    """Say in words how far a chunk without a marker has come: claimed, checkpointed or untouched."""
    if owner := inventory.owner(name):
        return f"not done yet: worker {owner} is working on it"
    num_segments = len(inventory.segments.get(name, ()))
    return f"not done; {num_segments} checkpoint segments" if num_segments else "not done"


def _problems(
    run: Run, inventory: Inventory, ref: ChunkRef, found: Found[Marker]
) -> Iterator[tuple[str, str]]:
    """Yield a (kind, problem) pair for each fault of a chunk's newest marker, the gravest fault first."""
    key, marker = found.info.key, found.record
    if marker is None:
        yield CORRUPT, f"{key}: {found.problem}"
        return
    wanted = {
        "fingerprint": run.fingerprint,
        "chunk": ref.key,
        "generation": (layout.parse_marker(key) or (ref.name, 0))[1],
        "chunk_sha256": ref.sha256,
    }
    for what, value in wanted.items():
        if getattr(marker, what) != value:
            yield FOREIGN, f"{key}: has the {what} {getattr(marker, what)}, expected {value}"
    if ref.name != layout.chunk_of_output(layout.output_key(marker.output)):
        yield FOREIGN, f"{key}: names the output {marker.output}, expected one of this chunk"
    output = inventory.outputs.get(marker.output)
    if output is None:
        yield CORRUPT, f"{key}: its output {marker.output} is gone"
    elif output.bytes != marker.output_bytes:
        yield (
            CORRUPT,
            f"{output.key}: {output.bytes} bytes, its marker says {marker.output_bytes}",
        )
    if marker.rows_done != ref.rows_to_do:
        yield CORRUPT, f"{key}: counts {marker.rows_done} rows, the chunk has {ref.rows_to_do}"
    if (by_code := sum(marker.errors.values())) not in {0, marker.rows_error}:
        yield CORRUPT, f"{key}: {marker.rows_error} error rows, by code {by_code}"


# --------------------------------------------------------------------------- the job and the chunks of a run


class RunTarget(NamedTuple):
    """A run, its job, and the chunks that it must have done."""

    run: Run
    job: Job
    job_url: str
    expected: dict[str, ChunkRef]
    """The chunks that must be done, by name. With --limit, only chunks with rows below the limit."""


def find_target(store: Store, open_store: OpenStore, *, job_url: str | None = None) -> RunTarget:
    """Find the job that a run was made from, and the chunks that the run must have done. Read-only.

    Args:
        store: The run's store.
        open_store: Opens the job's store from a URL.
        job_url: URL of the job; by default the folder above the run, or the URL that run.json records.

    Raises:
        InputError: The store holds no run or one without run.json, the job cannot be found or is another one, or
            run.json or job.json is damaged, edited or of a newer format version.
    """
    run = read_run(store)
    if run is None:
        raise no_run(store)
    job, url = find_job(run, store.url, open_store, asked_url=job_url)
    return RunTarget(run, job, url, job_chunks(job, url, run.config.get("limit")))
