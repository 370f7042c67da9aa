"""Very many workers on simulated time: how long a run takes, what is done twice, and what the bucket has to bear.

    python -m simulation.scale --workers 10         (with tests/ on the path; `make simulate-scale` takes 1000)

The workers are the real ones, over the parts of the other simulation: scheduler, machine, the S3 adapter. Simulated are
time, the bucket (no request fails or is throttled) and the engines. An engine's row stands for many rows of the data:
the engine finishes as many rows a second as a real one, in larger steps. Machines have speeds of their own, vanish
without a signal, and come back as the same worker after a while.
"""

import argparse
import gc
import json
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.ledger import jobs
from batchinfer.storage import ObjectInfo
from batchinfer.worker import joining, main_loop, minutes, ring, workload
from batchinfer.worker import start as worker_start
from making import put_job

from .files import BASE, close_files, tracked_files
from .machine import EngineTraits, SimBackground, SimEngine, make_environment, worker_config
from .oracle import JOB, RUN
from .plot import line_of
from .scheduler import Process, Scheduler
from .storage import EPOCH, Network, Server, SimStore, subject_of

_KINDS = {
    "get_object": "GET",
    "head_object": "HEAD",
    "list_objects_v2": "LIST",
    "put_object": "PUT",
    "delete_objects": "DELETE",
}
_READS = ("GET", "HEAD", "LIST")
_LATENCY_SECONDS = {"GET": 0.03, "HEAD": 0.02, "LIST": 0.1, "PUT": 0.05, "DELETE": 0.05}
"""Mean seconds until a request is answered; each takes from half of it to one and a half."""
DOLLARS_PER_1000 = {"PUT": 0.005, "LIST": 0.005, "GET": 0.0004, "HEAD": 0.0004, "DELETE": 0.0}
"""List prices of S3 Standard in us-east-1, as of 2025-06."""
WRITES_A_SECOND = 3500
READS_A_SECOND = 5500
"""What S3 takes for one prefix before it makes two of it; a deletion of many objects counts as so many writes."""
MOST_OF_IDEAL = 1.05
MOST_TWICE = 0.01
_NUM_SEQS = 1
"""Rows of an engine that it has at a time: a tenth of a chunk, as real engines have some 1,000 of 10,000 rows. A worker
opens its next chunk when it has no other rows left to give."""
_TURN_SECONDS = 15.0
"""Longest time between two turns of a worker's loop while its engine is busy. A real engine turns it much oftener."""
_SNAPSHOT_SECONDS = 25.0
"""Time between two copies of a worker's counters for its record, which is written every 30 s."""
_ANSWER = json.dumps({"choices": [{"text": "said", "finish_reason": "stop"}]}).encode()
_POLL_SECONDS = 2.0
"""Least time for which a worker waits for background work that does not finish, as one with an idle engine does."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is simulated. Rows are those of the data; `steps` of the engine's rows make one chunk."""

    num_workers: int
    num_chunks: int
    chunk_rows: int = 10_000
    steps: int = 10
    mean_rate: float = 60.0
    """Rows a second that a machine of mean speed generates."""
    fastest: float = 3.0
    """Times the slowest machine's speed."""
    lost_per_hour: float = 0.05
    away_seconds: tuple[float, float] = (30.0, 600.0)
    load_seconds: float = 120.0
    launch_seconds: float = 60.0
    """Time within which the workers begin."""
    lease_seconds: float = 120.0
    seed: int = 0


