"""Measure two replicas against one on rows of very uneven length, and whether both have work to the end.

With the echo engine (a random latency for each row) on every run; with --vllm also two real engines on the CPU, each
with one thread. The rows in flight are read from the pool a hundred times a second. The last line is one JSON object.

    python benchmarks/replicas.py [--quick] [--vllm] [--rows 8000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import tempfile
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import workload
from harness import alternate, spread

from batchinfer.core.records import Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.pool import ProcessPool
from batchinfer.prompts import PromptConfig
from batchinfer.worker.config import WorkerConfig, real_environment
from batchinfer.worker.start import run_worker

ECHO_SEQS = 64
VLLM_SEQS = 32


class Sampler:
    """Reads again and again how many rows each replica holds."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self._samples: list[list[int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._ended.wait(0.01):
            self._samples.append([len(each.in_flight) for each in list(self._pool.replicas)])

    def share_busy(self, num_replicas: int, last_rows: int) -> float:
        """Return the share of time in which every replica had a row, without the end with `last_rows` or fewer."""
        self._ended.set()
        self._thread.join()
        samples = [each for each in self._samples if len(each) == num_replicas]
        while samples and not sum(samples[0]):
            samples.pop(0)
        while samples and sum(samples[-1]) <= last_rows:
            samples.pop()
        return sum(all(each) for each in samples) / max(1, len(samples))


class Measured(NamedTuple):
    """One run of the worker: seconds without loading, engine steps, and the share of time with every replica busy.

    `driver_us`: CPU a request of this process, in which the worker runs; starting the replicas is part of it.
    """

    seconds: float
    steps: int
    busy: float
    driver_us: float


def measure(job: str, output: str, engine: EngineConfig, last_rows: int) -> Measured:
    """Run the worker once."""
    pool = ProcessPool(engine)
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=output,
        engine=engine,
        prompt=PromptConfig(request_format="completions"),
        sampling=Sampling(),
    )
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    sampler = Sampler(pool)
    cpu = time.process_time()
    result = run_worker(config, dataclasses.replace(environment, create_engine=lambda _: pool))
    assert isinstance(engine.replicas, int)
    return Measured(
        result["generate_time_sec"],
        result["engine_steps"],
        sampler.share_busy(engine.replicas, last_rows),
        1e6 * (time.process_time() - cpu) / result["request_count"],
    )


def compare(name: str, job: str, engine: EngineConfig, seqs: int, repeats: int) -> dict[str, Any]:
    """Measure one replica and two, in turns."""
    runs = count()

    def measure_with(replicas: int) -> Measured:
        output = f"{job}/runs/{name}-{next(runs)}"
        return measure(job, output, with_replicas(engine, replicas), seqs)

    found = alternate({"one": partial(measure_with, 1), "two": partial(measure_with, 2)}, repeats)
    one, two = (spread(each.seconds for each in found[way]) for way in ("one", "two"))
    steps = {way: spread(each.steps for each in found[way]) for way in found}
    driver = {way: spread(each.driver_us for each in found[way]) for way in found}
    busy = spread(each.busy for each in found["two"])
    ratio = two.median / one.median
    print(
        f"{name:6}one {one:.2f} s, two {two:.2f} s: {ratio:.3f} of it; "
        f"both busy {busy:.1%} of the time"
    )
    for way, title in (("one", "one replica"), ("two", "two replicas")):
        print(
            f"      {title}: {steps[way]:.0f} engine steps, driver CPU {driver[way]:.0f} us a request"
        )
    return {
        **one.entries("one_seconds", 3),
        **two.entries("two_seconds", 3),
        "ratio": round(ratio, 4),
        **busy.entries("both_busy"),
        **{f"{way}_steps": steps[way].median for way in found},
        **{f"{way}_driver_us": round(driver[way].median, 1) for way in found},
    }


def with_replicas(engine: EngineConfig, replicas: int) -> EngineConfig:
    """Return the same engine with another number of replicas."""
    return msgspec.structs.replace(engine, replicas=replicas)


def main() -> None:
    """Make the job, run both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--vllm", action="store_true", help="also real vLLM")
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    rows = arguments.rows
    repeats = 1 if arguments.quick else arguments.repeats
    result: dict[str, Any] = {"benchmark": "replicas", "rows": rows, "repeats": repeats}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = workload.write_job(f"{folder}/job", workload.make_requests(rows), per_chunk=200)
        echo = EngineConfig(engine="echo", max_num_seqs=ECHO_SEQS, echo_latency_seconds=0.1)
        result["echo"] = compare("echo", job, echo, 2 * ECHO_SEQS, repeats)
        if arguments.vllm:
            requests = workload.make_requests(min(400, rows))
            few = workload.write_job(f"{folder}/few", requests, per_chunk=50)
            model = workload.write_model(Path(folder) / "model")
            own = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")
            values = {**workload.CPU_ENGINE, "max_num_seqs": VLLM_SEQS}
            more = {name: value for name, value in values.items() if name not in own}
            vllm = EngineConfig(
                engine="vllm",
                model=str(model),
                engine_args=more,
                **{name: values[name] for name in own},
            )
            result["vllm"] = compare("vllm", few, vllm, 2 * VLLM_SEQS, repeats)
    half = abs(2 * result["echo"]["ratio"] - 1)
    result["reached"] = {"echo_within_10_percent_of_half": half <= 0.1}
    if "vllm" in result:
        result["reached"]["vllm_both_busy_95_percent"] = result["vllm"]["both_busy"] >= 0.95
    print(f"{time.monotonic() - begin:.0f} s in all")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
