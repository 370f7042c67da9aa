"""`batchinfer stop` and `stop --resume`, run beside the workers."""

from __future__ import annotations

from typing import Any

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, InputError, StopRequested
from batchinfer.runs.stop import StopConfig, run_stop
from simulation.machine import SimClock
from simulation.oracle import RUN
from simulation.scheduler import Process
from simulation.storage import StillStore

from .base import Injection


class _NearStore(StillStore):
    """The run's bucket over a line that is slow, but loses nothing."""

    def _call(self, method: str, **arguments: Any) -> Any:
        self._process.sleep(0.5 * self._process.chance.random())
        return super()._call(method, **arguments)


class Stops(Injection):
    """Stops the run, and lets it go on some time later."""

    NAME = "stops"
    MOST_STRIKES = 2

    def strike(self) -> str:
        self._run(has_to_resume=False)
        pause = self.chance.random() * 2 * self.scene.plot.lease_seconds
        self.after(pause, lambda: self._run(has_to_resume=True))
        return f"batchinfer stop, and --resume {pause:.1f} s later"

    def explains(self, error: BatchinferError) -> bool:
        return bool(self.num_strikes) and isinstance(error, StopRequested)

    def calm(self) -> None:
        self.is_over = True
        self.scene.server.delete(RUN + layout.STOP_KEY)

    is_over = False

    def begin(self, seconds: float) -> None:
        self.is_over = False
        super().begin(seconds)

    def _run(self, *, has_to_resume: bool) -> None:
        if self.is_over and not has_to_resume:
            return
        scheduler = self.scene.scheduler
        process = Process(scheduler, "stop#1", self.chance)
        process.on_crash = lambda error: self.scene.oracle.fail(f"crash: stop: {error!r}")
        store = _NearStore("s3://sim/run", self.scene.server, process)

        def work() -> None:
            config = StopConfig(run=store.url, resume=has_to_resume)
            try:
                run_stop(config, store=store, clock=SimClock(process, 0.0))
            except InputError as error:  # no worker has begun yet
                scheduler.log("outside", error.message)
            if self.is_over:
                self.scene.server.delete(RUN + layout.STOP_KEY)

        process.spawn(work)
