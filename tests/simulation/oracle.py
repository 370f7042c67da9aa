"""The promises, checked after every change of the bucket and at the end. Reads the job without the worker."""

import hashlib
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import layout
from batchinfer.core.records import Call, Reply, RowKey

from .machine import FLAKY, POISON, Asked, answer, read_call
from .scheduler import Process, Scheduler
from .storage import Server, read_record

RUN = "run/"
JOB = "job/"
ENDED = ("done", "stopped", "failed")
DEATHS_TO_GIVE_UP = 3
FOREIGN = "another run's"
"""Fingerprint of a run.json that was put in the place of the run's own from outside. No worker may use it."""
CLEANER = "clean"
"""Begins the names of processes that are no workers, but `batchinfer clean`."""


class Violation(AssertionError):
    """A promise is broken. The message begins with its name."""


class Row(NamedTuple):
    """One row of the job. `codes`: the error codes that it may end with; empty if it has an answer."""

    line: bytes
    prompt: str
    codes: frozenset[str] = frozenset()
    image: str = ""


class Truth(NamedTuple):
    """The job, as it was made."""

    chunks: dict[str, list[Row]]
    first_rows: dict[str, int]
    shas: dict[str, str]
    run_seed: int | None


def row_seed(run_seed: int, chunk: str, line: int) -> int:
    """P9: the upper 63 of 64 bits of blake2b of the run's seed, the chunk's name and the line, with NUL between them.

    Written apart from batchinfer's own formula, so that a change of that one shows.
    """
    digest = hashlib.blake2b(f"{run_seed}\0{chunk}\0{line}".encode(), digest_size=8)
    return int(digest.hexdigest(), 16) // 2


def _is_lease(name: str) -> bool:
    return name.startswith(layout.WORKERS) and not name.endswith(layout.STATISTICS_SUFFIX)


