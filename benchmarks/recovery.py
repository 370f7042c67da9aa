"""What kills, slow workers and dead workers cost, against the least possible.

    python benchmarks/recovery.py            # echo and real vLLM on the CPU, about twelve minutes
    python benchmarks/recovery.py --quick    # echo only, workers that help only, one run with kills: two minutes

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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from batchinfer.core import layout  # noqa: E402
from batchinfer.storage.opening import open_store  # noqa: E402
from batchinfer.worker.schedule import finished_chunks  # noqa: E402
from making import ECHO, make_job  # noqa: E402

SEQS = 8
WORKERS = 4
CHUNKS_PER_WORKER = 8
CHUNK_ROWS = 100


TALLY = """
import os, sys
from batchinfer.cli.main import main
from batchinfer.engines.echo import EchoEngine
file = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
generate = EchoEngine.generate
def counted(self, source, stop):
    for batch in generate(self, source, stop):
        os.write(file, b"x" * len(batch))
        yield batch
EchoEngine.generate = counted
sys.exit(main(sys.argv[2:]))
"""
"""A worker that writes one byte for every completion its engine gives: what it did is known even after SIGKILL."""


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


def records(run: Path) -> list[dict[str, Any]]:
    """Every worker's record."""
    store = open_store(str(run))
    return [json.loads(store.get(info.key).data) for info in store.list(layout.WORKERS)]


def num_markers(run: Path) -> int:
    """Chunks done so far."""
    return len(finished_chunks(open_store(str(run))))


def makespan(folder: Path, *, case: str, steal: bool, latency: float) -> dict[str, Any]:
    """Four workers; one is four times slower, or is killed for good at half the time. Until the last one has ended."""
    rows = WORKERS * CHUNKS_PER_WORKER * CHUNK_ROWS
    rate = SEQS / latency
    job, run = folder / "job", folder / f"run-{case}-{steal}"
    if not job.exists():
        make_job(job, rows=rows, per_chunk=CHUNK_ROWS, workers=WORKERS)
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
        options = echo(own, lease, 0.01 * ideal) + (() if steal else ("--no-steal",))
        processes.append(start(job, run, f"w{index}", f"worker-{index:05d}.txt", *options))
    # A process needs a moment to start; the clock runs from the first row's possible start.
    started = wait_for_first_rows(run, began)
    if case == "dead":
        time.sleep(max(0.0, calm / 2 - (time.monotonic() - started)))
        processes[0].kill()
    for process in processes:
        process.wait()
    ended = time.monotonic()
    done = num_markers(run)
    if case == "dead" and done < WORKERS * CHUNKS_PER_WORKER:
        # Without helping, the dead worker's share waits for its restart.
        start(job, run, "w0", "worker-00000.txt", *echo(latency, lease, 0.01 * ideal)).wait()
        ended = time.monotonic()
    seconds = ended - started
    generated = sum(record["rows_done"] for record in records(run))
    return {
        "case": case,
        "steal": steal,
        "seconds": round(seconds, 1),
        "ideal_seconds": round(ideal, 1),
        "ratio": round(seconds / ideal, 3),
        "rows_generated_per_row": round(generated / rows, 3),
    }


def wait_for_first_rows(run: Path, began: float) -> float:
    """When the last worker took up its first chunk: before that there is only the start of processes."""
    store = open_store(str(run))
    while time.monotonic() - began < 60:
        states = [
            json.loads(store.get(info.key).data)["state"] for info in store.list(layout.WORKERS)
        ]
        claims = sum(1 for _ in store.list(layout.CLAIMS))
        if len(states) == WORKERS and claims >= WORKERS:
            return time.monotonic()
        time.sleep(0.02)
    raise TimeoutError("the workers did not start")


def rows_with_kills(folder: Path, *, latency: float, seed: int) -> dict[str, Any]:
    """Two workers, each killed once at a random point and started again: rows generated against one pass."""
    rows, chunk_rows, workers = 1600, 100, 2
    rate = SEQS / latency
    calm = rows / (workers * rate)
    checkpoint = 0.02 * calm
    job, run, tally = (
        folder / f"job-kills-{seed}",
        folder / f"run-kills-{seed}",
        folder / f"tally-{seed}",
    )
    make_job(job, rows=rows, per_chunk=chunk_rows, workers=workers)
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
    # In flight: up to one and a half times the engine's places. Since the last checkpoint: its interval's rows.
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
    """From SIGKILL and an immediate restart to the first new finished row."""
    job, run = folder / f"job-first-{engine}", folder / f"run-first-{engine}"
    make_job(
        job,
        rows=4000,
        per_chunk=500,
        make_row=lambda row: {"prompt": f"What is {row % 90} + {row % 7}?"},
    )
    options = echo(0.5, 4, 0.5)
    if engine == "vllm":
        options = (
            "--model", str(ROOT / "examples/demo-model"), "--prompt-column", "prompt", "--as-chat",
            "--max-tokens", "32", "--max-model-len", "256", "--max-num-seqs", "4", "--temperature", "0",
            "--lease-seconds", "4", "--checkpoint-seconds", "0.5",
            "--engine-arg", "kv_cache_memory_bytes=67108864", "--engine-arg", "block_size=32",
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
    """Until so many new segments lie in the run."""
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
            spans = [
                makespan(place, case=case, steal=steal, latency=latency)
                for case in ("slow", "dead")
                for steal in ((True,) if arguments.quick else (True, False))
            ]
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
        print(
            f"{'4 workers, one':<18}{'helping':>8}{'seconds':>9}{'ideal':>7}{'ratio':>7}{'rows generated a row':>22}"
        )
    for span in spans:
        case = "4 times slower" if span["case"] == "slow" else "dead at half"
        print(
            f"{case:<18}{'yes' if span['steal'] else 'no':>8}{span['seconds']:>9}{span['ideal_seconds']:>7}"
            f"{span['ratio']:>7}{span['rows_generated_per_row']:>22}"
        )
    for kill in kills:
        print(f"one kill a worker: {kill}")
    for first in firsts:
        print(f"restart: {first}")
    result = {"benchmark": "recovery", "makespan": spans, "kills": kills, "restart": firsts}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
