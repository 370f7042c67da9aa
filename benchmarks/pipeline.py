"""Measure the worker without a model: rows from chunk to published output over the echo engine.

Against decoding and encoding the same lines with msgspec and nothing else. Rows are conversations of the shape of
LMSYS-Chat-1M, whole (as `split` keeps them) or four columns of them; the prompt is the first turn. CPU seconds are the
kernel's for the worker's process and all its threads; what a worker spends on a job of one row (imports, run.json, its
record) is measured too and taken off. Then the worker's peak memory over rows of 1 KB: 100,000 in one chunk, a million
in one chunk, a million in 1000 (5 GB of disk). The last line is one JSON object.

    python benchmarks/pipeline.py [--quick] [--rows 200000] [--repeats 3] [--folder DIR] [--only formats|memory]
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from repeats import Spread, alternate, spread

from batchinfer.core import codec, layout
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job

BASE_ROWS = 20_000
"""So many rows are made; larger jobs repeat them under new numbers."""
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
CHAT = ("--messages-column", "conversation")
COMPLETIONS = ("--request-format", "completions")
BATCH = ("--request-format", "openai-batch")


class Measured(NamedTuple):
    """One run of one command. `peak_bytes` is its resident memory at most."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


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
    """Write a file of lines as `batchinfer split` does; empty `columns` means all.

    They are not kept in memory: what this process holds would count as its children's peak.
    """
    data, job = scratch / "data", scratch / f"base-{len(columns)}"
    if not data.exists():
        maker = str(Path(__file__).with_name("lmsys.py"))
        run([sys.executable, maker, str(data), "--rows", str(BASE_ROWS)])
    if not job.exists():
        split = [sys.executable, "-m", "batchinfer.split", str(data), "--output", str(job)]
        run([*split, "--num-chunks", "1", *(["--columns", columns] if columns else [])])
    return job / layout.chunk_file("part-00000", "none")


def read_for_ever(base: Path) -> Iterator[bytes]:
    """Its lines again and again."""
    while True:
        with base.open("rb") as file:
            yield from file


def as_rows(line: bytes, row: int) -> bytes:
    """The line as the job's row of that number."""
    return line[: line.rindex(b',"_row":')] + b',"_row":%d,"_id":"%d"}\n' % (row, row)


def as_completions(line: bytes, row: int) -> bytes:
    """The first turn as a request of the completions format."""
    prompt = json.loads(line)["conversation"][0]["content"]
    request = {
        "prompt": prompt,
        "max_tokens": 2000,
        "temperature": 0.0,
        "_row": row,
        "_id": str(row),
    }
    return codec.encode(request) + b"\n"


def as_kilobyte(line: bytes, row: int) -> bytes:
    """About 1 KB: the first of the conversation's text, and the rest of that as another column."""
    text = "".join(turn["content"] for turn in json.loads(line)["conversation"])
    record = {"prompt": text[:300] or "-", "context": text[300:950], "_row": row, "_id": str(row)}
    return codec.encode(record) + b"\n"


def as_batch(line: bytes, row: int) -> bytes:
    """The first turn as a line of an OpenAI batch file."""
    body = {"model": "m", "messages": json.loads(line)["conversation"][:1], "max_tokens": 2000}
    request = {
        "custom_id": f"r{row}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return codec.encode({**request, "_row": row, "_id": str(row)}) + b"\n"


def make_job(folder: Path, base: Path, *, rows: int, chunks: int, convert: Any = as_rows) -> Path:
    """Write a job of so many rows, a chunk at a time; job.json last."""
    (folder / "chunks").mkdir(parents=True)
    (folder / "manifests").mkdir()
    lines = read_for_ever(base)
    found, keys = [], []
    for index in range(chunks):
        name = layout.chunk_name(index, chunks)
        keys.append(layout.chunk_file(name, "none"))
        first, end = index * rows // chunks, (index + 1) * rows // chunks
        with (folder / keys[-1]).open("wb") as file:
            for row in range(first, end):
                file.write(convert(next(lines), row))
        with (folder / keys[-1]).open("rb") as file:
            digest = codec.sha256_file(file)
        size = (folder / keys[-1]).stat().st_size
        found.append(Chunk(name=name, first_row=first, rows=end - first, bytes=size, sha256=digest))
    (folder / layout.ALL_MANIFEST).write_text("".join(f"{key}\n" for key in keys))
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=[],
        rows=rows,
        chunks=found,
        num_workers=1,
    )
    (folder / layout.JOB_KEY).write_bytes(codec.encode_pretty(job))
    return folder


# --------------------------------------------------------------------------- running


