"""The scenario of a seed: what it stands for, and its course from the first start to a finished run.

a job -> workers come and go, with every mishap there is -> calm -> one clean worker finishes the run
      -> perhaps the same again with --retry-errors -> everything is checked
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    BatchinferError,
    EngineError,
    Interrupted,
    NoProgress,
    RunMismatch,
    StopRequested,
    StorageError,
    Superseded,
)
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.ledger import survey
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.runs.verify import VerifyConfig, run_verify
from batchinfer.storage import opening, scratch
from batchinfer.worker import open_chunks, ring, stream
from batchinfer.worker import start as worker_start
from batchinfer.worker.media_fetching import NUM_THREADS, MediaFetcher
from batchinfer.worker.worker_config import Environment, Limits, WorkerConfig

from . import cleaning
from .cleaning import CALM_SECONDS, Cleanings
from .injections import draw_injections
from .injections.disks import FillingFile, no_space
from .machine import (
    BROKEN,
    FLAKY,
    POISON,
    EngineTraits,
    SimClock,
    SimEngine,
    fetch_images,
    make_environment,
    prompt_config,
)
from .oracle import JOB, RUN, Oracle, Row, Truth, Violation
from .scheduler import Overrun, Process, Scheduler
from .storage import Network, Server, StillStore, Weather

BUCKET = "s3://sim/"
AUDITED = 20
"""Of so many seeds one ends with `clean` and `verify`."""
STARTS_OF_A_POISON_ROW = 8
"""Starts of a worker alone, with a small engine, after which a row that kills the engine must be an error row."""
BASE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


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
    began: float
    outcome: str = ""
    stop_asked: float | None = None


class Report(NamedTuple):
    """How a seed went. `digest` is of every event, in order."""

    seed: int
    violation: str
    digest: str
    trace: list[str]
    virtual_seconds: float
    starts: int
    kills: int
    freezes: int
    cleanings: int
    strikes: int


@dataclass(slots=True)
class Plot:
    """Everything that is drawn from the seed before it begins."""

    chance: random.Random
    is_calm: bool = False
    steal: bool = True
    compression: str = "none"
    limit: int | None = None
    has_retry: bool = False
    has_other_config: bool = False
    has_stop: bool = False
    run_seed: int | None = 0
    lease_seconds: float = 6.0
    checkpoint_seconds: float = 1.5
    checkpoint_rows: int | None = None
    grace_seconds: float = 2.0
    storage_attempts: int = 4
    mishaps_seconds: float = 30.0
    mishap_gap: float = 4.0
    weather: Weather = field(default_factory=Weather)
    engine: EngineTraits = field(default_factory=EngineTraits)
    limits: Limits = field(default_factory=Limits)
    few: int = 20
    neighbour_digits: int = 3
    """0: an idle worker looks at one chunk after the other, as at the blocks of a large job."""
    most_sampled: int = 64
    fresh_seconds: float = 60.0
    temperature: float = 0.5
    """Temperature of the run. At 0, rows have no seeds."""
    image_seconds: float | None = None
    """Longest time until a row's image is fetched; None for a run without images."""
    most_fetched: int = NUM_THREADS
    """Rows whose images are fetched at a time."""


