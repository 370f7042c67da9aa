"""Measure what claims and checkpoints cost: requests a chunk, the worker's CPU a row, engine steps.

Real workers over an S3 stub that counts requests by method and place (s3_stub.py).

* claims: two workers that nothing disturbs, a manifest each. Heartbeats and looks for a stop request are counted apart,
  by quarter of a lease, since both come with time and not with chunks.
* checkpoints: the worker's CPU with the default interval and without checkpoints. An `echo` engine answers as many rows
  a second, and in such steps, as a GPU would (stepped_worker.py). Chunks of one size are done within an interval, so
  that few of their rows are ever written to a checkpoint; chunks of the other take longer, and nearly all rows are
  written. The engine computes in the worker's process here; its few microseconds a row are among the figures.
* steps: real vLLM on the CPU, with checkpoints every few seconds and without.

The last line is one JSON object. In full about half an hour.

    python benchmarks/bookkeeping.py [--quick] [--only claims|checkpoints|steps] [--repeats 3] [--seconds 100]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import harness
import s3_stub
import workload
from harness import alternate, print_table, spread

from batchinfer.core import layout

NUM_WORKERS = 2
CLAIM_CHUNK_ROWS = 40
CLAIM_SEQS = 8
CLAIM_LATENCY_SECONDS = 0.05
ECHO_SEQS = 256
ECHO_WORDS = (50, 250)
"""Words of a prompt, and so of its answer, least and most: about 1 KB."""
STEPPED_WORKER = str(Path(__file__).with_name("stepped_worker.py"))
DEFAULT_SECONDS = 30.0
"""The default of --checkpoint-seconds."""
NEVER_SECONDS = 1e9
STEPS_CHUNK_ROWS = 200
ECHO = ("--engine", "echo")
COMPLETIONS = ("--request-format", "completions")


# --------------------------------------------------------------------------- runs


class Measured(NamedTuple):
    """One run: CPU microseconds of the worker a row, engine steps, seconds, checkpoint objects that were written."""

    worker_us: float
    steps: int
    seconds: float
    segments: int


class Requests(NamedTuple):
    """Requests that a run sent to the store by method and place; quarters of a lease, summed over the workers."""

    came: Counter[str]
    quarters: float


class Runs:
    """Runs workers over jobs on one stub, each run under a name of its own."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._numbers = count()

    def pair(self, num_chunks: int, lease_seconds: float, *options: str) -> Requests:
        """Run two echo workers over a job of their own, each with half of its chunks."""
        number = next(self._numbers)
        job, output = f"s3://stub/job-{number}", f"s3://stub/run-{number}"
        harness.write_job(
            job,
            num_chunks * CLAIM_CHUNK_ROWS,
            lambda row: harness.as_line({"prompt": f"row {row}"}, row),
            per_chunk=CLAIM_CHUNK_ROWS,
            num_workers=NUM_WORKERS,
        )
        before = s3_stub.read_counts(self._endpoint)

        def work(index: int) -> float:
            result, _ = workload.run_worker(
                job, output, Path("echo"), {}, *ECHO,
                "--manifest", f"{job}/{layout.worker_manifest(index, NUM_WORKERS)}",
                "--worker-id", f"w{index}", "--prompt-column", "prompt",
                "--echo-latency-seconds", str(CLAIM_LATENCY_SECONDS), "--max-num-seqs", str(CLAIM_SEQS),
                "--lease-seconds", str(lease_seconds), *options, env=harness.environment(),
            )  # fmt: skip
            return float(result["run_time_sec"])

        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            seconds = sum(pool.map(work, range(NUM_WORKERS)))
        came = s3_stub.read_counts(self._endpoint) - before
        return Requests(came, seconds / (lease_seconds / 4))

    def echo(self, job: str, rate: float, seconds: float) -> Measured:
        """Run one worker over the echo engine at `rate` rows a second, with `seconds` between checkpoints."""
        options = (
            *ECHO, "--max-num-seqs", str(ECHO_SEQS),
            "--echo-latency-seconds", str(ECHO_SEQS / rate), "--checkpoint-seconds", str(seconds),
        )  # fmt: skip
        return self._work(job, Path("echo"), {}, *options, program=[STEPPED_WORKER])

    def vllm(self, job: str, model: Path, seconds: float) -> Measured:
        """Run one worker over vLLM, with `seconds` between checkpoints."""
        options = ("--checkpoint-seconds", str(seconds))
        return self._work(job, model, workload.CPU_ENGINE, *options)

    def _work(
        self, job: str, model: Path, engine: dict[str, Any], *options: str, **how: Any
    ) -> Measured:
        before = s3_stub.read_counts(self._endpoint)
        env = harness.environment()
        output = f"s3://stub/run-{next(self._numbers)}"
        result, ended = workload.run_worker(
            job, output, model, engine, *COMPLETIONS, *options, env=env, **how
        )
        came = s3_stub.read_counts(self._endpoint) - before
        return Measured(
            1e6 * ended.cpu["worker"] / result["request_count"],
            result["engine_steps"],
            result["generate_time_sec"],
            came[f"PUT {layout.CHECKPOINTS}"],
        )