class LargeServer(Server):
    """The server, with what listings show at hand. It keeps no bytes of outputs, but checks that each has all lines."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(page_keys=1000, has_content_etags=False)
        self._steps = plan.steps
        self._infos: dict[str, ObjectInfo] = {}

    def put(self, key: str, data: bytes, process: Process | None = None) -> str:
        etag = super().put(key, data, process)
        held = self.objects[key]
        if key.endswith(".jsonl") and key.startswith(RUN + layout.OUTPUTS):
            assert data.count(b"\n") == self._steps, f"{key}: lacks lines"
            self.objects[key] = held._replace(data=b"")
        self._infos[key] = ObjectInfo(key[len(RUN) :], len(data), etag, float(held.modified))
        return etag

    def _list_objects_v2(self, _process: Process, prefix: str, after: str | None) -> Any:
        keys = self.keys(prefix, after, self._page_keys + 1)
        page = keys[: self._page_keys]
        return [self._infos[key] for key in page], page[-1] if len(keys) > len(page) else None


@dataclass(slots=True)
class Tally:
    """Requests that came: by kind and place, and how many reads and writes in each second of the run."""

    by_place: Counter[tuple[str, str]] = field(default_factory=Counter)
    reads: Counter[int] = field(default_factory=Counter)
    writes: Counter[int] = field(default_factory=Counter)
    reads_of_prefixes: Counter[tuple[str, int]] = field(default_factory=Counter)

    def note(self, kind: str, place: str, second: int, weight: int) -> None:
        self.by_place[kind, place] += 1
        (self.reads if kind in _READS else self.writes)[second] += weight
        if kind in _READS:
            self.reads_of_prefixes["outputs/" if place == "markers" else place, second] += weight

    def dollars(self) -> float:
        return sum(DOLLARS_PER_1000[kind] * n / 1000 for (kind, _), n in self.by_place.items())


class CalmNetwork(Network):
    """The line to the bucket on a calm day: each request takes a while, and effect as it is answered."""

    def __init__(self, scheduler: Scheduler, server: Server) -> None:
        super().__init__(scheduler, server)
        self.tally = Tally()

    def request(self, process: Process, method: str, *arguments: Any) -> Any:
        kind = _KINDS[method]
        key = subject_of(*arguments)
        process.sleep(_LATENCY_SECONDS[kind] * (0.5 + process.chance.random()))
        weight = len(arguments[0]) if kind == "DELETE" else 1
        self.tally.note(kind, place_of(key), int(self.scheduler.now), weight)
        return self.server.handle(process, method, *arguments)


class PlainStore(SimStore):
    """The simulation's store, which takes pages as they are kept."""

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        ask = partial(self._network.request, self._process, "list_objects_v2", self._root + prefix)
        infos, after = self._retry(partial(ask, None))
        yield from infos
        while after:
            infos, after = self._retry(partial(ask, after))
            yield from infos


def place_of(key: str) -> str:
    """Return what a key is for: "claims/", "markers", "run.json".

    >>> place_of("run/claims/part-00000.json"), place_of("run/outputs/part-00000.succeed")
    ('claims/', 'markers')
    """
    if layout.MARKER_SUFFIX in key:
        return "markers"
    place, _, name = key.rpartition("/")
    return name if f"{place}/" in (RUN, JOB) else place.split("/")[1] + "/"


class PatientBackground(SimBackground):
    """Waits longer for what does not finish, so that fewer things happen. Work that finishes still ends a wait."""

    def wait(self, timeout_seconds: float) -> None:
        super().wait(max(timeout_seconds, _POLL_SECONDS))


class CoarseEngine(SimEngine):
    """Each row takes as long as so many rows of the data take on this machine."""

    def open(self, stop: Stop) -> EngineInfo:
        process, seconds = self._process, self._traits.load_seconds
        ready = process.scheduler.now + seconds
        while process.scheduler.now < ready:
            if stop.is_set():
                raise Interrupted("sim: stopped while it was loading")
            process.sleep(min(_TURN_SECONDS, ready - process.scheduler.now))
        return self._info(seconds)

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        process, scheduler, seconds = (
            self._process,
            self._process.scheduler,
            self._traits.row_seconds,
        )
        at_work: list[Call] = []
        due = 0.0
        process.on_exit.append(
            lambda: self._ward.lost(1 - (due - scheduler.now) / seconds if at_work else 0.0)
        )
        while not stop.is_set():
            if not at_work:
                calls = source.take(_NUM_SEQS)
                if calls is None:
                    return
                if not calls:
                    yield []
                    source.wait(0.5)
                    continue
                at_work, due = calls, scheduler.now + seconds
            process.sleep(min(_TURN_SECONDS, due - scheduler.now))
            replies: list[Reply] = []
            if scheduler.now >= due - 1e-6:
                replies.append(Reply(key=at_work.pop().key, status=200, body=_ANSWER))
                due = scheduler.now + seconds
                self._ward.yielded(process, replies)
            yield replies

    def stats(self) -> EngineStats:
        return EngineStats()


