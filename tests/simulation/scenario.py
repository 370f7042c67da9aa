"""The scenario of a seed: its course from the first start to a finished run.

a job -> workers come and go, with every mishap there is -> calm -> one clean worker finishes the run
      -> perhaps the same again with --retry-errors -> everything is checked
"""

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from batchinfer.core import layout
from batchinfer.core.errors import (
    BatchinferError,
    EngineError,
    Interrupted,
    RunMismatch,
    StopRequested,
    StorageError,
    Superseded,
)
from batchinfer.ledger import survey
from batchinfer.runs import clean
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage import opening
from batchinfer.worker import open_chunks, ring, stream
from batchinfer.worker import start as worker_start
from batchinfer.worker.media_fetching import MediaFetcher
from batchinfer.worker.worker_config import Environment, WorkerConfig
from making import own_manifest, put_job

from .files import BASE, close_files, tracked_files
from .injections import draw_injections
from .injections.commands import CALM_SECONDS, Cleanings
from .machine import BUCKET, SimClock, SimEngine, fetch_images, make_environment, worker_config
from .oracle import JOB, RUN, Oracle, Truth, Violation
from .plot import Plot
from .scheduler import Overrun, Process, Scheduler
from .storage import Network, Server, StillStore, Weather

AUDITED = 20
"""Of so many seeds one ends with `clean` and `verify`."""
STARTS_OF_A_POISON_ROW = 8
"""Starts of a worker alone, with a small engine, after which a row that kills the engine must be an error row."""


@dataclass(slots=True)
class Slot:
    """A place for a worker: who it is, and what it is told. `skew_seconds` is the machine's."""

    worker_id: str
    manifest: str
    chunks: list[str]
    temperature: float
    skew_seconds: float
    starts: int = 0


@dataclass(slots=True)
class Start:
    """One process of a slot."""

    slot: Slot
    process: Process
    environment: Environment
    outcome: str = ""
    has_to_stop: bool = False


class Report(NamedTuple):
    """How a seed went. `counts`: starts, kills and strikes of injections, and virtual hours."""

    seed: int
    violation: str
    trace: list[str]
    counts: Counter[str]


