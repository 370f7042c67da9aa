"""The demo: two real vLLM workers on a CPU, one killed half way, every answer checked.

Writes a data set of closed tasks (``demo_data.py``), splits it for two workers, runs both with the
committed model, kills the first with SIGKILL as soon as it has finished something, starts it
again, and then compares every row of the outputs with the one right answer to its prompt::

    python scripts/demo.py [--rows 3000] [--work-dir ./demo-run]

Exit status: 0 every row is there, in its place and right often enough; 1 something is
missing, misaligned or wrong, or a process failed; 2 usage. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_check import Findings, check_run, read_markers
from demo_data import DEFAULT_ROWS, DEFAULT_SEED, draw_examples, write_dataset

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError

REPOSITORY = Path(__file__).resolve().parent.parent
# Relative to the repository, as a reader would type it; every command runs there.
MODEL = "examples/demo-model"
OURS = ".batchinfer-demo"
VICTIM, OTHER = "w0", "w1"
MAX_PROBLEMS_SHOWN = 10
POLL_SECONDS = 0.05
PROCESS_END_SECONDS = 15


class DemoFailed(Exception):
    """The demo cannot go on; the message says why and what to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the demo."""

    work: Path
    rows: int
    num_chunks: int
    max_num_seqs: int
    checkpoint_seconds: int
    timeout_seconds: float

    @property
    def data(self) -> Path:
        """Where the data set lies."""
        return self.work / "data"

    @property
    def job(self) -> Path:
        """Where the job lies."""
        return self.work / "job"

    @property
    def run(self) -> Path:
        """Where the run lies."""
        return self.job / "runs" / "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What lay on disk when the first worker was killed.

    Attributes:
        chunks_published: Chunks of its own that it had finished: the ones to be skipped.
        chunks_checkpointed: Chunks of its own with finished rows but no marker: to be resumed.
        processes_left: Engine processes that outlived it.
    """

    chunks_published: int
    chunks_checkpointed: int
    processes_left: int


def prepare(work: Path) -> None:
    """Make an empty work folder; wipe it only if an earlier demo made it.

    Raises:
        DemoFailed: Something else lies there.
    """
    if work.exists() and not work.is_dir():
        raise DemoFailed(f"{work}: is not a folder; pass another --work-dir")
    if work.is_dir() and any(work.iterdir()):
        if not (work / OURS).is_file():
            raise DemoFailed(f"{work}: is no work folder of the demo; pass another --work-dir")
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    (work / OURS).write_text("made by scripts/demo.py, which empties this folder at its start\n")


def say(text: str) -> None:
    """Tell the person who watches. Results go to stdout, everything else here."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


def manifest_path(settings: Settings, worker_id: str) -> Path:
    """Where the manifest of a worker lies."""
    return settings.job / layout.worker_manifest(int(worker_id[1:]), 2)


def manifest_lines(settings: Settings, worker_id: str) -> list[str]:
    """The chunks of a worker's manifest."""
    return manifest_path(settings, worker_id).read_text(encoding="utf-8").split()


def worker_command(settings: Settings, worker_id: str) -> list[str]:
    """The command line of one worker; what a reader could type."""
    options = {
        "--manifest": manifest_path(settings, worker_id),
        "--output": settings.run,
        "--model": MODEL,
        "--messages-column": "conversation",
        "--turns": "first",
        "--max-tokens": 64,
        "--temperature": 0,
        "--worker-id": worker_id,
        "--max-model-len": 256,
        "--max-num-seqs": settings.max_num_seqs,
        "--checkpoint-seconds": settings.checkpoint_seconds,
    }
    pairs = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "batchinfer.worker", *pairs]


def split(settings: Settings) -> None:
    """Split the data set for two workers."""
    command = [sys.executable, "-m", "batchinfer.split", str(settings.data)]
    command += ["--output", str(settings.job), "--num-chunks", str(settings.num_chunks)]
    command += ["--num-workers", "2"]
    status = subprocess.run(command, cwd=REPOSITORY, check=False, stdout=sys.stderr).returncode
    if status:
        raise DemoFailed(f"batchinfer split: exit status {status}")


