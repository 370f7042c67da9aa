"""Commands that are run beside the workers: `batchinfer clean --yes`, `batchinfer stop` and `stop --resume`."""

from contextlib import suppress
from typing import Any

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError, StopRequested, StorageError
from batchinfer.runs import clean
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.runs.stop import StopConfig, run_stop
from simulation.machine import SimClock
from simulation.oracle import CLEANER, RUN
from simulation.scheduler import Process
from simulation.storage import SimStore, StillStore

from .base import Injection

CALM_SECONDS = 400.0
"""Virtual time that the workers have to come to an end, once nothing bad happens any more."""
DEFAULT_LEASES = clean.DEFAULT_AGE_SECONDS / 120.0
"""--older-than's default, in leases of the default length: here the age grows and shrinks with the lease."""


class Cleanings(Injection):
    """`batchinfer clean`, with its own faults, freezes, kills and clock.

    Where there is one, more workers than elsewhere are stopped between an output and its marker, and there may be a
    second day: what was left on the first one has or has not become old enough in the night between them.
    """

    NAME = "clean"
    SHARE = 0.25
    MOST_STRIKES = 6

    def __init__(self, scene: Any) -> None:
        super().__init__(scene)
        chance, lease = self.chance, scene.plot.lease_seconds
        leases = chance.choice([DEFAULT_LEASES, DEFAULT_LEASES, 0.4 * DEFAULT_LEASES])
        self.older_than_seconds = leases * lease
        # Further generations are where an orphan of a chunk that is done may still get its marker.
        scene.plot.has_retry |= chance.random() < 0.4
        self._most_seconds = min(1.2 * self.older_than_seconds, 0.75 * CALM_SECONDS)
        self.night_seconds = chance.choice([0.0, 0.5, 0.9, 1.1, 1.5]) * self.older_than_seconds

    def note_output(self, process: Process) -> None:
        chance = self.chance
        what = chance.choice(["", "", "kill", "freeze", "freeze"])
        seconds = chance.choice([self.leases(4), chance.random() * self._most_seconds])
        stops_clock = chance.random() < 0.5
        if what and not self.scene.is_over:
            self.scene.scheduler.log("scenario", f"{what} {process.name} before its marker")
            freeze = lambda: process.freeze(seconds, stops_clock=stops_clock)  # noqa: E731
            self.after(0.0, process.kill if what == "kill" else freeze)

    def strike(self) -> str:
        chance, scheduler = self.chance, self.scene.scheduler
        process = Process(scheduler, f"{CLEANER}#{self.num_strikes + 1}", chance)
        process.on_crash = lambda error: self.scene.oracle.crashed(process, error)
        skew_seconds = chance.choice([0.0, chance.uniform(-3600, 3600)])
        process.spawn(lambda: self._clean(process, skew_seconds))
        moment = chance.random() * chance.choice([0.1, 1.0, 10.0])
        mishap = chance.choice(["", "", "freeze", "kill"])
        if mishap == "kill":
            self.after(moment, process.kill)
        elif mishap:
            seconds, stops_clock = self.leases(0.3, 1.5, 4.0), chance.random() < 0.3
            self.after(moment, lambda: process.freeze(seconds, stops_clock=stops_clock))
        return f"{process.name}, its clock {skew_seconds:+.0f} s; {mishap}"

    def _clean(self, process: Process, skew_seconds: float) -> None:
        scene = self.scene
        store = SimStore("s3://sim/run", scene.network, process)
        config = CleanConfig(run=store.url, yes=True, older_than_seconds=self.older_than_seconds)
        has_run = RUN + layout.RUN_KEY in scene.server.objects
        try:
            result = run_clean(config, store=store, clock=SimClock(process, skew_seconds))
        except BatchinferError as error:
            scene.scheduler.log(process.name, f"ends: {type(error).__name__}: {error.message}")
            is_right = (
                (isinstance(error, StorageError) and process.num_faults)
                or (isinstance(error, InputError) and not has_run)
                or scene.is_explained(error)
            )
            if not is_right:
                scene.oracle.fail(f"clean: {process.name} without a reason: {error.message}")
            return
        scene.scheduler.log(process.name, f"ends: {result['removed']}")


class Stops(Injection):
    """Stops the run, and lets it go on some time later."""

    NAME = "stops"
    MOST_STRIKES = 2
    CAUSES = (StopRequested,)

    def strike(self) -> str:
        self._run(has_to_resume=False)
        pause = self.leases(2)
        self.after(pause, lambda: self._run(has_to_resume=True))
        return f"batchinfer stop, and --resume {pause:.1f} s later"

    def calm(self) -> None:
        self.scene.server.delete(RUN + layout.STOP_KEY)

    def _run(self, *, has_to_resume: bool) -> None:
        process = Process(self.scene.scheduler, "stop#1", self.chance)
        store = StillStore("s3://sim/run", self.scene.server, process)
        with suppress(InputError):  # no worker has begun yet
            run_stop(
                StopConfig(run=store.url, resume=has_to_resume),
                store=store,
                clock=SimClock(process, 0.0),
            )