def draw_plot(seed: int) -> Plot:
    """Decide what kind of run a seed is."""
    chance = random.Random(f"plot {seed}")
    is_calm = chance.random() < 0.1

    def maybe(share: float, value: float) -> float:
        return value * chance.random() if not is_calm and chance.random() < share else 0.0

    plot = Plot(chance, is_calm=is_calm)
    plot.steal = chance.random() > 0.2
    plot.compression = "zstd" if chance.random() < 0.15 else "none"
    plot.has_retry = chance.random() < 0.2
    plot.has_other_config = chance.random() < 0.12
    plot.has_stop = not is_calm and chance.random() < 0.1
    plot.run_seed = None if chance.random() < 0.2 else chance.randrange(3)
    plot.lease_seconds = chance.choice([3.0, 6.0, 12.0])
    plot.checkpoint_seconds = chance.choice([0.5, 1.5, 4.0, 1000.0])
    plot.checkpoint_rows = chance.choice([None, None, 1, 3])
    plot.grace_seconds = chance.choice([0.5, 2.0, 5.0])
    plot.storage_attempts = chance.choice([1, 2, 4])
    plot.mishaps_seconds = chance.choice([15.0, 30.0, 60.0])
    plot.mishap_gap = chance.choice([1.0, 3.0, 8.0])
    plot.few = chance.choice([20, 20, 1])
    parts = random.Random(f"parts {seed}")
    plot.neighbour_digits = parts.choice([0, 0, 3])
    plot.most_sampled = parts.choice([1, 64])
    plot.fresh_seconds = parts.choice([1.0, 10.0, 60.0])
    weather = plot.weather
    weather.latency_seconds = chance.choice([0.005, 0.03, 0.2])
    weather.refused = maybe(0.5, 0.2)
    weather.lost = maybe(0.5, 0.2)
    weather.late = maybe(0.4, 0.15)
    weather.late_seconds = plot.lease_seconds * chance.choice([0.3, 2.0, 6.0])
    weather.slow = maybe(0.4, 0.1)
    weather.slow_seconds = plot.lease_seconds * 1.5
    weather.partly = maybe(0.3, 0.5)
    weather.dies_before = maybe(0.3, 0.05)
    weather.dies_after = maybe(0.3, 0.05)
    if not is_calm and chance.random() < 0.2:
        start = chance.random() * plot.mishaps_seconds
        weather.outages = ((start, start + chance.random() * 3 * plot.lease_seconds),)
    engine = plot.engine
    engine.max_in_flight = chance.choice([1, 2, 4, 8, 16])
    engine.step_seconds = chance.choice([0.05, 0.2])
    engine.row_seconds = chance.choice([0.1, 0.5, 2.0])
    engine.load_seconds = chance.choice([0.2, 1.0, 4.0])
    engine.dies = maybe(0.2, 0.05)
    engine.fails_to_load = maybe(0.1, 0.3)
    engine.varies = chance.random() < 0.5
    plot.limits = Limits(
        max_open_chunks=chance.choice([1, 2, 64]),
        max_openings=chance.choice([1, 4]),
        max_publishing=random.Random(f"publishing {seed}").choice([1, 2, 7]),
        max_build_rows=chance.choice([1, 5, 512]),
        storage_attempts=plot.storage_attempts,
        storage_retry_seconds=chance.choice([0.2, 1.0]),
    )
    plot.temperature = random.Random(f"temperature {seed}").choice([0.0, 0.5, 0.5, 0.5])
    images = random.Random(f"images {seed}")
    if images.random() < 0.25:
        plot.image_seconds = images.choice([0.01, 0.5, 3.0])
        plot.most_fetched = images.choice([1, 2, NUM_THREADS])
    return plot


