"""Figures of a run, made from records alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from batchinfer.core import codec
from batchinfer.core.prices import Prices
from batchinfer.core.records import Job, Minute, Money, Run, Span, Worker
from batchinfer.ledger.inventory import SeenMarker, SeenWorker, Snapshot
from batchinfer.runs.overview import RECENT_MINUTES, STALL_SECONDS, Overview, overview
from big_run import Shape, make_job, make_run, make_workers
from fakes import worker_record

NOW = 1_790_000_040.0
SHAPE = Shape(num_chunks=10, rows_per_chunk=100, num_workers=2, now=NOW)


def job() -> Job:
    return make_job(SHAPE)


def run_json(**config: Any) -> Run:
    return make_run(codec.encode_pretty(job()), **config)


def running(**values: Any) -> Worker:
    """A worker that has finished 30 rows in each of the last ten minutes."""
    first = int(NOW // 60) - 10
    return worker_record(
        started=NOW - 700,
        starts=[NOW - 700],
        heartbeat=NOW,
        state="running",
        open_chunks=["part-00001"],
        open_spans=[
            Span(
                chunk="part-00001",
                start=NOW - 60,
                end=NOW,
                rows=40,
                resumed=10,
                epoch=1,
                outcome="open",
            )
        ],
        minutes=[
            Minute(
                minute=first + index, rows=30, prompt_tokens=300, completion_tokens=600, errors=0
            )
            for index in range(10)
        ],
        rows_done=300,
        prompt_tokens=3000,
        completion_tokens=6000,
        busy_seconds=600.0,
        up_seconds=720.0,
        **values,
    )


def look(*workers: Worker | SeenWorker, done: int = 1, **values: Any) -> Overview:
    seen = [
        worker if isinstance(worker, SeenWorker) else SeenWorker(worker, worker.heartbeat)
        for worker in workers
    ]
    snapshot = Snapshot(
        url="memory://run",
        taken=values.pop("taken", NOW),
        run=values.pop("run", run_json()),
        job=values.pop("job", job()),
        job_url="memory://job",
        is_stop_asked=values.pop("is_stop_asked", False),
        markers={f"part-{index:05d}": SeenMarker(0, NOW - 100) for index in range(done)},
        checkpointed={
            name: rows
            for name, rows in values.pop("checkpointed", {"part-00001": 40}).items()
            if name >= f"part-{done:05d}"
        },
        output_bytes=0,
        workers=seen,
        notes=[],
    )
    return overview(snapshot, values.pop("prices", Prices()), **values)


# --------------------------------------------------------------------------- progress


def test_chunks_and_rows_are_done_in_progress_or_waiting() -> None:
    seen = look(running(), done=1)
    assert (seen.chunks.total, seen.chunks.done, seen.chunks.in_progress, seen.chunks.waiting) == (
        10,
        1,
        1,
        8,
    )
    assert (seen.rows.total, seen.rows.done, seen.rows.in_progress, seen.rows.waiting) == (
        1000,
        100,
        40,
        860,
    )
    assert seen.state == "running"


def test_a_chunk_with_a_marker_is_done_though_a_record_still_calls_it_open() -> None:
    seen = look(running(), done=2)
    assert (seen.chunks.done, seen.chunks.in_progress) == (2, 0)
    assert seen.rows.in_progress == 0


def test_a_chunk_open_in_two_workers_counts_once() -> None:
    seen = look(running(id="a"), running(id="b"))
    assert seen.chunks.in_progress == 1
    assert seen.rows.in_progress == 40


def test_chunks_of_a_worker_that_is_gone_are_waiting() -> None:
    gone = msgspec.structs.replace(running(), heartbeat=NOW - 500)
    seen = look(gone)
    assert seen.chunks.in_progress == 0
    assert (seen.rows.in_progress, seen.rows.waiting) == (40, 860), "its checkpoints stay"


def test_only_rows_in_checkpoints_are_in_progress() -> None:
    """The record of a killed worker told of rows that were lost with it, and of none once it was gone."""
    killed = msgspec.structs.replace(
        running(), open_spans=[msgspec.structs.replace(running().open_spans[0], rows=77)]
    )
    assert look(killed, checkpointed={}).rows.in_progress == 0
    assert look(killed, checkpointed={"part-00001": 40, "part-00002": 3}).rows.in_progress == 43


def test_rows_that_are_in_two_segments_do_not_exceed_their_chunk() -> None:
    assert look(running(), checkpointed={"part-00001": 130}).rows.in_progress == 100


def test_segments_of_earlier_versions_count_as_their_worker_reported() -> None:
    seen = look(running(), checkpointed={"part-00001": None, "part-00002": 3})
    assert seen.rows.in_progress == 40 + 3


def test_a_limit_counts_only_the_rows_it_leaves() -> None:
    seen = look(run=run_json(limit=150), done=1)
    assert (seen.chunks.total, seen.rows.total, seen.rows.done) == (2, 150, 100)


def test_everything_done_is_done_whatever_workers_say() -> None:
    seen = look(running(), done=10)
    assert seen.state == "done"
    assert seen.eta_seconds == 0


def test_markers_of_chunks_that_the_job_does_not_have_are_left_out_and_noted() -> None:
    seen = look(running(), done=12)
    assert seen.chunks.done == 10
    assert any("2 markers are of no chunk of the job" in note for note in seen.notes)


def test_without_a_job_totals_are_not_known() -> None:
    seen = look(running(), job=None, done=3)
    assert seen.chunks.total is None
    assert seen.rows.waiting is None
    assert seen.chunks.done == 3
    assert seen.eta_seconds is None
    assert seen.state == "running"


def test_an_empty_run_is_empty() -> None:
    seen = look(done=0)
    assert seen.state == "empty"
    assert seen.eta_seconds is None
    assert seen.overall.rows == 0
    assert seen.cost.so_far is None


# --------------------------------------------------------------------------- rates and time left


def test_recent_rate_counts_whole_minutes_on_the_workers_own_clock() -> None:
    rate = look(running()).workers[0].recent
    seconds = RECENT_MINUTES * 60 + NOW % 60
    assert rate.seconds == pytest.approx(seconds)
    assert rate.rows == pytest.approx(RECENT_MINUTES * 30 / seconds)
    assert rate.output_tokens == pytest.approx(RECENT_MINUTES * 600 / seconds)


def test_a_worker_that_just_started_is_not_divided_by_the_time_before() -> None:
    minute = int(NOW // 60)
    young = worker_record(
        started=NOW - 40,
        starts=[NOW - 40],
        heartbeat=NOW,
        engine={"load_seconds": 30.0},
        minutes=[Minute(minute=minute, rows=50, prompt_tokens=0, completion_tokens=0, errors=0)],
    )
    assert look(young).workers[0].recent.rows == pytest.approx(5.0)


@pytest.mark.parametrize("state", ["loading", "running"])
def test_rows_of_the_start_before_are_not_divided_by_the_seconds_since_the_restart(
    state: str,
) -> None:
    """A record counts rows by the minute, and both starts were up in this one: it said 600 rows a second."""
    now = 60.0 * (NOW // 60) + 45
    again = worker_record(
        state=state,
        started=now - 500,
        starts=[now - 500, now - 10],
        ends=[(now - 12, "killed")],
        heartbeat=now,
        engine={"load_seconds": 9.0},
        minutes=[
            Minute(minute=int(now // 60), rows=600, prompt_tokens=0, completion_tokens=0, errors=0)
        ],
    )
    assert look(again, taken=now).workers[0].recent.rows == pytest.approx(600 / 45)


def test_time_left_is_rows_left_over_the_recent_rate() -> None:
    seen = look(running())
    assert seen.eta_seconds == pytest.approx(860 / seen.recent.rows)


def test_workers_that_ended_or_are_gone_add_nothing_to_the_recent_rate() -> None:
    ended = [running(id="a") for _ in range(1)]
    ended = [msgspec.structs.replace(ended[0], state="done")]
    gone = SeenWorker(running(id="b"), NOW - 3600)
    seen = look(*ended, gone)
    assert seen.recent.rows == 0
    assert seen.eta_seconds is None
    assert seen.state == "idle"


def test_overall_rate_is_over_the_time_since_the_first_start() -> None:
    assert look(running()).overall.rows == pytest.approx(140 / 700)


# --------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("changes", "age", "state"),
    [
        ({}, 10, "running"),
        ({"state": "loading"}, 10, "loading"),
        ({"open_chunks": []}, 10, "waiting"),
        # The record of the moment in which the engine was ready, before the first chunk was open.
        ({"open_chunks": [], "starts": [NOW - 2]}, 10, "running"),
        ({}, 80, "stalled"),
        ({}, 121, "gone"),
        ({"state": "loading"}, 500, "gone"),
        ({"lease_seconds": 600.0}, 121, "running"),
        ({"state": "done"}, 5000, "done"),
        ({"state": "stopped"}, 5000, "stopped"),
        ({"state": "failed"}, 5, "failed"),
        ({"minutes": [], "starts": [NOW - 2 * STALL_SECONDS]}, 5, "stalled"),
        (
            {
                "minutes": [],
                "starts": [NOW - 2 * STALL_SECONDS],
                "engine": {"load_seconds": 1100.0},
            },
            5,
            "running",
        ),
    ],
)
def test_state_is_what_a_worker_says_and_how_long_ago(
    changes: dict[str, Any], age: float, state: str
) -> None:
    record = msgspec.structs.replace(running(), **changes)
    seen = look(SeenWorker(record, NOW - age))
    assert seen.workers[0].state == state
    assert seen.workers[0].heartbeat_age_seconds == age


def test_a_stop_request_shows_while_workers_end_and_after() -> None:
    assert look(running(), is_stop_asked=True).state == "stopping"
    stopped = msgspec.structs.replace(running(), state="stopped")
    assert look(stopped, is_stop_asked=True).state == "stopped"


def test_a_change_that_we_saw_ourselves_counts_more_than_any_clock() -> None:
    seen = look(SeenWorker(running(), NOW - 9000, age_seconds=3.0))
    assert seen.workers[0].state == "running"


# --------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("hours", [-7, 7])
def test_a_worker_whose_clock_is_hours_off_counts_as_any_other(hours: float) -> None:
    off = hours * 3600.0
    right = running()
    wrong = msgspec.structs.replace(
        right,
        started=right.started + off,
        heartbeat=right.heartbeat + off,
        starts=[right.starts[0] + off],
        minutes=[
            msgspec.structs.replace(minute, minute=minute.minute + int(off // 60))
            for minute in right.minutes
        ],
    )
    seen = look(SeenWorker(wrong, NOW))
    expected = look(right)
    assert seen.workers[0].state == "running"
    assert seen.workers[0].clock_offset_seconds == -off
    assert seen.recent == expected.recent
    assert seen.overall == expected.overall
    assert seen.eta_seconds == expected.eta_seconds
    assert "the clocks of 1 worker are off" in seen.notes[-1]


@pytest.mark.parametrize(
    ("off", "shown"), [(-130.0, "2 min 10 s behind"), (2 * 3600.0, "2 h ahead"), (30.0, "")]
)
def test_a_clock_that_is_minutes_off_is_said_in_minutes(off: float, shown: str) -> None:
    right = running()
    wrong = msgspec.structs.replace(right, heartbeat=right.heartbeat + off)
    notes = look(SeenWorker(wrong, NOW)).notes
    assert [shown in note for note in notes] == ([True] if shown else [])


def test_our_own_clock_behind_storages_makes_nobody_younger_than_now() -> None:
    seen = look(running(), taken=NOW - 86400)
    assert seen.time == NOW
    assert seen.workers[0].heartbeat_age_seconds == 0


def test_storage_without_times_falls_back_to_the_heartbeat() -> None:
    seen = look(SeenWorker(running(), 0.0), taken=NOW + 50)
    assert seen.workers[0].heartbeat_age_seconds == 50
    assert seen.workers[0].clock_offset_seconds == 0


# --------------------------------------------------------------------------- cost


def test_cost_so_far_and_at_the_end_and_per_million_tokens() -> None:
    seen = look(running(), prices=Prices(5.0))
    assert seen.cost.so_far == pytest.approx(1.0)  # 720 s
    assert seen.eta_seconds is not None
    assert seen.cost.at_end == pytest.approx(1.0 + 5.0 * seen.eta_seconds / 3600)
    assert seen.cost.per_million_output_tokens == pytest.approx(1e6 / 6000)
    assert seen.cost.per_million_tokens == pytest.approx(1e6 / 9000)
    assert seen.cost.source == "--price-per-hour"


def test_gpus_price_by_table_spot_and_number() -> None:
    spot = running(id="a", host={"accelerator": "L4:2", "spot": True})
    plain = running(id="b", host={"accelerator": "L4", "gpus": "2"})
    first, second = look(spot, plain).workers
    assert (first.gpus, second.gpus) == (2, 2)
    assert first.price_per_hour is not None
    assert second.price_per_hour is not None
    assert first.price_per_hour < second.price_per_hour


def test_number_of_gpus_follows_from_parallelism_where_the_host_does_not_say() -> None:
    record = running(engine={"device": "NVIDIA H100 80GB HBM3", "num_replicas": 2})
    run = run_json()
    run = msgspec.structs.replace(run, recorded={**run.recorded, "tensor_parallel_size": 4})
    view = look(record, run=run).workers[0]
    assert (view.accelerator, view.gpus) == ("H100", 8)


def test_lost_replicas_are_warned_of_worker_by_worker() -> None:
    engine = {"num_replicas": 8}
    lost = [
        msgspec.structs.replace(running(engine=engine), id=f"w{index}", replicas_lost=index)
        for index in range(8)
    ]
    seen = look(*lost)
    assert seen.workers[3].replicas == 8
    assert seen.workers[3].replicas_lost == 3
    assert seen.warnings[0] == "worker w1: 1 of 8 replicas lost"
    assert seen.warnings[-1] == "worker w7: 7 of 8 replicas lost"
    assert len(seen.warnings) == 7
    assert look(running(engine=engine)).warnings == []


def test_workers_without_a_price_are_counted_not_guessed() -> None:
    seen = look(running(id="a", host={"accelerator": "L4"}), running(id="b"))
    assert seen.cost.unpriced_workers == 1
    assert seen.cost.so_far is not None
    assert seen.workers[1].cost is None


def test_a_record_of_an_older_worker_is_priced_by_its_busy_time() -> None:
    old = msgspec.structs.replace(running(), up_seconds=0.0, load_seconds=120.0)
    assert look(old, prices=Prices(1.0)).workers[0].up_seconds == 720.0


def money(**values: Any) -> Money:
    return Money(**{"price_per_hour": 2.0, "price_source": "its own", "cost": 3.0} | values)


def test_what_a_worker_has_recorded_as_its_cost_comes_before_lists_and_after_the_users_price() -> (
    None
):
    worker = running(money=money(), host={"accelerator": "L4"})
    seen = look(worker, prices=Prices())
    assert (seen.cost.so_far, seen.cost.source, seen.cost.per_hour_now) == (3.0, "its own", 2.0)
    assert look(worker, prices=Prices(5.0)).cost.so_far == pytest.approx(1.0)
    without = running(money=money(price_per_hour=None, cost=None), host={"accelerator": "L4"})
    assert "list prices" in look(without, prices=Prices()).cost.source


def test_the_limits_are_those_of_the_worker_that_started_last() -> None:
    first = running(id="a", money=money(max_cost=50.0, max_hours=9.0))
    last = msgspec.structs.replace(
        running(id="b", money=money(max_cost=20.0)), starts=[NOW - 9000, NOW - 300], ends=[(0, "")]
    )
    seen = look(first, last)
    assert (seen.cost.limit, seen.max_hours) == (20.0, None)
    assert (look(first).cost.limit, look(first).max_hours) == (50.0, 9.0)
    assert look(running()).cost.limit is None


def test_hours_count_time_in_which_anybody_was_up() -> None:
    """Three starts of two workers, two of them at one time, and an hour in which nobody ran."""
    early = running(id="a")
    early = msgspec.structs.replace(
        early, starts=[NOW - 7200, NOW - 1800], ends=[(NOW - 5400, "running")]
    )
    late = msgspec.structs.replace(running(id="b"), starts=[NOW - 900])
    assert look(early, late).hours == pytest.approx(1.0)


# --------------------------------------------------------------------------- a big run


def test_a_big_run_adds_up() -> None:
    shape = Shape(now=NOW)
    workers = make_workers(shape)
    job_ = make_job(shape)
    snapshot = Snapshot(
        url="u",
        taken=NOW,
        run=make_run(codec.encode_pretty(job_)),
        job=job_,
        job_url="j",
        is_stop_asked=False,
        markers={chunk.name: SeenMarker(0, NOW) for chunk in job_.chunks[:1200]},
        checkpointed={},
        output_bytes=0,
        workers=[SeenWorker(worker, worker.heartbeat) for worker in workers],
        notes=[],
    )
    seen = overview(snapshot, Prices())
    assert len(seen.workers) == 40
    assert [view.state for view in seen.workers].count("gone") == 1
    assert seen.rows.done == 600_000
    assert seen.errors["prompt_too_long"] == seen.rows_error
    assert codec.decode(codec.encode(seen), Overview, name="x") == seen
