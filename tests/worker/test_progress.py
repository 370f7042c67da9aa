"""What a worker shows on a terminal: a readable bar, log lines above it, and numbers that never exceed their total."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchinfer.core.clock import SystemClock
from batchinfer.core.counts import Counts
from batchinfer.worker.progress import MARKED_LINES, Bar, describe
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.workload import Workload
from making import make_job, run_worker_here, run_worker_process, worker_arguments

COLUMNS = 80


def run_in_terminal(arguments: list[str]) -> str:
    """Run batchinfer in a terminal of 80 columns; return the bytes that reached the terminal, as text."""
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - the child becomes another program
        os.execv(sys.executable, [sys.executable, "-m", "batchinfer", *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    found = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        found += part
    os.waitpid(pid, 0)
    os.close(terminal)
    return found.decode()


def screen(text: str) -> list[str]:
    """The lines that a terminal shows at the end. Knows carriage returns, newlines and wrapping, as a bar uses them."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for sign in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text):
        if sign == "\r":
            column = 0
            continue
        if sign == "\n" or column >= COLUMNS:
            row, column = row + 1, column if sign == "\n" else 0
            if row == len(lines):
                lines.append([])
        if sign != "\n":
            line = lines[row]
            line += " " * (column + 1 - len(line))
            line[column] = sign
            column += 1
    return ["".join(line).rstrip() for line in lines]


def test_a_terminal_shows_log_lines_above_one_bar(tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=300, per_chunk=50)
    text = run_in_terminal(
        worker_arguments(
            tmp_path / "job", tmp_path / "run",
            *("--echo-load-seconds", "1.2", "--echo-latency-seconds", "0.5"),
            *("--max-num-seqs", "64", "--checkpoint-seconds", "0.1"),
        )
    )  # fmt: skip
    lines = screen(text)
    start = next(index for index, line in enumerate(lines) if line.startswith("{"))
    log, bar = lines[: start - 1], lines[start - 1]
    assert re.fullmatch(r"100% \|█+\| 300/300 rows, \S+/s, \S+ tok/s", bar)
    assert len(bar) < COLUMNS
    entries = [line for line in log if re.match(r"\d\d:\d\d:\d\d INFO ", line)]
    assert len(entries) > 10
    assert not any("|" in line for line in log), "a piece of the bar stayed in the log"
    assert sum("checkpoints: " in line for line in entries) == 1, "one line a minute"
    assert json.loads("".join(lines[start:]))["chunks_done"] == 6
    shown = re.findall(r"\d+% \|[^|]*\| ([^\r]*)", text)
    loading = [part for part in shown if "loading the engine" in part]
    assert loading
    assert not any("/s" in part or "left" in part for part in loading)
    assert any(re.search(r"/300 rows, \S+/s, \S+ tok/s, \d:\d\d left", part) for part in shown)


def test_the_line_fits_into_a_terminal_of_80_columns() -> None:
    telemetry = cast(
        "Telemetry",
        SimpleNamespace(
            workload=SimpleNamespace(rows=99_999_999, rows_done=88_888_888, own_rows=25_000_000),
            counts=SimpleNamespace(rows_done=88_888, completion_tokens=10**9, rows_error=12_345),
            is_loading=False,
            busy_seconds=4000.0,
        ),
    )
    line = describe(telemetry)
    assert line == "88.9M/100M rows (own 25M), 22.2/s, 250k tok/s, ≤138h left, 12.3k failed"
    assert len(line) <= 71


def test_chunks_of_other_workers_count_in_the_total(tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=60, per_chunk=5, workers=2)
    result = run_worker_here(tmp_path / "job", tmp_path / "run", index=0)
    assert (result["chunks_total"], result["chunks_done"]) == (12, 12)
    again = run_worker_here(tmp_path / "job", tmp_path / "run", index=1)
    assert (again["chunks_total"], again["chunks_done"], again["chunks_skipped"]) == (6, 0, 6)


def test_a_worker_of_several_shows_the_rows_of_the_whole_job(tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=60, per_chunk=5, workers=4)
    done = run_worker_process(
        tmp_path / "job", tmp_path / "run", index=0, environment={MARKED_LINES: "1"}
    )
    marked = [line for line in done.stderr.split("\n") if line.startswith("\x1eprogress ")]
    finished, rows, text = json.loads(marked[-1].removeprefix("\x1eprogress "))
    assert (finished, rows) == (60, 60)
    assert text.startswith("60/60 rows (own 15)")


# --------------------------------------------------------------------------- the numbers of a workload


def chunk(name: str, rows: int, left: int) -> Any:
    return SimpleNamespace(name=name, num_rows=rows, num_left=left, counts=Counts())


def state(work: Workload) -> tuple[int, int | None, int, int]:
    return work.rows_done, work.rows, work.chunks_done, work.chunks


def test_the_total_is_that_of_the_job_and_the_own_share_is_named() -> None:
    """A worker with an eighth of the job said that under one minute was left of eleven."""
    work = Workload()
    work.set_own({"own": 10})
    assert (work.rows, work.own_rows) == (10, 10)
    work.set_job({"own": 10, "other": 70})
    assert (work.rows, work.own_rows) == (80, 10)
    work.done("other")
    assert state(work) == (70, 80, 0, 1), "another worker did it"


def test_a_chunk_of_another_worker_is_among_mine_while_it_is_open_and_once_it_is_done() -> None:
    work = Workload()
    work.set_own({"own": 10})
    work.set_job({"own": 10, "other": 7})
    work.opened(chunk("other", 7, left=2))
    assert state(work) == (5, 17, 0, 2)
    work.closed("other", "released")
    assert state(work) == (0, 17, 0, 1)
    work.opened(chunk("other", 7, left=0))
    work.closed("other", "done")
    assert state(work) == (7, 17, 1, 2)


def test_progress_of_a_start_without_rows_has_no_rate() -> None:
    telemetry = Telemetry("w0", SystemClock(), host={})
    telemetry.workload.set_own({"a": 5})
    assert describe(telemetry) == "0/5 rows, loading the engine for 0:00"


@pytest.mark.parametrize(
    "rest",
    ["", "[3, 10", '[3, 10, "3/10 ro', "[3, 10]", "5", '["a", 10, "b"]', "[3, 10, Traceback", "\ud800"],
)  # fmt: skip
def test_a_marked_line_that_is_cut_is_for_people_to_read(rest: str) -> None:
    bar = Bar()
    assert not bar.take(f"\x1eprogress {rest}")
    assert bar.take('\x1eprogress [4, 10, "4/10 rows"]')
    assert not bar.take("an ordinary line")
    bar.close()
