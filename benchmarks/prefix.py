"""Measure `--prefix-window`: prompt tokens that an engine has to compute when prefixes are scattered over a data set.

20,000 rows draw one of 500 prefixes of 512 tokens at random, each with a tail of its own. The worker is the real one;
the engine is a model of vLLM's prefix cache. It holds full blocks until the space is needed; the block that was unused
for the longest time goes first, and blocks of running requests never go. With --vllm a smaller set goes through real
vLLM. The least possible is every distinct full block once per window, and once in all. The full form takes a quarter of
an hour, one run of each window five minutes. The last line is one JSON object.

    python benchmarks/prefix.py [--quick] [--vllm] [--rows 20000] [--windows 0,2000,5000] [--repeats 3] [--replicas 1]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import harness
import workload
from harness import alternate, print_table, spread

from batchinfer.core.records import Choice, Completion, EngineInfo, EngineStats, Request, Sampling
from batchinfer.engines import RequestSource, Stop, share_out
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import PromptConfig
from batchinfer.worker.config import Limits, WorkerConfig, real_environment
from batchinfer.worker.start import run_worker

NUM_PREFIXES = 500
PREFIX_TOKENS = 512
VOCABULARY = 32_000
BLOCK_TOKENS = 16
CACHE_TOKENS = 40_000
"""Room for tokens on a 24 GB GPU beside an 8B model: less than a sixth of the prefixes."""
MAX_NUM_SEQS = 32
MAX_IN_FLIGHT = MAX_NUM_SEQS * 3 // 2
ROWS_PER_CHUNK = 500

Prompt = list[int]


def make_prompts(rows: int, num_prefixes: int, prefix_tokens: int, vocabulary: int) -> list[Prompt]:
    """Return prompts: each a prefix drawn at random and 16 to 64 tokens of its own."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, vocabulary), k=prefix_tokens) for _ in range(num_prefixes)]
    return [
        rng.choice(prefixes) + rng.choices(range(10, vocabulary), k=rng.randint(16, 64))
        for _ in range(rows)
    ]


def block_keys(prompt: Prompt, block_tokens: int) -> list[int]:
    """Return one key for each full block; two keys are equal if all tokens up to the blocks' ends are."""
    keys: list[int] = []
    key = 0
    for start in range(0, len(prompt) - block_tokens + 1, block_tokens):
        key = hash((key, tuple(prompt[start : start + block_tokens])))
        keys.append(key)
    return keys


def least_possible(prompts: list[Prompt], block_tokens: int, window: int) -> int:
    """Return the tokens to compute when every distinct full block is computed once per window."""
    computed = 0
    for start in range(0, len(prompts), window):
        part = prompts[start : start + window]
        blocks = {key for prompt in part for key in block_keys(prompt, block_tokens)}
        rest = sum(len(prompt) % block_tokens for prompt in part)
        computed += len(blocks) * block_tokens + rest
    return computed


