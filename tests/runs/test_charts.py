"""Charts and the series in them: right numbers, valid markup, nothing unescaped."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core import units
from batchinfer.core.records import Minute, Span
from batchinfer.ledger.snapshot import SeenWorker
from batchinfer.runs import charts
from batchinfer.runs.charts import Band, Count, Extent, bins_by_worker, bins_of, lanes_of, life_of
from fakes import worker_record

BEGIN = 1_790_000_040.0
EVIL = "\"><script>alert(1)</script>&'"
BINS = Extent(BEGIN, BEGIN + 600, 10)


def parse(markup: str) -> ET.Element:
    return ET.fromstring(markup)


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter("text")]


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


# --------------------------------------------------------------------------- markup


@pytest.mark.parametrize(
    "markup",
    [
        charts.stacked_areas(
            [Band(EVIL, [1.0] * 10, "s1")],
            BINS,
            BINS,
            title=EVIL,
            shown=lambda value: f"{value}{EVIL}",
        ),
        charts.columns([Count(EVIL, 3, EVIL)], title=EVIL, style="s1"),
        charts.heat_row([1.0, 2.0], 2.0, title=EVIL),
        charts.time_axis(BINS),
        charts.share_bar(1, 2, 3),
        charts.rule(1, 2, "s1"),
    ],
)
def test_charts_are_well_formed_and_escape_every_word(markup: str) -> None:
    root = parse(markup)
    assert root.tag == "svg"
    assert "<script" not in markup
    assert not [element for element in root.iter() if "style" in element.attrib]


def test_a_lane_escapes_names_from_the_bucket() -> None:
    span = Span(chunk=EVIL, start=BEGIN, end=BEGIN + 60, rows=1, resumed=0, epoch=1, outcome=EVIL)
    line = lanes_of([at(id=EVIL, spans=[span])], BINS)[0]
    markup = charts.lane(line, BINS)
    parse(markup)
    assert "<script" not in markup


@given(
    st.lists(st.lists(st.floats(0, 1e12), min_size=10, max_size=10), min_size=1, max_size=4),
    st.booleans(),
)
def test_areas_stay_in_their_chart(values: list[list[float]], is_sum: bool) -> None:
    bands = [Band(str(index), each, "s1") for index, each in enumerate(values)]
    root = parse(
        charts.stacked_areas(bands, BINS, BINS, title="t", shown=units.short, is_sum=is_sum)
    )
    inner = next(element for element in root.iter("svg") if "viewBox" in element.attrib)
    height = float(inner.attrib["height"])
    for path in inner.iter("path"):
        for point in path.attrib["d"].strip("MZ").split(" L"):
            x, y = map(float, point.split(","))
            assert 0 <= x <= 1000
            assert -0.1 <= y <= height + 0.1


@given(st.floats(0, 1e15))
def test_the_axis_reaches_every_value_and_not_much_further(value: float) -> None:
    top = charts.nice_maximum(value)
    assert top >= value * (1 - 1e-6)
    assert value < 1e-9 or top <= 1.7 * value


@given(st.integers(0, 4_000_000_000), st.floats(10, 1e9))
def test_ticks_lie_inside_and_are_few(begin: int, seconds: float) -> None:
    extent = Extent(begin, begin + seconds, 1)
    ticks = charts.time_ticks(extent)
    assert len(ticks) <= 20
    assert all(extent.begin <= moment <= extent.end for moment, _ in ticks)


def test_a_clock_beyond_the_calendar_draws_all_the_same() -> None:
    extent = Extent(9e15, 9e15 + 600, 1)
    parse(charts.time_axis(extent))


def test_columns_name_their_highest() -> None:
    root = parse(charts.columns([Count("8", 3, "3"), Count("16", 7, "7")], title="t", style="s1"))
    assert texts(root) == ["8", "16", "7"]


def test_no_columns_are_no_chart() -> None:
    assert charts.columns([], title="t", style="s1") == ""


def test_a_progress_bar_never_leaves_its_track() -> None:
    for part, other, whole in ((5, 9, 10), (20, 20, 10), (0, 0, 0)):
        rects = list(parse(charts.share_bar(part, other, whole)).iter("rect"))
        widths = [float(rect.attrib["width"].rstrip("%")) for rect in rects[1:]]
        assert sum(widths) <= 100


# --------------------------------------------------------------------------- series


def test_minutes_land_in_their_bins() -> None:
    bins = bins_by_worker([at(minutes=[minute(0), minute(3, 30)])], BINS)[0]
    assert bins.rows == [60, 0, 0, 30, 0, 0, 0, 0, 0, 0]


def test_a_joined_point_is_spread_over_the_minutes_it_stands_for() -> None:
    bins = bins_by_worker([at(minutes=[minute(2, 90, length=3)])], BINS)[0]
    assert bins.rows == pytest.approx([0, 0, 30, 30, 30, 0, 0, 0, 0, 0])


def test_bins_cover_a_long_run_in_whole_minutes() -> None:
    life = Extent(BEGIN + 17, BEGIN + 17 + 5 * 86400, 1)
    bins = bins_of(life, 180)
    assert bins.num_bins <= 180
    assert bins.begin <= life.begin
    assert bins.end >= life.end
    assert math.isclose(bins.bin_seconds % 60, 0)


def test_life_is_from_the_first_start_to_the_last_heartbeat_on_one_clock() -> None:
    right = at(id="a")
    wrong = msgspec.structs.replace(
        right.record, started=BEGIN + 7200, starts=[BEGIN + 7200], heartbeat=BEGIN + 7800
    )
    life = life_of([right, SeenWorker(wrong, BEGIN + 600)])
    assert (life.begin, life.end) == (BEGIN, BEGIN + 600)


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
    line = lanes_of([at(spans=[span("a", 0, 100), span("b", 50, 200), span("c", 100, 300)])], BINS)[
        0
    ]
    assert {bar.name: bar.track for bar in line.bars} == {"a": 0, "b": 1, "c": 0}
    assert line.num_tracks == 2


def test_short_neighbours_are_joined_and_none_is_lost() -> None:
    spans = [span(f"c{index}", index * 0.1, index * 0.1 + 0.1) for index in range(2000)]
    line = lanes_of([at(spans=spans)], BINS)[0]
    assert len(line.bars) < 500
    assert sum(bar.chunks for bar in line.bars) == 2000
    assert sum(bar.rows for bar in line.bars) == 20000


def test_a_kill_and_a_resume_are_marked_with_the_gap_between() -> None:
    record = at(
        epoch=2,
        starts=[BEGIN, BEGIN + 300],
        ends=[(BEGIN + 200, "running")],
        spans=[span("a", 100, 200, "killed")],
    )
    line = lanes_of([record], BINS)[0]
    assert [(mark.kind, mark.moment - BEGIN) for mark in line.marks] == [
        ("start", 0),
        ("kill", 200),
        ("resume", 300),
    ]
    assert [(begin - BEGIN, end - BEGIN) for begin, end in line.up] == [(0, 200), (300, 600)]
    assert 'class="m-kill"' in charts.lane(line, BINS)


def test_a_start_that_ended_by_itself_is_no_kill() -> None:
    record = at(epoch=2, starts=[BEGIN, BEGIN + 300], ends=[(BEGIN + 200, "stopped")], state="done")
    kinds = [mark.kind for mark in lanes_of([record], BINS)[0].marks]
    assert kinds == ["start", "end", "resume", "end"]


def test_records_of_older_workers_without_ends_draw_too() -> None:
    record = at(epoch=3, starts=[BEGIN, BEGIN + 100, BEGIN + 200], ends=[])
    parse(charts.lane(lanes_of([record], BINS)[0], BINS))
