"""Figures and states of a run, made from records alone."""

from typing import Any

import msgspec
import pytest

from batchinfer.core.records import Minute, Money, Run, Worker
from batchinfer.ledger.looks import SeenWorker, Snapshot
from batchinfer.runs.overview import RECENT_MINUTES, Overview, overview
from fakes import worker_record
from making import put_job

NOW = 1_790_000_040.0
JOB = put_job(lambda *_: None, [b"{}\n" * 100] * 10, workers=2)
CHUNK, NEXT = "part-00001", "part-00002"


def minutes(*, rows: int, until: float = NOW) -> list[Minute]:
    tokens = {"prompt_tokens": 10 * rows, "completion_tokens": 20 * rows, "errors": 0}
    first = int(until // 60) - 10
    return [Minute(minute=first + index, rows=rows, **tokens) for index in range(10)]


def running(**values: Any) -> Worker:
    """A worker that has finished 30 rows in each of the last ten minutes, 40 of them in its open chunk."""
    usual: dict[str, Any] = {
        "started": NOW - 700,
        "num_starts": 1,
        "last_start": NOW - 700,
        "heartbeat": NOW,
        "open_chunks": {CHUNK: 40},
        "minutes": minutes(rows=30),
        "rows_ok": 300,
        "prompt_tokens": 3000,
        "completion_tokens": 6000,
        "up_seconds": 720.0,
    }
    return worker_record(**usual | values)


def look(*workers: Worker | SeenWorker, done: int = 1, **values: Any) -> Overview:
    seen = [
        one if isinstance(one, SeenWorker) else SeenWorker(one, one.heartbeat) for one in workers
    ]
    config = {"model": "m", "limit": values.pop("limit", None)}
    snapshot = Snapshot(
        url="memory://run",
        taken=values.pop("taken", NOW),
        run=Run(format_version=1, fingerprint="f", config=config, recorded={}, nonce="n"),
        job=JOB,
        job_url="memory://job",
        is_stop_asked=values.pop("is_stop_asked", False),
        markers={f"part-{index:05d}": 0 for index in range(done)},
        checkpointed=values.pop("checkpointed", {}),
        workers=seen,
        notes=[],
    )
    return overview(snapshot, values.pop("per_hour", None), **values)


GONE = running(id="gone", heartbeat=NOW - 500)
AHEAD = running(id="b", open_chunks={CHUNK: 45})
PROGRESS: dict[str, tuple[list[Worker], dict[str, Any], tuple[int, ...]]] = {
    # workers, arguments of look, and (chunks done, in progress), (rows done, in progress)
    "rows that a live worker reports": ([running()], {}, (1, 1, 100, 40)),
    "more in checkpoints": ([running()], {"checkpointed": {CHUNK: 60}}, (1, 1, 100, 60)),
    "more than the chunk has": ([], {"checkpointed": {CHUNK: 999}}, (1, 0, 100, 100)),
    "a chunk that two workers have open": ([running(id="a"), AHEAD], {}, (1, 1, 100, 45)),
    "a worker that is gone": ([GONE], {"checkpointed": {NEXT: 30}}, (1, 0, 100, 30)),
    "an open chunk that is done": ([running()], {"done": 2}, (2, 0, 200, 0)),
    "markers of chunks that the job lacks": ([running()], {"done": 12}, (10, 0, 1000, 0)),
    "a limit": ([], {"limit": 150}, (1, 0, 100, 0)),
}


@pytest.mark.parametrize("case", PROGRESS)
def test_every_row_and_chunk_counts_once(case):
    workers, values, wanted = PROGRESS[case]
    seen = look(*workers, **values)
    found = (seen.chunks.done, seen.chunks.in_progress, seen.rows.done, seen.rows.in_progress)
    assert found == wanted
    for each in (seen.chunks, seen.rows):
        assert each.total == each.done + each.in_progress + each.waiting


LOADING = running(state="loading", open_chunks={}, minutes=[])
NEW = running(open_chunks={}, minutes=[], engine={"load_seconds": 699.0})
STUCK = running(minutes=minutes(rows=1, until=NOW - 700), last_start=NOW - 2000)
FAILED = running(id="a", state="failed")
STOP = {"is_stop_asked": True}
STATES: dict[str, tuple[list[Worker], dict[str, Any], str, list[str]]] = {
    # workers, arguments of look, state of the run, states of the workers
    "nothing": ([], {"done": 0}, "empty", []),
    "loading": ([LOADING], {}, "loading", ["loading"]),
    "running": ([running()], {}, "running", ["running"]),
    "new": ([NEW], {}, "running", ["running"]),
    "waiting": ([running(open_chunks={})], {}, "waiting", ["waiting"]),
    "silent": ([running(heartbeat=NOW - 80)], {}, "running", ["running"]),
    "no row for ten minutes": ([STUCK], {}, "stalled", ["stalled"]),
    "gone": ([GONE], {}, "idle", ["gone"]),
    "ended": ([FAILED, running(state="done")], {}, "idle", ["failed", "done"]),
    "asked to stop": ([running()], STOP, "stopping", ["running"]),
    "stopped": ([running(state="stopped")], STOP, "stopped", ["stopped"]),
    "done, whatever workers say": ([running()], {"done": 10}, "done", ["running"]),
    "one of several is gone": ([GONE, running()], {}, "running", ["gone", "running"]),
}


@pytest.mark.parametrize("case", STATES)
def test_states_of_workers_and_run(case):
    workers, values, state, states = STATES[case]
    seen = look(*workers, **values)
    assert (seen.state, [view.state for view in seen.workers]) == (state, states)


def test_the_recent_rate_counts_whole_minutes_on_the_workers_own_clock():
    seen = look(running())
    seconds = RECENT_MINUTES * 60 + NOW % 60
    assert seen.workers[0].recent.rows == pytest.approx(RECENT_MINUTES * 30 / seconds)
    assert seen.recent.output_tokens == pytest.approx(RECENT_MINUTES * 600 / seconds)
    assert seen.eta_seconds == pytest.approx(860 / seen.recent.rows)
    assert look(running(), GONE).recent == seen.recent, "one that is gone makes nothing"
    assert not look(running(), GONE).notes
    assert "this machine's clock" in look(GONE).notes[0]
    assert look(LOADING, done=0).eta_seconds is None


@pytest.mark.parametrize("hours", [5 * 3600.0, -5 * 3600.0])
def test_a_wrong_clock_of_a_worker_or_of_this_machine_changes_no_figure(hours):
    start, now = NOW - 700 - hours, NOW - hours
    late = minutes(rows=30, until=now)
    wrong = running(started=start, last_start=start, heartbeat=now, minutes=late)
    seen = look(SeenWorker(wrong, NOW))
    assert (seen.workers[0].state, seen.workers[0].clock_offset_seconds) == ("running", hours)
    assert seen.started == NOW - 700
    assert seen.recent.rows > 0
    assert look(running(), taken=NOW - 9000).workers[0].heartbeat_age_seconds == 0


def test_cost_is_that_of_all_workers_and_their_tokens():
    unpriced = running(id="x", host={}, up_seconds=3600.0)
    assert look(unpriced).cost.so_far is None
    seen = look(running(up_seconds=1800.0), GONE, per_hour=2.0)
    assert seen.cost.so_far == pytest.approx(1.0 + 2.0 * 720 / 3600)
    assert seen.cost.per_hour_now == 2.0, "one that is gone costs nothing now"
    assert seen.cost.at_end == pytest.approx(seen.cost.so_far + 2.0 * seen.eta_seconds / 3600)
    assert seen.cost.per_million_output_tokens == pytest.approx(1e6 * seen.cost.so_far / 12_000)
    own = running(id="own", money=Money(price_per_hour=3.0, price_source="its own", cost=0.5))
    seen = look(own, unpriced)
    assert (seen.cost.so_far, seen.cost.unpriced_workers) == (0.5, 1)
    assert seen.cost.per_million_output_tokens == pytest.approx(0.5e6 / 6000)
    assert look(own, per_hour=2.0).cost.so_far == pytest.approx(2.0 * 720 / 3600)


def test_what_a_start_before_this_one_made_is_not_its_rate():
    late = minutes(rows=30)[-1:]  # there was no time for rows in the minute of the start
    start = running(num_starts=2, last_start=NOW - 70, minutes=late)
    seen = look(*(running(id=name) for name in "abc"), start)
    assert (seen.workers[3].recent.seconds, seen.workers[3].recent.rows) == (60.0, 0.5)
    burst = [msgspec.structs.replace(late[0], minute=late[0].minute + 2, rows=900)]
    new = running(num_starts=2, heartbeat=NOW + 61, last_start=NOW + 20, minutes=burst)
    assert look(new, taken=NOW + 61).recent.rows == 0.0, "a second is too short"


def test_a_lost_replica_is_noted():
    seen = look(running(engine={"num_replicas": 8}, replicas_lost=1))
    assert seen.notes == ["worker w0: 1 of 8 replicas are lost"]
