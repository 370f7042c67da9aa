"""What a worker shows on a terminal: a readable bar, log lines above it, and numbers that never exceed their total."""

import re
import shlex
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import echo_server
from batchinfer.core.counts import Counts
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.worker.progress import Bar, describe
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.workload import Workload
from making import make_job, worker_arguments
from models import write_model_stub
from terminal import Terminal


def test_a_terminal_shows_log_lines_and_one_bar(tmp_path):
    make_job(tmp_path / "job", rows=300, per_chunk=50)
    model = str(write_model_stub(tmp_path / "model"))
    names = ["--served-model-name", model]
    options = EngineConfig(engine="echo", echo_latency_seconds=0.5, server_args=names)
    server = [sys.executable, echo_server.__file__, msgspec.json.encode(options).decode(), "{port}"]
    arguments = worker_arguments(
        tmp_path / "job", tmp_path / "run",
        *("--engine", "vllm", "--model", model, "--server-command", shlex.join(server)),
        *("--max-concurrency", "64", "--checkpoint-seconds", "0.1", "--max-tokens", "99"),
    )  # fmt: skip
    begin = time.monotonic()
    with Terminal(*arguments, state=tmp_path) as terminal:
        assert terminal.end() == 0
        shown = terminal.shown
    minutes = (time.monotonic() - begin) / 60
    assert re.search(r"100% \|█+\| 300/300 rows, \S+/s, \S+ tok/s *\n", shown)
    assert len(re.findall(r"\d\d:\d\d:\d\d INFO .*\n", shown)) > 10
    assert 1 <= shown.count("checkpoints: ") <= 1 + minutes, "one line a minute"
    bars = [bar.partition("%")[0] for bar in re.findall(r"% \|[^|]*\| ([^%]*)", shown)]
    loading = [bar for bar in bars if "loading the engine" in bar]
    assert loading
    assert not any("tok/s" in bar or "left" in bar for bar in loading)
    assert any(re.search(r"/300 rows, \S+/s, \S+ tok/s, \d:\d\d left", bar) for bar in bars)


def test_the_line_fits_into_a_terminal_of_80_columns():
    telemetry = cast(
        "Telemetry",
        SimpleNamespace(
            workload=SimpleNamespace(
                rows=99_999_999, rows_done=88_888_888, own_rows=25_000_000, open={"part-00000"}
            ),
            counts=SimpleNamespace(rows_done=88_888, completion_tokens=10**9, rows_error=12_345),
            is_loading=False,
            busy_seconds=4000.0,
        ),
    )
    line = describe(telemetry)
    assert line == "88.9M/100M rows (own 25M), 22.2/s, 250k tok/s, ≤138h left, 12.3k failed"
    assert len(line) <= 71
    telemetry.workload.open = {}
    assert describe(telemetry) == line.replace("≤138h left", "waiting for chunks")


# --------------------------------------------------------------------------- the numbers of a workload


def chunk(name: str, rows: int, left: int) -> Any:
    return SimpleNamespace(name=name, num_rows=rows, num_left=left, counts=Counts())


def state(work: Workload) -> tuple[int, int | None, int, int]:
    return work.rows_done, work.rows, work.chunks_done, work.chunks


def test_the_total_is_that_of_the_job_and_a_chunk_of_another_worker_is_mine_once_it_is_done():
    """A worker with an eighth of the job said that under one minute was left of eleven."""
    work = Workload()
    work.set_own({"own": 10})
    assert (work.rows, work.own_rows) == (10, 10)
    work.set_job({"own": 10, "other": 7, "third": 70})
    assert (work.rows, work.own_rows) == (87, 10)
    work.done("third")
    assert state(work) == (70, 87, 0, 1), "another worker did it"
    work.opened(chunk("other", 7, left=2))
    assert state(work) == (75, 87, 0, 1)
    work.closed(work.open["other"], "released")
    assert state(work) == (70, 87, 0, 1)
    work.opened(chunk("other", 7, left=0))
    work.closed(work.open["other"], "done")
    assert state(work) == (77, 87, 1, 2)


@pytest.mark.parametrize(
    "rest",
    ["", "[3, 10", '[3, 10, "3/10 ro', "[3, 10]", "5", '["a", 10, "b"]', "[3, 10, Traceback", "\ud800"],
)  # fmt: skip
def test_a_marked_line_that_is_cut_is_for_people_to_read(rest):
    bar = Bar()
    assert not bar.take(f"\x1eprogress {rest}")
    assert bar.take('\x1eprogress [4, 10, "4/10 rows"]')
    assert not bar.take("an ordinary line")
    bar.close()