class CacheModel:
    """Replicas that answer with nothing but count what vLLM's block cache would lack. Implements Engine.

    All replicas step together, which takes `step_seconds`. The number of steps of a request depends on its row.
    """

    def __init__(self, step_seconds: float, num_replicas: int = 1) -> None:
        self._step_seconds = step_seconds
        self._replicas = [ReplicaModel() for _ in range(num_replicas)]
        self._steps = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that no cache had."""
        return sum(replica.computed for replica in self._replicas)

    def open(self, stop: Stop) -> EngineInfo:
        """Load nothing."""
        del stop
        return EngineInfo(
            name="model",
            version="1",
            model="model",
            max_model_len=4096,
            max_num_seqs=MAX_NUM_SEQS * len(self._replicas),
            max_in_flight=MAX_IN_FLIGHT * len(self._replicas),
            num_replicas=len(self._replicas),
        )

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """Run as many as there are sequences; see Engine.generate."""
        while not stop.is_set():
            held = [replica.num_held for replica in self._replicas]
            free_slots = [MAX_IN_FLIGHT - number for number in held]
            taken = source.take(sum(free_slots), free_slots) if any(free_slots) else []
            rest = taken or []
            for replica, share in zip(
                self._replicas, share_out(held, free_slots, len(rest)), strict=True
            ):
                replica.waiting += rest[:share]
                rest = rest[share:]
                replica.admit(self._steps)
            if not any(replica.running for replica in self._replicas):
                if taken is None:
                    return
                yield []
                source.wait(0.2)
                continue
            self._steps += 1
            time.sleep(self._step_seconds)
            yield [each for replica in self._replicas for each in replica.finish(self._steps)]

    def stats(self) -> EngineStats:
        """Counters."""
        return EngineStats(steps=self._steps)

    def close(self) -> None:
        """Nothing to free."""


class ReplicaModel:
    """One engine's cache, and what runs in it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Number of running requests by block that they use; the block that was used last comes last."""
        self._free = CACHE_TOKENS // BLOCK_TOKENS
        self.computed = 0
        self.waiting: list[Request] = []
        self.running: list[tuple[int, Request, list[int]]] = []

    @property
    def num_held(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def admit(self, step: int) -> None:
        """Start waiting requests while there are free sequences."""
        while self.waiting and len(self.running) < MAX_NUM_SEQS:
            request = self.waiting.pop(0)
            steps = 10 + request.key[1] % 40
            self.running.append((step + steps, request, self._admit(request)))

    def finish(self, step: int) -> list[Completion]:
        """End the requests whose last step this is."""
        done = [each for each in self.running if each[0] <= step]
        self.running = [each for each in self.running if each[0] > step]
        return [self._finish(request, keys) for _, request, keys in done]

    def _admit(self, request: Request) -> list[int]:
        prompt = request.token_ids or []
        keys = block_keys(prompt, BLOCK_TOKENS)
        num_cached = 0
        for key in keys:
            if key not in self._blocks:
                break
            num_cached += 1
        # vLLM computes at least the last token.
        cached = min(num_cached * BLOCK_TOKENS, len(prompt) - 1)
        self.computed += len(prompt) - cached
        for key in keys:
            if key not in self._blocks:
                self._make_room()
                self._blocks[key] = 0
                self._free -= 1
            self._blocks[key] += 1
            self._blocks.move_to_end(key)
        return keys

    def _make_room(self) -> None:
        if self._free:
            return
        for key, users in self._blocks.items():
            if not users:
                del self._blocks[key]
                self._free += 1
                return
        raise RuntimeError("the cache is smaller than what runs")

    def _finish(self, request: Request, keys: list[int]) -> Completion:
        # The end of a prompt is the first to go, as in vLLM.
        for key in reversed(keys):
            self._blocks[key] -= 1
            self._blocks.move_to_end(key)
        return Completion(key=request.key, choices=[Choice(index=0, text="")])


class Measured(NamedTuple):
    """One run: prompt tokens computed, engine steps, seconds, and CPU of the processes beside the engine's.

    Runs of the cache's model have tokens and steps only: it computes in the worker's process, and its seconds are made
    up.
    """

    computed: int
    steps: int
    seconds: float = 0.0
    driver_us: float = 0.0


def run_model(
    job: Path, runs: Iterator[int], window: int, step_seconds: float, num_replicas: int
) -> Measured:
    """Run the worker over the model of an engine."""
    engine = CacheModel(step_seconds, num_replicas)
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=f"{job}/runs/{next(runs)}",
        engine=EngineConfig(engine="echo"),
        prompt=PromptConfig(prompt_column="prompt"),
        sampling=Sampling(max_tokens=1),
        limits=Limits(prefix_window=window),
    )
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    run_worker(config, dataclasses.replace(environment, create_engine=lambda _: engine))
    return Measured(engine.computed, engine.stats().steps)