@dataclass(slots=True)
class Machine:
    """A place for a worker. `speed` is in the engine's rows a second; `ready`: when it could generate, from and to."""

    index: int
    speed: float
    starts: int = 0
    began: float = 0.0
    ready: list[tuple[float, float]] = field(default_factory=list)


class Campaign:
    """One run from its first worker to the end of its last."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed, max_events=1 << 62)
        self.chance = random.Random(f"scale {plan.seed}")
        self.server = LargeServer(plan)
        self.network = CalmNetwork(self.scheduler, self.server)
        total = plan.num_chunks * plan.steps
        self._finished = bytearray(total)
        """Which of the engine's rows were finished."""
        self.num_finished = 0
        self.num_distinct = 0
        self.lost_in_flight = 0.0
        """Parts of the engine's rows that were computed and lost with a machine, or dropped at a worker's end."""
        self.num_losses = 0
        self.marked_at = 0.0
        self.ends: list[tuple[float, float]] = []
        """When each worker that came to its end began, and when it ended."""
        self.num_running = 0
        unit = plan.chunk_rows / plan.steps
        shares = [plan.fastest ** self.chance.uniform(-0.5, 0.5) for _ in range(plan.num_workers)]
        mean = sum(shares) / len(shares)
        self.machines = [
            Machine(index, plan.mean_rate / unit * share / mean)
            for index, share in enumerate(shares)
        ]
        self._put_job()

    def _put_job(self) -> None:
        plan = self.plan
        # Every chunk holds the same bytes: what a prompt says decides nothing here.
        lines = [line_of(step, f"say {step}") + b"\n" for step in range(plan.steps)]
        chunk = b"".join(lines).replace(b'"_row"', b'"row"')
        chunks, put = [chunk] * plan.num_chunks, self.server.put
        put_job(lambda key, data: put(JOB + key, data), chunks, workers=plan.num_workers)

    def run(self) -> dict[str, Any]:
        """Let all workers finish the run, and return its figures. Raises if a row is missing, or a worker fails."""
        self.folder = Path(tempfile.mkdtemp(prefix="batchinfer-scale-", dir=BASE))
        try:
            with ExitStack() as stack:
                for context in (tracked_files, _one_job, _less_detail, _small_sets):
                    stack.enter_context(context())
                for machine in self.machines:
                    self.num_running += 1
                    delay = self.chance.random() * self.plan.launch_seconds
                    self.scheduler.after(delay, lambda machine=machine: self._start(machine))
                self.scheduler.run(float("inf"), lambda: not self.num_running)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        assert self.num_distinct == len(self._finished), "rows are missing"
        markers = [key for key in self.server.keys(RUN + layout.OUTPUTS) if ".succeed" in key]
        assert len(markers) == self.plan.num_chunks, f"{len(markers)} markers"
        self.marked_at = max(self.server.objects[key].modified - EPOCH for key in markers)
        return self._result

    # -- machines

    def _start(self, machine: Machine) -> None:
        plan, scheduler = self.plan, self.scheduler
        machine.starts += 1
        machine.began = scheduler.now
        process = Process(scheduler, f"w{machine.index}#{machine.starts}")
        traits = EngineTraits(
            max_in_flight=_NUM_SEQS, row_seconds=1 / machine.speed, load_seconds=plan.load_seconds
        )
        environment = make_environment(
            process,
            self.network,
            engine=lambda: CoarseEngine(process, traits, self),
            background=PatientBackground,
            store=PlainStore,
        )
        arguments = ["--max-num-seqs", str(_NUM_SEQS)]
        config = worker_config(
            process,
            self.folder,
            layout.worker_manifest(machine.index, plan.num_workers),
            engine=EngineConfig(engine="sim", model="sim", server_args=arguments),
            temperature=0.0,
            lease_seconds=plan.lease_seconds,
        )
        is_over = False

        def main() -> None:
            nonlocal is_over
            try:
                worker_start.run_worker(config, environment)
            except BatchinferError as error:
                raise AssertionError(f"{process.name}: {error}") from error
            is_over = True
            self._end(machine, is_lost=False)
            self.num_running -= 1
            self.ends.append((machine.began, scheduler.now))
            scheduler.after(0.0, process.kill)

        def vanish() -> None:
            if is_over:
                return
            self.num_losses += 1
            process.kill()
            self._end(machine, is_lost=True)
            scheduler.after(self.chance.uniform(*plan.away_seconds), lambda: self._start(machine))

        process.on_exit.append(lambda: close_files(process.name))
        process.spawn(main)
        if plan.lost_per_hour:
            scheduler.after(self.chance.expovariate(plan.lost_per_hour / 3600), vanish)

    def _end(self, machine: Machine, *, is_lost: bool) -> None:
        now = self.scheduler.now
        ready = machine.began + self.plan.load_seconds
        # A machine whose worker is done might have gone on: the ideal run lets it.
        machine.ready.append((ready, now if is_lost else float("inf")))
        shutil.rmtree(self.folder / f"w{machine.index}#{machine.starts}", ignore_errors=True)

    # -- engines (machine.Ward)

    def took(self, process: Process, call: Call) -> None: ...

    def died(self, in_flight: list[Any]) -> None: ...

    def yielded(self, process: Process, replies: list[Reply]) -> None:
        for reply in replies:
            chunk, line = reply.key
            index = _number_of(chunk) * self.plan.steps + line
            self.num_finished += 1
            self.num_distinct += not self._finished[index]
            self._finished[index] = True
            if self.num_distinct * 20 % len(self._finished) == 0:
                print(f"{self.scheduler.now:.0f} s: {self.num_distinct:,} rows", file=sys.stderr)

    def lost(self, part: float) -> None:
        """Note that a part of a row was computed for nothing."""
        self.lost_in_flight += min(max(part, 0.0), 1.0)

    @property
    def _result(self) -> dict[str, Any]:
        plan, tally = self.plan, self.network.tally
        total, ideal = len(self._finished), self.ideal_seconds()
        again = self.num_finished - total + self.lost_in_flight
        # Machines that come back when everything is done begin a worker that finds nothing to do.
        ended_at = max(end for began, end in self.ends if began <= self.marked_at)
        return {
            "workers": plan.num_workers,
            "chunks": plan.num_chunks,
            "rows": plan.num_chunks * plan.chunk_rows,
            "machines_lost": self.num_losses,
            "makespan_seconds": round(ended_at),
            "ideal_seconds": round(ideal),
            "of_ideal": round(ended_at / ideal, 4),
            "done_twice": round(again / total, 5),
            "requests_by_place": {" ".join(name): n for name, n in tally.by_place.most_common()},
            "requests_per_chunk": round(tally.by_place.total() / plan.num_chunks, 1),
            "worst_second_reads": max(tally.reads.values()),
            "worst_second_reads_of_one_prefix": max(tally.reads_of_prefixes.values()),
            "worst_second_writes": max(tally.writes.values()),
            "dollars": round(tally.dollars(), 2),
        }

    def ideal_seconds(self) -> float:
        """Least time in which these machines could have done all rows, loading and absences included."""
        total = float(self.plan.num_chunks * self.plan.steps)
        changes: list[tuple[float, float]] = []
        for machine in self.machines:
            for start, end in machine.ready:
                if end > start:
                    changes += [(start, machine.speed), (end, -machine.speed)]
        rate = done = now = 0.0
        for when, change in sorted(changes):
            if done + rate * (when - now) >= total:
                break
            done += rate * (when - now)
            now, rate = when, rate + change
        return now + (total - done) / rate


