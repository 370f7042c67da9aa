"""Measure a worker's start over a large job: 100,000 chunks in the manifest, 99,000 of them with markers.

CPU seconds of the worker, from its first instruction until its first chunk is open and its rows can be sent, and how
many listing pages and other requests that took. Pages come from a stub (s3_stub.py), since a test S3 server is slow
at this size.
The last line is one JSON object.

    python benchmarks/startup.py [--quick] [--chunks 100000] [--markers 99000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import workload

FIRST_CHUNK = '"event": "chunk_open"', '"event":"chunk_open"'


class Measured(NamedTuple):
    """One start."""

    cpu_seconds: float
    wall_seconds: float
    pages: int
    requests: int


def start(port: int, number: int) -> Measured:
    """Start a worker, and end it when its first chunk is open."""
    endpoint = f"http://127.0.0.1:{port}"
    before = counts(endpoint)
    env = workload.environment(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="testing",
        AWS_SECRET_ACCESS_KEY="testing",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    command = [
        sys.executable,
        "-m",
        "batchinfer.worker",
        "--engine",
        "echo",
        "--log-format",
        "json",
    ]
    command += ["--job", "s3://stub/job", "--prompt-column", "prompt", "--worker-id", f"w{number}"]
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
    after = counts(endpoint)
    process.kill()
    process.wait()
    pages = after["list"] - before["list"]
    return Measured(cpu, wall, pages, sum(after.values()) - sum(before.values()) - pages)


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counts(endpoint: str) -> dict[str, int]:
    """Requests that came so far, by kind."""
    with urllib.request.urlopen(f"{endpoint}/stub-counts") as answer:
        return {"list": 0, **json.load(answer)}


def main() -> None:
    """Serve, start, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one start")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--markers", type=int, default=99_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    stub = str(Path(__file__).with_name("s3_stub.py"))
    command = [sys.executable, stub, str(arguments.chunks), str(arguments.markers)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=workload.environment()
    )
    assert server.stdout
    try:
        port = int(server.stdout.readline())
        repeats = 1 if arguments.quick else arguments.repeats
        runs = [start(port, number) for number in range(repeats)]
    finally:
        server.kill()
        server.wait()
    cpu = statistics.median(run.cpu_seconds for run in runs)
    wall = statistics.median(run.wall_seconds for run in runs)
    pages, requests = runs[0].pages, runs[0].requests
    print(f"{arguments.chunks} chunks, {arguments.markers} done, medians of {repeats} starts")
    print(f"{'CPU s':>8}{'wall s':>8}{'listing pages':>15}{'other requests':>16}")
    print(f"{cpu:8.2f}{wall:8.2f}{pages:15}{requests:16}")
    result = {
        "benchmark": "startup",
        "chunks": arguments.chunks,
        "markers": arguments.markers,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "listing_pages": pages,
        "other_requests": requests,
        "reached": {"cpu_at_most_5_seconds": cpu <= 5, "pages_at_most_200": pages <= 200},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