# --------------------------------------------------------------------------- claims


def measure_claims(
    runs: Runs, num_chunks: int, lease_seconds: float, repeats: int
) -> dict[str, Any]:
    """Count requests; print them by method and place."""
    ways = {
        "claims": partial(runs.pair, num_chunks, lease_seconds),
    }
    found = alternate(ways, repeats)
    names = sorted({name for each in found.values() for run in each for name in run.came})
    timed = {name for name in names if name.endswith((layout.WORKERS, layout.STOP_KEY))}
    per_chunk = {
        way: {name: spread(run.came[name] / num_chunks for run in found[way]) for name in names}
        for way in ways
    }
    print(
        f"{num_chunks} chunks, {NUM_WORKERS} workers: requests a chunk, medians of {repeats} runs"
    )
    print_table(
        ("request", *ways, ""),
        [
            (
                name,
                *(format(per_chunk[way][name], ".2f") for way in ways),
                "(by time)" if name in timed else "",
            )
            for name in names
        ],
    )
    totals = {
        way: spread(
            sum(number for name, number in run.came.items() if name not in timed) / num_chunks
            for run in found[way]
        )
        for way in ways
    }
    own = spread(_ending(run.came, layout.CLAIMS) / num_chunks for run in found["claims"])
    # Each worker creates its record when it starts and writes it for the last time when it ends.
    beats = spread(
        (run.came[f"PUT {layout.WORKERS}"] - 2 * NUM_WORKERS) / run.quarters
        for run in found["claims"]
    )
    looks = spread(_ending(run.came, layout.STOP_KEY) / run.quarters for run in found["claims"])
    print(f"all but those by time: {totals['claims']:.2f}; for claims themselves {own:.2f}")
    print(
        f"a worker and quarter of a lease: {beats:.2f} heartbeats, {looks:.2f} looks for a stop request"
    )
    return {
        "chunks": num_chunks,
        "workers": NUM_WORKERS,
        "requests_per_chunk": {
            way: {name: round(figure.median, 4) for name, figure in figures.items()}
            for way, figures in per_chunk.items()
        },
        **totals["claims"].entries("with_claims_per_chunk"),
        **own.entries("claim_requests_per_chunk"),
        **beats.entries("heartbeats_per_quarter_lease"),
        **looks.entries("stop_looks_per_quarter_lease"),
    }


def _ending(came: Counter[str], place: str) -> int:
    return sum(number for name, number in came.items() if name.endswith(f" {place}"))


# --------------------------------------------------------------------------- checkpoints