class Scenario:
    """One seed, from beginning to end. `run` gives its report."""

    def __init__(
        self,
        seed: int,
        *,
        keeps_trace: bool = False,
        watches_claims: bool = True,
        is_cleaned: bool | None = None,
        injected: Collection[str] | None = None,
    ) -> None:
        self.seed = seed
        self.plot = draw_plot(seed)
        self.scheduler = Scheduler(seed)
        if keeps_trace:
            self.scheduler.trace = []
        chance = self.plot.chance
        self.server = Server(
            page_keys=chance.choice([2, 1000, 1000]),
            has_content_etags=chance.random() < 0.7,
        )
        self.network = Network(self.scheduler, self.server)
        self.network.attempts = chance.choice([1, 3, 3])
        truth = self._make_job(chance)
        self.oracle = Oracle(self.scheduler, self.server, truth, self.plot.engine)
        self.oracle.lease_seconds = self.plot.lease_seconds
        self.oracle.watches_claims &= watches_claims
        self.server.watcher = self.oracle
        self.cleanings: Cleanings | None = None
        if cleaning.is_cleaned(seed) if is_cleaned is None else is_cleaned:
            self.cleanings = Cleanings(
                seed, self.scheduler, self.network, self.oracle, self.plot.lease_seconds
            )
            self.oracle.on_output = self._interrupt
            self.plot.has_retry |= self.cleanings.has_retry
        self.folder = Path(tempfile.mkdtemp(prefix="batchinfer-simulation-", dir=BASE))
        self.live: list[Start] = []
        self.has_room: Callable[[str], bool] | None = None
        self.injections = draw_injections(self, injected)
        if self.cleanings is not None:
            self.cleanings.explains = self._is_explained
        self.is_retrying = False
        self.are_mishaps_over = False
        self.num_starts = self.num_kills = self.num_freezes = 0

    def run(self) -> Report:
        """Run the seed. What breaks a promise is in the report's `violation`; it never raises."""
        violation = ""
        try:
            # The names of probes come from the seed, too.
            names = SimpleNamespace(
                token_hex=lambda _: f"{self.scheduler.random.getrandbits(64):x}"
            )
            with (
                mock.patch.object(survey, "_FEW", self.plot.few),
                mock.patch.object(survey, "_NEIGHBOUR_DIGITS", self.plot.neighbour_digits),
                mock.patch.object(survey, "MOST_SAMPLED", self.plot.most_sampled),
                mock.patch.object(ring, "_FRESH_SECONDS", self.plot.fresh_seconds),
                mock.patch.object(opening, "secrets", names),
                mock.patch.object(stream, "NUM_THREADS", self.plot.most_fetched),
                mock.patch.object(MediaFetcher, "fetch_now", self._fetch_images),
                cleaning.in_virtual_time(self.seed, self.scheduler),
                tracked_files(lambda name: self.has_room is None or self.has_room(name)),
            ):
                self._play()
        except Violation as error:
            violation = str(error)
        except Overrun as error:
            violation = f"ends: {error}"
        finally:
            for start in self.live:
                start.process.kill()
            if self.cleanings is not None:
                self.cleanings.end()
            shutil.rmtree(self.folder, ignore_errors=True)
        if violation:
            self.scheduler.log("oracle", violation)
        trace = self.scheduler.trace or []
        digest = hashlib.sha256("\n".join(trace).encode()).hexdigest()[:16]
        return Report(
            self.seed,
            violation,
            digest,
            trace,
            self.scheduler.now,
            self.num_starts,
            self.num_kills,
            self.num_freezes,
            0 if self.cleanings is None else self.cleanings.num,
            sum(injection.num_strikes for injection in self.injections),
        )

    @property
    def _fetch_images(self) -> Callable[..., Any]:
        return partialmethod(fetch_images, longest_seconds=self.plot.image_seconds or 0.0)

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
        is_audited = self.seed % AUDITED == 0 or self.cleanings is not None
        if is_audited:
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
                run=store.url, job=f"{BUCKET}job", is_deep=True, scratch_dir=str(self.folder)
            ),
            open_store=lambda url: StillStore(url, self.server, process),
            clock=clock,
        )
        self.oracle.check_end()
        self._raise()
        if not verdict.is_sound:
            self.oracle.fail("verify: " + " / ".join(verdict.lines()))
        left = [
            *self.server.keys(RUN + layout.CHECKPOINTS),
            *self.server.keys(RUN + layout.CLAIMS),
        ]
        if left:
            self.oracle.fail(f"clean: leaves {left}")
        self._raise()

    def _phase(self) -> None:
        """Workers and mishaps, then calm until all have ended, then one clean worker."""
        scheduler, cleanings = self.scheduler, self.cleanings
        self.network.weather = self.plot.weather
        slots = self._slots()
        if cleanings is not None:
            cleanings.begin(1.5 * self.plot.mishaps_seconds)
        self._day(slots)
        if cleanings is not None and cleanings.night_seconds:
            self._night(cleanings)
            self._day(slots)
        scheduler.log("scenario", "== calm ==")
        self._calm_down()
        self._let_pass(scheduler.now + CALM_SECONDS, lambda: not self._awaited)
        if self._awaited:
            names = ", ".join(start.process.name for start in self._awaited)
            self.oracle.fail(f"ends: {names} still run after {CALM_SECONDS:.0f} s of calm")
        self._raise()
        self._finish_cleanly()

    def _day(self, slots: list[Slot]) -> None:
        """Workers and mishaps."""
        plot, scheduler = self.plot, self.scheduler
        self.are_mishaps_over = False
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
        self.are_mishaps_over = True

    def _night(self, cleanings: Cleanings) -> None:
        """Every worker is killed, or its machine sleeps. What they left grows old."""
        self.scheduler.log("scenario", "== night ==")
        seconds = cleanings.night_seconds
        for start in list(self.live):
            if cleanings.chance.random() < 0.5:
                start.process.kill()
            else:
                start.process.freeze(
                    seconds * cleanings.chance.uniform(0.8, 1.1),
                    stops_clock=cleanings.chance.random() < 0.5,
                )
        cleanings.begin(1.1 * seconds + self.plot.mishaps_seconds)
        self._let_pass(self.scheduler.now + seconds)

    def _calm_down(self) -> None:
        self.network.weather = Weather(latency_seconds=self.plot.weather.latency_seconds)
        self.server.delete(RUN + layout.STOP_KEY)
        self.plot.engine.dies = self.plot.engine.fails_to_load = 0.0
        for injection in self.injections:
            injection.calm()

    def _finish_cleanly(self) -> None:
        """One worker alone must be able to finish what is left, an engine that dies of its rows apart."""
        name = "cleaner-retry" if self.is_retrying else "cleaner"
        slot = Slot(name, layout.ALL_MANIFEST, list(self.oracle.chunks), self._temperature(), 0.0)
        for _ in range(STARTS_OF_A_POISON_ROW * max(4, self._num_poison)):
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
        scheduler, plot = self.scheduler, self.plot

        def happen() -> None:
            if scheduler.now < end:
                self._mishap()
                self._next_mishap(end)

        scheduler.after(scheduler.random.expovariate(1 / plot.mishap_gap), happen)

    def _mishap(self) -> None:
        chance, lease = self.scheduler.random, self.plot.lease_seconds
        if self.plot.has_stop and chance.random() < 0.2:
            self.scheduler.log("scenario", "stop.json comes")
            self.server.put(RUN + layout.STOP_KEY, b"{}")
            self.scheduler.after(chance.random() * lease, self._resume)
        if not self.live:
            return
        start = chance.choice(self.live)
        what = chance.choice(["kill", "kill", "freeze", "freeze", "stop", "double"])
        self.scheduler.log("scenario", f"{what} {start.process.name}")
        if what == "kill":
            start.process.kill()
        elif what == "freeze":
            self.num_freezes += 1
            start.process.freeze(
                chance.random() * chance.choice([0.3, 1.5, 4.0]) * lease,
                stops_clock=chance.random() < 0.3,
            )
        elif what == "stop":
            start.stop_asked = start.stop_asked or self.scheduler.now
            start.environment.stopper.request(Interrupted("stopped by the scenario"))
        elif start.slot.starts < 6:
            self.start(start.slot)

    def _interrupt(self, process: Process) -> None:
        if self.cleanings is not None and not self.plot.is_calm and not self.are_mishaps_over:
            self.cleanings.interrupt(process)

    def _resume(self) -> None:
        self.scheduler.log("scenario", "stop.json goes")
        self.server.delete(RUN + layout.STOP_KEY)

    # -- workers

    def start(self, slot: Slot) -> Start:
        """Start one worker process of a slot."""
        slot.starts += 1
        self.num_starts += 1
        plot, chance = self.plot, self.scheduler.random
        process = Process(self.scheduler, f"{slot.worker_id}#{slot.starts}")
        environment = make_environment(
            process,
            self.network,
            engine=lambda: SimEngine(process, plot.engine, self.oracle),
            skew_seconds=slot.skew_seconds,
            grace_seconds=plot.grace_seconds,
            num_hands=chance.choice([2, 8]),
            tries_store=chance.random() < 0.3,
        )
        start = Start(slot, process, environment, self.scheduler.now)
        config = self._worker_config(slot)
        self.live.append(start)
        process.on_exit.append(lambda: self._ended(start))
        process.on_crash = lambda error: self._crashed(process, error)

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
        except Exception as error:  # noqa: BLE001 - whatever else it is, it is a defect
            self._crashed(process, error)
            return "crash"
        # A repair finds by a listing what there is to repair, and passes over what a lagging one does not show.
        has_seen_all = not (self.is_retrying and self.server.has_lagged)
        if has_seen_all or start.slot.worker_id == "cleaner-retry":
            self.oracle.check_done(start.slot.chunks, process)
        self.oracle.check_confirmed(process)
        return "SUCCESS"

    def _crashed(self, process: Process, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        self.scheduler.log(process.name, "".join(traceback.format_exception(error)))
        self.oracle.fail(
            f"crash: {process.name}: {type(error).__name__}: {error} "
            f"({Path(last.filename).name}:{last.lineno})"
        )

    def _check_error(self, start: Start, error: BatchinferError) -> None:
        """Every worker may end only for a reason that there is."""
        process, plot = start.process, self.plot
        self.scheduler.log(process.name, f"ends: {type(error).__name__}: {error.message[:300]}")
        is_peaceful = not process.num_faults and not process.has_been_frozen
        reasons = {
            RunMismatch: plot.has_other_config,
            StorageError: bool(process.num_faults),
            EngineError: not plot.is_calm or self.oracle.deaths,
            Interrupted: start.stop_asked is not None,
            StopRequested: plot.has_stop,
            Superseded: start.slot.starts > 1,
            NoProgress: False,
        }
        is_explained = self._is_explained(error)
        for kind, is_right in reasons.items():
            if isinstance(error, kind):
                if not is_right and not is_explained:
                    self.oracle.fail(
                        f"ends: {process.name} without a reason: {error.message[:300]}"
                    )
                if isinstance(error, Interrupted | EngineError | StopRequested) and is_peaceful:
                    self.oracle.check_saved(process, open_chunks._SAVE_SECONDS + plot.grace_seconds)
                return
        if not is_explained:
            self.oracle.fail(f"ends: {process.name}: {type(error).__name__}: {error.message[:300]}")

    def _is_explained(self, error: BatchinferError) -> bool:
        """Whether what was injected may end a process with this error."""
        return any(injection.explains(error) for injection in self.injections)

    def _ended(self, start: Start) -> None:
        self.live.remove(start)
        close_files(start.process.name)
        outcome = start.outcome or "killed"
        self.num_kills += outcome == "killed"
        if outcome == "killed":
            seconds = 1.0 + 10 * self.plot.weather.latency_seconds
            self.oracle.check_killed(start.process, self.plot.checkpoint_seconds + seconds)
        self.scheduler.log("scenario", f"{start.process.name} has ended: {outcome}")
        comes_back = outcome not in ("SUCCESS", "Superseded", "StopRequested")
        comes_back &= outcome != "RunMismatch" or not self.plot.has_other_config
        chance = self.scheduler.random
        if comes_back and not self.are_mishaps_over and chance.random() < 0.8:
            delay = chance.random() * self.plot.lease_seconds * chance.choice([0.1, 1, 3])
            self.scheduler.after(delay, lambda: self._start_again(start.slot))

    def _start_again(self, slot: Slot) -> None:
        if not self.are_mishaps_over and slot.starts < 12:
            self.start(slot)

    def _worker_config(self, slot: Slot) -> WorkerConfig:
        plot = self.plot
        return WorkerConfig(
            manifests=[f"{BUCKET}job/{slot.manifest}"],
            output=f"{BUCKET}run",
            engine=EngineConfig(engine="sim", model="sim"),
            prompt=prompt_config(slot.temperature, has_images=plot.image_seconds is not None),
            run_seed=plot.run_seed,
            worker_id=slot.worker_id,
            limit=plot.limit,
            retry_errors=self.is_retrying,
            max_error_rate=1.0,  # a run of few rows may by chance have bad ones only
            lease_seconds=plot.lease_seconds,
            checkpoint_seconds=plot.checkpoint_seconds,
            checkpoint_rows=plot.checkpoint_rows,
            max_attempts=1000,
            scratch_dir=str(self.folder / f"{slot.worker_id}#{slot.starts}"),
            limits=plot.limits,
        )

    def _slots(self) -> list[Slot]:
        chance = self.plot.chance
        prefix = "r" if self.is_retrying else "w"
        slots = []
        for index in range(self.num_workers):
            manifest = layout.worker_manifest(index, self.num_workers)
            if not self.plot.steal:
                manifest = own_manifest(index)
            if chance.random() < 0.3:
                manifest = layout.ALL_MANIFEST
            lines = self.server.objects[JOB + manifest].data.decode().split()
            chunks = [layout.stem(line) for line in lines]
            is_other = self.plot.has_other_config and chance.random() < 0.4
            slots.append(
                Slot(
                    f"{prefix}{index}",
                    manifest,
                    [chunk for chunk in chunks if chunk in self.oracle.chunks],
                    0.7 if is_other else self.plot.temperature,
                    chance.uniform(-3600, 3600),
                )
            )
        return slots

    # -- the job

    def _make_job(self, chance: random.Random) -> Truth:
        num_chunks = chance.randint(2, 8)
        self.num_workers = min(chance.randint(2, 5), num_chunks)
        per_chunk = chance.randint(1, 12)
        num_poison = 1 if chance.random() < 0.1 else 0
        num_rows = num_chunks * per_chunk - chance.randrange(per_chunk)
        rows = [_make_row(chance, index) for index in range(num_rows)]
        poison = random.Random(f"poison {self.seed}")
        if poison.random() < 0.15:
            num_poison += poison.randint(1, 3)
            self.plot.engine.kills_at_once = poison.random() < 0.5
            self.plot.engine.restarts = poison.choice([0.0, 0.7])
        for _ in range(num_poison):
            rows[chance.randrange(len(rows))] = good_row(0, f"{POISON} row")
        rows = [_numbered(row, index) for index, row in enumerate(rows)]
        columns = ["prompt"]
        if self.plot.image_seconds is not None:
            columns.append("image")
            rows = [_with_image(row, self.seed) for row in rows]
        if chance.random() < 0.15:
            self.plot.limit = chance.randint(1, len(rows))
        self._num_poison = sum(POISON in row.prompt for row in rows)
        truth = Truth({}, {}, {}, self.plot.run_seed)
        parts = [rows[first : first + per_chunk] for first in range(0, len(rows), per_chunk)]
        job = put_job(
            self.server,
            [[row.line for row in part] for part in parts],
            num_workers=self.num_workers,
            compression=self.plot.compression,
            columns=columns,
        )
        for chunk, part in zip(job.chunks, parts, strict=True):
            first, limit = chunk.first_row, self.plot.limit
            wanted = part if limit is None else part[: max(0, limit - first)]
            if wanted:
                truth.chunks[chunk.name] = wanted
                truth.first_rows[chunk.name] = first
                truth.shas[chunk.name] = chunk.sha256
        return truth


def own_manifest(index: int) -> str:
    """Key of a list of one worker's chunks that `split` would not write: whoever works by it takes no others."""
    return f"{layout.MANIFESTS}only-{index}.txt"


def put_job(
    server: Server,
    parts: list[list[bytes]],
    *,
    num_workers: int = 1,
    compression: str = "none",
    columns: Sequence[str] = ("prompt",),
) -> Job:
    """Put a job of these lines into the bucket, a chunk for each part."""
    chunks, keys = [], []
    first_row = 0
    for index, part in enumerate(parts):
        data = b"".join(line + b"\n" for line in part)
        if compression == "zstd":
            data = _compress(data)
        name = layout.chunk_name(index, len(parts))
        keys.append(layout.chunk_file(name, compression))
        server.put(JOB + keys[-1], data)
        chunks.append(
            Chunk(
                name=name,
                first_row=first_row,
                rows=len(part),
                bytes=len(data),
                sha256=codec.sha256(data),
            )
        )
        first_row += len(part)
    manifests = {layout.ALL_MANIFEST: keys}
    for worker in range(num_workers):
        start, end = worker * len(keys) // num_workers, (worker + 1) * len(keys) // num_workers
        manifests[layout.worker_manifest(worker, num_workers)] = keys[start:end]
        manifests[own_manifest(worker)] = keys[start:end]
    for manifest, lines in manifests.items():
        server.put(JOB + manifest, "".join(f"{line}\n" for line in lines).encode())
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=list(columns),
        rows=first_row,
        chunks=chunks,
        num_workers=num_workers,
        compression=compression,
    )
    server.put(JOB + layout.JOB_KEY, codec.encode_pretty(job))
    return job


