"""The demo: two real vLLM workers on a CPU, one killed half way, every answer checked.

Writes a data set of closed tasks (``demo_data.py``), splits it for two workers, and runs both with the committed model.
As soon as the first has published a chunk and holds finished rows of another, it is killed with SIGKILL and started
again. Then `batchinfer verify --deep` proves the rows, and every collected answer is compared with the one right answer
to its prompt::

    python scripts/demo.py [--rows 3000] [--work-dir ./demo-run] [further options of the workers]

Exit status: 0 every row is there, in its place and right often enough; 1 something is missing, misaligned or wrong, or
a process failed; 2 usage. The last line of stdout is one JSON object.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_data import DEFAULT_ROWS, DEFAULT_SEED, Example, draw_examples, write_dataset

from batchinfer.core import layout

REPOSITORY = Path(__file__).resolve().parent.parent
# Relative to the repository, as a reader would type it; every command runs there.
MODEL = "examples/demo-model"
OURS = ".batchinfer-demo"
VICTIM, OTHER = "w0", "w1"
REQUIRED_ACCURACY = 0.99
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
    timeout_seconds: float
    worker_options: list[str]

    @property
    def job(self) -> Path:
        """Where the job lies."""
        return self.work / "job"

    @property
    def run(self) -> Path:
        """Where the run lies."""
        return self.job / "runs" / "demo"


@dataclass(slots=True)
class Findings:
    """What a check of the answers found: one line for each problem, rows and exact matches by task."""

    problems: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        """No problem, and every task accurate enough; a missing row is a wrong one."""
        return not self.problems and all(
            self.right[task] >= REQUIRED_ACCURACY * rows for task, rows in self.asked.items()
        )


def check_answers(answers: Iterable[dict[str, Any]], examples: list[Example]) -> Findings:
    """Compare collected rows with the one right answer to each prompt of the data set.

    Args:
        answers: Rows of `batchinfer collect`.
        examples: Of the data set by row number, drawn anew: so a mistake of the splitter is found too.
    """
    findings = Findings(asked=Counter(example.task for example in examples))
    by_row: dict[int, dict[str, Any]] = {}
    for answer in answers:
        if answer["_row"] in by_row:
            findings.problems.append(f"row {answer['_row']}: is there twice")
        by_row[answer["_row"]] = answer
    for row, example in enumerate(examples):
        answer = by_row.pop(row, {})
        if answer.get("_id") != str(row) or answer["status"] != 200:
            findings.problems.append(f"row {row}: is {answer or 'missing'}")
        findings.right[example.task] += answer.get("text") == example.answer
    findings.problems += [f"row {row}: is one too many" for row in by_row]
    return findings


def prepare(work: Path) -> None:
    """Make an empty work folder; wipe it only if an earlier demo made it.

    Raises:
        DemoFailed: Something else lies there.
    """
    if work.exists() and not (work / OURS).is_file() and (work.is_file() or any(work.iterdir())):
        raise DemoFailed(f"{work}: is no work folder of the demo; pass another --work-dir")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / OURS).write_text("made by scripts/demo.py, which empties this folder at its start\n")


def say(text: str) -> None:
    """Tell the person who watches. Results go to stdout, everything else here."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


def batchinfer(*words: object) -> dict[str, Any]:
    """Run a command to its end and return its JSON object. Its log goes to stderr."""
    command = [sys.executable, "-m", "batchinfer", *map(str, words)]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DemoFailed(f"batchinfer {words[0]}: exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def worker_command(settings: Settings, worker_id: str) -> list[str]:
    """The command line of one worker; what a reader could type."""
    options = {
        "--manifest": settings.job / layout.worker_manifest(int(worker_id[1:]), 2),
        "--output": settings.run,
        "--model": MODEL,
        "--messages-column": "conversation",
        "--turns": "first",
        "--max-tokens": 64,
        "--temperature": 0,
        "--worker-id": worker_id,
        "--checkpoint-seconds": 1,
    }
    pairs = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "batchinfer.worker", *pairs, *settings.worker_options]


