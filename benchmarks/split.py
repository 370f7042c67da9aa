"""Measure `batchinfer split` against `datasets`: load_dataset, then to_json of every chunk.

Every way runs in a process of its own, turn and turn about, on the same parquet files; CPU seconds and peak memory are
the kernel's for that process and its children, start-up included. "x less" is the CPU of `datasets` divided by that of
the way, turn by turn: median of the turns, and in brackets the least and the most. The last line is one JSON object.

    python benchmarks/split.py [--rows 150000] [--mean-chars 270] [--repeats 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from repeats import Spread, alternate, spread

COLUMNS = "conversation_id,model,conversation,turn"
"""What a prompt needs: the text, and three columns to tell rows apart by."""
NUM_CHUNKS = 30

# As people do it with `datasets`: load everything, select a range, write it as JSON Lines.
DATASETS = """
import sys
import datasets
datasets.disable_progress_bars()
source, output, chunks = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = datasets.load_dataset("parquet", data_files=source + "/*.parquet", split="train", cache_dir=output + "/cache")
for index in range(chunks):
    rows = range(len(data) * index // chunks, len(data) * (index + 1) // chunks)
    data.select(rows).to_json(f"{output}/part-{index:05d}.jsonl")
"""


class Way(NamedTuple):
    """One way to split: its name in the table, and its command with {source} and {output} to fill in."""

    name: str
    command: list[str]


class Measured(NamedTuple):
    """One run of one way. `peak_bytes` is that of the largest process."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    output_bytes: int


def make_ways() -> list[Way]:
    """Return the ways to compare; the first is what the others are measured against."""
    split = [
        sys.executable,
        "-m",
        "batchinfer.split",
        "{source}",
        "--output",
        "{output}/job",
    ]
    split += ["--num-chunks", str(NUM_CHUNKS)]
    four = [*split, "--columns", COLUMNS]
    return [
        Way(
            "datasets to_json",
            [sys.executable, "-c", DATASETS, "{source}", "{output}", str(NUM_CHUNKS)],
        ),
        Way("split, all columns", split),
        Way("split, 4 columns", four),
        Way("split, 4 columns, zstd", [*four, "--compression", "zstd"]),
        Way("split, all columns, 2 processes", [*split, "--processes", "2"]),
    ]


def measure(way: Way, source: Path, scratch: Path) -> Measured:
    """Run one way once, in an empty output folder, and remove what it wrote."""
    with _empty_folder(scratch) as output:
        places = {"{source}": str(source), "{output}": str(output), "{output}/job": f"{output}/job"}
        command = [places.get(part, part) for part in way.command]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        start = time.monotonic()
        with (output / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            # wait4 counts the process and every child that it waited for, and nobody else's.
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - start
        if process.returncode:
            sys.exit(
                f"{way.name}: exit {process.returncode}\n{(output / 'log').read_text()[-3000:]}"
            )
        size = sum(path.stat().st_size for path in output.rglob("*.jsonl*"))
        return Measured(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024, size)


@contextlib.contextmanager
def _empty_folder(scratch: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


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
        # By processes of their own: what this one ever held would count as its children's peak memory.
        for place, rows in ((source, arguments.rows), (small, arguments.rows // 4)):
            maker = [sys.executable, str(Path(__file__).with_name("lmsys.py")), str(place)]
            maker += ["--rows", str(rows), "--mean-chars", str(arguments.mean_chars)]
            subprocess.run(maker, check=True, stdout=sys.stderr)
        ways = make_ways()
        calls = {way.name: partial(measure, way, source, scratch) for way in ways}
        runs = alternate(calls, arguments.repeats)
        quarter = measure(ways[1], small, scratch)
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
    print(f"{'way':33}{'CPU s':>20}{'x less':>16}{'wall s':>8}{'peak MB':>9}{'out MB':>8}")
    table = {}
    for name, measured in runs.items():
        cpu = spread(run.cpu_seconds for run in measured)
        wall = spread(run.wall_seconds for run in measured)
        times_less = _times_less(base, measured)
        peak = max(run.peak_bytes for run in measured)
        print(
            f"{name:33}{f'{cpu:.2f}':>20}{f'{times_less:.1f}':>16}{wall.median:8.2f}"
            f"{peak / 1e6:9.0f}{measured[0].output_bytes / 1e6:8.0f}"
        )
        table[name] = {
            **cpu.entries("cpu_seconds", 3),
            **times_less.entries("times_less_cpu", 2),
            "wall_seconds": round(wall.median, 3),
            "peak_mb": round(peak / 1e6, 1),
            "output_mb": round(measured[0].output_bytes / 1e6, 1),
        }
    print(f"all columns, a quarter of the rows: peak {quarter.peak_bytes / 1e6:.0f} MB")
    all_columns, four = table["split, all columns"], table["split, 4 columns"]
    result = {
        "benchmark": "split",
        "rows": rows,
        "repeats": len(base),
        "ways": table,
        "peak_mb_quarter": round(quarter.peak_bytes / 1e6, 1),
        "reached": {
            "all_columns_2x": all_columns["times_less_cpu"] >= 2,
            "four_columns_4x": four["times_less_cpu"] >= 4,
            "peak_below_400_mb": max(
                way["peak_mb"] for name, way in table.items() if name != "datasets to_json"
            )
            < 400,
            "peak_flat": all_columns["peak_mb"] < 1.25 * quarter.peak_bytes / 1e6,
        },
    }
    print(json.dumps(result))


def _times_less(base: list[Measured], measured: list[Measured]) -> Spread:
    """How many times less CPU a way took than `base`, turn by turn: what slows the machine slows both."""
    return spread(
        first.cpu_seconds / run.cpu_seconds for first, run in zip(base, measured, strict=True)
    )


if __name__ == "__main__":
    main()