@contextmanager
def _less_detail() -> Iterator[None]:
    """Let records of workers be copied more seldom, without their figures by minute: nothing here reads those."""
    with (
        mock.patch.object(main_loop, "_SNAPSHOT_SECONDS", _SNAPSHOT_SECONDS),
        mock.patch.object(minutes.Minutes, "series", return_value=[]),
        mock.patch.object(layout, "parse_marker", cache(layout.parse_marker)),
        mock.patch.object(layout, "chunk_of_output", cache(layout.chunk_of_output)),
    ):
        yield


@contextmanager
def _one_job() -> Iterator[None]:
    """Let all workers of this process share what they read of job.json: it is the same for each of them."""

    def once(make: Callable[..., Any]) -> Callable[..., Any]:
        made: list[Any] = []

        def shared(*arguments: Any, **options: Any) -> Any:
            if not made:
                made.append(make(*arguments, **options))
            return made[0]

        return shared

    job_chunks = once(jobs.job_chunks)

    def resolve(lines: dict[str, str], *job: Any) -> list[Any]:
        return [job_chunks(*job)[layout.stem(line)] for line in lines]

    with (
        mock.patch.object(jobs, "decode_job", once(jobs.decode_job)),
        mock.patch.object(jobs, "identity", once(jobs.identity)),
        mock.patch.object(jobs, "_resolve", resolve),
        mock.patch.object(joining, "job_chunks", job_chunks),
        mock.patch.object(ring, "blocks_of", once(ring.blocks_of)),
        mock.patch.object(worker_start, "rows_by_chunk", once(jobs.rows_by_chunk)),
    ):
        yield