def start_worker(settings: Settings, worker_id: str) -> subprocess.Popen[bytes]:
    """Start a worker, or start it again; its log is appended to."""
    with (settings.work / f"{worker_id}.log").open("ab") as log:
        process = subprocess.Popen(
            worker_command(settings, worker_id),
            cwd=REPOSITORY,
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    say(f"started worker {worker_id} (pid {process.pid})")
    return process


def is_in_the_middle(run: Path) -> bool:
    """Whether the victim holds finished rows of a chunk that nobody has published, and a chunk is published."""
    published = {path.name.split(".")[0] for path in (run / layout.OUTPUTS).glob("*.succeed")}
    # A segment's name begins with that of its worker and a nonce.
    own = {path.parent.name for path in (run / layout.CHECKPOINTS).glob(f"*/{VICTIM}.*.jsonl")}
    return bool(published and own - published)


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Poll until a condition holds, or raise DemoFailed after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(POLL_SECONDS)


@contextmanager
def running_workers() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Give a place for workers by their name; end whatever still runs on the way out: politely, then not."""
    workers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        yield workers
    finally:
        running = [process for process in workers.values() if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(PROCESS_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_workers(settings: Settings) -> None:
    """Run both workers, kill the first in the middle, start it again, and wait for both."""
    with running_workers() as workers:
        for worker_id in (VICTIM, OTHER):
            workers[worker_id] = start_worker(settings, worker_id)

        def is_due() -> bool:
            if workers[VICTIM].poll() is not None:
                raise DemoFailed(
                    f"worker {VICTIM} ended with {workers[VICTIM].returncode} before it could be killed; "
                    f"see {settings.work}/{VICTIM}.log, or pass more --rows"
                )
            return is_in_the_middle(settings.run)

        wait_until(is_due, settings.timeout_seconds, f"worker {VICTIM} to be in the middle")
        workers[VICTIM].kill()
        workers[VICTIM].wait()
        say(f"killed worker {VICTIM} (SIGKILL) in the middle of a chunk")
        workers[VICTIM] = start_worker(settings, VICTIM)
        for worker_id, process in workers.items():
            try:
                status = process.wait(settings.timeout_seconds)
            except subprocess.TimeoutExpired as error:
                raise DemoFailed(str(error)) from error
            if status:
                raise DemoFailed(
                    f"worker {worker_id} ended with {status}; see {settings.work}/{worker_id}.log"
                )


def report(findings: Findings, settings: Settings) -> dict[str, Any]:
    """Print the tables; return the same as one object."""
    status = batchinfer("status", settings.run, "--json")
    totals, speed = status["totals"], status["overall"]
    print(f"\n{'task':12}{'rows':>8}{'right':>8}{'accuracy':>10}")
    for task, rows in [*sorted(findings.asked.items()), ("total", settings.rows)]:
        right = findings.right.total() if task == "total" else findings.right[task]
        print(f"{task:12}{rows:8}{right:8}{right / rows:10.2%}")
    print(
        f"\n{totals['rows_resumed']} rows were finished before the kill and not done again, "
        f"{speed['input_tokens'] + speed['output_tokens']:.0f} tokens/s"
    )
    print(f"job:  {settings.job}\nrun:  {settings.run}\nlogs: {settings.work}/*.log")
    if not totals["rows_resumed"]:
        findings.problems.append("the killed worker left finished rows, but no row was resumed")
    for problem in findings.problems[:MAX_PROBLEMS_SHOWN]:
        print(f"PROBLEM {problem}")
    print("\nPASSED" if findings.passed else "\nFAILED")
    return {
        "passed": findings.passed,
        "problems": len(findings.problems),
        "rows": status["rows"]["done"],
        "rows_right": findings.right.total(),
        "rows_resumed": totals["rows_resumed"],
        "run": str(settings.run),
    }


def parse_options(arguments: list[str] | None) -> Settings:
    """Read the command line. Options that the demo does not know are the workers'."""
    parser = argparse.ArgumentParser(
        description="Two workers, one killed, every answer checked.", allow_abbrev=False
    )
    parser.add_argument("--work-dir", type=Path, default=Path("demo-run"))
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS)
    parser.add_argument("--num-chunks", type=int, default=12)
    parser.add_argument("--timeout-seconds", type=float, default=300, help="for each of the waits")
    options, others = parser.parse_known_args(arguments)
    if options.num_chunks < 4 or options.rows < options.num_chunks:
        parser.error("expected at least 4 chunks and a row for each")
    # Few rows at once, so that the kill lands in the middle.
    defaults = [] if "--engine" in others else ["--max-model-len", "256", "--max-num-seqs", "8"]
    return Settings(
        work=options.work_dir.resolve(),
        rows=options.rows,
        num_chunks=options.num_chunks,
        timeout_seconds=options.timeout_seconds,
        worker_options=[*defaults, *others],
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    settings = parse_options(arguments)
    try:
        prepare(settings.work)
    except DemoFailed as error:
        say(str(error))
        return 2
    data, answers = settings.work / "data", settings.work / "answers.jsonl"
    try:
        say(f"writing {settings.rows} rows to {data}")
        write_dataset(data, num_rows=settings.rows)
        workers = ("--num-chunks", settings.num_chunks, "--num-workers", 2)
        batchinfer("split", data, "--output", settings.job, *workers)
        run_workers(settings)
        batchinfer("verify", settings.run, "--deep")
        batchinfer("collect", settings.run, answers)
        examples = draw_examples(settings.rows, seed=DEFAULT_SEED, held_out=True)
        lines = answers.read_text(encoding="utf-8").splitlines()
        findings = check_answers(map(json.loads, lines), list(examples))
        result = report(findings, settings)
    except DemoFailed as error:
        say(f"FAILED: {error}")
        return 1
    print(json.dumps(result))
    return 0 if findings.passed else 1


if __name__ == "__main__":
    # SIGTERM ends the demo like Ctrl-C does, so that its workers go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