class Scenario:
    """One seed, from beginning to end. `run` gives its report.

    Args:
        seed: Of everything.
        keeps_trace: Whether the report holds all that happened.
        watches_claims: Whether claims must be respected.
        injected: Names of the kinds of injections; None leaves them to the seed, too.
    """

    def __init__(
        self,
        seed: int,
        *,
        keeps_trace: bool = False,
        watches_claims: bool = True,
        injected: Collection[str] | None = None,
    ) -> None:
        self.seed = seed
        self.plot = Plot(seed)
        self.scheduler = Scheduler(seed)
        if keeps_trace:
            self.scheduler.trace = []
        chance = self.plot.chance
        self.server = Server(
            page_keys=chance.choice([2, 1000, 1000]), has_content_etags=chance.random() < 0.7
        )
        self.network = Network(self.scheduler, self.server)
        self.network.attempts = chance.choice([1, 3, 3])
        self.oracle = Oracle(self.scheduler, self.server, self._make_job())
        self.oracle.lease_seconds = self.plot.lease_seconds
        self.oracle.watches_claims &= watches_claims
        self.server.watcher = self.oracle
        self.folder = Path(tempfile.mkdtemp(prefix="batchinfer-simulation-", dir=BASE))
        self.live: list[Start] = []
        self.is_over = False
        """Whether the mishaps of the day are."""
        self.injections = draw_injections(self, injected)
        self.cleanings = next((it for it in self.injections if isinstance(it, Cleanings)), None)
        if self.cleanings is not None:
            self.oracle.on_output = self.cleanings.note_output
        self.is_retrying = False
        self.counts: Counter[str] = Counter()

    def run(self) -> Report:
        """Run the seed. What breaks a promise is in the report's `violation`; it never raises."""
        violation = ""
        try:
            with ExitStack() as stack:
                self._enter(stack)
                self._play()
        except Violation as error:
            violation = str(error)
        except Overrun as error:
            violation = f"ends: {error}"
        finally:
            for process in self.scheduler.processes:
                process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
        if violation:
            self.scheduler.log("oracle", violation)
        self.counts["virtual hours"] = self.scheduler.now / 3600
        self.counts["injections"] = sum(injection.num_strikes for injection in self.injections)
        return Report(self.seed, violation, self.scheduler.trace or [], self.counts)

    def _enter(self, stack: ExitStack) -> None:
        """Let what is not handed to a worker or a command be the simulation's, too: names, limits, images, files."""
        plot = self.plot
        draw = random.Random(f"names {self.seed}").getrandbits
        names = SimpleNamespace(token_hex=lambda _: f"{draw(64):x}")
        longest = plot.image_seconds or 0.0
        for where, name, value in (
            (survey, "_MOST_NEIGHBOURS", plot.most_neighbours),
            (survey, "MOST_SAMPLED", plot.most_sampled),
            (ring, "_FRESH_SECONDS", plot.fresh_seconds),
            (stream, "NUM_THREADS", plot.most_fetched),
            (MediaFetcher, "fetch_now", partialmethod(fetch_images, longest_seconds=longest)),
            (opening, "secrets", names),
            (clean, "secrets", names),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(tracked_files(self._has_room))

    def _has_room(self, process_name: str) -> bool:
        return all(injection.has_room(process_name) for injection in self.injections)

    # -- the story

    def _play(self) -> None:
        self._phase()
        if self.plot.has_retry:
            self.scheduler.log("scenario", "== the engine is mended; error rows are done again ==")
            self.plot.engine.is_mended = True
            self.is_retrying = True
            self.oracle.begin_retrying()
            self._phase()
        self.scheduler.run(float("inf"))
        self.oracle.check_end()
        self._raise()
        if self.seed % AUDITED == 0 or self.cleanings is not None:
            self._audit()

    def _audit(self) -> None:
        """Run `batchinfer clean` and `batchinfer verify --deep` over the finished run."""
        process = Process(self.scheduler, "audit#1")
        store = StillStore(f"{BUCKET}run", self.server, process)
        self.scheduler.now += 1000.0  # longer than any lease, so that the dead count as gone
        clock = SimClock(process, 0.0)
        run_clean(
            CleanConfig(run=store.url, yes=True, older_than_seconds=0.0), store=store, clock=clock
        )
        verdict = run_verify(
            VerifyConfig(
                run=store.url, job=f"{BUCKET}job", deep=True, scratch_dir=str(self.folder)
            ),
            open_store=lambda url: StillStore(url, self.server, process),
            clock=clock,
        )
        self.oracle.check_end()
        self._raise()
        if not verdict.is_sound:
            self.oracle.fail("verify: " + " / ".join(verdict.lines()))
        of_workers = (RUN + layout.CHECKPOINTS, RUN + layout.CLAIMS)
        if left := [key for key in self.server.keys(RUN) if key.startswith(of_workers)]:
            self.oracle.fail(f"clean: leaves {left}")
        self._raise()

    def _phase(self) -> None:
        """Workers and mishaps, then calm until all have ended, then one clean worker."""
        scheduler = self.scheduler
        self.network.weather = self.plot.weather
        slots = self._slots()
        self._day(slots)
        if self.cleanings is not None and self.cleanings.night_seconds:
            self._night(self.cleanings)
            self._day(slots)
        scheduler.log("scenario", "== calm ==")
        self.network.weather = Weather(latency_seconds=self.plot.weather.latency_seconds)
        self.plot.engine.dies = self.plot.engine.fails_to_load = 0.0
        for injection in self.injections:
            injection.calm()
        self._let_pass(scheduler.now + CALM_SECONDS, lambda: not self._awaited)
        if self._awaited:
            names = ", ".join(start.process.name for start in self._awaited)
            self.oracle.fail(f"ends: {names} still run after {CALM_SECONDS:.0f} s of calm")
        self._raise()
        self._finish_cleanly()

    def _day(self, slots: list[Slot]) -> None:
        """Workers and mishaps."""
        plot, scheduler = self.plot, self.scheduler
        self.is_over = False
        for injection in self.injections:
            injection.begin(plot.mishaps_seconds)
        for slot in slots:
            scheduler.after(
                plot.chance.random() * plot.mishaps_seconds * 0.5 * plot.chance.choice([0, 1]),
                lambda slot=slot: self.start(slot),
            )
        end = scheduler.now + plot.mishaps_seconds
        if not plot.is_calm:
            self._next_mishap(end)
        self._let_pass(end)
        self.is_over = True

    def _night(self, cleanings: Cleanings) -> None:
        """Every worker is killed, or its machine sleeps. What they left grows old."""
        self.scheduler.log("scenario", "== night ==")
        seconds, chance = cleanings.night_seconds, cleanings.chance
        for start in list(self.live):
            if chance.random() < 0.5:
                start.process.kill()
            else:
                asleep = seconds * chance.uniform(0.8, 1.1)
                start.process.freeze(asleep, stops_clock=chance.random() < 0.5)
        cleanings.begin(1.1 * seconds)
        self._let_pass(self.scheduler.now + seconds)

    def _finish_cleanly(self) -> None:
        """One worker alone must be able to finish what is left, an engine that dies of its rows apart."""
        name = "cleaner-retry" if self.is_retrying else "cleaner"
        slot = Slot(name, layout.ALL_MANIFEST, list(self.oracle.chunks), self._temperature(), 0.0)
        for _ in range(STARTS_OF_A_POISON_ROW * max(4, len(self.plot.poison))):
            start = self.start(slot)
            self._let_pass(self.scheduler.now + CALM_SECONDS, lambda: not self._awaited)
            if self._awaited:
                self.oracle.fail("ends: the clean worker does not come to an end")
            self._raise()
            # One that woke up just now may have made the run its own: who comes later takes its configuration.
            is_late = slot.temperature != self._temperature()
            slot.temperature = self._temperature()
            if start.outcome != "EngineDied" and not is_late:
                break
        if start.outcome != "SUCCESS":
            self.oracle.fail(f"P5: the clean worker cannot finish the run: {start.outcome}")
        for each in list(self.live):
            each.process.kill()  # its main loop hangs for ever
        self.oracle.check_end()
        self._raise()

    @property
    def _awaited(self) -> list[Start]:
        """The workers that run and must come to an end. One whose main loop hangs for ever must keep nobody waiting."""
        return [start for start in self.live if start.process.hung_until != float("inf")]

    def _temperature(self) -> float:
        """The run's configuration, once it exists."""
        run = self.server.objects.get(RUN + layout.RUN_KEY)
        if run is None:
            return self.plot.temperature
        temperature: float = json.loads(run.data)["config"]["prompt"]["body"]["temperature"]
        return temperature

    def _let_pass(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        oracle = self.oracle
        self.scheduler.run(until, lambda: oracle.violation is not None or is_over())
        self._raise()

    def _raise(self) -> None:
        if self.oracle.violation is not None:
            raise self.oracle.violation

    # -- mishaps

    def _next_mishap(self, end: float) -> None:
        scheduler = self.scheduler

        def happen() -> None:
            if scheduler.now < end:
                self._mishap()
                self._next_mishap(end)

        scheduler.after(scheduler.random.expovariate(1 / self.plot.mishap_gap), happen)

    def _mishap(self) -> None:
        if not self.live:
            return
        chance = self.scheduler.random
        start = chance.choice(self.live)
        what = chance.choice(["kill", "kill", "freeze", "freeze", "stop", "double"])
        self.scheduler.log("scenario", f"{what} {start.process.name}")
        if what == "kill":
            start.process.kill()
        elif what == "freeze":
            seconds = chance.random() * chance.choice([0.3, 1.5, 4.0]) * self.plot.lease_seconds
            start.process.freeze(seconds, stops_clock=chance.random() < 0.3)
        elif what == "stop":
            start.has_to_stop = True
            start.environment.stopper.request(Interrupted("stopped by the scenario"))
        elif start.slot.starts < 6:
            self.start(start.slot)

    # -- workers

    def start(self, slot: Slot) -> Start:
        """Start one worker process of a slot."""
        slot.starts += 1
        self.counts["starts"] += 1
        plot, chance = self.plot, self.scheduler.random
        process = Process(self.scheduler, f"{slot.worker_id}#{slot.starts}")
        environment = make_environment(
            process,
            self.network,
            engine=lambda: SimEngine(process, plot.engine, self.oracle),
            skew_seconds=slot.skew_seconds,
            grace_seconds=plot.grace_seconds,
            tries_store=chance.random() < 0.3,
        )
        start = Start(slot, process, environment)
        config = worker_config(
            process,
            self.folder,
            slot.manifest,
            temperature=slot.temperature,
            has_images=plot.image_seconds is not None,
            run_seed=plot.run_seed,
            limit=plot.limit,
            retry_errors=self.is_retrying,
            max_error_rate=1.0,  # a run of few rows may by chance have bad ones only
            lease_seconds=plot.lease_seconds,
            checkpoint_seconds=plot.checkpoint_seconds,
            limits=plot.limits,
        )
        self.live.append(start)
        process.on_exit.append(lambda: self._ended(start))
        process.on_crash = lambda error: self.oracle.crashed(process, error)

        def main() -> None:
            start.outcome = self._run_worker(start, config)
            self.scheduler.at(self.scheduler.now, process.kill)

        self.scheduler.log("scenario", f"start {process.name}")
        process.spawn(main)
        return start

    def _run_worker(self, start: Start, config: WorkerConfig) -> str:
        process = start.process
        try:
            worker_start.run_worker(config, start.environment)
        except BatchinferError as error:
            self._check_error(start, error)
            return type(error).__name__
        # A repair finds by a listing what there is to repair, and passes over what a lagging one does not show.
        has_seen_all = not (self.is_retrying and self.server.has_lagged)
        if has_seen_all or start.slot.worker_id == "cleaner-retry":
            self.oracle.check_done(start.slot.chunks, process)
        self.oracle.check_confirmed(process)
        return "SUCCESS"

    def _check_error(self, start: Start, error: BatchinferError) -> None:
        """Every worker may end only for a reason that there is."""
        process, plot = start.process, self.plot
        self.scheduler.log(process.name, f"ends: {type(error).__name__}: {error.message[:300]}")
        reasons = {
            RunMismatch: plot.has_other_config,
            StorageError: bool(process.num_faults),
            EngineError: not plot.is_calm or self.oracle.deaths,
            Interrupted: start.has_to_stop,
            Superseded: start.slot.starts > 1,
        }
        is_right = any(isinstance(error, kind) and there_is for kind, there_is in reasons.items())
        is_by_injection = self.is_explained(error)
        if not is_right and not is_by_injection:
            self.oracle.fail(
                f"ends: {process.name} without a reason: {type(error).__name__}: {error.message[:300]}"
            )
        is_peaceful = not process.num_faults and not process.has_been_frozen
        if is_peaceful and isinstance(error, Interrupted | EngineError | StopRequested):
            self.oracle.check_saved(process, open_chunks._SAVE_SECONDS + plot.grace_seconds)

    def is_explained(self, error: BatchinferError) -> bool:
        """Whether what was injected may end a process with this error."""
        return any(injection.explains(error) for injection in self.injections)

    def _ended(self, start: Start) -> None:
        self.live.remove(start)
        close_files(start.process.name)
        outcome = start.outcome or "killed"
        if outcome == "killed":
            self.counts["kills"] += 1
            seconds = 1.0 + 10 * self.plot.weather.latency_seconds
            self.oracle.check_killed(start.process, self.plot.checkpoint_seconds + seconds)
        self.scheduler.log("scenario", f"{start.process.name} has ended: {outcome}")
        comes_back = outcome not in ("SUCCESS", "Superseded", "StopRequested")
        comes_back &= outcome != "RunMismatch" or not self.plot.has_other_config
        chance = self.scheduler.random
        if comes_back and not self.is_over and chance.random() < 0.8:
            delay = chance.random() * self.plot.lease_seconds * chance.choice([0.1, 1, 3])
            self.scheduler.after(delay, lambda: self._start_again(start.slot))

    def _start_again(self, slot: Slot) -> None:
        if not self.is_over and slot.starts < 12:
            self.start(slot)

    def _slots(self) -> list[Slot]:
        plot, chance = self.plot, self.plot.chance
        prefix = "r" if self.is_retrying else "w"
        slots = []
        for index in range(plot.num_workers):
            manifest = layout.worker_manifest(index, plot.num_workers)
            if plot.has_own_manifests:
                manifest = own_manifest(index)
            if chance.random() < 0.3:
                manifest = layout.ALL_MANIFEST
            lines = self.server.objects[JOB + manifest].data.decode().split()
            chunks = [chunk for chunk in map(layout.stem, lines) if chunk in self.oracle.chunks]
            is_other = plot.has_other_config and chance.random() < 0.4
            temperature = 0.7 if is_other else plot.temperature
            skew_seconds = chance.uniform(-3600, 3600)
            slots.append(Slot(f"{prefix}{index}", manifest, chunks, temperature, skew_seconds))
        return slots

    def _make_job(self) -> Truth:
        """Put the job, and return what there is to do of it."""
        plot = self.plot
        job = put_job(
            lambda key, data: self.server.put(JOB + key, data),
            [b"".join(row.line + b"\n" for row in part) for part in plot.rows],
            workers=plot.num_workers,
            compression=plot.compression,
            columns=["prompt", "image"],
        )
        truth = Truth({}, {}, {}, plot.run_seed)
        for chunk, part in zip(job.chunks, plot.rows, strict=True):
            first, limit = chunk.first_row, plot.limit
            wanted = part if limit is None else part[: max(0, limit - first)]
            if wanted:
                truth.chunks[chunk.name] = wanted
                truth.first_rows[chunk.name] = first
                truth.shas[chunk.name] = chunk.sha256
        return truth


def simulate(seed: int, **options: Any) -> Report:
    """Run one seed, see `Scenario`."""
    return Scenario(seed, **options).run()
