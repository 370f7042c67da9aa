"""Proof that a run is complete and sound: job.json, markers and outputs are compared with each other. Read-only.

A sound run keeps promises P1 to P4 and P6. Every chunk to do then has a marker. The marker can be read, belongs to this
run and this chunk, counts exactly the rows to do, and names an output of the right size. `verify --deep` also
reads the outputs: it compares their sha256, and checks that the lines answer the right rows in order, with the right
ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.counts import Counts
from batchinfer.core.errors import InputError
from batchinfer.core.printable import error_code
from batchinfer.core.records import Job, Marker, Record, Run
from batchinfer.core.shell import quote
from batchinfer.ledger.inventory import Inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore, job_chunks, read_assignment
from batchinfer.ledger.runs import (
    edit_of,
    find_job,
    is_beside,
    job_sha256_of,
    no_run,
    read_run,
    recorded_job,
)
from batchinfer.storage import ObjectInfo, Store

MISSING = "missing"
CORRUPT = "corrupt"
FOREIGN = "foreign"
LEFTOVER = "leftover"
KINDS = (MISSING, CORRUPT, FOREIGN, LEFTOVER)


class Finding(Record, frozen=True, kw_only=True, rename={"fix": "mend"}):
    """One problem that the audit found in a run. A run is unsound if it has a finding of any kind but LEFTOVER."""

    kind: str
    subject: str
    """Name of the chunk that has the problem, or key of the object that has it."""
    problem: str
    fix: str
    """Word for the way to fix the problem, such as "redo"; `verify` turns it into a command. JSON calls it "mend"."""


@dataclass(slots=True)
class Totals:
    """Sums over the markers of all chunks that passed the audit."""

    chunks: int = 0
    output_bytes: int = 0
    counts: Counts = field(default_factory=Counts)

    def add(self, marker: Marker) -> None:
        """Add the numbers in a sound chunk's marker."""
        self.chunks += 1
        self.output_bytes += marker.output_bytes
        self.counts = self.counts.plus(marker.with_codes(error_code))


