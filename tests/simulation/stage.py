"""A small scripted scene: one job, workers one after the other, and a hook that decides what happens to requests."""

import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError
from batchinfer.core.records import Call, Claim, Reply, RowKey, WorkerLease
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.storage import Store
from batchinfer.worker import start as worker_start
from batchinfer.worker.worker_config import Environment
from making import put_job

from .files import BASE, close_files, tracked_files
from .machine import BUCKET, EngineTraits, SimClock, SimEngine, make_environment, worker_config
from .oracle import CLEANER, JOB, RUN
from .plot import line_of
from .scheduler import Process, Scheduler
from .storage import Hook, Network, Server, StillStore


class Ending(NamedTuple):
    """How a process ended. `error` is None for success and for a kill; `is_killed` tells the two apart."""

    is_killed: bool
    error: Exception | None
    result: dict[str, Any]

    @property
    def is_success(self) -> bool:
        """Exit status 0."""
        return not self.is_killed and self.error is None


class Outside(NamedTuple):
    """Opens stores, and tells the time, beside the workers."""

    open_store: Callable[[str], Store]
    clock: SimClock


Row = str | dict[str, Any]
"""A prompt, or a row with further columns."""


class Stage:
    """A bucket with a job of these rows, by chunk. A context: its scratch folder goes with it."""

    run_url = f"{BUCKET}run"

    def __init__(
        self, rows: Sequence[Sequence[Row]], *, num_workers: int = 1, seed: int = 0
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.server = Server(page_keys=1000, has_content_etags=True)
        self.network = Network(self.scheduler, self.server)
        self.engine = EngineTraits()
        self.taken: list[RowKey] = []
        self.finished: list[RowKey] = []
        self.deaths: list[list[RowKey]] = []
        self.environment: Environment | None = None
        self.process: Process | None = None
        index = itertools.count()
        chunks = [
            b"".join(
                line_of(next(index), **({"prompt": row} if isinstance(row, str) else row)) + b"\n"
                for row in part
            )
            for part in rows
        ]
        put_job(lambda key, data: self.server.put(JOB + key, data), chunks, workers=num_workers)
        self._files = tracked_files()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="batchinfer-simulation-", dir=BASE))
        self._files.__enter__()
        logging.disable(logging.CRITICAL)
        return self

    def __exit__(self, *_error: object) -> None:
        logging.disable(logging.NOTSET)
        self._files.__exit__(None, None, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self,
        worker_id: str = "w0",
        *,
        hook: Hook | None = None,
        manifest: str = layout.ALL_MANIFEST,
        within_seconds: float = 600.0,
        **options: Any,
    ) -> Ending:
        """Run one worker process to its end. Raises TimeoutError after so much virtual time."""
        scheduler = self.scheduler
        self.network.hook, self.network.num_requests = hook, 0
        self.process = process = Process(scheduler, f"{worker_id}#{scheduler.num_events}")
        self.environment = environment = make_environment(
            process, self.network, engine=lambda: SimEngine(process, self.engine, self)
        )
        config = worker_config(process, self.folder, manifest, **{"lease_seconds": 6.0} | options)
        endings: list[Ending] = []
        crashes: list[Exception] = []

        def main() -> None:
            try:
                endings.append(Ending(False, None, worker_start.run_worker(config, environment)))
            except BatchinferError as error:
                endings.append(Ending(False, error, {}))

        process.on_crash = crashes.append
        process.spawn(main)
        until = scheduler.now + within_seconds
        scheduler.run(until, lambda: bool(endings or crashes or process.is_dead))
        was_killed = process.is_dead
        if not was_killed:
            process.kill()
        close_files(process.name)
        if crashes:
            raise crashes[0]
        if not endings and not was_killed:
            raise TimeoutError(f"{worker_id} still runs after {within_seconds:.0f} virtual seconds")
        return endings[0] if endings else Ending(True, None, {})

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """The objects of the run."""
        found = self.server.objects
        return {key.removeprefix(RUN): found[key].data for key in self.server.keys(RUN + prefix)}

    def put(self, key: str, data: bytes) -> None:
        """Put an object into the run by hand."""
        self.server.put(RUN + key, data)

    def let_another_hold(self, *chunks: str, beats: int = 1_000_000) -> None:
        """Let the worker w9 hold chunks. Its heart beats so many times, once a second."""
        for chunk in chunks:
            self.put(layout.claim_key(chunk), codec.encode(Claim(worker="w9", nonce="n")))

        def beat(number: int = 1) -> None:
            record = WorkerLease(
                id="w9", nonce="n", state="running", heartbeat=0.0, lease_seconds=6.0, beat=number
            )
            self.put(layout.worker_key("w9"), codec.encode(record))
            if number < beats:
                self.scheduler.after(1.0, lambda: beat(number + 1))

        beat()

    def outside(self) -> Outside:
        """What a command works with that somebody runs at this instant."""
        process = Process(self.scheduler, CLEANER)
        return Outside(
            partial(StillStore, server=self.server, process=process), SimClock(process, 0.0)
        )

    def clean(self) -> None:
        """Run `batchinfer clean --yes` at this instant."""
        open_store, clock = self.outside()
        config = CleanConfig(run=self.run_url, yes=True)
        run_clean(config, store=open_store(self.run_url), clock=clock)

    def stop(self, error: BatchinferError) -> None:
        """Ask the worker that runs to stop."""
        assert self.environment is not None
        self.environment.stopper.request(error)

    def kill(self) -> None:
        """Kill the worker that runs."""
        assert self.process is not None
        self.process.kill()

    # -- machine.Ward

    def took(self, process: Process, call: Call) -> None:
        """See machine.Ward."""
        self.taken.append(call.key)

    def yielded(self, process: Process, replies: list[Reply]) -> None:
        """See machine.Ward."""
        self.finished += [reply.key for reply in replies]

    def died(self, in_flight: list[RowKey]) -> None:
        """See machine.Ward."""
        self.deaths.append(in_flight)


Ask = Callable[[str, str], bool]


def when(ask: Ask, fate: str | float, *, times: int = 1_000_000) -> Hook:
    """A hook: the first `times` requests of which `ask(method, key)` is true have this fate."""
    left = times

    def hook(_number: int, method: str, key: str, _process: Process) -> str | float | None:
        nonlocal left
        if left and ask(method, key):
            left -= 1
            return fate
        return None

    return hook
