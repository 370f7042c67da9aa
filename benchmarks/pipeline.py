"""Measure the worker without a model: rows from chunk to published output over the echo engine.

Against decoding and encoding the same lines with msgspec and nothing else. Rows are conversations of the shape of
LMSYS-Chat-1M, whole (as `split` keeps them) or four columns of them; the prompt is the first turn. CPU seconds are the
kernel's for the worker's process and all its threads; what a worker spends on a job of one row (imports, run.json, its
record) is measured too and taken off. Then the worker's peak memory over rows of 1 KB: 100,000 in one chunk, a million
in one chunk, a million in 1000 (5 GB of disk); and over 12,000 rows of 120 KB, for which 300 MB is the bound. The last
line is one JSON object.

    python benchmarks/pipeline.py [--quick] [--rows 200000] [--repeats 3] [--folder DIR] [--only formats|memory]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import Spread, Usage, alternate, as_line, entries, print_table, spread

from batchinfer.core import layout

BASE_ROWS = 20_000
LARGE_ROWS, LARGE_BYTES = 12_000, 120_000
"""Rows that are made; larger jobs repeat them under new numbers."""
MILLION = 1_000_000

BARE = """
import sys, time, msgspec
decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
seconds = 0.0
with open(sys.argv[1], "rb") as file:
    while lines := file.readlines(1 << 20):
        begin = time.process_time()
        for line in lines:
            encode(decode(line))
        seconds += time.process_time() - begin
print(seconds)
"""

COLUMNS = "conversation_id,model,conversation,turn"
PROMPT = ("--prompt-column", "prompt")
TEMPLATE = "{{ model }}, turn {{ turn }}: {{ conversation[0].content }}"
CHAT = ("--messages-column", "conversation")
COMPLETIONS = ("--request-format", "completions")
BATCH = ("--request-format", "openai-batch")


def main() -> None:
    """Make the jobs, run every way, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small jobs, one run of each")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--only", choices=("formats", "memory"), help="one of the two parts")
    arguments = parser.parse_args()
    rows = 20_000 if arguments.quick else arguments.rows
    repeats = 1 if arguments.quick else arguments.repeats
    big = 100_000 if arguments.quick else MILLION
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        scratch = Path(folder)
        tempfile.tempdir = folder  # the rows of one chunk may take a GB
        result: dict[str, Any] = {"benchmark": "pipeline", "reached": {}}
        if arguments.only != "memory":
            base, wide = make_base(scratch, columns=COLUMNS), make_base(scratch, columns="")
            ways = measure_ways(base, wide, scratch, rows=rows, repeats=repeats)
            report_ways(ways, result, rows=rows, repeats=repeats)
        if arguments.only != "formats":
            base = make_base(scratch, columns=COLUMNS)
            report_memory(measure_memory(base, scratch, big, repeats), result)
    print(json.dumps(result))


# --------------------------------------------------------------------------- the rows


def make_base(scratch: Path, *, columns: str) -> Path:
    """Write the lines that all jobs are made of, as `batchinfer split` does; empty `columns` means all.

    The lines are not kept in memory: what this process holds would count as its children's peak.
    """
    data, job = scratch / "data", scratch / f"base-{len(columns)}"
    if not data.exists():
        maker = str(Path(__file__).with_name("lmsys.py"))
        harness.run([sys.executable, maker, str(data), "--rows", str(BASE_ROWS)])
    if not job.exists():
        split = [sys.executable, "-m", "batchinfer.split", str(data), "--output", str(job)]
        harness.run([*split, "--num-chunks", "1", *(["--columns", columns] if columns else [])])
    return job / layout.chunk_file("part-00000", "none")


Convert = Callable[[bytes, int], bytes]
"""Makes the line of a job's row, whose number is given, from a line of the base."""


def as_rows(line: bytes, row: int) -> bytes:
    """Keep the line; only the number of the row is another."""
    return line[: line.rindex(b',"_row":')] + b',"_row":%d,"_id":"%d"}\n' % (row, row)


def as_completions(line: bytes, row: int) -> bytes:
    """Make a request of the completions format from the first turn."""
    prompt = json.loads(line)["conversation"][0]["content"]
    return as_line({"prompt": prompt, "max_tokens": 2000, "temperature": 0.0}, row)