class Audit:
    """Checks one run.

    Args:
        run: The content of run.json.
        job_sha256: Checksum of the job.json that was found; empty if the run was made from a list without a job.json.
        expected: The chunks that must be done, by name. With --limit, only the chunks that hold rows below the limit.
        known: Names of all chunks of the job, also of those beyond --limit; None if there is no job.json.
        inventory: The objects that are stored under the run.
    """

    def __init__(
        self,
        *,
        run: Run,
        job_sha256: str,
        expected: dict[str, ChunkRef],
        known: Collection[str] | None,
        inventory: Inventory,
    ) -> None:
        self._run = run
        self._job_sha256 = job_sha256
        self._expected = expected
        self._known = None if known is None else {*known, *expected}
        self._inventory = inventory
        self.totals = Totals()
        self.findings: list[Finding] = []

    def check_all(self) -> list[tuple[ChunkRef, Marker]]:
        """Make every check that does not read an output. Return the chunks that passed, with their markers."""
        if self._is_edited() or self._is_of_another_job():
            # The audit ends here if run.json was edited or the job is the wrong one. With the wrong job every chunk
            # would look foreign, and the suggested fixes would destroy sound chunks. An edited limit would hide chunks.
            return []
        sound = []
        for name, ref in self._expected.items():
            marker = self._check_chunk(name, ref)
            if marker is not None:
                sound.append((ref, marker))
        self.findings += self._foreign_markers()
        self.findings += leftovers(self._inventory, self._known)
        return sound

    def count(self, marker: Marker) -> None:
        """Add a chunk that has passed every check to the totals."""
        self.totals.add(marker)

    def add(self, kind: str, subject: str, problem: str, fix: str) -> None:
        """Add a finding to `findings`."""
        self.findings.append(Finding(kind=kind, subject=subject, problem=problem, fix=fix))

    def _is_edited(self) -> bool:
        problem = edit_of(self._run)
        if problem:
            self.add(CORRUPT, layout.RUN_KEY, problem, "run")
        return bool(problem)

    def _is_of_another_job(self) -> bool:
        wanted = str(self._run.config.get("job_sha256") or "")
        if wanted == self._job_sha256:
            return False
        self.add(
            FOREIGN,
            layout.RUN_KEY,
            f"the run is of the job.json with sha256 {wanted[:12] or '(none)'}…, "
            f"this one has {self._job_sha256[:12] or '(none)'}…",
            "job",
        )
        return True

    def _check_chunk(self, name: str, ref: ChunkRef) -> Marker | None:
        newest = self._inventory.newest(name)
        if newest is None:
            self.add(MISSING, name, self._where(name), "worker")
            return None
        damaged = self._inventory.damaged_markers.get(name, {}).get(newest)
        if damaged is not None:
            self.add(CORRUPT, name, f"{damaged.info.key}: {damaged.problem}", "redo")
            return None
        marker = self._inventory.markers[name][newest]
        for kind, problem in self._problems(name, ref, newest, marker):
            self.add(kind, name, problem, "redo")
            return None
        return marker

    def _where(self, name: str) -> str:
        """Say in words how far a chunk without a marker has come: claimed, checkpointed or untouched."""
        owner = self._inventory.claims.get(name)
        if owner is not None and owner.is_alive:
            return f"not done yet: worker {owner.claim.worker} is working on it"
        num_segments = len(self._inventory.segments.get(name, ()))
        return f"not done; {num_segments} checkpoint segments" if num_segments else "not done"

    def _problems(
        self, name: str, ref: ChunkRef, generation: int, marker: Marker
    ) -> Iterator[tuple[str, str]]:
        """Yield a (kind, problem) pair for each fault of a chunk's marker, the gravest fault first."""
        key = layout.marker_key(name, generation)
        if marker.fingerprint != self._run.fingerprint:
            yield (
                FOREIGN,
                f"{key}: of the run {marker.fingerprint}, this is {self._run.fingerprint}",
            )
        if marker.chunk != ref.key or marker.generation != generation:
            yield (
                FOREIGN,
                (
                    f"{key}: speaks of {marker.chunk}, generation {marker.generation}, "
                    f"expected {ref.key}, generation {generation}"
                ),
            )
        if ref.sha256 is not None and marker.chunk_sha256 != ref.sha256:
            yield (
                FOREIGN,
                (
                    f"{key}: of a chunk with sha256 {marker.chunk_sha256[:12]}…, "
                    f"job.json says {ref.sha256[:12]}…"
                ),
            )
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
        yield from self._wrong_counts(key, ref, marker)

    @staticmethod
    def _wrong_counts(key: str, ref: ChunkRef, marker: Marker) -> Iterator[tuple[str, str]]:
        rows = ref.rows if ref.row_limit is None else ref.row_limit
        total = marker.rows_ok + marker.rows_error
        if rows is not None and total != rows:
            yield CORRUPT, f"{key}: counts {total} rows, the chunk has {rows}"
        if min(marker.rows_ok, marker.rows_error) < 0:
            yield CORRUPT, f"{key}: counts {marker.rows_ok} and {marker.rows_error} rows"
        if sum(marker.errors.values()) not in {0, marker.rows_error}:
            yield (
                CORRUPT,
                f"{key}: {marker.rows_error} error rows, by code {sum(marker.errors.values())}",
            )

    def _foreign_markers(self) -> Iterator[Finding]:
        """Yield a finding for each chunk that has a marker but is not in the job."""
        if self._known is None:
            return
        for name in sorted(self._inventory.marker_infos.keys() - self._known):
            if self._inventory.marker_infos[name]:
                yield _finding(FOREIGN, name, "has a marker, but the job has no such chunk", "redo")


def leftovers(inventory: Inventory, known: Collection[str] | None) -> Iterator[Finding]:
    """Yield a finding for each object that the run's outputs do not need, such as an orphan output or a stop request.

    A worker's record that is damaged is reported as CORRUPT, not as LEFTOVER: the numbers that `status` and `report`
    read from it are lost.
    """
    yield from _left_of_chunks(inventory, known)
    for damaged in inventory.damaged_claims.values():
        yield _finding(LEFTOVER, damaged.info.key, damaged.problem, "clean")
    for damaged in inventory.damaged_workers.values():
        yield _finding(CORRUPT, damaged.info.key, damaged.problem, "clean")
    for info in inventory.probes:
        yield _finding(LEFTOVER, info.key, "a probe of the store", "clean")
    if inventory.stop is not None:
        yield _finding(LEFTOVER, inventory.stop.key, "the run is stopped: workers exit", "resume")
    for info in inventory.foreign:
        yield _finding(LEFTOVER, info.key, "nothing that batchinfer writes", "hand")


def _left_of_chunks(inventory: Inventory, known: Collection[str] | None) -> Iterator[Finding]:
    def is_foreign(name: str) -> bool:
        return known is not None and name not in known

    for name, info in inventory.orphans():
        if inventory.damaged_markers.get(name):
            continue  # The chunk's damaged marker may name this output, so the output may be in use.
        if inventory.is_passed_over(name, info):
            yield _finding(LEFTOVER, info.key, "an output that no marker names", "clean")
        elif is_foreign(name):
            yield _finding(LEFTOVER, info.key, "an output of no chunk of the job", "hand")
        elif inventory.current(name) is None:
            # `clean` removes this output only after the chunk has been done.
            yield _finding(LEFTOVER, info.key, "an output whose marker did not follow", "clean")
    for name, owner in inventory.claims.items():
        if inventory.current(name) is not None and not owner.is_alive:
            yield _finding(LEFTOVER, owner.info.key, "the claim of a done chunk", "clean")
        elif is_foreign(name) and not owner.is_alive:
            yield _finding(LEFTOVER, owner.info.key, "the claim of no chunk", "hand")
    for name, infos in inventory.segments.items():
        left = [info for info in infos if inventory.is_passed_over(name, info)]
        if left:
            yield _finding(LEFTOVER, left[0].key, f"{len(left)} segments of a done chunk", "clean")
        elif is_foreign(name):
            yield from _segments_of_no_chunk(infos)
    yield from _superseded(inventory)


