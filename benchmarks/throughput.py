"""Measure the worker with a real model against the ways in which vLLM is used without it.

All ways get the same requests: prompts of 6 to 30 words, answers of very uneven length, a seed each, and the same
engine options. The worker reads its chunks from S3 on loopback (s3_stub.py), asks its own `vllm serve` over a unix
socket, and writes checkpoints, outputs, markers and claims. Seconds do not include the loading of the engine, which is
reported apart, but they do include what the first request costs. Medians of the repeats; about 10 minutes on two quiet
cores. The last line is one JSON object.

    python benchmarks/throughput.py [--quick] [--gpu] [--prompts 800] [--repeats 3] [--model FOLDER]
    python benchmarks/throughput.py --ways batchinfer,run_batch    # see --help

What a request costs the worker itself, from chunk to published line, is measured apart, and not with --gpu: over two
servers that answer with the prompt and over more rows, and without what a job of one row costs. The bounds of the
project: `steps_of_one_generate` at most 1.02, `wall_of_run_batch` at most 1.10, `own_us_a_request` at most 400.

The way `ray` is Ray Data LLM with its defaults. Ray is no dependency; a folder on the path is enough:

    pip install --no-deps --target /tmp/ray-data ray msgpack
    PYTHONPATH=/tmp/ray-data python benchmarks/throughput.py --ways batchinfer,run_batch,ray,generate
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import msgspec
import s3_stub
import workload
from harness import Spread, alternate, entries, print_table, spread
from ways import ROWS_PER_CHUNK

from batchinfer.engines.engine_config import EngineConfig

TITLES = {
    "generate": "LLM.generate once",
    "chunks": f"LLM.generate per {ROWS_PER_CHUNK} rows",
    "batchinfer": "batchinfer",
    "run_batch": "vllm run-batch",
    "ray": "Ray Data LLM",
}
DEFAULT_WAYS = "generate,batchinfer,run_batch"
OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
ECHO_SERVER = Path(__file__).parent.parent / "tests/echo_server.py"


class Measured(NamedTuple):
    """One run of one way.

    `steps` is 0 if they cannot be counted. `driver_seconds`: CPU of the process that has the rows; `server_seconds`:
    CPU of the server beside it, without the engine, 0 if there is none.
    """

    wall_seconds: float
    load_seconds: float
    requests: int
    steps: int
    driver_seconds: float
    server_seconds: float = 0.0


class Bench:
    """The requests, their files and their job, and the engine that all ways have."""

    def __init__(self, scratch: Path, arguments: argparse.Namespace) -> None:
        self.scratch = scratch
        self.engine = workload.GPU_ENGINE if arguments.gpu else workload.CPU_ENGINE
        self.model = arguments.model or workload.write_model(scratch / "model", is_8b=arguments.gpu)
        longest = 1024 if arguments.gpu else 256
        self.requests = workload.make_requests(arguments.prompts, longest=longest)
        self.job = workload.write_job("s3://stub/job", self.requests, per_chunk=ROWS_PER_CHUNK)
        self.all = self._write("all.jsonl", self.requests)
        chats = [_chat(each, index) for index, each in enumerate(self.requests)]
        self.batch = self._write("batch.jsonl", chats)
        self._runs = 0

    def _write(self, name: str, lines: list[dict[str, Any]]) -> Path:
        path = self.scratch / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def plain(self, way: str, requests: Path) -> Measured:
        """Run a way of ways.py."""
        script = str(Path(__file__).with_name("ways.py"))
        command = [sys.executable, script, way, str(requests), str(self.model)]
        env = harness.environment(**OWN)
        found = harness.run([*command, json.dumps(self.engine)], env=env).last_object
        names = ("wall_seconds", "load_seconds", "requests", "steps", "cpu_seconds")
        return Measured(*(found[name] for name in names))

    def worker(self) -> Measured:
        """Run the worker with checkpoints and claims."""
        self._runs += 1
        options = ["--request-format", "completions", "--checkpoint-seconds", "5"]
        result, ended = workload.run_worker(
            self.job,
            f"s3://stub/run-{self._runs}",
            self.model,
            self.engine,
            *options,
            env=harness.environment(**OWN),
        )
        return Measured(
            result["generate_time_sec"],
            result["engine_load_sec"],
            result["request_count"],
            result["engine_steps"],
            ended.cpu["worker"],
            ended.cpu["server"],
        )

    def own(self, factor: int = 10) -> float:
        """Return the CPU microseconds of the worker a request, beside servers that take next to none."""
        jobs = {}
        for name, requests in (("one", self.requests[:1]), ("many", self.requests * factor)):
            url = f"s3://stub/job-{name}"
            jobs[name] = workload.write_job(url, requests, per_chunk=10 * ROWS_PER_CHUNK)
        config = EngineConfig(engine="echo", model=str(self.model))
        server = [
            sys.executable,
            str(ECHO_SERVER),
            msgspec.json.encode(config).decode(),
            "{socket}",
        ]
        options = ["--server-command", shlex.join(server), "--replicas", "2"]
        options += ["--max-concurrency", "384", "--request-format", "completions"]
        cpu = {}
        for name, job in jobs.items():
            self._runs += 1
            output = f"s3://stub/run-{self._runs}"
            env = harness.environment()
            _, ended = workload.run_worker(job, output, self.model, {}, *options, env=env)
            cpu[name] = ended.cpu["worker"]
        return 1e6 * (cpu["many"] - cpu["one"]) / (len(self.requests) * factor)

    def chosen(self, names: str | None) -> dict[str, Callable[[], Measured]]:
        """Return the wanted ways by their titles."""
        ways: dict[str, Callable[[], Measured]] = {
            "generate": partial(self.plain, "generate", self.all),
            "chunks": partial(self.plain, "chunks", self.all),
            "batchinfer": self.worker,
            "run_batch": partial(self.plain, "run_batch", self.batch),
            "ray": partial(self.plain, "ray", self.all),
        }
        wanted = (names or DEFAULT_WAYS).split(",")
        if unknown := sorted(set(wanted) - set(ways)):
            sys.exit(f"--ways: no way {', '.join(unknown)}; expected some of {', '.join(ways)}")
        return {TITLES[name]: ways[name] for name in wanted}


def _chat(request: dict[str, Any], index: int) -> dict[str, Any]:
    body = {name: value for name, value in request.items() if name != "prompt"}
    body |= {"model": "m", "messages": [{"role": "user", "content": request["prompt"]}]}
    return {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}


def main() -> None:
    """Run every way, in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, one run of each")
    parser.add_argument("--gpu", action="store_true", help="an 8B model's shape, dummy weights")
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a model's folder in place of the made one")
    parser.add_argument("--ways", help=f"by comma: {', '.join(TITLES)} (default: {DEFAULT_WAYS})")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.repeats = 300, 1
    with tempfile.TemporaryDirectory() as folder, s3_stub.serving() as endpoint:
        os.environ |= s3_stub.variables(endpoint)
        bench = Bench(Path(folder), arguments)
        own = None
        if not arguments.gpu:
            own = spread(bench.own() for _ in range(arguments.repeats))
            print(f"the worker's own CPU: {own:.0f} us a request", flush=True)
        runs = alternate(bench.chosen(arguments.ways), arguments.repeats)
        tokens = sum(each["max_tokens"] for each in bench.requests)
    report(runs, len(bench.requests), tokens, own)


