"""Measure `batchinfer split` against `datasets`: load_dataset, then to_json of every chunk.

Every way runs in a process of its own, in turns, on the same parquet files. CPU seconds and peak memory are the
kernel's for that process and its children, start-up included. "x less" is the CPU of `datasets` divided by that of the
way, within each turn: the median of the turns, in brackets the least and the most. The last line is one JSON object.

    python benchmarks/split.py [--rows 150000] [--mean-chars 270] [--repeats 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
from harness import Spread, alternate, print_table, spread

COLUMNS = "conversation_id,model,conversation,turn"
"""Columns that a prompt needs: the text, and three that tell rows apart."""
NUM_CHUNKS = 30

# As people do it with `datasets`: load everything, select a range, write it as JSON Lines.
DATASETS = """
import sys
import datasets
datasets.disable_progress_bars()
source, output, chunks = sys.argv[1], sys.argv[2], NUM_CHUNKS
data = datasets.load_dataset("parquet", data_files=source + "/*.parquet", split="train", cache_dir=output + "/cache")
for index in range(chunks):
    rows = range(len(data) * index // chunks, len(data) * (index + 1) // chunks)
    data.select(rows).to_json(f"{output}/part-{index:05d}.jsonl")
""".replace("NUM_CHUNKS", str(NUM_CHUNKS))


class Measured(NamedTuple):
    """One run of one way. `peak_bytes` is the memory of the largest process."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    output_bytes: int


def make_ways() -> dict[str, list[str]]:
    """Return the commands to compare, without source and output; the others are measured against the first."""
    split = ["-m", "batchinfer.split", "--num-chunks", str(NUM_CHUNKS)]
    four = [*split, "--columns", COLUMNS]
    return {
        "datasets to_json": ["-c", DATASETS],
        "split, all columns": split,
        "split, 4 columns": four,
        "split, 4 columns, zstd": [*four, "--compression", "zstd"],
    }


def measure(way: list[str], source: Path, scratch: Path) -> Measured:
    """Run one way once, in an empty output folder, and remove what it wrote."""
    with tempfile.TemporaryDirectory(dir=scratch) as output:
        places = [str(source), *(["--output"] if "-m" in way else []), f"{output}/job"]
        usage = harness.run([sys.executable, *way, *places]).usage
        size = sum(path.stat().st_size for path in Path(output).rglob("*.jsonl*"))
    return Measured(*usage, size)


def main() -> None:
    """Make the data set, run every way, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=150_000)
    parser.add_argument("--mean-chars", type=int, default=270, help="mean length of a user's turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        scratch = Path(folder)
        source, small = scratch / "data", scratch / "small"
        # In processes of their own: what this process ever held would count as its children's peak memory.
        for place, rows in ((source, arguments.rows), (small, arguments.rows // 4)):
            maker = [sys.executable, str(Path(__file__).with_name("lmsys.py")), str(place)]
            maker += ["--rows", str(rows), "--mean-chars", str(arguments.mean_chars)]
            harness.run(maker)
        ways = make_ways()
        calls = {name: partial(measure, way, source, scratch) for name, way in ways.items()}
        runs = alternate(calls, arguments.repeats)
        quarter = measure(ways["split, all columns"], small, scratch)
        size = sum(path.stat().st_size for path in source.iterdir())
    report(runs, quarter, rows=arguments.rows, parquet_bytes=size)


def report(
    runs: dict[str, list[Measured]], quarter: Measured, *, rows: int, parquet_bytes: int
) -> None:
    """Print the table and the last JSON line."""
    base = runs["datasets to_json"]
    output_bytes = runs["split, all columns"][0].output_bytes
    print(
        f"{rows} rows of {output_bytes / rows / 1e3:.1f} KB, {parquet_bytes / 1e6:.0f} MB of parquet, {len(base)} turns"
    )
    table, rows_shown = {}, []
    for name, measured in runs.items():
        cpu = spread(run.cpu_seconds for run in measured)
        wall = spread(run.wall_seconds for run in measured)
        times_less = _times_less(base, measured)
        peak = max(run.peak_bytes for run in measured)
        megabytes = (f"{peak / 1e6:.0f}", f"{measured[0].output_bytes / 1e6:.0f}")
        rows_shown.append(
            (name, f"{cpu:.2f}", f"{times_less:.1f}", f"{wall.median:.2f}", *megabytes)
        )
        table[name] = {
            **cpu.entries("cpu_seconds", 3),
            **times_less.entries("times_less_cpu", 2),
            "wall_seconds": round(wall.median, 3),
            "peak_mb": round(peak / 1e6, 1),
            "output_mb": round(measured[0].output_bytes / 1e6, 1),
        }
    print_table(("way", "CPU s", "x less", "wall s", "peak MB", "out MB"), rows_shown)
    print(f"all columns, a quarter of the rows: peak {quarter.peak_bytes / 1e6:.0f} MB")
    all_columns, four = table["split, all columns"], table["split, 4 columns"]
    result = {
        "benchmark": "split",
        "rows": rows,
        "repeats": len(base),
        "ways": table,
        "peak_mb_quarter": round(quarter.peak_bytes / 1e6, 1),
        "reached": {
            "all_columns_2.5x": all_columns["times_less_cpu"] >= 2.5,
            "four_columns_5x": four["times_less_cpu"] >= 5,
            "peak_below_400_mb": max(
                way["peak_mb"] for name, way in table.items() if name != "datasets to_json"
            )
            < 400,
            "peak_flat": all_columns["peak_mb"] < 1.25 * quarter.peak_bytes / 1e6,
        },
    }
    print(json.dumps(result))


def _times_less(base: list[Measured], measured: list[Measured]) -> Spread:
    """Return how many times less CPU a way took than `base`, within each turn: what slows the machine slows both."""
    return spread(
        first.cpu_seconds / run.cpu_seconds for first, run in zip(base, measured, strict=True)
    )


if __name__ == "__main__":
    main()