def _segments_of_no_chunk(infos: Iterable[ObjectInfo]) -> Iterator[Finding]:
    """Yield a finding for each segment of a chunk that is not in the job.

    `clean` does not read the job, so it cannot know that the chunk is foreign, and keeps its segments.
    """
    for info in infos:
        yield _finding(LEFTOVER, info.key, "a segment of no chunk", "hand")


def _superseded(inventory: Inventory) -> Iterator[Finding]:
    for name, generations in inventory.damaged_markers.items():
        for generation, damaged in generations.items():
            if generation != inventory.newest(name):
                problem = f"superseded, and {damaged.problem}"
                yield _finding(LEFTOVER, damaged.info.key, problem, "hand")


def _finding(kind: str, subject: str, problem: str, fix: str) -> Finding:
    return Finding(kind=kind, subject=subject, problem=problem, fix=fix)


def counts_by_kind(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of findings of each kind. A kind without findings has the number 0."""
    counts = dict.fromkeys(KINDS, 0)
    for finding in findings:
        counts[finding.kind] += 1
    return counts


# --------------------------------------------------------------------------- the job and the chunks of a run


class RunTarget(NamedTuple):
    """A run, its job, and the chunks that it must have done.

    `job` is None, and `job_url` and `job_sha256` are empty, for a list of files without a job.json.
    """

    run: Run
    job: Job | None
    job_url: str
    job_sha256: str
    expected: dict[str, ChunkRef]
    """The chunks that must be done, by name. With --limit, only chunks with rows below the limit."""

    def audit(self, inventory: Inventory) -> Audit:
        """Return an `Audit` that compares this run with the objects in `inventory`."""
        return Audit(
            run=self.run,
            job_sha256=self.job_sha256,
            expected=self.expected,
            known=None if self.job is None else [chunk.name for chunk in self.job.chunks],
            inventory=inventory,
        )


def find_target(
    store: Store,
    inventory: Inventory,
    open_store: OpenStore,
    *,
    usage: str,
    job_url: str | None = None,
    manifests: list[str] | None = None,
) -> RunTarget:
    """Find the job that a run was made from, and the chunks that the run must have done. Read-only.

    Args:
        store: The run's store.
        inventory: The objects that are stored under the run.
        open_store: Opens the job's store from a URL.
        usage: Command line for hints, with {} in place of the option and the run.
        job_url: URL of the job; by default the folder above the run, or the URL that run.json records.
        manifests: Lists of chunks, for a run made from a list without a job.json.

    Raises:
        InputError: The store holds no run or one without run.json, the job cannot be found, or run.json, job.json or a
            manifest is damaged or of a newer format version. A job.json with another checksum than the run's is not
            refused here; the audit reports it.
    """
    run = _read_run(store, inventory)
    limit = run.config.get("limit")
    if manifests:
        found = read_assignment(
            manifests, job_url=job_url, allow_absolute=True, limit=limit, open_store=open_store
        )
        expected = {ref.name: ref for ref in found.chunks}
        return RunTarget(run, found.job, found.job_url, found.job_sha256, expected)
    if not job_sha256_of(run):
        raise InputError(
            f"{store.url}: made from a list of chunks without a job.json, which must be given",
            hint=usage.format(f"--manifest LIST {quote(store.url)}"),
        )
    found_job = find_job(run, store.url, open_store, asked_url=job_url)
    if found_job is None:
        elsewhere = recorded_job(run)
        raise InputError(
            f"{store.url}: run.json names the job {elsewhere!r}, which is not where the run is, "
            "so it is read only when asked for"
            if elsewhere and not is_beside(elsewhere, store.url)
            else f"{store.url}: neither run.json nor its place tells where its job lies",
            hint=usage.format(f"--job JOB {quote(store.url)}"),
        )
    job, url, sha256 = found_job
    return RunTarget(run, job, url, sha256, job_chunks(job, url, limit))


def _read_run(store: Store, inventory: Inventory) -> Run:
    # The audit reports an edited run.json, so it is not refused here.
    run = read_run(store, may_be_edited=True)
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
        hint=f"see how it goes: batchinfer status {quote(store.url)}",
    )