def summarize(measured: list[Measured]) -> dict[str, Spread]:
    """Return the figures of one way over its runs, per 1000 requests; only loading is not divided."""
    scale = 1000 / measured[0].requests
    return {
        "wall_seconds": spread(each.wall_seconds for each in measured) * scale,
        "steps": spread(each.steps for each in measured) * scale,
        "driver_us": spread(1e3 * each.driver_seconds for each in measured) * scale,
        "server_us": spread(1e3 * each.server_seconds for each in measured) * scale,
        "load_seconds": spread(each.load_seconds for each in measured),
    }


def report(runs: dict[str, list[Measured]], prompts: int, tokens: int, own: Spread | None) -> None:
    """Print the table and the last JSON line; figures are medians over the repeats, per 1000 requests."""
    table = {name: summarize(measured) for name, measured in runs.items()}
    repeats = len(next(iter(runs.values())))
    print(
        f"{prompts} requests, {tokens} tokens, medians of {repeats} (least-most), per 1000 requests"
    )
    columns = {
        "wall_seconds": ("wall s", ".2f"),
        "steps": ("steps", ".0f"),
        "driver_us": ("driver's CPU us/request", ".0f"),
        "server_us": ("server's CPU us/request", ".0f"),
        "load_seconds": ("load s", ".1f"),
    }
    print_table(
        ["way", *(title for title, _ in columns.values())],
        [
            [
                name,
                *(
                    format(way[key], spec) if way[key].median else "-"
                    for key, (_, spec) in columns.items()
                ),
            ]
            for name, way in table.items()
        ],
    )
    medians = {name: {key: each.median for key, each in way.items()} for name, way in table.items()}
    result = {
        "benchmark": "throughput",
        "prompts": prompts,
        "tokens": tokens,
        "repeats": repeats,
        **(own.entries("own_us_a_request", 1) if own else {}),
        "ways": {name: entries(way) for name, way in table.items()},
        "ratios": ratios(medians),
    }
    print(json.dumps(result))


def ratios(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios for which the project has bounds, of each pair of ways that was measured."""
    ours = table.get(TITLES["batchinfer"], {})
    wanted = {
        "steps_of_one_generate": ("generate", "steps"),
        "steps_of_generate_per_chunk": ("chunks", "steps"),
        "wall_of_one_generate": ("generate", "wall_seconds"),
        "wall_of_run_batch": ("run_batch", "wall_seconds"),
    }
    return {
        name: round(ours[key] / table[TITLES[other]][key], 3)
        for name, (other, key) in wanted.items()
        if ours and table.get(TITLES[other], {}).get(key)
    }


if __name__ == "__main__":
    main()