def _make_row(chance: random.Random, index: int) -> Row:
    draw = chance.random()
    if draw < 0.03:
        return Row(b'{"prompt": "broken', "", frozenset({"invalid_json"}))
    if draw < 0.05:
        return Row(b"", "", frozenset({"invalid_json"}))
    if draw < 0.08:
        return Row(b'{"other": 1}', "", frozenset({"missing_column"}))
    if draw < 0.1:
        return good_row(index, "")._replace(codes=frozenset({"invalid_column"}))
    if draw < 0.15:
        return good_row(index, f"{FLAKY} {index}")
    return good_row(index, f"say {index}")


def good_row(index: int, prompt: str) -> Row:
    return Row(json.dumps({"prompt": prompt, "_row": index, "_id": str(index)}).encode(), prompt)


def _numbered(row: Row, index: int) -> Row:
    """Give a row that was put elsewhere the number of its place."""
    if POISON in row.prompt:
        return good_row(index, row.prompt)
    return row


def _with_image(row: Row, seed: int) -> Row:
    """Give a row an image, a broken one or none, as its prompt and the seed say."""
    if row.codes and row.codes != {"invalid_column"}:
        return row
    chance = random.Random(f"image {seed} {row.prompt}").random()
    values = json.loads(row.line)
    values["image"] = None
    if chance < 0.6:
        values["image"] = f"http://images/{row.prompt.replace(' ', '-')}"
    if chance < 0.05 and row.prompt:
        values["image"] += BROKEN
        row = row._replace(codes=frozenset({"media_unavailable"}))
    return row._replace(line=json.dumps(values).encode(), image=values["image"] or "")


