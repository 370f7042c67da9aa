"""Measure the worker with a real model against the ways in which vLLM is used without it.

All ways get the same requests: prompts of 6 to 30 words, answers of very uneven length, a seed each. The worker reads
its chunks from S3 on loopback (s3_stub.py) and writes checkpoints, outputs, markers and claims there. Seconds do not
include the loading of the engine, which is reported apart, but they do include what the first request costs. On a CPU
the engine computes in the process that drives it; in the lines "own process" it has another, as on a GPU, so that the
driver's CPU seconds show. About 12 minutes on two quiet cores. The last line is one JSON object.

    python benchmarks/throughput.py [--quick] [--gpu] [--prompts 800] [--repeats 3] [--model FOLDER]
    python benchmarks/throughput.py --ways batchinfer,characters    # or --ways all; see --help
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import s3_stub
import workload
from harness import Spread, alternate, entries, print_table, spread
from ways import ROWS_PER_CHUNK

OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
WITHIN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TITLES = {
    "generate": "LLM.generate once",
    "batchinfer": "batchinfer",
    "loop": "bare loop",
    "chunks": "LLM.generate per chunk",
    "characters": "2000 characters",
    "generate-own": "LLM.generate once, own process",
    "loop-own": "bare loop, own process",
    "batchinfer-own": "batchinfer, own process",
    "run_batch-own": "run_batch, own process",
    "chunks-own": "LLM.generate per chunk, own process",
    "characters-own": "2000 characters, own process",
    "ray-own": "Ray Data LLM, own process",
}
DEFAULT_WAYS = "generate,batchinfer,chunks,loop-own,batchinfer-own,run_batch-own"
DEFAULT_GPU_WAYS = "generate-own,loop-own,batchinfer-own,run_batch-own,chunks-own,characters-own"


class Measured(NamedTuple):
    """One run of one way.

    `steps` is 0 if they cannot be counted. `driver_seconds`: CPU of the processes that drive the engine.
    `engine_seconds`: CPU of the one of them in which the engine computes, 0 if the engine has a process of its own.
    """

    wall_seconds: float
    load_seconds: float
    requests: int
    steps: int
    engine_seconds: float
    driver_seconds: float


class Bench:
    """The requests, their files and their job, and the engine that all ways have."""

    def __init__(self, scratch: Path, arguments: argparse.Namespace) -> None:
        self.scratch = scratch
        self.is_gpu = arguments.gpu
        self.engine = workload.GPU_ENGINE if arguments.gpu else workload.CPU_ENGINE
        self.model = arguments.model or workload.write_model(scratch / "model", is_8b=arguments.gpu)
        longest = 1024 if arguments.gpu else 256
        self.requests = workload.make_requests(arguments.prompts, longest=longest)
        self.job = workload.write_job("s3://stub/job", self.requests, per_chunk=ROWS_PER_CHUNK)
        self.all = self._write("all.jsonl", self.requests)
        # For a slow way: as few requests as give a steady figure.
        self.few = self._write("few.jsonl", self.requests[: max(100, len(self.requests) // 4)])
        self.batch = self._write(
            "batch.jsonl", [_chat(each, i) for i, each in enumerate(self.requests)]
        )
        self.one = self._write("one.jsonl", [{**self.requests[0], "max_tokens": 1}])
        self.ray_python = arguments.ray_python
        self._runs = 0

    def _write(self, name: str, lines: list[dict[str, Any]]) -> Path:
        path = self.scratch / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def plain(self, way: str, where: dict[str, str], requests: Path) -> Measured:
        """Run a way of ways.py."""
        found = self._script(sys.executable, way, requests, where)
        cpu, is_own = found["cpu_seconds"], where is OWN
        return Measured(
            found["wall_seconds"],
            found["load_seconds"],
            found["requests"],
            found["steps"],
            engine_seconds=0.0 if is_own else cpu,
            driver_seconds=cpu if is_own else 0.0,
        )

    def ray(self, python: str) -> Measured:
        """Run Ray Data LLM. What it takes for a single request counts as its loading."""
        where = {"RAY_USAGE_STATS_ENABLED": "0"}
        load, wall = (
            self._script(python, "ray", requests, where)["wall_seconds"]
            for requests in (self.one, self.all)
        )
        return Measured(wall - load, load, len(self.requests), 0, 0.0, 0.0)

    def _script(
        self, python: str, way: str, requests: Path, where: dict[str, str]
    ) -> dict[str, Any]:
        script = str(Path(__file__).with_name("ways.py"))
        command = [python, script, way, str(requests), str(self.model), json.dumps(self.engine)]
        return harness.run(command, env=harness.environment(**where)).last_object

    def worker(self, where: dict[str, str]) -> Measured:
        """Run the worker with checkpoints and claims."""
        self._runs += 1
        options = ["--request-format", "completions", "--checkpoint-seconds", "5"]
        output = f"s3://stub/run-{self._runs}"
        env = harness.environment(**where)
        result, ended = workload.run_worker(
            self.job, output, self.model, self.engine, *options, env=env
        )
        host, is_own = ended.cpu["engine host"], where is OWN
        return Measured(
            result["generate_time_sec"],
            result["engine_load_sec"],
            result["request_count"],
            result["engine_steps"],
            engine_seconds=0.0 if is_own else host,
            driver_seconds=ended.cpu["worker"] + (host if is_own else 0.0),
        )

    def ways(self) -> dict[str, Callable[[], Measured]]:
        """Return every way by its name in `--ways`."""
        found: dict[str, Callable[[], Measured]] = {}
        for suffix, where in (("", WITHIN), ("-own", OWN)):
            if self.is_gpu and where is WITHIN:
                continue  # nobody computes on a GPU from the driver's process
            found |= {
                f"generate{suffix}": partial(self.plain, "all", where, self.all),
                f"batchinfer{suffix}": partial(self.worker, where),
                f"loop{suffix}": partial(self.plain, "loop", where, self.all),
                f"chunks{suffix}": partial(self.plain, "chunks", where, self.all),
                f"characters{suffix}": partial(self.plain, "batches", where, self.few),
            }
        found["run_batch-own"] = partial(self.plain, "run_batch", OWN, self.batch)
        if self.ray_python:
            found["ray-own"] = partial(self.ray, self.ray_python)
        return found

    def chosen(self, names: str | None) -> dict[str, Callable[[], Measured]]:
        """Return the wanted ways by their titles."""
        ways = self.ways()
        names = names or (DEFAULT_GPU_WAYS if self.is_gpu else DEFAULT_WAYS)
        wanted = list(ways) if names == "all" else names.split(",")
        if unknown := sorted(set(wanted) - set(ways)):
            sys.exit(f"--ways: no way {', '.join(unknown)}; expected some of {', '.join(ways)}")
        if self.ray_python and "ray-own" not in wanted:
            wanted.append("ray-own")
        return {TITLES[name]: ways[name] for name in wanted}


def _chat(request: dict[str, Any], index: int) -> dict[str, Any]:
    body = {name: value for name, value in request.items() if name != "prompt"}
    body |= {"model": "m", "messages": [{"role": "user", "content": request["prompt"]}]}
    return {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}


def main() -> None:
    """Run every way, in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, one run of each")
    parser.add_argument(
        "--gpu", action="store_true", help="the shape of an 8B model, dummy weights"
    )
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a model's folder in place of the made one")
    parser.add_argument("--ray-python", help="a Python that has ray[data] beside vLLM")
    parser.add_argument(
        "--ways",
        help=f"which, by comma, or all: {', '.join(TITLES)} (default: {DEFAULT_WAYS})",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.repeats = 300, 1
    with tempfile.TemporaryDirectory() as folder, s3_stub.serving() as endpoint:
        os.environ |= s3_stub.variables(endpoint)
        bench = Bench(Path(folder), arguments)
        runs = alternate(bench.chosen(arguments.ways), arguments.repeats)
        tokens = sum(each["max_tokens"] for each in bench.requests)
    report(runs, len(bench.requests), tokens)


def summarize(measured: list[Measured]) -> dict[str, Spread]:
    """Return the figures of one way over its runs, per 1000 requests; only loading is not divided."""
    scale = 1000 / measured[0].requests
    return {
        "wall_seconds": spread(each.wall_seconds for each in measured) * scale,
        "load_seconds": spread(each.load_seconds for each in measured),
        "steps": spread(each.steps for each in measured) * scale,
        "engine_cpu_seconds": spread(each.engine_seconds for each in measured) * scale,
        "driver_us": spread(1e3 * each.driver_seconds for each in measured) * scale,
    }


def report(runs: dict[str, list[Measured]], prompts: int, tokens: int) -> None:
    """Print the table and the last JSON line; figures are medians over the repeats, per 1000 requests."""
    table = {name: summarize(measured) for name, measured in runs.items()}
    repeats = len(next(iter(runs.values())))
    print(
        f"{prompts} requests, {tokens} tokens, medians of {repeats} runs (least-most), per 1000 requests"
    )
    columns = {
        "wall_seconds": ("wall s", ".2f"),
        "steps": ("steps", ".0f"),
        "engine_cpu_seconds": ("engine CPU s", ".2f"),
        "driver_us": ("driver CPU us/request", ".0f"),
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
    result = {
        "benchmark": "throughput",
        "prompts": prompts,
        "tokens": tokens,
        "repeats": repeats,
        "ways": {name: entries(way) for name, way in table.items()},
        "ratios": ratios(
            {name: {key: found.median for key, found in way.items()} for name, way in table.items()}
        ),
    }
    print(json.dumps(result))


def ratios(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios for which the project has bounds, of each pair of ways that was measured."""
    wanted = {
        "steps_of_one_generate": ("batchinfer", "LLM.generate once", "steps"),
        "steps_of_generate_per_chunk": ("batchinfer", "LLM.generate per chunk", "steps"),
        "wall_of_one_generate": ("batchinfer", "LLM.generate once", "wall_seconds"),
        "engine_cpu_of_one_generate": ("batchinfer", "LLM.generate once", "engine_cpu_seconds"),
        "wall_of_2000_characters": ("batchinfer", "2000 characters", "wall_seconds"),
    }
    found = {}
    for suffix in ("", ", own process"):
        for name, (ours, other, key) in wanted.items():
            if table.get(ours + suffix, {}).get(key) and other + suffix in table:
                found[name + suffix.replace(", ", "_").replace(" ", "_")] = (
                    table[ours + suffix][key] / table[other + suffix][key]
                )
    ours = table.get("batchinfer, own process", {})
    for name, other, key in (
        ("driver_of_bare_loop", "bare loop, own process", "driver_us"),
        ("wall_of_run_batch", "run_batch, own process", "wall_seconds"),
        ("wall_of_ray_data_llm", "Ray Data LLM, own process", "wall_seconds"),
    ):
        if ours and other in table:
            found[name] = ours[key] / table[other][key]
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
