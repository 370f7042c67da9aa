"""Measure what commands cost over a run of very many chunks: status, a worker's start, verify, collect's start.

The bucket is a stub (s3_stub.py), whose requests take no time to speak of: what counts are CPU seconds, requests and
memory of the command. On S3 a request takes some 20 to 100 ms.
The last line is one JSON object.

    python benchmarks/large_job.py [--chunks 100000] [--only status,worker,verify,collect]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import s3_stub
from harness import print_table

from batchinfer.core import layout
from batchinfer.core.codec import decode
from batchinfer.core.records import Job
from batchinfer.storage.opening import open_store

JOB = "s3://stub/job"
RUN = f"{JOB}/runs/default"
BATCHINFER = (sys.executable, "-m", "batchinfer")
ECHO = (
    *BATCHINFER, "worker", "--engine", "echo", "--job", JOB, "--output", RUN, "--prompt-column", "prompt",
    "--log-level", "warning",
)  # fmt: skip


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the commands that are measured, by name."""
    return {
        "status": (*BATCHINFER, "status", RUN, "--json"),
        "worker": (*ECHO, "--worker-id", "late", "--manifest", f"{JOB}/{layout.ALL_MANIFEST}"),
        "verify": (*BATCHINFER, "verify", RUN),
        "collect": (*BATCHINFER, "collect", RUN, str(folder / "answers.jsonl")),
    }


def make_run(endpoint: str, folder: Path, num_chunks: int) -> None:
    """Let a worker do the first chunk, and the stub all others."""
    manifest = folder / "first.txt"
    job = read_job()
    manifest.write_text(f"{layout.chunk_file(job.chunks[0].name, job.compression)}\n")
    harness.run((*ECHO, "--worker-id", "first", "--manifest", str(manifest)))
    urllib.request.urlopen(f"{endpoint}/stub-finish?markers={num_chunks}").close()


def read_job() -> Job:
    """Return the content of job.json."""
    return decode(open_store(JOB).get(layout.JOB_KEY).data, Job, name=layout.JOB_KEY)


def measured(endpoint: str, run: Callable[[], harness.Ended]) -> tuple[harness.Usage, Counter[str]]:
    """Run a command; return what it used, and its requests by method and place."""
    before = s3_stub.read_counts(endpoint)
    usage = run().usage
    return usage, s3_stub.read_counts(endpoint) - before


def main() -> None:
    """Make the run, measure each command, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--only", default="status,worker,verify,collect", help="by comma")
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    result: dict[str, Any] = {"benchmark": "large_job", "chunks": arguments.chunks}
    with (
        tempfile.TemporaryDirectory() as temporary,
        s3_stub.serving(arguments.chunks) as endpoint,
    ):
        os.environ |= s3_stub.variables(endpoint)
        folder = Path(temporary)
        make_run(endpoint, folder, arguments.chunks)
        result["job_json_bytes"] = len(open_store(JOB).get(layout.JOB_KEY).data)
        for name, command in commands(folder).items():
            if name not in arguments.only.split(","):
                continue
            usage, came = measured(endpoint, lambda command=command: harness.run(command))
            pages = sum(number for what, number in came.items() if what.startswith("LIST "))
            rows.append(
                (
                    name,
                    f"{usage.cpu_seconds:.1f}",
                    f"{usage.wall_seconds:.1f}",
                    str(pages),
                    str(came.total() - pages),
                    f"{usage.peak_bytes / 1e6:.0f}",
                )
            )
            result[name] = {
                "cpu_seconds": round(usage.cpu_seconds, 2),
                "wall_seconds": round(usage.wall_seconds, 2),
                "peak_mb": round(usage.peak_bytes / 1e6),
                "requests": dict(came.most_common()),
            }
            print(f"{name}: {dict(came.most_common(8))}", file=sys.stderr)
    print(f"{arguments.chunks} chunks, all done; job.json has {result['job_json_bytes']} bytes")
    print_table(("command", "CPU s", "wall s", "listing pages", "other requests", "MB"), rows)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