class Oracle:
    """Watches the bucket (storage.Watcher) and the engines (machine.Ward) of one seed."""

    def __init__(self, scheduler: Scheduler, server: Server, truth: Truth) -> None:
        self._scheduler = scheduler
        self._server = server
        self._truth = truth
        self.lease_seconds = 0.0
        self.watches_claims = True
        self.deaths: dict[RowKey, int] = {}
        self._died_alone: set[RowKey] = set()
        self._generation_of_phase = 0
        self._beats: dict[str, list[float]] = {}
        self._unanswered: set[tuple[str, float]] = set()
        """Heartbeats whose replies were lost: with them their worker has not renewed its lease, as far as it knows."""
        self._claimed: dict[str, tuple[float, str]] = {}
        """When a claim was last written, and by which process."""
        self._segments: dict[str, dict[str, dict[int, bool]]] = {}
        """By chunk and key: which rows it holds, and whether they are fine."""
        self._configuration_of: dict[str, str] = {}
        """Fingerprint in the first line of a segment, by the segment's key."""
        self._known: dict[tuple[str, str], dict[str, set[int]]] = {}
        """By process and chunk: the lines that the process found in segments, by the segments' fingerprints."""
        self._outputs: dict[str, bytes] = {}
        """Checksum of the first bytes that were put under each output's name, also if they are gone since."""
        self._writers: dict[str, str] = {}
        """The process that last wrote a worker's record."""
        self._renewed: dict[str, float] = {}
        """When a process last wrote its worker's record."""
        self._late: dict[str, float] = {}
        """When a process last wrote its worker's record late, so that it may have been without its lease before."""
        self._ghosts: set[str] = set()
        self._closed: set[str] = set()
        """Processes whose worker's record says that they have ended."""
        self._nonces: dict[str, str] = {}
        """Nonce in the record that a process last wrote."""
        self._lost_until: dict[str, float] = {}
        """When a worker's record that was removed or damaged was written again; infinite while it is not."""
        self._seen_damaged: set[tuple[str, str]] = set()
        """Processes, and the workers' records that were damaged when the process last read them."""
        self._temperatures: dict[str, float] = {}
        """Temperature of every run.json that stood, by fingerprint. Workers leave out the segments of other ones."""
        self._ids: dict[RowKey, str] = {}
        """Id of each row's first answer. It follows from the row's key, so all answers of the row have it."""
        self._finished: dict[str, dict[RowKey, float]] = {}
        """By process: the rows that its engine has finished, and when."""
        self._run_seen: dict[str, tuple[float, bytes]] = {}
        """By process: when it last read or wrote run.json, and the content."""
        self._marked_at: dict[str, float] = {}
        """By process: when it last wrote a marker."""
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

    def crashed(self, process: Process, error: Exception) -> None:
        """Note an exception that nobody caught."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        self._scheduler.log(process.name, "".join(traceback.format_exception(error)))
        self.fail(
            f"crash: {process.name}: {type(error).__name__}: {error} "
            f"({Path(last.filename).name}:{last.lineno})"
        )

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
            self.note_run(data)
            self._run_seen[process.name] = (self._scheduler.now, data)
            if changed:
                self.fail("P6: run.json changes")
        elif marker is not None:
            if changed:
                self.fail(f"P4: the marker {name} changes")
            self._marked_at[process.name] = self._scheduler.now
            self.check_marker(*marker)
        elif name.startswith(layout.OUTPUTS):
            digest = hashlib.sha256(data).digest()
            if self._outputs.setdefault(name, digest) != digest:
                self.fail(f"P4: the output {name} is put with other bytes than before")
            self.on_output(process)
        elif name.startswith(layout.CHECKPOINTS):
            self._store_segment(name, data)
        elif name.startswith(layout.CLAIMS):
            self._check_claim(name, data, before, process)
        elif _is_lease(name):
            self._beats.setdefault(name, []).append(self._scheduler.now)
            self._writers[name] = process.name
            if self._is_late(process):
                self._late[process.name] = self._scheduler.now
            self._renewed[process.name] = self._scheduler.now
            self._ghosts.discard(process.name)
            record = msgspec.json.decode(data)
            self._nonces[process.name] = record["nonce"]
            if record["state"] in ENDED:
                self._closed.add(process.name)
            if name in self._lost_until:
                self._lost_until[name] = min(self._lost_until[name], self._scheduler.now)

    def deleted(self, key: str, data: bytes, process: Process | None) -> None:
        """Check one deletion."""
        name = key.removeprefix(RUN)
        is_ours = process is not None
        if (name == layout.RUN_KEY and is_ours) or layout.parse_marker(name):
            self.fail(f"P3: {name} is deleted")
        elif name.startswith(layout.OUTPUTS):
            chunk = layout.chunk_of_output(name)
            for generation in self._generations(chunk):
                if layout.output_key(self._marker(chunk, generation)["output"]) == name:
                    self.fail(f"P2: {name} is deleted, and a marker names it")
        elif name.startswith(layout.CHECKPOINTS):
            chunk = name.split("/")[1]
            if not self._generations(chunk):
                self.fail(f"P5: the segment {name} is deleted, and its chunk has no marker")
            self._segments[chunk].pop(name, None)
        elif _is_lease(name):
            # A worker that starts may have written it anew since `clean` read it.
            if process is not None and (process.name, name) not in self._seen_damaged:
                self.fail(f"clean: {process.name} deletes {name}, which is not damaged")
            self.record_struck(name)

    def read(self, key: str, data: bytes, process: Process) -> None:
        """Note what a process has seen of the run's configuration, and which workers' records it saw damaged."""
        name = key.removeprefix(RUN)
        self._seen_damaged.discard((process.name, name))
        if _is_lease(name) and read_record(data) is None:
            self._seen_damaged.add((process.name, name))
        if key == RUN + layout.RUN_KEY:
            self._run_seen[process.name] = (self._scheduler.now, data)

    def listed(self, prefix: str, keys: Collection[str], process: Process) -> None:
        """Note what a process that resumes a chunk is about to find."""
        name = prefix.removeprefix(RUN)
        if not name.startswith(layout.CHECKPOINTS):
            return
        shown = {key.removeprefix(RUN) for key in keys}
        chunks = self._truth.chunks if name == layout.CHECKPOINTS else [name.split("/")[1]]
        for chunk in chunks:
            self._note_known(process, chunk, shown)

    def knows(self, process: Process, key: str, data: bytes) -> None:
        """Note that a process has read its own worker's record, which a newer start of itself may have by now."""
        record, nonce = read_record(data), self._nonces.get(process.name)
        if key == layout.WORKERS + process.name.split("#")[0] + ".json" and record and nonce:
            self._ghosts |= {process.name} if record["nonce"] != nonce else set()

    def creating(self, name: str, process: Process) -> None:
        """Check that whoever is about to write an output, a marker or a segment may do so."""
        if not name.startswith((layout.OUTPUTS, layout.CHECKPOINTS)):
            return
        if process.name in self._ghosts:
            self.fail(f"fence: {process.name} knows of a newer start of itself, and writes {name}")
        if process.name in self._closed:
            self.fail(f"lease: {process.name} has closed its record, and writes {name}")
        # A clock that stood still tells its worker nothing of the time that has passed.
        is_judged = not process.frozen_seconds
        silent_seconds = self._scheduler.now - self._renewed.get(process.name, 0.0)
        if is_judged and silent_seconds > self.lease_seconds:
            self.fail(
                f"lease: {process.name} writes {name} {silent_seconds:.2f} s after its heartbeat"
            )

    # -- machine.Ward

    def took(self, process: Process, call: Call) -> None:
        """Check that an engine gets no row that its worker had found in a checkpoint."""
        chunk, line = call.key
        temperature = read_call(call).temperature
        known = self._known.get((process.name, chunk), {})
        is_known = any(
            line in lines and self._temperatures[fingerprint] == temperature
            for fingerprint, lines in known.items()
        )
        if is_known and not self._is_done(chunk):
            self.fail(
                f"P5: {chunk} line {line} was in a checkpoint, and {process.name} does it again"
            )

    def yielded(self, process: Process, replies: list[Reply]) -> None:
        """Note what a worker was given."""
        finished = self._finished.setdefault(process.name, {})
        for reply in replies:
            finished.setdefault(reply.key, self._scheduler.now)

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

    def check_saved(self, process: Process, saving_seconds: float) -> None:
        """P5: a worker that was asked to stop, and had no trouble, leaves none of its finished rows behind.

        A heartbeat that was late in the last `saving_seconds` is trouble: without its lease a worker must not write.
        """
        late_seconds = self._scheduler.now - self._late.get(process.name, float("-inf"))
        if self._is_ghost(process) or self._is_late(process) or late_seconds < saving_seconds:
            return
        for chunk, line in sorted(self._finished.get(process.name, ())):
            if not self._is_kept(chunk, line):
                self.fail(
                    f"P5: {process.name} was stopped in peace, and {chunk} line {line} is lost"
                )

    def check_killed(self, process: Process, promised_seconds: float) -> None:
        """P5: a worker that was killed loses the rows in flight, and what it finished since its last checkpoint.

        A row counts only if since it was finished no trouble has kept the worker from saving it, and no heartbeat of
        the worker was late.

        Args:
            process: The worker's process.
            promised_seconds: Seconds after which a finished row is in a checkpoint.
        """
        if self._is_ghost(process):
            return
        now = self._scheduler.now
        calm_since = max(process.troubled_at, self._late_beat_of(process))
        for (chunk, line), finished in self._finished.get(process.name, {}).items():
            is_due = finished > calm_since and now - finished > promised_seconds
            if is_due and not self._is_kept(chunk, line):
                self.fail(
                    f"P5: {process.name} was killed {now - finished:.1f} s after it had finished {chunk} line {line}, "
                    f"which is in no checkpoint"
                )

    def check_done(self, chunks: list[str], process: Process) -> None:
        """Exit status 0: every chunk of the manifests is done."""
        for chunk in chunks:
            if not self._is_done(chunk):
                self.fail(f"exit 0: {process.name} says that it is done, and {chunk} is not")

    def check_confirmed(self, process: Process) -> None:
        """P6: before exit status 0, a worker sees that the run still has its configuration, after its last marker."""
        looked_at, data = self._run_seen.get(process.name, (-1.0, b""))
        if data and msgspec.json.decode(data)["fingerprint"] == FOREIGN:
            self.fail(f"P6: {process.name} is done, and had seen another run's run.json last")
        if looked_at < self._marked_at.get(process.name, -1.0):
            self.fail(
                f"P6: {process.name} is done, and has not looked at run.json after its markers"
            )

    def check_end(self) -> None:
        """P1 to P4 and P6 of every object in the run, once the run is complete."""
        for chunk in self._truth.chunks:
            if not self._is_done(chunk):
                self.fail(f"P1: {chunk} is not done")
            for generation in self._generations(chunk):
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
        run = self._server.objects.get(RUN + layout.RUN_KEY)
        fingerprint = None if run is None else msgspec.json.decode(run.data)["fingerprint"]
        is_own = fingerprint not in (None, FOREIGN)
        if is_own and marker["fingerprint"] != fingerprint:
            self.fail(f"P6: {name} is of another configuration than run.json")
        if marker["fingerprint"] not in self._temperatures:
            self.fail(f"P6: {name} is of a configuration that no run.json has had")
            return
        self._check_marker_fields(name, marker, chunk, generation)
        try:
            self._check_output(chunk, generation, held.data, marker)
        except Violation as violation:
            self.fail(f"{violation} (in {marker['output']})")

    def note_run(self, data: bytes) -> None:
        """Note the configuration of a run.json."""
        run = msgspec.json.decode(data)
        self._temperatures[run["fingerprint"]] = run["config"]["prompt"]["body"]["temperature"]

    def record_struck(self, name: str) -> None:
        """Note that a worker's record is removed or damaged, from outside or by `clean`."""
        self._lost_until[name] = float("inf")

    def unanswered(self, key: str) -> None:
        """Note that the reply to the request that has just taken effect does not arrive."""
        self._unanswered.add((key.removeprefix(RUN), self._scheduler.now))

    # -- inside

    def _is_late(self, process: Process) -> bool:
        """Whether a heartbeat is late. A lease counts from when a beat was sent, so half of one is enough."""
        now = self._scheduler.now
        return now - self._renewed.get(process.name, now) > 0.5 * self.lease_seconds

    def _late_beat_of(self, process: Process) -> float:
        """When a worker last had its lease again after a late heartbeat: a lease counts from when a beat was sent."""
        key = layout.worker_key(process.name.split("#")[0])
        beats = [at for at in self._beats.get(key, [0.0]) if (key, at) not in self._unanswered]
        ends = [*beats[1:], self._scheduler.now, self._scheduler.now]
        late = [
            ends[index + 1]
            for index, start in enumerate(beats)
            if ends[index] - start > 0.5 * self.lease_seconds
        ]
        return max(late, default=0.0)

    def _is_ghost(self, process: Process) -> bool:
        """Whether a later start has the worker's record. A worker that has lost it must not write."""
        if process.name in self._ghosts:
            return True
        nonce = self._nonces.get(process.name)
        record = self._record(process.name.split("#")[0])
        return nonce is not None and record is not None and record["nonce"] != nonce

    def _record(self, worker: str) -> dict[str, Any] | None:
        """A worker's record; None if it is gone or damaged."""
        held = self._server.objects.get(RUN + layout.worker_key(worker))
        return None if held is None else read_record(held.data)

    def _check_marker_fields(
        self, name: str, marker: dict[str, Any], chunk: str, generation: int
    ) -> None:
        truth = self._truth
        of = marker["chunk_sha256"], marker["generation"]
        if of != (truth.shas[chunk], generation):
            self.fail(f"P3: {name} is of the text and generation {of}")
        rows = marker["rows_ok"] + marker["rows_error"]
        if rows != len(truth.chunks[chunk]):
            self.fail(f"P1: {name} counts {rows} rows, the chunk has {len(truth.chunks[chunk])}")
        if not 0 <= marker["rows_resumed"] <= rows:
            self.fail(f"P3: {name} counts {marker['rows_resumed']} resumed of {rows} rows")
        if marker["start"] > marker["end"]:
            self.fail(f"P3: {name} ends before it starts")

    def _check_output(
        self, chunk: str, generation: int, data: bytes, marker: dict[str, Any]
    ) -> None:
        temperature = self._temperatures[marker["fingerprint"]]
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
            if line["status"] == 200:
                num_ok += 1
                self._check_answer(where, (chunk, index), row, line, temperature)
            else:
                code = line["error"]["code"]
                errors[code] = errors.get(code, 0) + 1
                self._check_error(where, (chunk, index), generation, row, code)
        if (num_ok, errors) != (marker["rows_ok"], marker.get("errors", {})):
            raise Violation(f"P3: {chunk}: {num_ok} ok and {errors}, the marker counts otherwise")

    def _check_answer(
        self, where: str, key: RowKey, row: Row, line: dict[str, Any], temperature: float
    ) -> None:
        run_seed = self._truth.run_seed
        is_greedy = temperature <= 0
        seed = None if run_seed is None or is_greedy else row_seed(run_seed, *key)
        body = line["body"]
        if "created" in body or self._ids.setdefault(key, body["id"]) != body["id"]:
            raise Violation(f"P1: {where}: equal answers are not equal bytes")
        choice = body["choices"][0]
        said = choice["message"]["content"] if "message" in choice else choice["text"]
        if said != answer(Asked(row.prompt, row.image, temperature, seed)):
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
        elif not (code == "invalid_request" and FLAKY in row.prompt and generation == 0):
            raise Violation(f"P1: {where}: {code}, and it has an answer")

    def _store_segment(self, name: str, data: bytes) -> None:
        chunk = name.split("/")[1]
        header, *records = [msgspec.json.decode(text) for text in data.split(b"\n") if text]
        if header["chunk_sha256"] != self._truth.shas.get(chunk):
            self.fail(f"P5: {name} answers another text than the chunk has, or is of no chunk")
        self._configuration_of[name] = header["fingerprint"]
        rows = {record["line"]: record["ok"] for record in records if "ok" in record}
        self._segments.setdefault(chunk, {})[name] = rows

    def _check_claim(self, name: str, data: bytes, before: bytes | None, process: Process) -> None:
        """A claim changes hands only after its owner's lease has lapsed, or once its owner has started again."""
        since, claimer = self._claimed.get(name, (0.0, ""))
        self._claimed[name] = (self._scheduler.now, process.name)
        if before is None or not self.watches_claims:
            return
        old, new = msgspec.json.decode(before), msgspec.json.decode(data)
        if not old["worker"] or (old["worker"], old["nonce"]) == (new["worker"], new["nonce"]):
            return
        record = self._record(old["worker"])
        if record is None or self._lost_until.get(layout.worker_key(old["worker"]), -1.0) >= since:
            return  # the claim counted as lapsed while its owner's record was gone
        is_stale = self._writers[layout.worker_key(old["worker"])] != claimer
        if is_stale or record["state"] in ENDED:
            return
        if not new["worker"]:
            if process.name == claimer:
                return
            if process.name.split("#")[0] != CLEANER:
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

    def _is_kept(self, chunk: str, line: int) -> bool:
        """Whether a finished row is in a segment, or its chunk has a marker."""
        segments = self._segments.get(chunk, {}).values()
        return any(line in rows for rows in segments) or self._is_done(chunk)

    def _is_done(self, chunk: str) -> bool:
        """Whether it has a marker; after --retry-errors one without error rows, or of a further generation."""
        generations = self._generations(chunk)
        if not generations or not self._generation_of_phase:
            return bool(generations)
        return generations[-1] > 0 or not self._marker(chunk, 0)["rows_error"]

    def _note_known(self, process: Process, chunk: str, shown: Collection[str]) -> None:
        """Note the lines that a process finds in the segments of a listing, as far as they count in this phase."""
        known: dict[str, set[int]] = {}
        for name, rows in self._segments.get(chunk, {}).items():
            if name not in shown:
                continue
            lines = {line for line, ok in rows.items() if ok or not self._generation_of_phase}
            known.setdefault(self._configuration_of[name], set()).update(lines)
        self._known[process.name, chunk] = known

    def _generations(self, chunk: str) -> list[int]:
        """Generations of a chunk's markers, in order. A repair may leave some out."""
        found = [
            marker[1]
            for key in self._server.keys(RUN + layout.marker_key(chunk))
            if (marker := layout.parse_marker(key.removeprefix(RUN)))
        ]
        return sorted(found)

    def _marker(self, chunk: str, generation: int) -> dict[str, Any]:
        marker: dict[str, Any] = msgspec.json.decode(
            self._server.objects[RUN + layout.marker_key(chunk, generation)].data
        )
        return marker