def run_vllm(job: Path, runs: Iterator[int], model: Path, window: int) -> Measured:
    """Run the worker over real vLLM, whose engine computes in the process of its host."""
    engine = {"max_model_len": 640, "max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
    engine |= {"kv_cache_memory_bytes": 8192 * 16_384, "max_num_batched_tokens": 2048}
    options = ["--prompt-column", "prompt", "--max-tokens", "4", "--temperature", "0"]
    options += ["--prefix-window", str(window)]
    output = f"{job}/runs/{next(runs)}"
    env = harness.environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    result, ended = workload.run_worker(str(job), output, model, engine, *options, env=env)
    outputs = Path(output, "outputs").glob("*.jsonl")
    usages = [json.loads(line)["usage"] for path in outputs for line in path.open()]
    computed = sum(each["prompt_tokens"] - each["cached_tokens"] for each in usages)
    driver_us = 1e6 * ended.cpu["worker"] / result["request_count"]
    return Measured(computed, result["engine_steps"], result["generate_time_sec"], driver_us)


def main() -> None:
    """Run every window and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one window, shorter steps")
    parser.add_argument("--vllm", action="store_true", help="also a smaller set through real vLLM")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--windows", default="0,2000,5000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1, help="of the model, a cache for each")
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    logging.disable(logging.WARNING)
    windows = [0, 5000] if arguments.quick else [int(text) for text in arguments.windows.split(",")]
    step_seconds = 0.003 if arguments.quick else 0.005
    prompts = make_prompts(arguments.rows, NUM_PREFIXES, PREFIX_TOKENS, VOCABULARY)
    result: dict[str, Any] = {"benchmark": "prefix", "rows": len(prompts), "repeats": repeats}
    result["replicas"] = arguments.replicas
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        workload.write_job(
            str(job), [{"prompt": each} for each in prompts], per_chunk=ROWS_PER_CHUNK
        )
        runs = count()
        ways = {
            str(each): partial(run_model, job, runs, each, step_seconds, arguments.replicas)
            for each in windows
        }
        found = alternate(ways, repeats)
    result["model"] = report("model of the cache", prompts, found, BLOCK_TOKENS)
    if arguments.vllm:
        result["vllm"] = measure_vllm([0, 500], repeats)
    best = result["model"][str(windows[-1])]
    result["reached"] = {"window_at_most_1.15": best["of_least_in_window"] <= 1.15}
    print(json.dumps(result))


def measure_vllm(windows: list[int], repeats: int) -> dict[str, Any]:
    """1000 rows of 50 prefixes through vLLM on the CPU, with room for 8192 tokens."""
    prompts = make_prompts(1000, 50, PREFIX_TOKENS, 1000)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        workload.write_job(str(job), [{"prompt": each} for each in prompts], per_chunk=100)
        model = workload.write_model(Path(folder) / "model")
        runs = count()
        ways = {str(each): partial(run_vllm, job, runs, model, each) for each in windows}
        found = alternate(ways, repeats)
    table = report("vLLM on a CPU", prompts, found, 32)
    for window, measured in found.items():
        seconds = spread(each.seconds for each in measured)
        driver = spread(each.driver_us for each in measured)
        table[window] |= {**seconds.entries("seconds", 2), **driver.entries("driver_us", 1)}
        print(f"window {window}: {seconds:.1f} s, driver CPU {driver:.0f} us a request")
    return table


def report(
    name: str, prompts: list[Prompt], runs: dict[str, list[Measured]], block_tokens: int
) -> dict[str, Any]:
    """Print one table and return its figures by window."""
    total = sum(map(len, prompts))
    overall = least_possible(prompts, block_tokens, len(prompts))
    print(f"{name}: {len(prompts)} rows, {total} prompt tokens, least possible in all {overall}")
    table, shown = {}, []
    for window, measured in runs.items():
        least = least_possible(prompts, block_tokens, int(window) or 1)
        computed = spread(each.computed for each in measured)
        steps = spread(each.steps for each in measured)
        ratio = computed.median / least
        of_all = f"{computed.median / total:.2f}"
        shown.append(
            (window, f"{computed:.0f}", of_all, str(least), f"{ratio:.2f}", f"{steps:.0f}")
        )
        table[window] = {
            **computed.entries("computed", 0),
            **steps.entries("steps", 0),
            "least_in_window": least,
            "of_least_in_window": round(ratio, 3),
            "of_least_in_all": round(computed.median / overall, 3),
        }
    print_table(("window", "computed", "of all", "least in window", "x least", "steps"), shown)
    return table


if __name__ == "__main__":
    sys.exit(main())
