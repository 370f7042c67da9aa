"""The harness of all benchmarks: turns and spreads, measured processes, jobs to work on, tables.

Peak memory of a measured process is at least what its parent held when it was started. So this module imports nothing
large, and jobs are written chunk by chunk.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batchinfer.core import codec, layout
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job
from batchinfer.storage.opening import open_store

ROOT = Path(__file__).resolve().parents[1]

Run = TypeVar("Run")


# --------------------------------------------------------------------------- runs and their spread


class Spread(NamedTuple):
    """The median of some runs, the least and the most of them. Formatted as "1.2 (1.1-1.4)"; one run as "1.2"."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Format each number by `spec`."""
        median, low, high = (format(value, spec) for value in self)
        return median if low == high else f"{median} ({low}-{high})"

    def __truediv__(self, divisor: float) -> Spread:
        return Spread(*(value / divisor for value in self))

    def __mul__(self, factor: float) -> Spread:
        return Spread(*(value * factor for value in self))

    def entries(self, name: str, digits: int = 4) -> dict[str, float]:
        """Return the numbers for a JSON object: NAME, NAME_min, NAME_max; NAME alone if all runs gave the same."""
        median = {name: round(self.median, digits)}
        if self.low == self.high:
            return median
        low, high = round(self.low, digits), round(self.high, digits)
        return {**median, f"{name}_min": low, f"{name}_max": high}


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of one figure over the runs of one way."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def entries(figures: Mapping[str, Spread], digits: int = 4) -> dict[str, float]:
    """Return the entries of all figures of one way."""
    return {
        key: value
        for name, found in figures.items()
        for key, value in found.entries(name, digits).items()
    }


def alternate(ways: Mapping[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Run every way `repeats` times, in the order A B C A B C: a machine that becomes slower does so for all ways.

    Prints on stderr what each run gave. Returns the runs by way, in the order in which they were made.
    """
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name, way in ways.items():
            runs[name].append(way())
            print(f"{turn + 1}/{repeats} {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return runs


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    for first, *cells in lines:
        right = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{first:{widths[0]}}" + "".join(right))


# --------------------------------------------------------------------------- processes


class Usage(NamedTuple):
    """What one process and the children that it waited for used. `peak_bytes` is the memory of the largest of them."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


class Ended(NamedTuple):
    """A process that ended with status 0.

    `cpu` is filled only if `run` had an `is_ready`: CPU seconds since then by the name of the process.
    """

    stdout: str
    usage: Usage
    cpu: dict[str, float]

    @property
    def last_object(self) -> dict[str, Any]:
        """The JSON object of the last line of stdout."""
        found: dict[str, Any] = json.loads(self.stdout.strip().splitlines()[-1])
        return found


def environment(**more: str) -> dict[str, str]:
    """Return the variables of every measured process: one thread, no network, one GPU at most."""
    # vLLM itself may be on the inherited path only.
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    is_ready: Callable[[str], bool] | None = None,
) -> Ended:
    """Run a command to its end; the benchmark ends if the command fails.

    Args:
        command: The program and its arguments.
        env: All variables of the process (default: `environment()`).
        is_ready: Says of a line of stderr whether the CPU seconds of `Ended.cpu` count from then on.
    """
    last_lines: deque[str] = deque(maxlen=60)
    with tempfile.TemporaryFile("w+") as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.PIPE, text=True, env=env or environment()
        )
        watch = Watch(process.pid) if is_ready else None

        def read() -> None:
            assert process.stderr
            with process.stderr:
                for line in process.stderr:
                    last_lines.append(line)
                    if watch and is_ready and is_ready(line):
                        watch.mark()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        # wait4 counts the process and every child that it waited for, and no other process.
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu = watch.end() if watch else {}
        reader.join(5)
        if process.returncode:
            sys.exit(f"{' '.join(command)}: exit {process.returncode}\n{''.join(last_lines)}")
        output.seek(0)
        usage = Usage(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * 1024)
        return Ended(output.read(), usage, cpu)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch:
    """CPU seconds of a process and of those that it started, by name, read twenty times a second while they live."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, tuple[str, float]] = {}
        self._marked: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def mark(self) -> None:
        """Count from here on."""
        self._look()
        self._marked = {pid: seconds for pid, (_, seconds) in self._seen.items()}

    def end(self) -> dict[str, float]:
        """Stop reading; return the sums by name."""
        self._ended.set()
        self._thread.join()
        sums: dict[str, float] = {}
        for pid, (name, seconds) in self._seen.items():
            sums[name] = sums.get(name, 0.0) + seconds - self._marked.get(pid, 0.0)
        return sums

    def _loop(self) -> None:
        while not self._ended.wait(0.05):
            self._look()

    def _look(self) -> None:
        waiting = [self._pid]
        while waiting:
            pid = waiting.pop()
            folder = Path("/proc") / str(pid)
            with contextlib.suppress(OSError, ValueError, IndexError):
                command = (folder / "cmdline").read_bytes().decode().split("\0")
                seconds = cpu_seconds(pid)
                if any(command):  # a process that is ending has no command any more
                    self._seen[pid] = (_name(command), seconds)
                for task in (folder / "task").iterdir():
                    with contextlib.suppress(OSError):  # a thread may end meanwhile
                        waiting += map(int, (task / "children").read_text().split())


def _name(command: list[str]) -> str:
    text = " ".join(command)
    for part, name in (
        ("-m batchinfer.worker", "worker"),  # first: it may name a server's command
        ("stepped_worker.py", "worker"),
        ("guard.py", "guard"),
        ("vllm_serve", "server"),
        ("echo_server", "server"),
        ("EngineCore", "engine core"),
        ("VLLM::Worker", "engine worker"),
        ("spawn_main", "engine core"),
        ("batchinfer", "worker"),
    ):
        if part in text:
            return name
    return "driver"


# --------------------------------------------------------------------------- jobs


def as_line(record: Mapping[str, Any], row: int) -> bytes:
    """Return the line of a chunk that holds a record as the job's row of that number."""
    return codec.encode({**record, "_row": row, "_id": str(row)}) + b"\n"


def write_job(
    url: str, rows: int, make_line: Callable[[int], bytes], *, per_chunk: int, num_workers: int = 1
) -> None:
    """Write a job as `batchinfer split` would; `make_line` gives the line of each row."""
    store = open_store(url)
    num_chunks = -(-rows // per_chunk)
    chunks = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(num_chunks):
            numbers = range(index * per_chunk, min(rows, (index + 1) * per_chunk))
            name = layout.chunk_name(index, num_chunks)
            path = Path(folder, name)  # a file of its own: a local store may keep it as it is
            with path.open("w+b") as file:
                file.writelines(map(make_line, numbers))
                size = file.tell()
                file.seek(0)
                digest = codec.sha256_file(file)
            store.put_file(layout.chunk_file(name, "none"), path)
            chunks.append(
                Chunk(
                    name=name, first_row=numbers.start, rows=len(numbers), bytes=size, sha256=digest
                )
            )
    keys = [f"{layout.chunk_file(chunk.name, 'none')}\n" for chunk in chunks]
    store.create(layout.ALL_MANIFEST, "".join(keys).encode())
    for worker in range(num_workers):
        own = keys[worker * num_chunks // num_workers : (worker + 1) * num_chunks // num_workers]
        store.create(layout.worker_manifest(worker, num_workers), "".join(own).encode())
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=[],
        rows=rows,
        chunks=chunks,
        num_workers=num_workers,
    )
    store.create(layout.JOB_KEY, codec.encode_pretty(job))
