"""Proof that a run is complete and sound: job.json, markers and outputs are compared with each other. Read-only.

A sound run keeps promises P1 to P4 and P6. Every chunk to do then has a marker. The marker can be read, belongs to this
run and this chunk, counts exactly the rows to do, and names an output of the right size. `verify --deep` also
reads the outputs: it compares their sha256, and checks that the lines answer the right rows in order, with the right
ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import Job, Marker, Record, Run
from batchinfer.core.shell import quote
from batchinfer.ledger.inventory import Inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore, job_chunks
from batchinfer.ledger.runs import (
    edit_of,
    find_job,
    job_sha256_of,
    no_run,
    read_run,
)
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


class Audit:
    """Checks one run.

    Args:
        target: The run, its job, and the chunks that must be done.
        inventory: The objects that are stored under the run.
    """

    def __init__(self, target: RunTarget, inventory: Inventory) -> None:
        self._target = target
        self._run = target.run
        self._known = {chunk.name for chunk in target.job.chunks}
        self._inventory = inventory
        self.findings: list[Finding] = []

    def check_all(self) -> list[tuple[ChunkRef, Marker]]:
        """Make every check that does not read an output. Return the chunks that passed, with their markers."""
        if self._is_edited() or self._is_of_another_job():
            # The audit ends here if run.json was edited or the job is the wrong one. With the wrong job every chunk
            # would look foreign, and the suggested fixes would destroy sound chunks. An edited limit would hide chunks.
            return []
        sound = []
        for name, ref in self._target.expected.items():
            marker = self._check_chunk(name, ref)
            if marker is not None:
                sound.append((ref, marker))
        for name in sorted(self._inventory.markers.keys() - self._known):
            self.add(FOREIGN, name, "has a marker, but the job has no such chunk", "redo")
        self.findings += leftovers(self._inventory, self._known)
        return sound

    def add(self, kind: str, subject: str, problem: str, fix: str) -> None:
        """Add a finding to `findings`."""
        self.findings.append(Finding(kind, subject, problem, fix))

    def _is_edited(self) -> bool:
        problem = edit_of(self._run)
        if problem:
            self.add(CORRUPT, layout.RUN_KEY, problem, "run")
        return bool(problem)

    def _is_of_another_job(self) -> bool:
        wanted, found = job_sha256_of(self._run), self._target.job_sha256
        if wanted == found:
            return False
        problem = (
            f"the run is of the job.json with sha256 {wanted[:12]}…, this one has {found[:12]}…"
        )
        self.add(FOREIGN, layout.RUN_KEY, problem, "job")
        return True

    def _check_chunk(self, name: str, ref: ChunkRef) -> Marker | None:
        newest = self._inventory.newest(name)
        if newest is None:
            self.add(MISSING, name, self._where(name), "worker")
            return None
        if newest.record is None:
            self.add(CORRUPT, name, f"{newest.info.key}: {newest.problem}", "redo")
            return None
        for kind, problem in self._problems(name, ref, newest.info.key, newest.record):
            self.add(kind, name, problem, "redo")
            return None
        return newest.record

    def _where(self, name: str) -> str:
        """Say in words how far a chunk without a marker has come: claimed, checkpointed or untouched."""
        if owner := self._inventory.owner(name):
            return f"not done yet: worker {owner} is working on it"
        num_segments = len(self._inventory.segments.get(name, ()))
        return f"not done; {num_segments} checkpoint segments" if num_segments else "not done"

    def _problems(
        self, name: str, ref: ChunkRef, key: str, marker: Marker
    ) -> Iterator[tuple[str, str]]:
        """Yield a (kind, problem) pair for each fault of a chunk's marker at `key`, the gravest fault first."""
        wanted = {
            "fingerprint": self._run.fingerprint,
            "chunk": ref.key,
            "generation": (layout.parse_marker(key) or (name, 0))[1],
            "chunk_sha256": ref.sha256,
        }
        for what, value in wanted.items():
            if getattr(marker, what) != value:
                yield FOREIGN, f"{key}: has the {what} {getattr(marker, what)}, expected {value}"
        if name != layout.chunk_of_output(layout.output_key(marker.output)):
            yield FOREIGN, f"{key}: names the output {marker.output}, expected one of this chunk"
        output = self._inventory.outputs.get(marker.output)
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