def run(command: list[str]) -> tuple[Measured, str]:
    """Run a command to its end; what it printed comes too."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=log, env=environment)
        # wait4 counts the process and every child that it waited for, and nobody else's.
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        log.seek(0)
        if process.returncode:
            sys.exit(f"{command}: exit {process.returncode}\n{log.read().decode()[-3000:]}")
        text = output.read().decode()
    return Measured(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024), text


def run_worker(job: Path, options: tuple[str, ...]) -> Measured:
    """Run an echo worker over the whole job, and remove its run."""
    output = job / "runs" / "benchmark"
    command = [
        sys.executable,
        "-m",
        "batchinfer.worker",
        "--engine",
        "echo",
        "--job",
        str(job),
    ]
    measured, text = run([*command, "--output", str(output), "--max-tokens", "2000", *options])
    result = json.loads(text.splitlines()[-1])
    if result["status"] != "SUCCESS" or result["error_count"]:
        sys.exit(f"{job}: {text}")
    shutil.rmtree(output)
    return measured


def run_bare(job: Path) -> Measured:
    """Decode and encode every line of a job; CPU seconds are those of that alone."""
    begin = time.monotonic()
    runs = [
        run([sys.executable, "-c", BARE, str(path)]) for path in sorted((job / "chunks").iterdir())
    ]
    return Measured(
        sum(float(text) for _, text in runs),
        time.monotonic() - begin,
        max(measured.peak_bytes for measured, _ in runs),
    )


def make_ways(
    base: Path, wide: Path, scratch: Path, rows: int
) -> Iterator[tuple[str, Path, Path, tuple[str, ...]]]:
    """Each way: name, job, a job of one row, and the worker's options."""
    for name, lines, convert, options in (
        ("rows", base, as_rows, CHAT),
        ("wide", wide, as_rows, CHAT),
        ("completions", base, as_completions, COMPLETIONS),
        ("openai-batch", base, as_batch, BATCH),
    ):
        job = make_job(
            scratch / name, lines, rows=rows, chunks=max(1, rows // 10_000), convert=convert
        )
        one = make_job(scratch / f"{name}-one", lines, rows=1, chunks=1, convert=convert)
        if name == "rows":
            yield "rows -> native", job, one, options
            yield (
                "rows -> native, prompt and columns kept",
                job,
                one,
                (*options, "--keep-prompt", "--keep", "model,turn"),
            )
            yield "rows -> openai-batch", job, one, (*options, "--output-format", "openai-batch")
        elif name == "wide":
            yield "rows, all columns -> native", job, one, options
        elif name == "completions":
            yield (
                "completions -> completions",
                job,
                one,
                (*options, "--output-format", "completions"),
            )
        else:
            yield (
                "openai-batch -> openai-batch",
                job,
                one,
                (*options, "--output-format", "openai-batch"),
            )
        shutil.rmtree(job)


def measure_ways(
    base: Path, wide: Path, scratch: Path, *, rows: int, repeats: int
) -> dict[str, dict[str, Spread]]:
    """CPU per row of every format, and bare."""
    table = {}
    for name, job, one, options in make_ways(base, wide, scratch, rows):
        sides: dict[str, Callable[[], Measured]] = {
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
    """Peak memory in MB by number of rows and chunks."""
    with contextlib.ExitStack() as stack:
        ways = {}
        for name, count, chunks in (
            (f"{rows // 10} rows, 1 chunk", rows // 10, 1),
            (f"{rows} rows, 1 chunk", rows, 1),
            (f"{rows // 10} rows, 100 chunks", rows // 10, 100),
            (f"{rows} rows, 1000 chunks", rows, 1000),
        ):
            folder = scratch / f"memory-{count}-{chunks}"
            job = make_job(folder, base, rows=count, chunks=chunks, convert=as_kilobyte)
            stack.callback(shutil.rmtree, job)
            ways[name] = partial(run_worker, job, PROMPT)
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
    columns = (
        ("row_bytes", "bytes", 7, ".0f"),
        ("bare_us", "bare us", 18, ".1f"),
        ("cpu_us", "CPU us", 19, ".1f"),
        ("times_bare", "x bare", 19, ".2f"),
        ("rows_per_second", "rows/s", 22, ".0f"),
        ("peak_mb", "peak MB", 14, ".0f"),
    )
    print(f"{'way':42}" + "".join(f"{title:>{width}}" for _, title, width, _ in columns))
    for name, way in ways.items():
        cells = [f"{format(way[key], spec):>{width}}" for key, _, width, spec in columns]
        print(f"{name:42}" + "".join(cells))
    result |= {
        "rows": rows,
        "repeats": repeats,
        "ways": {
            name: {
                key: value
                for figure, found in way.items()
                for key, value in found.entries(figure, 2).items()
            }
            for name, way in ways.items()
        },
    }
    result["reached"] |= {
        "third_of_bare_all_columns": ways["rows, all columns -> native"]["times_bare"].median <= 3,
        "third_of_bare_four_columns": ways["rows -> native"]["times_bare"].median <= 3,
    }


def report_memory(memory: dict[str, Spread], result: dict[str, Any]) -> None:
    """Print the table of peak memory, and enter its figures into the result."""
    for name, peak in memory.items():
        print(f"peak memory, {name:28}{format(peak, '.0f'):>18} MB")
    small, large, few_chunks, many_chunks = (peak.median for peak in memory.values())
    result["peak_memory"] = {name: peak.entries("mb", 1) for name, peak in memory.items()}
    # Where each row of an open chunk lies is remembered; the rest must not grow.
    added_rows = 0.9 * int(list(memory)[1].split()[0])
    result["bytes_a_row_of_an_open_chunk"] = round(1e6 * (large - small) / added_rows, 1)
    print(
        f"and that is {result['bytes_a_row_of_an_open_chunk']} bytes for each row of an open chunk"
    )
    result["reached"] |= {
        "memory_flat_in_data_set": many_chunks < 1.25 * few_chunks,
        "memory_flat_in_chunks": many_chunks < 1.25 * small,
        "memory_of_a_row_of_an_open_chunk": result["bytes_a_row_of_an_open_chunk"] <= 20,
    }


if __name__ == "__main__":
    main()
