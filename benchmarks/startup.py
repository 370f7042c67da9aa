"""Measure a worker's start over a large job: 100,000 chunks in the manifest, 99,000 of them with markers.

Measured are the CPU seconds of the worker from its first instruction until its first chunk is open and its rows can be
sent, the listing pages and the other requests. Pages come from a stub (s3_stub.py), since moto is slow at this size.
The last line is one JSON object.

    python benchmarks/startup.py [--quick] [--chunks 100000] [--markers 99000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import count
from typing import NamedTuple

import s3_stub
from harness import alternate, cpu_seconds, environment, print_table, spread

FIRST_CHUNK = '"event": "chunk_open"', '"event":"chunk_open"'


class Measured(NamedTuple):
    """One start."""

    cpu_seconds: float
    wall_seconds: float
    pages: int
    requests: int


def start(endpoint: str, number: int) -> Measured:
    """Start a worker, and end it when its first chunk is open."""
    before = s3_stub.read_counts(endpoint)
    env = environment(**s3_stub.variables(endpoint))
    command = [
        *(sys.executable, "-m", "batchinfer.worker", "--engine", "echo", "--log-format", "json"),
        *("--job", "s3://stub/job", "--prompt-column", "prompt", "--worker-id", f"w{number}"),
    ]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if any(text in line for text in FIRST_CHUNK):
            break
    else:
        sys.exit("".join(lines)[-3000:])
    wall, cpu = time.monotonic() - begin, cpu_seconds(process.pid)
    came = s3_stub.read_counts(endpoint) - before
    process.kill()
    process.wait()
    pages = sum(number for name, number in came.items() if name.startswith("LIST "))
    return Measured(cpu, wall, pages, came.total() - pages)


def main() -> None:
    """Serve, start, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one start")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--markers", type=int, default=99_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    numbers = count()
    with s3_stub.serving(arguments.chunks, arguments.markers) as endpoint:
        runs = alternate({"start": lambda: start(endpoint, next(numbers))}, repeats)["start"]
    cpu = spread(run.cpu_seconds for run in runs)
    wall = spread(run.wall_seconds for run in runs)
    pages, requests = runs[0].pages, runs[0].requests
    print(f"{arguments.chunks} chunks, {arguments.markers} done, medians of {repeats} starts")
    print_table(
        ("CPU s", "wall s", "listing pages", "other requests"),
        [(f"{cpu:.2f}", f"{wall:.2f}", str(pages), str(requests))],
    )
    result = {
        "benchmark": "startup",
        "chunks": arguments.chunks,
        "markers": arguments.markers,
        **cpu.entries("cpu_seconds", 2),
        **wall.entries("wall_seconds", 2),
        "listing_pages": pages,
        "other_requests": requests,
        "reached": {"cpu_at_most_20_seconds": cpu.median <= 20, "pages_at_most_200": pages <= 200},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