def as_kilobyte(line: bytes, row: int) -> bytes:
    """Make a row of about 1 KB: the begin of the conversation's text as the prompt, more of it as another column."""
    text = "".join(turn["content"] for turn in json.loads(line)["conversation"])
    return as_line({"prompt": text[:300] or "-", "context": text[300:950]}, row)


def as_large(line: bytes, row: int) -> bytes:
    """Make a row whose prompt has 120 KB. Its answer has 2000 words of them."""
    words = json.loads(line)["conversation"][0]["content"][:50] + " "
    return as_line({"prompt": (words * (LARGE_BYTES // len(words) + 1))[:LARGE_BYTES]}, row)


def as_batch(line: bytes, row: int) -> bytes:
    """Make a line of an OpenAI batch file from the first turn."""
    body = {"model": "echo", "messages": json.loads(line)["conversation"][:1], "max_tokens": 2000}
    frame = {"custom_id": f"r{row}", "method": "POST", "url": "/v1/chat/completions"}
    return as_line({**frame, "body": body}, row)


def read_for_ever(base: Path) -> Iterator[bytes]:
    """Yield the lines of the base again and again."""
    while True:
        with base.open("rb") as file:
            yield from file


def make_job(folder: Path, base: Path, *, rows: int, per_chunk: int, convert: Convert) -> Path:
    """Write a job of any number of rows."""
    lines = read_for_ever(base)
    harness.write_job(str(folder), rows, lambda row: convert(next(lines), row), per_chunk=per_chunk)
    return folder


# --------------------------------------------------------------------------- running


def run_worker(job: Path, options: tuple[str, ...]) -> Usage:
    """Run an echo worker over the whole job, and remove its run."""
    output = job / "runs" / "benchmark"
    command = [sys.executable, "-m", "batchinfer.worker", "--engine", "echo", "--job", str(job)]
    ended = harness.run([*command, "--output", str(output), "--max-tokens", "2000", *options])
    result = ended.last_object
    if result["status"] != "SUCCESS" or result["error_count"]:
        sys.exit(f"{job}: {result}")
    shutil.rmtree(output)
    return ended.usage


def run_bare(job: Path) -> Usage:
    """Decode and encode every line of a job; the CPU seconds are those of that alone."""
    begin = time.monotonic()
    runs = [
        harness.run([sys.executable, "-c", BARE, str(path)])
        for path in sorted((job / "chunks").iterdir())
    ]
    return Usage(
        sum(float(each.stdout) for each in runs),
        time.monotonic() - begin,
        max(each.usage.peak_bytes for each in runs),
    )


def make_ways(
    base: Path, wide: Path, scratch: Path, rows: int
) -> Iterator[tuple[str, Path, Path, tuple[str, ...]]]:
    """Yield each way: name, job, a job of one row, and the worker's options. A job is removed after its last way."""
    template = scratch / "template.jinja"
    template.write_text(TEMPLATE)
    for folder, lines, convert, ways in (
        ("rows", base, as_rows, {
            "rows": CHAT,
            "rows, a template": ("--prompt-template", str(template)),
        }),
        ("wide", wide, as_rows, {"rows, all columns": CHAT}),
        ("completions", base, as_completions, {"completions": COMPLETIONS}),
        ("batch", base, as_batch, {"openai-batch": BATCH}),
    ):  # fmt: skip
        make = partial(make_job, base=lines, per_chunk=10_000, convert=convert)
        job = make(scratch / folder, rows=rows)
        one = make(scratch / f"{folder}-one", rows=1)
        for name, options in ways.items():
            yield name, job, one, options
        shutil.rmtree(job)


def measure_ways(
    base: Path, wide: Path, scratch: Path, *, rows: int, repeats: int
) -> dict[str, dict[str, Spread]]:
    """Measure CPU per row of every way, and of bare decoding and encoding."""
    table = {}
    for name, job, one, options in make_ways(base, wide, scratch, rows):
        sides: dict[str, Callable[[], Usage]] = {
            "bare": partial(run_bare, job),
            "worker": partial(run_worker, job, options),
            "worker, one row": partial(run_worker, one, options),
        }
        runs = alternate(sides, repeats)
        begun = spread(each.cpu_seconds for each in runs["worker, one row"])
        begun_wall = spread(each.wall_seconds for each in runs["worker, one row"])
        bare_us = spread(1e6 * each.cpu_seconds / rows for each in runs["bare"])
        cpu_us = spread(1e6 * (each.cpu_seconds - begun.median) / rows for each in runs["worker"])
        size = sum(path.stat().st_size for path in (job / "chunks").iterdir())
        table[name] = {
            "row_bytes": spread([round(size / rows)]),
            "bare_us": bare_us,
            "cpu_us": cpu_us,
            "times_bare": cpu_us / bare_us.median,
            "rows_per_second": spread(
                rows / (each.wall_seconds - begun_wall.median) for each in runs["worker"]
            ),
            "start_cpu_seconds": begun,
            "peak_mb": spread(each.peak_bytes / 1e6 for each in runs["worker"]),
        }
    return table


def measure_memory(base: Path, scratch: Path, rows: int, repeats: int) -> dict[str, Spread]:
    """Measure peak memory in MB by number of rows and chunks."""
    with contextlib.ExitStack() as stack:
        ways = {}
        for name, count, chunks in (
            (f"{rows // 10} rows, 1 chunk", rows // 10, 1),
            (f"{rows} rows, 1 chunk", rows, 1),
            (f"{rows // 10} rows, 100 chunks", rows // 10, 100),
            (f"{rows} rows, 1000 chunks", rows, 1000),
        ):
            folder = scratch / f"memory-{count}-{chunks}"
            job = make_job(folder, base, rows=count, per_chunk=count // chunks, convert=as_kilobyte)
            stack.callback(shutil.rmtree, job)
            ways[name] = partial(run_worker, job, PROMPT)
        job = make_job(
            scratch / "memory-large", base, rows=LARGE_ROWS, per_chunk=1000, convert=as_large
        )
        stack.callback(shutil.rmtree, job)
        ways[f"{LARGE_ROWS} rows of 120 KB"] = partial(run_worker, job, PROMPT)
        runs = alternate(ways, repeats)
    return {
        name: spread(each.peak_bytes / 1e6 for each in measured) for name, measured in runs.items()
    }


# --------------------------------------------------------------------------- reporting


def report_ways(
    ways: dict[str, dict[str, Spread]], result: dict[str, Any], *, rows: int, repeats: int
) -> None:
    """Print the table of the formats, and enter its figures into the result."""
    print(f"{rows} rows, medians of {repeats} runs (least-most)")
    columns = {
        "row_bytes": ("bytes", ".0f"),
        "bare_us": ("bare us", ".1f"),
        "cpu_us": ("CPU us", ".1f"),
        "times_bare": ("x bare", ".2f"),
        "rows_per_second": ("rows/s", ".0f"),
        "peak_mb": ("peak MB", ".0f"),
    }
    print_table(
        ["way", *(title for title, _ in columns.values())],
        [
            [name, *(format(way[key], spec) for key, (_, spec) in columns.items())]
            for name, way in ways.items()
        ],
    )
    result |= {
        "rows": rows,
        "repeats": repeats,
        "ways": {name: entries(way, 2) for name, way in ways.items()},
    }


def report_memory(memory: dict[str, Spread], result: dict[str, Any]) -> None:
    """Print the table of peak memory, and enter its figures into the result."""
    print_table(("job", "peak MB"), [(name, format(peak, ".0f")) for name, peak in memory.items()])
    small, large, few_chunks, many_chunks, large_rows = (each.median for each in memory.values())
    result["peak_memory"] = {name: peak.entries("mb", 1) for name, peak in memory.items()}
    # The worker remembers the place of each row of an open chunk; nothing else may grow.
    added_rows = 0.9 * int(list(memory)[1].split()[0])
    result["bytes_a_row_of_an_open_chunk"] = round(1e6 * (large - small) / added_rows, 1)
    print(
        f"and that is {result['bytes_a_row_of_an_open_chunk']} bytes for each row of an open chunk"
    )
    result["reached"] |= {
        "memory_flat_in_data_set": many_chunks < 1.25 * few_chunks,
        "memory_flat_in_chunks": many_chunks < 1.25 * small,
        "memory_of_a_row_of_an_open_chunk": result["bytes_a_row_of_an_open_chunk"] <= 20,
        "memory_of_large_rows": large_rows < 300,
    }


if __name__ == "__main__":
    main()