class _Chunks:
    """A set of chunks' names, as far as workers use it, of one byte for each chunk. A set of Python's takes forty."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._held = bytearray()
        self |= names

    def add(self, name: str) -> None:
        self |= [name]

    def __ior__(self, names: Iterable[str]) -> Self:
        for number in map(_number_of, names):
            if number >= len(self._held):
                self._held.extend(bytes(number + 1 - len(self._held)))
            self._held[number] = 1
        return self

    def __contains__(self, name: str) -> bool:
        number = _number_of(name)
        return number < len(self._held) and self._held[number] == 1

    def __rand__(self, names: set[str]) -> set[str]:
        return {name for name in names if name in self}


@cache
def _number_of(chunk: str) -> int:
    return int(chunk.rpartition("-")[2])


@contextmanager
def _small_sets() -> Iterator[None]:
    """Let the chunks that each worker knows to be done take little memory: at the end a thousand know all of them."""
    make_ring, make_workload = ring.Ring.__init__, workload.Workload.__init__

    def small_ring(self: Any, *arguments: Any, **options: Any) -> None:
        make_ring(self, *arguments, **options)
        self._settled = _Chunks(self._settled)

    def small_workload(self: Any) -> None:
        make_workload(self)
        self._done = _Chunks()

    with (
        mock.patch.object(ring.Ring, "__init__", small_ring),
        mock.patch.object(workload.Workload, "__init__", small_workload),
    ):
        yield


def main() -> int:
    """See the module. The last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m simulation.scale", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--chunks", type=int, help="default: 100 a worker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_chunks = options.chunks or 100 * options.workers
    plan = Plan(num_workers=options.workers, num_chunks=num_chunks, seed=options.seed)
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    campaign = Campaign(plan)
    gc.freeze()
    gc.set_threshold(100_000, 20, 10)
    result = campaign.run()
    result["real_seconds"] = round(time.monotonic() - began)
    result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    for name, count in result.pop("requests_by_place").items():
        print(f"{count:12,}  {name}")
    print(json.dumps(result))
    is_good = result["of_ideal"] <= MOST_OF_IDEAL and result["done_twice"] <= MOST_TWICE
    is_good &= result["worst_second_reads"] <= READS_A_SECOND
    return int(not (is_good and result["worst_second_writes"] <= WRITES_A_SECOND))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation.scale", *sys.argv[1:]])
    sys.exit(main())