class Workers:
    """The worker processes of the demo. Leaves none running, however the demo ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, worker_id: str) -> None:
        """Start a worker, or start it again; its log is appended to."""
        with self.log(worker_id).open("ab") as log:
            self._processes[worker_id] = subprocess.Popen(
                worker_command(self._settings, worker_id),
                cwd=REPOSITORY,
                env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, worker_id: str) -> Path:
        """Where a worker's output goes."""
        return self._settings.work / f"{worker_id}.log"

    def pid(self, worker_id: str) -> int:
        """Process id of a worker."""
        return self._processes[worker_id].pid

    def status(self, worker_id: str) -> int | None:
        """Exit status, or None while it runs."""
        return self._processes[worker_id].poll()

    def kill(self, worker_id: str) -> int:
        """SIGKILL one worker, as a preemption would; return how many of its processes live on."""
        process = self._processes[worker_id]
        before = list(_descendants(process.pid))
        process.kill()
        process.wait()
        return len(_wait_gone(before))

    def stop_all(self) -> None:
        """End what still runs: politely, then not."""
        running = [p for p in self._processes.values() if p.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(PROCESS_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield (process id, start time in ticks) of a process's children, theirs too; Linux only."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            started = _started(int(child))
            if started:
                yield int(child), started
            yield from _descendants(int(child))


def _started(pid: int) -> str:
    """Start time of a live process; empty for a gone one and for a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]


def _wait_gone(processes: list[tuple[int, str]]) -> list[tuple[int, str]]:
    deadline = time.monotonic() + PROCESS_END_SECONDS
    while (left := [p for p in processes if _started(p[0]) == p[1]]) and (
        time.monotonic() < deadline
    ):
        time.sleep(POLL_SECONDS)
    return left


def finished_by(run: Path, worker_id: str) -> tuple[set[str], set[str]]:
    """Return the chunks that a worker published, and those it holds only checkpoints of."""
    markers = read_markers(run)
    published = {name for name, marker in markers.items() if marker.worker == worker_id}
    segments = (
        layout.parse_segment(str(path.relative_to(run)))
        for path in (run / layout.CHECKPOINTS).glob("*/*")
    )
    writer = f"{worker_id}."  # a nonce follows
    begun = {each.chunk for each in segments if each and each.writer.startswith(writer)}
    return published, begun - set(markers)


def is_time_to_kill(published: int, checkpointed: int, num_chunks: int) -> bool:
    """Whether a worker is in the middle: a chunk done and another begun, or half of them done."""
    return (published > 0 and checkpointed > 0) or published * 2 >= num_chunks


def kill_in_the_middle(settings: Settings, workers: Workers) -> Kill:
    """Wait until the victim has finished something but not all, and kill it.

    Raises:
        DemoFailed: It ended before.
    """
    num_chunks = len(manifest_lines(settings, VICTIM))

    def is_due() -> bool:
        if workers.status(VICTIM) is not None:
            raise DemoFailed(
                f"worker {VICTIM} ended with {workers.status(VICTIM)} before it could be killed; "
                f"see {workers.log(VICTIM)}, or pass more --rows"
            )
        published, checkpointed = finished_by(settings.run, VICTIM)
        return is_time_to_kill(len(published), len(checkpointed), num_chunks)

    wait_until(is_due, settings.timeout_seconds, f"worker {VICTIM} to finish its first rows")
    pid = workers.pid(VICTIM)
    left = workers.kill(VICTIM)
    published, checkpointed = finished_by(settings.run, VICTIM)
    say(
        f"killed worker {VICTIM} (pid {pid}, SIGKILL): {len(published)} of its {num_chunks} chunks "
        f"published, {len(checkpointed)} with checkpoints only"
    )
    return Kill(
        chunks_published=len(published), chunks_checkpointed=len(checkpointed), processes_left=left
    )


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Poll until a condition holds, or raise DemoFailed after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(POLL_SECONDS)


@contextmanager
def running_workers(settings: Settings) -> Iterator[Workers]:
    """Give the workers; end whatever still runs on the way out."""
    workers = Workers(settings)
    try:
        yield workers
    finally:
        workers.stop_all()


def run_workers(settings: Settings) -> Kill:
    """Run both workers, kill the first in the middle, start it again, and wait for both."""
    with running_workers(settings) as workers:
        for worker_id in (VICTIM, OTHER):
            workers.start(worker_id)
            say(f"started worker {worker_id} (pid {workers.pid(worker_id)})")
        kill = kill_in_the_middle(settings, workers)
        workers.start(VICTIM)
        say(f"started worker {VICTIM} again (pid {workers.pid(VICTIM)})")
        wait_until(
            lambda: all(workers.status(name) is not None for name in (VICTIM, OTHER)),
            settings.timeout_seconds,
            "both workers to finish",
        )
        for worker_id in (VICTIM, OTHER):
            if workers.status(worker_id):
                raise DemoFailed(
                    f"worker {worker_id} ended with {workers.status(worker_id)}; "
                    f"see {workers.log(worker_id)}"
                )
    return kill


def check_recovery(findings: Findings, kill: Kill) -> None:
    """Add to the problems what the restart should have kept and did not."""
    if kill.processes_left:
        findings.problems.append(
            f"{kill.processes_left} processes of the killed worker were still running "
            f"{PROCESS_END_SECONDS} s later"
        )
    if kill.chunks_checkpointed and not findings.total.rows_resumed:
        findings.problems.append("the killed worker left checkpoints, but no row was resumed")


def report(findings: Findings, kill: Kill, settings: Settings) -> dict[str, Any]:
    """Print the tables; return the same as one object."""
    print(f"\n{'worker':8}{'chunks':>8}{'rows':>8}{'resumed rows':>14}{'tokens/s':>10}")
    for name, totals in [*sorted(findings.workers.items()), ("total", findings.total)]:
        print(
            f"{name:8}{totals.chunks:8}{totals.rows:8}{totals.rows_resumed:14}"
            f"{totals.tokens_per_second:10.0f}"
        )
    print(f"\n{'task':12}{'rows':>8}{'right':>8}{'accuracy':>10}")
    for task, accuracy in findings.accuracy.items():
        rows, right = findings.asked[task], findings.right[task]
        print(f"{task:12}{rows:8}{right:8}{accuracy:10.2%}")
    overall = findings.right.total() / max(findings.asked.total(), 1)
    print(f"{'total':12}{findings.asked.total():8}{findings.right.total():8}{overall:10.2%}")
    # While the killed worker loads its model again, the other one helps itself to what is left.
    own = [layout.stem(line) for line in manifest_lines(settings, VICTIM)]
    taken_over = sum(findings.chunk_workers.get(name) == OTHER for name in own)
    print(
        f"\nchunks of {VICTIM}, done before the kill and skipped after it: {kill.chunks_published}"
    )
    print(
        f"chunks resumed from checkpoints: {findings.total.chunks_resumed}, "
        f"with {findings.total.rows_resumed} finished rows"
    )
    print(f"chunks of {VICTIM} taken over by {OTHER}: {taken_over}")
    for name, place in (("data", settings.data), ("job", settings.job), ("run", settings.run)):
        print(f"{name + ':':8}{place}")
    print(f"logs:   {settings.work}/*.log")
    for problem in findings.problems[:MAX_PROBLEMS_SHOWN]:
        print(f"PROBLEM {problem}")
    if len(findings.problems) > MAX_PROBLEMS_SHOWN:
        print(f"PROBLEM ... and {len(findings.problems) - MAX_PROBLEMS_SHOWN} more")
    print("\nPASSED" if findings.passed else "\nFAILED")
    return {
        "passed": findings.passed,
        "problems": len(findings.problems),
        "rows": findings.total.rows,
        "rows_resumed": findings.total.rows_resumed,
        "chunks_skipped": kill.chunks_published,
        "chunks_resumed": findings.total.chunks_resumed,
        "accuracy": findings.accuracy,
        "tokens_per_second": round(findings.total.tokens_per_second),
        "run": str(settings.run),
    }


def parse_options(arguments: list[str] | None) -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Two workers, one killed, every answer checked.")
    parser.add_argument("--work-dir", type=Path, default=Path("demo-run"))
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS)
    parser.add_argument("--num-chunks", type=int, default=12)
    parser.add_argument(
        "--max-num-seqs", type=int, default=8, help="small, so that the kill lands in the middle"
    )
    parser.add_argument("--checkpoint-seconds", type=int, default=1)
    parser.add_argument(
        "--timeout-seconds", type=float, default=300, help="for each of the two waits"
    )
    options = parser.parse_args(arguments)
    if options.num_chunks < 4 or options.rows < options.num_chunks:
        parser.error("expected at least 4 chunks and a row for each")
    return Settings(
        work=options.work_dir.resolve(),
        rows=options.rows,
        num_chunks=options.num_chunks,
        max_num_seqs=options.max_num_seqs,
        checkpoint_seconds=options.checkpoint_seconds,
        timeout_seconds=options.timeout_seconds,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    settings = parse_options(arguments)
    try:
        prepare(settings.work)
    except DemoFailed as error:
        say(str(error))
        return 2
    try:
        say(f"writing {settings.rows} rows to {settings.data}")
        write_dataset(settings.data, num_rows=settings.rows)
        split(settings)
        kill = run_workers(settings)
    except (DemoFailed, BatchinferError) as error:
        say(f"FAILED: {error}")
        return 1
    examples = draw_examples(settings.rows, seed=DEFAULT_SEED, held_out=True)
    findings = check_run(settings.job, settings.run, [example.prompt for example in examples])
    check_recovery(findings, kill)
    print(json.dumps(report(findings, kill, settings)))
    return 0 if findings.passed else 1


if __name__ == "__main__":
    # SIGTERM ends the demo like Ctrl-C does, so that its workers go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
