"""What kills, slow workers and dead workers cost, against the least possible.

    python benchmarks/recovery.py            # echo and real vLLM on the CPU, about twelve minutes
    python benchmarks/recovery.py --quick    # echo only, one run with kills: two minutes

Real worker processes over the local disk. The echo engine answers after a random latency, so that a worker's speed is
its latency and not this machine's. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness import ROOT, as_line, print_table, write_job

from batchinfer.core import layout
from batchinfer.core.records import Worker
from batchinfer.ledger.looks import read_workers
from batchinfer.storage.opening import open_store

ECHO = ("--engine", "echo", "--prompt-column", "prompt")
SEQS = 8
WORKERS = 4
CHUNKS_PER_WORKER = 8
CHUNK_ROWS = 100


TALLY = """
import os, sys
from batchinfer.cli.main import main
from batchinfer.engines.http import HttpEngine
file = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
generate = HttpEngine.generate
def counted(self, source, stop):
    for batch in generate(self, source, stop):
        os.write(file, b"x" * sum(bool(reply.key[0]) for reply in batch))  # rows, and no probe
        yield batch
HttpEngine.generate = counted
sys.exit(main(sys.argv[2:]))
"""
"""A worker that writes one byte to a file for every completion of its engine: SIGKILL does not lose the count."""


def start(
    job: Path, run: Path, name: str, manifest: str, *options: str, tally: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start one worker; with `tally`, its completions are counted in that file."""
    program = ["-m", "batchinfer"] if tally is None else ["-c", TALLY, str(tally)]
    arguments = [
        *("worker", "--manifest", f"{job}/manifests/{manifest}", "--output", str(run)),
        *("--worker-id", name, "--log-level", "error", "--max-attempts", "100000"),
    ]
    return subprocess.Popen(
        [sys.executable, *program, *arguments, *options], stdout=subprocess.DEVNULL
    )


def echo(
    latency_seconds: float, lease_seconds: float, checkpoint_seconds: float
) -> tuple[str, ...]:
    """Options of an echo worker that finishes SEQS / latency rows a second."""
    return (
        *ECHO,
        "--echo-latency-seconds", str(latency_seconds),
        "--max-num-seqs", str(SEQS),
        "--lease-seconds", str(lease_seconds),
        "--checkpoint-seconds", str(checkpoint_seconds),
    )  # fmt: skip


def hello(row: int) -> bytes:
    """Return the line of a row; its length differs from row to row."""
    return as_line({"prompt": f"hello row {row} " + "x " * (row % 17)}, row)


def records(run: Path) -> list[Worker]:
    """Return every worker's record."""
    return [worker.record for worker in read_workers(open_store(str(run)))[0]]


def makespan(folder: Path, *, case: str, latency: float) -> dict[str, Any]:
    """Measure the time of four workers, one of which is four times slower, or killed for good at half the time."""
    rows = WORKERS * CHUNKS_PER_WORKER * CHUNK_ROWS
    rate = SEQS / latency
    job, run = folder / "job", folder / f"run-{case}"
    if not job.exists():
        write_job(str(job), rows, hello, per_chunk=CHUNK_ROWS, num_workers=WORKERS)
    calm = rows / (WORKERS * rate)
    ideal = (
        rows / ((WORKERS - 1 + 0.25) * rate)
        if case == "slow"
        else calm / 2 + (rows / 2) / ((WORKERS - 1) * rate)
    )
    lease = 0.03 * ideal
    began = time.monotonic()
    processes = []
    for index in range(WORKERS):
        own = latency * 4 if case == "slow" and index == 0 else latency
        options = echo(own, lease, 0.01 * ideal)
        processes.append(start(job, run, f"w{index}", f"worker-{index:05d}.txt", *options))
    # A process needs a moment to start; the time counts from when all workers have a chunk.
    started = wait_for_first_rows(run, began)
    if case == "dead":
        time.sleep(max(0.0, calm / 2 - (time.monotonic() - started)))
        processes[0].kill()
    for process in processes:
        process.wait()
    ended = time.monotonic()
    seconds = ended - started
    generated = sum(record.rows_done for record in records(run))
    return {
        "case": case,
        "seconds": round(seconds, 1),
        "ideal_seconds": round(ideal, 1),
        "ratio": round(seconds / ideal, 3),
        "rows_generated_per_row": round(generated / rows, 3),
    }


def wait_for_first_rows(run: Path, began: float) -> float:
    """Wait until every worker has taken its first chunk; return the time."""
    store = open_store(str(run))
    while time.monotonic() - began < 60:
        claims = sum(1 for _ in store.list(layout.CLAIMS))
        if len(records(run)) == WORKERS and claims >= WORKERS:
            return time.monotonic()
        time.sleep(0.02)
    raise TimeoutError("the workers did not start")