def _compress(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


_open_files: dict[str, list[Any]] = {}


class _TrackedPath(type(Path())):  # type: ignore[misc]  # pathlib's own way before Python 3.12
    """Paths of the scratch folders: a killed process's open files are closed, as the kernel would do."""

    has_room: ClassVar[Callable[[str], bool]]

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        owner, has_room = self.parts[len(BASE.parts) + 1], type(self).has_room
        if "w" in mode and not has_room(owner):
            raise no_space(self)
        file = super().open(mode, *args, **options)
        _open_files.setdefault(owner, []).append(file)
        return FillingFile(file, self, lambda: has_room(owner)) if "w" in mode else file

    def __format__(self, spec: str) -> str:
        """Messages reach the trace, and the true path has a random part."""
        return format("/scratch", spec)


def tracked_files(
    has_room: Callable[[str], bool] = lambda _process_name: True,
) -> AbstractContextManager[Any]:
    """Remember the files that scratch folders open, for `close_files`.

    `has_room`: Whether the scratch disk of a process takes what is written to it.
    """
    _TrackedPath.has_room = staticmethod(has_room)
    return mock.patch.object(scratch, "Path", _TrackedPath)


def close_files(process_name: str) -> None:
    """Close what a process has open in its scratch folder, which has the process's name."""
    for file in _open_files.pop(process_name, ()):
        file.close()


def simulate(
    seed: int,
    *,
    keeps_trace: bool = False,
    watches_claims: bool = True,
    is_cleaned: bool | None = None,
    injected: Collection[str] | None = None,
) -> Report:
    """Run one seed from its beginning to its end.

    Args:
        seed: Of everything.
        keeps_trace: Whether the report holds all that happened.
        watches_claims: Whether claims must be respected.
        is_cleaned: Whether `batchinfer clean` runs beside the workers; None leaves that to the seed, too.
        injected: Names of the kinds of injections; None leaves them to the seed, too.
    """
    return Scenario(
        seed,
        keeps_trace=keeps_trace,
        watches_claims=watches_claims,
        is_cleaned=is_cleaned,
        injected=injected,
    ).run()
