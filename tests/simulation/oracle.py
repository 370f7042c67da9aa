"""The promises, checked after every change of the bucket and at the end. Reads the job without the worker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.records import Completion, Request, RowKey

from .machine import FLAKY, POISON, EngineTraits, answer
from .scheduler import Process, Scheduler
from .storage import Server, read_record

RUN = "run/"
JOB = "job/"
ENDED = ("done", "stopped", "failed")
DEATHS_TO_GIVE_UP = 3
CLEANER = "clean"
"""Begins the names of processes that are no workers, but `batchinfer clean`."""


class Violation(AssertionError):
    """A promise is broken. The message begins with its name."""


class Row(NamedTuple):
    """One row of the job. `codes`: the error codes that it may end with; empty if it has an answer."""

    line: bytes
    prompt: str
    codes: frozenset[str] = frozenset()


class Truth(NamedTuple):
    """The job, as it was made."""

    chunks: dict[str, list[Row]]
    first_rows: dict[str, int]
    shas: dict[str, str]
    run_seed: int | None


class Oracle:
    """Watches the bucket (storage.Watcher) and the engines (machine.Ward) of one seed."""

    def __init__(
        self,
        scheduler: Scheduler,
        server: Server,
        truth: Truth,
        engine: EngineTraits,
        *,
        is_safe: bool,
    ) -> None:
        self._scheduler = scheduler
        self._server = server
        self._truth = truth
        self._engine = engine
        self._is_safe = is_safe
        self.lease_seconds = 0.0
        self.watches_claims = is_safe
        self.deaths: dict[RowKey, int] = {}
        self._died_alone: set[RowKey] = set()
        self._generation_of_phase = 0
        self._beats: dict[str, list[float]] = {}
        self._claimed_at: dict[str, float] = {}
        self._segments: dict[str, dict[str, dict[int, bool]]] = {}
        """By chunk and key: which rows it holds, and whether they are fine."""
        self._known: dict[tuple[str, str], set[int]] = {}
        self._outputs: dict[str, bytes] = {}
        self._ghosts: set[str] = set()
        self._epochs: dict[str, int] = {}
        self._lost_until: dict[str, float] = {}
        """When a worker's record that was removed or damaged was written again; infinite while it is not."""
        self._fingerprints: set[str] = set()
        """Of every run.json that stood. Several only where preconditions are ignored and first workers differ: then the
        segments of each configuration are left out by the workers of the other."""
        self._finished: dict[str, set[RowKey]] = {}
        self.on_output: Callable[[Process], object] = lambda _process: None
        self.violation: Violation | None = None

    @property
    def chunks(self) -> dict[str, list[Row]]:
        """Every chunk of the run, with the rows of it that count."""
        return self._truth.chunks

    def fail(self, message: str) -> None:
        """Note a violation; the first one counts."""
        if self.violation is None:
            self._scheduler.log("oracle", message)
            self.violation = Violation(message)

    # -- storage.Watcher

    def stored(self, key: str, data: bytes, before: bytes | None, process: Process | None) -> None:
        """Check one write."""
        if process is None or not key.startswith(RUN):
            return
        name = key.removeprefix(RUN)
        if not data:
            self.fail(f"P3: {name} is written empty")
        changed = before is not None and before != data
        marker = layout.parse_marker(name)
        if name == layout.RUN_KEY:
            self._fingerprints.add(msgspec.json.decode(data)["fingerprint"])
            if changed and self._is_safe:
                self.fail("P6: run.json changes")
        elif marker is not None:
            if changed and self._is_safe:
                self.fail(f"P4: the marker {name} changes")
            self.check_marker(*marker)
        elif name.startswith(layout.OUTPUTS):
            if changed:
                self.fail(f"P4: the output {name} changes")
            self.on_output(process)
        elif name.startswith(layout.CHECKPOINTS):
            self._store_segment(name, data)
        elif name.startswith(layout.CLAIMS):
            self._check_claim(name, data, before, process)
        elif name.startswith(layout.WORKERS):
            self._beats.setdefault(name, []).append(self._scheduler.now)
            self._ghosts.discard(process.name)
            self._epochs[process.name] = msgspec.json.decode(data)["epoch"]
            if name in self._lost_until:
                self._lost_until[name] = min(self._lost_until[name], self._scheduler.now)

    def deleted(self, key: str, data: bytes, process: Process | None) -> None:
        """Check one deletion."""
        name = key.removeprefix(RUN)
        if name == layout.RUN_KEY or (layout.parse_marker(name) and self._is_safe):
            self.fail(f"P3: {name} is deleted")
        elif name.startswith(layout.OUTPUTS):
            for chunk in layout.chunks_of_output(name):
                for generation in self._generations(chunk):
                    if layout.output_key(self._marker(chunk, generation)["output"]) == name:
                        self.fail(f"P2: {name} is deleted, and a marker names it")
        elif name.startswith(layout.CHECKPOINTS):
            chunk = name.split("/")[1]
            if not self._generations(chunk):
                self.fail(f"P5: the segment {name} is deleted, and its chunk has no marker")
            self._segments[chunk].pop(name, None)
        elif name.startswith(layout.WORKERS):
            self.record_struck(name)

    def listed(self, prefix: str, process: Process) -> None:
        """Note what a process that resumes a chunk is about to find."""
        name = prefix.removeprefix(RUN)
        if name == layout.CHECKPOINTS:
            for chunk in self._truth.chunks:
                self._known[process.name, chunk] = self._saved_lines(chunk)
        elif name.startswith(layout.CHECKPOINTS):
            chunk = name.split("/")[1]
            self._known[process.name, chunk] = self._saved_lines(chunk)

    def superseded(self, process: Process) -> None:
        """Note that a process found out about a newer epoch of itself, at a renewal that was refused."""
        self._ghosts.add(process.name)

    def creating(self, name: str, process: Process) -> None:
        """Check that whoever is about to write a marker or a segment does not know better."""
        is_visible = layout.parse_marker(name) or name.startswith(layout.CHECKPOINTS)
        if is_visible and process.name in self._ghosts:
            self.fail(f"epochs: {process.name} knows of a newer start of itself, and writes {name}")

    # -- machine.Ward

    def took(self, process: Process, request: Request) -> None:
        """Check that an engine gets no row that its worker had found in a checkpoint."""
        chunk, line = request.key
        is_known = line in self._known.get((process.name, chunk), ())
        if is_known and not self._is_done(chunk) and len(self._fingerprints) < 2:
            self.fail(
                f"P5: {chunk} line {line} was in a checkpoint, and {process.name} does it again"
            )

    def yielded(self, process: Process, completions: list[Completion]) -> None:
        """Note what a worker was given."""
        self._finished.setdefault(process.name, set()).update(
            completion.key
            for completion in completions
            if completion.failure is None or not completion.failure.transient
        )

    def died(self, in_flight: list[RowKey]) -> None:
        """Count an engine's death for the rows in it."""
        for key in in_flight:
            self.deaths[key] = self.deaths.get(key, 0) + 1
        if len(in_flight) == 1:
            self._died_alone.update(in_flight)

    # -- at certain moments

    def begin_retrying(self) -> None:
        """From now on error rows are done again, in further generations."""
        self._generation_of_phase = 1
        self._known.clear()

    def check_saved(self, process: Process) -> None:
        """P5: a worker that was asked to stop, and had no trouble, leaves none of its finished rows behind."""
        epoch = self._epochs.get(process.name)
        if epoch is not None:  # else it was stopped before it had its record
            record = self._record(process.name.split("#")[0])
            if record is not None and record["epoch"] != epoch:
                return  # a ghost must not write
        for chunk, line in sorted(self._finished.get(process.name, ())):
            is_kept = any(line in rows for rows in self._segments.get(chunk, {}).values())
            if not is_kept and not self._generations(chunk):
                self.fail(
                    f"P5: {process.name} was stopped in peace, and {chunk} line {line} is lost"
                )

    def check_done(self, chunks: list[str], process: Process) -> None:
        """Exit status 0: every chunk of the manifests is done."""
        for chunk in chunks:
            if not self._is_done(chunk):
                self.fail(f"exit 0: {process.name} says that it is done, and {chunk} is not")

    def check_end(self) -> None:
        """P1 to P4 and P6 of every object in the run, once the run is complete."""
        for chunk in self._truth.chunks:
            generations = self._generations(chunk)
            if not self._is_done(chunk):
                self.fail(f"P1: {chunk} is not done")
            for generation in generations:
                self.check_marker(chunk, generation)

    def check_marker(self, chunk: str, generation: int) -> None:
        """P1 to P3 and P6 of one marker and its output."""
        name = layout.marker_key(chunk, generation)
        if chunk not in self._truth.chunks:
            self.fail(f"P3: {name} is of no chunk")
            return
        marker = self._marker(chunk, generation)
        held = self._server.objects.get(RUN + layout.output_key(marker["output"]))
        if held is None:
            self.fail(f"P3: {name} names {marker['output']}, which is not there")
            return
        digest = hashlib.sha256(held.data).hexdigest()
        if (len(held.data), digest) != (marker["output_bytes"], marker["output_sha256"]):
            self.fail(f"P2: {name} vouches for other bytes than {marker['output']} holds")
            return
        run = msgspec.json.decode(self._server.objects[RUN + layout.RUN_KEY].data)
        if self._is_safe and marker["fingerprint"] != run["fingerprint"]:
            self.fail(f"P6: {name} is of another configuration than run.json")
        self._check_marker_fields(name, marker, chunk, generation)
        temperatures = (
            {run["config"]["sampling"].get("temperature")} if self._is_safe else {0.5, 0.7}
        )
        try:
            self._check_output(chunk, generation, held.data, marker, temperatures)
        except Violation as violation:
            self.fail(f"{violation} (in {marker['output']})")

    def record_struck(self, name: str) -> None:
        """Note that a worker's record is removed or damaged, from outside or by `clean`."""
        self._lost_until[name] = float("inf")

    # -- inside

    def _record(self, worker: str) -> dict[str, Any] | None:
        """A worker's record; None if it is gone or damaged."""
        held = self._server.objects.get(RUN + layout.worker_key(worker))
        return None if held is None else read_record(held.data)

    def _check_marker_fields(
        self, name: str, marker: dict[str, Any], chunk: str, generation: int
    ) -> None:
        truth = self._truth
        wanted = {
            "chunk_sha256": truth.shas[chunk],
            "generation": generation,
        }
        for field, value in wanted.items():
            if marker[field] != value:
                self.fail(f"P3: {name} says {field} {marker[field]}, and it is {value}")
        rows = marker["rows_ok"] + marker["rows_error"]
        if rows != len(truth.chunks[chunk]):
            self.fail(f"P1: {name} counts {rows} rows, the chunk has {len(truth.chunks[chunk])}")
        if not 0 <= marker["rows_resumed"] <= rows:
            self.fail(f"P3: {name} counts {marker['rows_resumed']} resumed of {rows} rows")
        if marker["start"] > marker["end"]:
            self.fail(f"P3: {name} ends before it starts")

    def _check_output(
        self,
        chunk: str,
        generation: int,
        data: bytes,
        marker: dict[str, Any],
        temperatures: set[float | None],
    ) -> None:
        rows = self._truth.chunks[chunk]
        lines = data.split(b"\n")
        if lines.pop() != b"" or len(lines) != len(rows):
            raise Violation(f"P1: {chunk}: {len(lines)} lines for {len(rows)} rows")
        num_ok = 0
        errors: dict[str, int] = {}
        for index, (row, text) in enumerate(zip(rows, lines, strict=True)):
            where = f"{chunk} line {index}"
            try:
                line = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise Violation(f"P1: {where}: is no JSON ({error})") from error
            if line["_row"] != self._truth.first_rows[chunk] + index:
                raise Violation(f"P1: {where}: it is row {line['_row']}")
            if line["status"] == "ok":
                num_ok += 1
                self._check_answer(where, (chunk, index), row, line, temperatures)
            else:
                code = line["error"]["code"]
                errors[code] = errors.get(code, 0) + 1
                self._check_error(where, (chunk, index), generation, row, code)
        if (num_ok, errors) != (marker["rows_ok"], marker.get("errors", {})):
            raise Violation(f"P3: {chunk}: {num_ok} ok and {errors}, the marker counts otherwise")

    def _check_answer(
        self,
        where: str,
        key: RowKey,
        row: Row,
        line: dict[str, Any],
        temperatures: set[float | None],
    ) -> None:
        run_seed = self._truth.run_seed
        seed = None if run_seed is None else codec.row_seed(run_seed, *key)
        said = line["choices"][0]["text"]
        if said not in {answer(row.prompt, temperature, seed) for temperature in temperatures}:
            raise Violation(f"P1, P6: {where}: {said!r} is no answer to {row.prompt!r}")
        if row.codes or POISON in row.prompt:
            raise Violation(f"P7: {where}: has an answer, and cannot have one")

    def _check_error(self, where: str, key: RowKey, generation: int, row: Row, code: str) -> None:
        if row.codes:
            if code not in row.codes:
                raise Violation(f"P7: {where}: {code}, expected one of {sorted(row.codes)}")
        elif code == "engine_crash":
            if self.deaths.get(key, 0) < DEATHS_TO_GIVE_UP:
                raise Violation(f"P7: {where}: given up after {self.deaths.get(key, 0)} deaths")
            if key not in self._died_alone:
                raise Violation(f"P7: {where}: given up, and no engine died with it alone")
        elif not (code == "engine_rejected" and FLAKY in row.prompt and generation == 0):
            raise Violation(f"P1: {where}: {code}, and it has an answer")

    def _store_segment(self, name: str, data: bytes) -> None:
        chunk = name.split("/")[1]
        records = [msgspec.json.decode(text) for text in data.split(b"\n") if text]
        rows = {record["line"]: record["ok"] for record in records if "ok" in record}
        self._segments.setdefault(chunk, {})[name] = rows

    def _check_claim(self, name: str, data: bytes, before: bytes | None, process: Process) -> None:
        """A claim changes hands only after its owner's lease has lapsed, or its epoch."""
        since = self._claimed_at.get(name, 0.0)
        self._claimed_at[name] = self._scheduler.now
        if before is None or not self.watches_claims:
            return
        old, new = msgspec.json.decode(before), msgspec.json.decode(data)
        if not old["worker"] or (old["worker"], old["epoch"]) == (new["worker"], new["epoch"]):
            return
        record = self._record(old["worker"])
        if record is None or self._lost_until.get(layout.worker_key(old["worker"]), -1.0) >= since:
            return  # the claim counted as lapsed while its owner's record was gone
        if record["epoch"] != old["epoch"] or record["state"] in ENDED:
            return
        if not new["worker"]:
            who = process.name.split("#")[0]
            if (who, self._epochs.get(process.name)) == (old["worker"], old["epoch"]):
                return
            if who != CLEANER:
                self.fail(f"claims: {process.name} releases {name}, which is {old['worker']}'s")
                return
        beats = self._beats[f"{layout.WORKERS}{old['worker']}.json"]
        ends = [*beats[1:], self._scheduler.now]
        stillness = max(
            (end - start for start, end in zip(beats, ends, strict=True) if end >= since),
            default=0.0,
        )
        if stillness < 0.999 * self.lease_seconds:
            self.fail(
                f"claims: {process.name} takes {name} from {old['worker']}, whose heart beats "
                f"(longest pause {stillness:.2f} s)"
            )

    def _is_done(self, chunk: str) -> bool:
        """Whether it has a marker; after --retry-errors one without error rows, or of a further generation."""
        generations = self._generations(chunk)
        if not generations or not self._generation_of_phase:
            return bool(generations)
        return generations[-1] > 0 or not self._marker(chunk, 0)["rows_error"]

    def _saved_lines(self, chunk: str) -> set[int]:
        """Lines that segments hold, as far as they count in this phase."""
        return {
            line
            for rows in self._segments.get(chunk, {}).values()
            for line, is_ok in rows.items()
            if is_ok or not self._generation_of_phase
        }

    def _generations(self, chunk: str) -> list[int]:
        found = []
        generation = 0
        while RUN + layout.marker_key(chunk, generation) in self._server.objects:
            found.append(generation)
            generation += 1
        return found

    def _marker(self, chunk: str, generation: int) -> dict[str, Any]:
        marker: dict[str, Any] = msgspec.json.decode(
            self._server.objects[RUN + layout.marker_key(chunk, generation)].data
        )
        return marker
