"""Measure `batchinfer collect` against reading the same outputs with `datasets` and writing parquet.

    python benchmarks/collect.py [--rows N] [--chunk-rows N] [--words N] [--folder DIR]

All read one finished run on the local disk and write parquet. `datasets` is measured twice: with the bodies as they
are, in one nested column, and with collect's columns made of them. collect verifies every output's sha256, each line's
row and order; `datasets` does not. Each runs in a process of its own, after a small run; memory is that process's peak.
Each figure is the least of the runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import print_table

COLLECT, NESTED, FLAT = "collect", "datasets, bodies as they are", "datasets, the same columns"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "in", "an", "old", "house")  # fmt: skip


def main() -> None:
    """Make a run where there is none, measure all ways, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--chunk-rows", type=int, default=5_000)
    parser.add_argument("--words", type=int, default=120, help="mean words of an answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the run there")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(*options.part)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "job" / "job.json").exists():
            make_run(folder, options.rows, options.chunk_rows, options.words)
        size = sum(path.stat().st_size for path in folder.glob("job/runs/a/outputs/*.jsonl"))
        small = folder / "small"
        if not small.exists():
            make_run(small, max(1, options.rows // 4), options.chunk_rows, options.words)
        ways = {name: partial(measure, name, folder) for name in (COLLECT, NESTED, FLAT)}
        tries = harness.alternate(ways, options.repeat)
        figures = {
            name: min(done, key=lambda one: one["cpu_seconds"]) for name, done in tries.items()
        }
    show(figures, size)


def make_run(folder: Path, rows: int, chunk_rows: int, words: int) -> None:
    """Make a finished run of the echo engine, whose answers repeat the prompts; these differ in length."""
    source = folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    with source.open("w") as file:
        for number in range(rows):
            count = max(1, round(draw.lognormvariate(0, 0.6) * words))
            text = f"{number} " + " ".join(draw.choices(WORDS, k=count))
            file.write(json.dumps({"prompt": text}) + "\n")
    job = folder / "job"
    batchinfer(
        "split", str(source), "--output", str(job), "--num-chunks", str(-(-rows // chunk_rows))
    )
    batchinfer(
        *("worker", "--manifest", f"{job}/manifests/all.txt", "--output", f"{job}/runs/a"),
        *("--engine", "echo", "--prompt-column", "prompt"),
    )
    source.unlink()


def batchinfer(*arguments: str) -> None:
    """Run a command that must succeed."""
    harness.run([sys.executable, "-m", "batchinfer", *arguments, "--log-level", "warning"])


def measure(name: str, folder: Path) -> dict[str, float]:
    """Run one way once, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, __file__, "--part", name, str(folder), temporary]
        env = harness.environment(HF_DATASETS_CACHE=f"{temporary}/cache")
        return harness.run(command, env=env).last_object


def run_part(name: str, folder: str, temporary: str) -> None:
    """Run one way and print what it took. A small run comes first, so that imports are not measured."""
    sides = {COLLECT: by_collect, NESTED: by_datasets, FLAT: partial(by_datasets, is_flat=True)}
    side = sides[name]
    small = Path(folder) / "small"
    if small.exists():
        side(small / "job/runs/a", Path(temporary) / "small")
    target = Path(temporary) / "out"
    started, cpu = time.perf_counter(), time.process_time()
    side(Path(folder) / "job/runs/a", target)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    rows = count_rows(target)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(path.stat().st_size for path in target.glob("*.parquet"))
    found = {"seconds": seconds, "cpu_seconds": cpu, "rows": rows, "peak_bytes": peak}
    print(json.dumps({**found, "parquet_bytes": size}))


def by_collect(run: Path, target: Path) -> None:
    """Collect the run with batchinfer."""
    from batchinfer.cli.main import main as command

    status = command(["collect", str(run), str(target), "--log-level", "warning"])
    assert status == 0, f"collect ended with {status}"


def by_datasets(run: Path, target: Path, *, is_flat: bool = False) -> None:
    """Collect the run as the documentation of `datasets` shows it."""
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, run.glob("outputs/*.jsonl")))
    found = datasets.load_dataset("json", data_files=files, split="train")
    if is_flat:
        found = found.map(columns_of, batched=True, remove_columns=["body"])
    target.mkdir()
    found.to_parquet(str(target / "all.parquet"))


def columns_of(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return collect's columns of some bodies. No row has failed."""
    bodies = batch["body"]
    answers = [body["choices"][0] for body in bodies]
    return {
        "text": [answer["text"] for answer in answers],
        "finish_reason": [answer["finish_reason"] for answer in answers],
        "model": [body["model"] for body in bodies],
        "prompt_tokens": [body["usage"]["prompt_tokens"] for body in bodies],
        "completion_tokens": [body["usage"]["completion_tokens"] for body in bodies],
    }


def count_rows(folder: Path) -> int:
    """Return the rows in a folder of parquet files."""
    from pyarrow import parquet

    return sum(parquet.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


def show(figures: dict[str, dict[str, float]], size: int) -> None:
    """Print the table, and the JSON object last."""
    print_table(
        ("", "rows", "s", "CPU s", "rows/s", "peak MiB", "parquet MiB"),
        [
            (
                name,
                str(found["rows"]),
                f"{found['seconds']:.2f}",
                f"{found['cpu_seconds']:.2f}",
                f"{found['rows'] / found['seconds']:.0f}",
                f"{found['peak_bytes'] / 2**20:.0f}",
                f"{found['parquet_bytes'] / 2**20:.1f}",
            )
            for name, found in figures.items()
        ],
    )
    collect = figures[COLLECT]
    result: dict[str, Any] = {"benchmark": "collect", "rows": collect["rows"], "jsonl_bytes": size}
    for key, name in (("nested", NESTED), ("flat", FLAT)):
        ratio = figures[name]["cpu_seconds"] / collect["cpu_seconds"]
        result[f"datasets_{key}_times_the_cpu"] = round(ratio, 2)
    result["collect_cpu_seconds"] = round(collect["cpu_seconds"], 3)
    result["collect_peak_bytes"] = collect["peak_bytes"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
