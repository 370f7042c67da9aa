"""What the report's charts show: right numbers in the right places, whatever a record says."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.records import Minute, Span
from batchinfer.ledger.inventory import SeenWorker
from batchinfer.runs import charts
from batchinfer.runs.answers import DoneChunk, Piece
from batchinfer.runs.charts import Bins, Period, Series, lane_of
from fakes import worker_record

BEGIN = 1_790_000_040.0
LIFE = Period(BEGIN, BEGIN + 600)
BINS = Bins(BEGIN, 60.0, 10)


def points(path: str) -> list[tuple[float, float]]:
    """The corners of an area."""
    return [
        (float(x), float(y))
        for x, y in (point.split(",") for point in path.strip("MZ").split(" L"))
    ]


def boxes(path: str) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of the bars in a lane."""
    found = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path)
    return [(float(x), float(y), float(width), float(height)) for x, y, width, height in found]


def at(*, minutes: list[Minute] | None = None, **values: object) -> SeenWorker:
    record = worker_record(
        **{"started": BEGIN, "starts": [BEGIN], "heartbeat": BEGIN + 600, "minutes": minutes or []}
        | values
    )
    return SeenWorker(record, record.heartbeat)


def minute(index: int, rows: int = 60, length: int = 1) -> Minute:
    return Minute(
        minute=int(BEGIN // 60) + index,
        rows=rows,
        prompt_tokens=rows,
        completion_tokens=rows,
        errors=0,
        length=length,
    )


# --------------------------------------------------------------------------- axes


@given(st.floats(0, 1e15))
def test_the_axis_reaches_every_value_and_not_much_further(value: float) -> None:
    top = charts.nice_maximum(value)
    assert top >= value * (1 - 1e-6)
    assert value < 1e-9 or top <= 1.7 * value


@given(st.integers(0, 4_000_000_000), st.floats(10, 1e9))
def test_ticks_lie_inside_and_are_few(begin: int, seconds: float) -> None:
    ticks = charts.time_ticks(Period(begin, begin + seconds))
    assert len(ticks) <= 2 * charts.MAX_TICKS
    assert all(0 <= tick.at <= 100 for tick in ticks)


@pytest.mark.parametrize("begin", [9e15, 1e300])
def test_a_clock_beyond_the_calendar_has_an_axis_all_the_same(begin: float) -> None:
    charts.time_ticks(Period(begin, 2 * begin))


def test_life_is_from_the_first_start_to_the_last_heartbeat_on_one_clock() -> None:
    right = at(id="a")
    wrong = msgspec.structs.replace(
        right.record, started=BEGIN + 7200, starts=[BEGIN + 7200], heartbeat=BEGIN + 7800
    )
    assert charts.life_of([right, SeenWorker(wrong, BEGIN + 600)]) == LIFE


def test_bins_cover_a_long_run_in_whole_minutes() -> None:
    life = Period(BEGIN + 17, BEGIN + 17 + 5 * 86400)
    bins = Bins.covering(life, 180)
    assert bins.number <= 180
    assert bins.edges()[0] <= life.begin
    assert bins.edges()[-1] >= life.end
    assert math.isclose(bins.seconds % 60, 0)


# --------------------------------------------------------------------------- areas


def piece(worker: str, rows: int, begin: float = BEGIN, end: float = BEGIN + 600) -> Piece:
    return Piece(worker, begin, end, rows, 2.0 * rows)


def test_rows_lie_where_the_minutes_of_their_worker_say() -> None:
    worker = at(id="w", minutes=[minute(0), minute(3, 30)])
    (series,) = charts.series_of([piece("w", 90)], [worker], BINS)
    assert series.rows == [60, 0, 0, 30, 0, 0, 0, 0, 0, 0]
    (series,) = charts.series_of([piece("w", 45)], [worker], BINS)
    assert series.rows == [30, 0, 0, 15, 0, 0, 0, 0, 0, 0], "their sum is that of the pieces"
    assert series.tokens == [60, 0, 0, 30, 0, 0, 0, 0, 0, 0]


def test_a_joined_point_is_spread_over_the_minutes_it_stands_for() -> None:
    worker = at(id="w", minutes=[minute(2, 90, length=3)])
    (series,) = charts.series_of([piece("w", 90)], [worker], BINS)
    assert series.rows == pytest.approx([0, 0, 30, 30, 30, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("length", [0, -3])
def test_a_minute_without_a_length_is_left_out(length: int) -> None:
    """A forged record made `report` divide by zero."""
    worker = at(id="w", minutes=[minute(2, 90, length=length)])
    (series,) = charts.series_of([piece("w", 90)], [worker], BINS)
    assert series.rows == pytest.approx([9] * 10)


@pytest.mark.parametrize("begin", [-1e300, BEGIN - 3600, BEGIN + 9e9, 1e300])
def test_rows_outside_the_chart_stand_at_its_edge(begin: float) -> None:
    (series,) = charts.series_of([piece("w", 90, begin, begin)], [], BINS)
    assert sum(series.rows) == 90
    assert max(series.rows[0], series.rows[-1]) == 90


def test_rows_in_no_record_are_a_band_of_their_own() -> None:
    pieces = [piece("", 20, BEGIN + 60, BEGIN + 120), piece("w", 90)]
    series = charts.series_of(pieces, [at(id="w", minutes=[minute(0)])], BINS)
    assert [one.name for one in series] == ["w", charts.UNREPORTED]
    assert series[1].rows == [0, 20, 0, 0, 0, 0, 0, 0, 0, 0]
    chart = charts.progress(series, BINS, LIFE, 110)
    assert [area.style for area in chart.areas] == ["s1", "unreported"]


def test_more_workers_than_colours_are_added_up() -> None:
    pieces = [piece(f"w{index}", 60) for index in range(charts.MAX_BANDS + 1)]
    workers = [at(id=f"w{index}", minutes=[minute(1)]) for index in range(charts.MAX_BANDS + 1)]
    series, unreported = charts.series_of([*pieces, piece("", 1)], workers, BINS)
    assert series.name == "all 8 workers"
    assert series.rows == [0, 480, 0, 0, 0, 0, 0, 0, 0, 0]
    assert unreported.name == charts.UNREPORTED
    assert len(charts.series_of(pieces[1:], workers, BINS)) == charts.MAX_BANDS


def test_a_rate_is_over_the_part_of_a_bin_that_anybody_lived_in() -> None:
    life = Period(BEGIN + 30, BEGIN + 122)
    series = [Series("a", [0, 0, 0], [30.0, 60.0, 10.0])]
    (area,) = charts.throughput(series, Bins(BEGIN, 60.0, 3), life).areas
    # 30 in 30 seconds, 60 in 60, and the last 2 seconds count as 10: the rate is 1 all along.
    assert {y for _, y in points(area.path)} == {0, 1000}


def test_progress_begins_at_nothing_and_reaches_to_the_total() -> None:
    series = [Series("a", [10.0, 10.0], [0, 0]), Series("b", [0.0, 20.0], [0, 0])]
    chart = charts.progress(series, Bins(BEGIN, 300.0, 2), LIFE, 80)
    assert chart.levels == ["0", "20", "40", "60", "80"]
    first, second = (points(area.path) for area in chart.areas)
    assert first[:3] == [(0, 1000), (500, 875), (1000, 750)]
    assert second[:3] == [(0, 1000), (500, 875), (1000, 500)]


@given(st.lists(st.lists(st.floats(0, 1e12), min_size=10, max_size=10), min_size=1, max_size=4))
def test_areas_stay_in_their_chart(values: list[list[float]]) -> None:
    series = [Series(str(index), each, each) for index, each in enumerate(values)]
    for chart in (
        charts.throughput(series, BINS, LIFE),
        charts.progress(series, BINS, LIFE, 100),
    ):
        for area in chart.areas:
            for x, y in points(area.path):
                assert 0 <= x <= 1000
                assert -0.1 <= y <= 1000.1


# --------------------------------------------------------------------------- time lines


def span(name: str, start: float, end: float, outcome: str = "done") -> Span:
    return Span(
        chunk=name,
        start=BEGIN + start,
        end=BEGIN + end,
        rows=10,
        resumed=0,
        epoch=1,
        outcome=outcome,
    )


def test_chunks_open_at_the_same_time_have_tracks_of_their_own() -> None:
    line = lane_of(at(spans=[span("a", 0, 120), span("b", 60, 240), span("c", 120, 300)]), LIFE)
    assert line.num_tracks == 2
    assert [(x, int(y)) for x, y, _, _ in boxes(line.bars[0].path)] == [(0, 0), (100, 1), (200, 0)]


def test_chunks_beyond_the_last_track_overlap() -> None:
    line = lane_of(at(spans=[span(str(index), 0, 100) for index in range(50)]), LIFE)
    assert line.num_tracks == charts.MAX_TRACKS
    assert len(boxes(line.bars[0].path)) == 50


def test_the_shortest_chunk_can_be_seen_and_none_is_left_out() -> None:
    spans = [span(f"c{index}", index * 0.1, index * 0.1 + 0.1) for index in range(2000)]
    (bars,) = lane_of(at(spans=spans), LIFE).bars
    assert len(boxes(bars.path)) == 2000
    assert min(width for _, _, width, _ in boxes(bars.path)) >= 1
    assert bars.title == "done: c0, c1, c2 and 1997 more; 20,000 rows"


def test_chunks_are_drawn_by_what_became_of_them() -> None:
    spans = [span("a", 0, 60), span("b", 60, 120, "killed"), span("c", 120, 180)]
    line = lane_of(at(spans=spans, open_spans=[span("d", 200, 300, "open")]), LIFE)
    assert [(bars.outcome, len(boxes(bars.path))) for bars in line.bars] == [
        ("done", 2),
        ("killed", 1),
        ("open", 1),
    ]


def done_chunk(name: str, start: float, end: float, **values: Any) -> DoneChunk:
    return DoneChunk(
        name, "w", values.pop("epoch", 1), BEGIN + start, BEGIN + end, 10, 0, 0, 10, False, **values
    )


def test_a_chunk_with_a_marker_is_done_whatever_the_record_says() -> None:
    """A start published chunks after its last heartbeat, and was killed."""
    record = at(spans=[span("a", 0, 100, "killed"), span("b", 0, 150, "killed")])
    line = lane_of(record, LIFE, [done_chunk("a", 0, 300), done_chunk("new", 300, 450)])
    assert {bars.outcome: bars.title for bars in line.bars} == {
        "done": "done: a, new; 20 rows",
        "killed": "killed: b; 10 rows",
    }


def test_open_chunks_of_a_worker_that_is_gone_were_killed_with_it() -> None:
    record = at(state="running", open_spans=[span("a", 0, 100, "open")])
    line = lane_of(record, LIFE, is_gone=True)
    assert [bars.outcome for bars in line.bars] == ["killed"]
    assert [mark.kind for mark in line.marks] == ["start", "kill"]


def test_a_kill_and_a_resume_are_marked_with_the_gap_between() -> None:
    record = at(
        epoch=2,
        starts=[BEGIN, BEGIN + 300],
        ends=[(BEGIN + 180, "running")],
        spans=[span("a", 100, 180, "killed")],
    )
    line = lane_of(record, LIFE)
    assert [(mark.kind, mark.at) for mark in line.marks] == [
        ("start", 0),
        ("kill", 30),
        ("resume", 50),
    ]
    assert [(x, width) for x, _, width, _ in boxes(line.up)] == [(0, 300), (500, 500)]
    assert line.num_kills == 1


def test_a_start_that_ended_by_itself_is_no_kill() -> None:
    record = at(epoch=2, starts=[BEGIN, BEGIN + 300], ends=[(BEGIN + 200, "stopped")], state="done")
    kinds = [mark.kind for mark in lane_of(record, LIFE).marks]
    assert kinds == ["start", "end", "resume", "end"]


def test_records_of_older_workers_without_ends_have_a_lane_too() -> None:
    record = at(epoch=3, starts=[BEGIN, BEGIN + 100, BEGIN + 200], ends=[])
    assert lane_of(record, LIFE).marks[0].kind == "start"


# --------------------------------------------------------------------------- histograms


def test_columns_are_as_high_as_their_share_of_the_highest() -> None:
    columns = charts.histogram([{"8": 3}, {"16": 6}])
    assert [(column.name, column.height, column.shown) for column in columns] == [
        ("8", 50, "3"),
        ("16", 100, "6"),
    ]


def test_no_lengths_are_no_columns() -> None:
    assert charts.histogram([{}, {"?": 3}]) == []


def test_a_length_beyond_all_measure_makes_no_endless_chart() -> None:
    assert len(charts.histogram([{"1": 1, str(2**200): 1}])) == charts.MAX_COLUMNS