def measure_checkpoints(
    runs: Runs, seconds: float, rate: float, sizes: list[int], repeats: int
) -> dict[str, Any]:
    """Measure the worker's CPU a row at a steady rate, by rows a chunk, with the default interval and without."""
    least, most = ECHO_WORDS
    requests = [
        {**each, "prompt": "a word " * (random.randint(least, most) // 2), "max_tokens": most}
        for each in workload.make_requests(round(seconds * rate))
    ]
    ways: dict[str, Callable[[], Measured]] = {}
    for rows in sizes:
        job = workload.write_job(f"s3://stub/job-of-{rows}", requests, per_chunk=rows)
        for title, interval in (("none", NEVER_SECONDS), ("every 30 s", DEFAULT_SECONDS)):
            ways[f"{rows} {title}"] = partial(runs.echo, job, rate, interval)
    found = alternate(ways, repeats)
    print(f"{len(requests)} rows at {rate:g} a second, medians of {repeats} runs")
    table = []
    result: dict[str, Any] = {"rows": len(requests), "rate": rate, "chunk_rows": {}}
    for rows in sizes:
        none, every = found[f"{rows} none"], found[f"{rows} every 30 s"]
        for title, measured in (("none", none), ("every 30 s", every)):
            seconds_cell = format(spread(each.seconds for each in measured), ".1f")
            cpu_cell = format(spread(each.worker_us for each in measured), ".1f")
            table.append((str(rows), title, str(measured[0].segments), seconds_cell, cpu_cell, ""))
        # The ratio within each turn: what the machine did to both cancels out.
        ratio = spread(
            our.worker_us / other.worker_us for our, other in zip(every, none, strict=True)
        )
        table[-1] = (*table[-1][:-1], f"{ratio:.3f}")
        result["chunk_rows"][str(rows)] = {
            **spread(each.worker_us for each in none).entries("worker_us_without", 2),
            **spread(each.worker_us for each in every).entries("worker_us_with", 2),
            **ratio.entries("cpu_ratio"),
            "segments": every[0].segments,
        }
    print_table(
        (
            "rows a chunk",
            "checkpoints",
            "segments",
            "seconds",
            "worker CPU us/row",
            "of that without",
        ),
        table,
    )
    return result


def measure_steps(
    runs: Runs, scratch: Path, prompts: int, interval: float, repeats: int
) -> dict[str, Any]:
    """Count the engine steps of real vLLM with checkpoints and without."""
    model = workload.write_model(scratch / "model")
    requests = workload.make_requests(prompts)
    job = workload.write_job("s3://stub/job-steps", requests, per_chunk=STEPS_CHUNK_ROWS)
    ways = {
        title: partial(runs.vllm, job, model, seconds)
        for title, seconds in (("none", NEVER_SECONDS), (f"every {interval:g} s", interval))
    }
    found = alternate(ways, repeats)
    none, every = found.values()
    print(f"vLLM on the CPU, {prompts} requests, medians of {repeats} runs")
    print_table(
        ("checkpoints", "segments", "steps", "seconds"),
        [
            (
                title,
                str(measured[0].segments),
                format(spread(each.steps for each in measured), ".0f"),
                format(spread(each.seconds for each in measured), ".1f"),
            )
            for title, measured in found.items()
        ],
    )
    with_, without = (spread(each.steps for each in measured) for measured in (every, none))
    return {
        "prompts": prompts,
        "checkpoint_seconds": interval,
        "segments": every[0].segments,
        **without.entries("steps_without", 0),
        **with_.entries("steps_with", 0),
        "steps_ratio": round(with_.median / without.median, 4),
    }


# --------------------------------------------------------------------------- all


def main() -> None:
    """Measure the three, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and short, one run of each")
    parser.add_argument("--only", choices=("claims", "checkpoints", "steps"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=200, help="claims: chunks of the job")
    parser.add_argument("--seconds", type=float, default=100.0, help="checkpoints: of each run")
    parser.add_argument("--rate", type=float, default=1000.0, help="checkpoints: rows a second")
    parser.add_argument("--chunk-rows", default="2000,40000", help="checkpoints: by comma")
    parser.add_argument("--prompts", type=int, default=600, help="steps: requests")
    arguments = parser.parse_args()
    lease_seconds, interval = 8.0, 5.0
    if arguments.quick:
        arguments.repeats, arguments.chunks, arguments.seconds, arguments.prompts = 1, 40, 35.0, 200
        arguments.chunk_rows = "40000"
        lease_seconds, interval = 4.0, 2.0
    repeats = arguments.repeats
    sizes = [int(text) for text in arguments.chunk_rows.split(",")]
    result: dict[str, Any] = {"benchmark": "bookkeeping", "repeats": repeats, "reached": {}}
    reached = result["reached"]
    with tempfile.TemporaryDirectory() as folder, s3_stub.serving() as endpoint:
        os.environ |= s3_stub.variables(endpoint)
        runs = Runs(endpoint)
        if arguments.only in {None, "claims"}:
            claims = measure_claims(runs, arguments.chunks, lease_seconds, repeats)
            result["claims"] = claims
            # One to take it, one to release it, and few that find it taken.
            reached["claims_about_2_requests_a_chunk"] = claims["claim_requests_per_chunk"] <= 2.1
            reached["heartbeats_at_most_1_a_quarter_lease"] = (
                claims["heartbeats_per_quarter_lease"] <= 1
            )
        if arguments.only in {None, "checkpoints"}:
            found = measure_checkpoints(runs, arguments.seconds, arguments.rate, sizes, repeats)
            result["checkpoints"] = found
            reached["checkpoints_below_5_percent_of_cpu"] = all(
                each["cpu_ratio"] < 1.05 for each in found["chunk_rows"].values()
            )
        if arguments.only in {None, "steps"}:
            steps = measure_steps(runs, Path(folder), arguments.prompts, interval, repeats)
            result["steps"] = steps
            reached["steps_unchanged_within_1_percent"] = abs(steps["steps_ratio"] - 1) <= 0.01
    print(json.dumps(result))


if __name__ == "__main__":
    main()
