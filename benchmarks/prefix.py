"""Measure `--prefix-window`: prompt tokens that vLLM has to compute when prefixes are scattered over a data set.

1000 rows draw one of 50 prefixes of 512 tokens at random, each with a tail of its own, and the KV cache of the server
has room for 16 of them. The least possible is every distinct full block once per window, and once in all. Medians of
the repeats, about a minute each. The last line is one JSON object.

    python benchmarks/prefix.py [--quick] [--rows 1000] [--windows 0,500] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import harness
import workload
from harness import alternate, print_table, spread

NUM_PREFIXES = 50
PREFIX_TOKENS = 512
BLOCK_TOKENS = 32
ENGINE = {
    "max_model_len": 640,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 8192 * 16_384,
}

Prompt = list[int]


def make_prompts(rows: int) -> list[Prompt]:
    """Return prompts: each a prefix drawn at random and 16 to 64 tokens of its own."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, 1000), k=PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [
        rng.choice(prefixes) + rng.choices(range(10, 1000), k=rng.randint(16, 64))
        for _ in range(rows)
    ]


def block_keys(prompt: Prompt) -> list[int]:
    """Return one key for each full block; two keys are equal if all tokens up to the blocks' ends are."""
    keys: list[int] = []
    key = 0
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tuple(prompt[start : start + BLOCK_TOKENS])))
        keys.append(key)
    return keys


def least_possible(prompts: list[Prompt], window: int) -> int:
    """Return the tokens to compute when every distinct full block is computed once per window."""
    computed = 0
    for start in range(0, len(prompts), window):
        part = prompts[start : start + window]
        blocks = {key for prompt in part for key in block_keys(prompt)}
        computed += len(blocks) * BLOCK_TOKENS + sum(len(prompt) % BLOCK_TOKENS for prompt in part)
    return computed


class Measured(NamedTuple):
    """One run: prompt tokens computed, engine steps, seconds, and the worker's own CPU."""

    computed: int
    steps: int
    seconds: float
    own_us: float


def measure(folder: Path, runs: count[int], window: int) -> Measured:
    """Run the worker over the job."""
    options = ["--prompt-column", "prompt", "--max-tokens", "4", "--temperature", "0"]
    options += ["--prefix-window", str(window)]
    job, model, output = f"{folder}/job", folder / "model", f"{folder}/runs/{next(runs)}"
    env = harness.environment()
    result, ended = workload.run_worker(job, output, model, ENGINE, *options, env=env)
    computed = result["total_prompt_tokens"] - result["total_cached_tokens"]
    own_us = 1e6 * ended.cpu["worker"] / result["request_count"]
    return Measured(computed, result["engine_steps"], result["generate_time_sec"], own_us)


def main() -> None:
    """Run every window and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="200 rows, one run of each window")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--windows", default="0,500")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.repeats = 200, 1
    prompts = make_prompts(arguments.rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.write_model(folder / "model")
        rows = [{"prompt": each} for each in prompts]
        workload.write_job(f"{folder}/job", rows, per_chunk=100)
        runs = count()
        windows = arguments.windows.split(",")
        ways = {each: partial(measure, folder, runs, int(each)) for each in windows}
        found = alternate(ways, arguments.repeats)
    result = {"benchmark": "prefix", "rows": len(prompts), "repeats": arguments.repeats}
    print(json.dumps(result | report(prompts, found)))


def report(prompts: list[Prompt], runs: dict[str, list[Measured]]) -> dict[str, Any]:
    """Print the table and return its figures by window."""
    total, overall = sum(map(len, prompts)), least_possible(prompts, len(prompts))
    print(f"{len(prompts)} rows, {total} prompt tokens, least possible in all {overall}")
    table: dict[str, Any] = {}
    shown = []
    for window, measured in runs.items():
        least = least_possible(prompts, int(window) or 1)
        fields = {f: spread(getattr(each, f) for each in measured) for f in Measured._fields}
        computed = fields["computed"].median
        table[window] = harness.entries(fields, 2) | {"of_least_in_window": computed / least}
        cells = (f"{fields['computed']:.0f}", f"{computed / total:.2f}", f"{computed / least:.2f}")
        shown.append((window, *cells, f"{fields['steps']:.0f}", f"{fields['seconds']:.1f}"))
    print_table(("window", "computed", "of all", "x least in window", "steps", "seconds"), shown)
    return table


if __name__ == "__main__":
    main()
