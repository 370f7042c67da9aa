"""What a worker shows on a terminal: a readable line, and numbers that never exceed their total."""

from types import SimpleNamespace
from typing import Any

from batchinfer.core.counts import Counts
from batchinfer.worker.progress import describe
from batchinfer.worker.workload import Workload


def test_the_line_fits_into_a_terminal_of_80_columns():
    telemetry = SimpleNamespace(
        workload=SimpleNamespace(
            rows=99_999_999, rows_done=88_888_888, own_rows=25_000_000, open={"part-00000"}
        ),
        counts=SimpleNamespace(rows_done=88_888, completion_tokens=10**9, rows_error=12_345),
        is_loading=False,
        busy_seconds=4000.0,
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