def rows_with_kills(folder: Path, *, latency: float, seed: int) -> dict[str, Any]:
    """Kill each of two workers once at a random time and start it again; compare the rows generated with one pass."""
    rows, chunk_rows, workers = 1600, 100, 2
    rate = SEQS / latency
    calm = rows / (workers * rate)
    checkpoint = 0.02 * calm
    job, run, tally = (
        folder / f"job-kills-{seed}",
        folder / f"run-kills-{seed}",
        folder / f"tally-{seed}",
    )
    write_job(str(job), rows, hello, per_chunk=chunk_rows, num_workers=workers)
    chance = random.Random(seed)
    options = echo(latency, 0.05 * calm, checkpoint)

    def launch(index: int) -> subprocess.Popen[bytes]:
        manifest = f"worker-{index:05d}.txt"
        return start(job, run, f"w{index}", manifest, *options, tally=tally)

    processes = [launch(index) for index in range(workers)]
    kills = sorted((chance.uniform(0.1, 0.9) * calm, index) for index in range(workers))
    began = time.monotonic()
    for moment, index in kills:
        time.sleep(max(0.0, moment - (time.monotonic() - began)))
        processes[index].kill()
        processes[index].wait()
        processes[index] = launch(index)
    for process in processes:
        process.wait()
    generated = tally.stat().st_size
    # A kill loses at most the rows of one checkpoint interval, and those in flight: 1.5 times the engine's sequences.
    unavoidable = workers * (checkpoint * rate + 1.5 * SEQS)
    return {
        "seed": seed,
        "kills": workers,
        "rows": rows,
        "rows_generated": generated,
        "rows_since_checkpoint_and_in_flight": round(unavoidable),
        "ratio": round((generated - unavoidable) / rows, 3),
        "ratio_all": round(generated / rows, 3),
    }


def time_to_first_row(folder: Path, *, engine: str) -> dict[str, Any]:
    """Measure the time from SIGKILL and an immediate restart to the first new finished row."""
    job, run = folder / f"job-first-{engine}", folder / f"run-first-{engine}"
    write_job(
        str(job),
        4000,
        lambda row: as_line({"prompt": f"What is {row % 90} + {row % 7}?"}, row),
        per_chunk=500,
    )
    options = echo(0.5, 4, 0.5)
    if engine == "vllm":
        options = (
            "--model", str(ROOT / "examples/demo-model"), "--prompt-column", "prompt", "--as-chat",
            "--max-tokens", "32", "--max-model-len", "256", "--max-num-seqs", "4", "--temperature", "0",
            "--lease-seconds", "4", "--checkpoint-seconds", "0.5",
            "--kv-cache-memory-bytes", "67108864", "--block-size", "32",
        )  # fmt: skip
    first = start(job, run, "w0", "all.txt", *options)
    wait_for_segments(run, 1)
    first.kill()
    first.wait()
    killed = time.monotonic()
    before = {info.key for info in open_store(str(run)).list(layout.CHECKPOINTS)}
    second = start(job, run, "w0", "all.txt", *options)
    wait_for_segments(run, 1, before)
    seconds = time.monotonic() - killed
    second.kill()
    second.wait()
    return {
        "engine": engine,
        "seconds_from_sigkill_to_first_new_row_checkpointed": round(seconds, 1),
    }


def wait_for_segments(run: Path, number: int, before: Collection[str] = ()) -> None:
    """Wait until the run has that number of new segments."""
    store = open_store(str(run))
    deadline = time.monotonic() + 180
    while len({info.key for info in store.list(layout.CHECKPOINTS)}.difference(before)) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint appeared in {run}")
        time.sleep(0.05)


def main() -> None:
    """Run every case and print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="echo only, fewer and shorter runs")
    parser.add_argument("--only", choices=("makespan", "kills", "restart"), help="one part")
    arguments = parser.parse_args()
    latency = 0.25 if arguments.quick else 0.5
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts = {arguments.only} if arguments.only else {"makespan", "kills", "restart"}
    spans, kills, firsts = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if "makespan" in parts:
            spans = [makespan(place, case=case, latency=latency) for case in ("slow", "dead")]
        if "kills" in parts:
            seeds = (1,) if arguments.quick else (1, 2, 3)
            kills = [rows_with_kills(place, latency=latency, seed=seed) for seed in seeds]
        if "restart" in parts:
            engines = ("echo",) if arguments.quick else ("echo", "vllm")
            firsts = [time_to_first_row(place, engine=engine) for engine in engines]
    report(spans, kills, firsts)


def report(
    spans: list[dict[str, Any]], kills: list[dict[str, Any]], firsts: list[dict[str, Any]]
) -> None:
    """Print the tables and the last JSON line."""
    if spans:
        figures = ("seconds", "ideal_seconds", "ratio", "rows_generated_per_row")
        print_table(
            (
                "4 workers, one",
                "seconds",
                "ideal",
                "ratio",
                "rows generated a row",
            ),
            [
                (
                    "4 times slower" if span["case"] == "slow" else "dead at half",
                    *(str(span[name]) for name in figures),
                )
                for span in spans
            ],
        )
    for kill in kills:
        print(f"one kill a worker: {kill}")
    for first in firsts:
        print(f"restart: {first}")
    result = {"benchmark": "recovery", "makespan": spans, "kills": kills, "restart": firsts}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
