"""`batchinfer clean --yes` beside the workers of a seed: at any moment, with its own faults, freezes, kills and clock.

All of it is drawn from a stream of its own: until something of it befalls the workers of a seed, they do what they do
without it. Where there is `clean`, more of them than elsewhere are stopped between an output and its marker.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError, StorageError
from batchinfer.ledger import inventory
from batchinfer.runs import clean
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.storage import opening

from .machine import SimClock
from .oracle import CLEANER, RUN, Oracle
from .scheduler import Process, Scheduler
from .storage import Network, SimStore

CALM_SECONDS = 400.0
"""Virtual time that the workers have to come to an end, once nothing bad happens any more."""
SHARE = 0.25
"""Of all seeds, so many are cleaned while they run."""
DEFAULT_LEASES = clean.DEFAULT_AGE_SECONDS / 120.0
"""--older-than's default, in leases of the default length: here the age grows and shrinks with the lease."""


def is_cleaned(seed: int) -> bool:
    """Whether a seed is among those that are cleaned."""
    return random.Random(f"is cleaned {seed}").random() < SHARE


class Cleanings:
    """The cleanings of one seed. `night_seconds`: how long every worker is away, before the second day; 0: never."""

    def __init__(
        self,
        seed: int,
        scheduler: Scheduler,
        network: Network,
        oracle: Oracle,
        lease_seconds: float,
    ) -> None:
        self.chance = chance = random.Random(f"cleanings {seed}")
        self._scheduler = scheduler
        self._network = network
        self._oracle = oracle
        self._lease_seconds = lease_seconds
        self._processes: list[Process] = []
        self.explains: Callable[[BatchinferError], bool] = lambda _error: False
        """Whether the command may end with an error because of what is injected."""
        leases = chance.choice([DEFAULT_LEASES, DEFAULT_LEASES, 0.4 * DEFAULT_LEASES])
        self.older_than_seconds = leases * lease_seconds
        # An age that what was left on the first day has reached by the second, or has not.
        # Further generations are where an orphan of a chunk that is done may still get its marker.
        self.has_retry = chance.random() < 0.4
        self._most_seconds = min(1.2 * self.older_than_seconds, 0.75 * CALM_SECONDS)
        self.night_seconds = chance.choice([0.0, 0.5, 0.9, 1.1, 1.5]) * self.older_than_seconds

    @property
    def num(self) -> int:
        """How often the command was started."""
        return len(self._processes)

    def begin(self, seconds: float) -> None:
        """Let the command be run some times within so many seconds from now."""
        for _ in range(self.chance.randint(1, 6)):
            self._scheduler.after(self.chance.random() * seconds, self._start, self.chance)

    def interrupt(self, process: Process) -> None:
        """Perhaps stop a worker that has just put an output, and not yet its marker: for ever, or until it is old."""
        chance = self.chance
        what = chance.choice(["", "", "kill", "freeze", "freeze"])
        seconds = chance.random() * chance.choice([4 * self._lease_seconds, self._most_seconds])
        stops_clock = chance.random() < 0.5
        if what:
            self._scheduler.log("scenario", f"{what} {process.name} before its marker")
            self._scheduler.after(
                0.0,
                process.kill
                if what == "kill"
                else lambda: process.freeze(seconds, stops_clock=stops_clock),
                chance,
            )

    def end(self) -> None:
        """Leave nothing running."""
        for process in self._processes:
            process.kill()

    def _start(self) -> None:
        chance, scheduler = self.chance, self._scheduler
        process = Process(scheduler, f"{CLEANER}#{self.num + 1}", chance)
        self._processes.append(process)
        process.on_crash = lambda error: self._crashed(process, error)
        skew_seconds = chance.choice([0.0, chance.uniform(-3600, 3600)])
        scheduler.log("scenario", f"start {process.name}, its clock {skew_seconds:+.0f} s")
        process.spawn(lambda: self._clean(process, skew_seconds))
        mishap = chance.choice(["", "", "freeze", "kill"])
        moment = chance.random() * chance.choice([0.1, 1.0, 10.0])
        if mishap:
            scheduler.after(moment, lambda: self._befall(process, mishap), chance)

    def _clean(self, process: Process, skew_seconds: float) -> None:
        store = SimStore("s3://sim/run", self._network, process)
        config = CleanConfig(run=store.url, yes=True, older_than_seconds=self.older_than_seconds)
        has_run = RUN + layout.RUN_KEY in self._network.server.objects
        try:
            result = run_clean(config, store=store, clock=SimClock(process, skew_seconds))
        except BatchinferError as error:
            self._scheduler.log(process.name, f"ends: {type(error).__name__}: {error.message}")
            is_right = (
                (isinstance(error, StorageError) and process.num_faults)
                or (isinstance(error, InputError) and not has_run)
                or self.explains(error)
            )
            if not is_right:
                self._oracle.fail(f"clean: {process.name} without a reason: {error.message}")
            return
        self._scheduler.log(process.name, f"ends: {result['removed']}")

    def _befall(self, process: Process, mishap: str) -> None:
        self._scheduler.log("scenario", f"{mishap} {process.name}")
        if mishap == "kill":
            process.kill()
            return
        chance = self.chance
        process.freeze(
            chance.random() * chance.choice([0.3, 1.5, 4.0]) * self._lease_seconds,
            stops_clock=chance.random() < 0.3,
        )

    def _crashed(self, process: Process, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        self._scheduler.log(process.name, "".join(traceback.format_exception(error)))
        self._oracle.fail(
            f"crash: {process.name}: {type(error).__name__}: {error} "
            f"({Path(last.filename).name}:{last.lineno})"
        )


def in_virtual_time(seed: int, scheduler: Scheduler) -> AbstractContextManager[object]:
    """Let clean read one record after the other, in its own process, and name its probes from the seed.

    Its names and the workers' are drawn apart: what it looks at must not change what they are called.
    """
    stack = ExitStack()
    stack.enter_context(mock.patch.object(inventory, "in_parallel", map))
    for module, what in ((clean, "probes of clean"), (opening, "probes")):
        draw = random.Random(f"{what} {seed}").getrandbits
        names = SimpleNamespace(token_hex=lambda _, draw=draw: f"{draw(64):x}")
        stack.enter_context(mock.patch.object(module, "secrets", names))
    return stack