def leftovers(inventory: Inventory, known: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each object that the run's outputs do not need, as an orphan output or a stop request."""
    yield from _left_of_chunks(inventory, known)
    yield from _superseded(inventory)
    for worker in inventory.workers.values():
        if worker.record is None:
            yield Finding(LEFTOVER, worker.info.key, worker.problem, "hand")
    for info in inventory.probes:
        yield Finding(LEFTOVER, info.key, "a probe of the store", "clean")
    if inventory.stop is not None:
        yield Finding(LEFTOVER, inventory.stop.key, "the run is stopped: workers exit", "resume")
    for info in inventory.foreign:
        yield Finding(LEFTOVER, info.key, "nothing that batchinfer writes", "hand")


def _left_of_chunks(inventory: Inventory, known: Collection[str]) -> Iterator[Finding]:
    for name, info in inventory.orphans():
        if inventory.has_damaged_marker(name):
            continue  # It may name this output, so the output may be in use.
        if inventory.is_passed_over(name, info):
            yield Finding(LEFTOVER, info.key, "an output that no marker names", "clean")
        elif name not in known:
            yield Finding(LEFTOVER, info.key, "an output of no chunk of the job", "hand")
        elif inventory.current(name) is None:
            # `clean` removes this output only after the chunk has been done.
            yield Finding(LEFTOVER, info.key, "an output whose marker did not follow", "later")
    for name, found in inventory.claims.items():
        if inventory.owner(name):
            continue
        if inventory.current(name) is not None:
            yield Finding(LEFTOVER, found.info.key, "the claim of a done chunk", "clean")
        elif name not in known:
            yield Finding(LEFTOVER, found.info.key, "the claim of no chunk", "hand")
    for name, infos in inventory.segments.items():
        left = [info for info in infos if inventory.is_passed_over(name, info)]
        if left:
            yield Finding(LEFTOVER, left[0].key, f"{len(left)} segments of a done chunk", "clean")
        elif name not in known:
            # `clean` does not read the job, so it cannot know that the chunk is foreign, and keeps its segments.
            for info in infos:
                yield Finding(LEFTOVER, info.key, "a segment of no chunk", "hand")


def _superseded(inventory: Inventory) -> Iterator[Finding]:
    for name, generations in inventory.markers.items():
        for found in generations.values():
            if found.record is None and found is not inventory.newest(name):
                problem = f"superseded, and {found.problem}"
                yield Finding(LEFTOVER, found.info.key, problem, "hand")


# --------------------------------------------------------------------------- the job and the chunks of a run


class RunTarget(NamedTuple):
    """A run, its job, and the chunks that it must have done."""

    run: Run
    job: Job
    job_url: str
    job_sha256: str
    expected: dict[str, ChunkRef]
    """The chunks that must be done, by name. With --limit, only chunks with rows below the limit."""


def find_target(
    store: Store, inventory: Inventory, open_store: OpenStore, *, job_url: str | None = None
) -> RunTarget:
    """Find the job that a run was made from, and the chunks that the run must have done. Read-only.

    Args:
        store: The run's store.
        inventory: The objects that are stored under the run.
        open_store: Opens the job's store from a URL.
        job_url: URL of the job; by default the folder above the run, or the URL that run.json records.

    Raises:
        InputError: The store holds no run or one without run.json, the job cannot be found, or run.json or job.json is
            damaged or of a newer format version. A job.json with another checksum than the run's is not refused here;
            the audit reports it.
    """
    run = _read_run(store, inventory)
    job, url, sha256 = find_job(run, store.url, open_store, asked_url=job_url)
    return RunTarget(run, job, url, sha256, job_chunks(job, url, run.config.get("limit")))


def _read_run(store: Store, inventory: Inventory) -> Run:
    # The audit reports an edited run.json, so it is not refused here.
    run = read_run(store, may_be_edited=True)
    if run is not None:
        return run
    if inventory.is_empty:
        raise no_run(store)
    if inventory.markers:
        raise InputError(
            f"{store.url}: has markers but no run.json, which says what they are of",
            hint="restore run.json; without it nothing tells these outputs from another run's",
        )
    raise InputError(
        f"{store.url}: nothing is done yet; no worker's engine has been ready so far",
        hint=f"see how it goes: batchinfer status {quote(store.url)}",
    )
