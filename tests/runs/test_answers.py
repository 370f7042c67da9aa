"""What a run keeps is counted once, whatever the workers' records say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.clock import iso_utc
from batchinfer.core.prices import Prices
from batchinfer.core.records import Span, Worker
from batchinfer.ledger.inventory import SeenMarker, SeenWorker, Snapshot
from batchinfer.runs.answers import Answers, Piece, most, pieces_of, shares_of, with_answers
from batchinfer.runs.overview import overview
from fakes import marker_record, worker_record

T = 1_790_000_000.0


def marker(**values: Any) -> Any:
    found = marker_record()
    times = {
        "start": iso_utc(T + values.pop("start", 0)),
        "end": iso_utc(T + values.pop("end", 60)),
    }
    usual = {"rows_ok": 100, "rows_error": 0, "rows_resumed": 0, "worker": "w0", "epoch": 1}
    return msgspec.structs.replace(found, **usual | times | values)


def answers(**markers: Any) -> Answers:
    found = Answers()
    for name, each in markers.items():
        found.add(name, each, T)
    return found


def span(chunk: str, start: float, end: float, rows: int, **values: Any) -> Span:
    usual: dict[str, Any] = {"resumed": 0, "epoch": 1, "outcome": "killed"}
    return Span(chunk=chunk, start=T + start, end=T + end, rows=rows, **usual | values)


def worker(**values: Any) -> Worker:
    usual: dict[str, Any] = {
        "id": "w0", "started": T, "starts": [T, T + 200], "ends": [(T + 50, "running")], "epoch": 2,
        "heartbeat": T + 300, "lease_seconds": 120.0, "state": "running",
    }  # fmt: skip
    return worker_record(**usual | values)


def snapshot(*workers: Worker, **checkpointed: int) -> Snapshot:
    return Snapshot(
        url="memory://run",
        taken=T + 300,
        run=None,
        job=None,
        job_url="",
        is_stop_asked=False,
        markers={"a": SeenMarker(0, T)},
        checkpointed=dict(checkpointed),
        output_bytes=0,
        workers=[SeenWorker(each, each.heartbeat) for each in workers],
        notes=[],
    )


def shown(pieces: list[Piece]) -> list[tuple[str, float, float, int]]:
    return [(each.worker, each.begin - T, each.end - T, each.rows) for each in pieces]


def test_resumed_rows_are_of_the_starts_that_reported_them_and_the_rest_is_in_no_record() -> None:
    done = answers(a=marker(rows_resumed=70, epoch=2, start=200, end=260, completion_tokens=200))
    record = worker(spans=[span("a", 10, 50, 45), span("b", 0, 5, 9, outcome="done")])
    pieces = pieces_of(done, snapshot(record), gone=[])
    assert shown(pieces) == [("w0", 200, 260, 30), ("w0", 10, 50, 45), ("", 50, 80, 25)]
    assert sum(piece.tokens for piece in pieces) == 200
    assert shares_of(done, pieces)["w0"] == (1, 75, 0, 150.0)


def test_a_chunk_that_was_published_after_the_last_heartbeat_needs_no_record() -> None:
    done = answers(a=marker(start=40, end=70))
    record = worker(spans=[span("a", 40, 50, 12)])
    assert shown(pieces_of(done, snapshot(record), gone=[])) == [("w0", 40, 70, 100)]


def test_checkpoints_newer_than_the_record_are_of_the_worker_that_lives() -> None:
    record = worker(open_spans=[span("b", 210, 300, 30, epoch=2, outcome="open")])
    pieces = pieces_of(answers(), snapshot(record, b=40), gone=[])
    assert [(each.worker, each.rows) for each in pieces] == [("w0", 30), ("w0", 10)]
    pieces = pieces_of(answers(), snapshot(record, b=40), gone=["w0"])
    assert [(each.worker, each.rows) for each in pieces] == [("w0", 30), ("", 10)]


def test_rows_that_the_record_told_of_and_that_were_lost_are_not_kept() -> None:
    record = worker(open_spans=[span("b", 210, 300, 90, epoch=2, outcome="open")])
    assert sum(each.rows for each in pieces_of(answers(), snapshot(record, b=40), gone=[])) == 40


def test_good_rows_of_an_earlier_generation_are_the_repairers() -> None:
    done = answers(a=marker(rows_resumed=99, generation=1))
    pieces = pieces_of(done, snapshot(worker()), gone=[])
    assert {each.worker for each in pieces} == {"w0"}


@given(
    st.lists(st.tuples(st.integers(-5, 200), st.integers(-5, 200), st.integers(0, 3)), max_size=8),
    st.integers(-10, 200),
    st.integers(0, 150),
)
def test_each_row_is_in_one_piece(
    spans: list[tuple[int, int, int]], resumed: int, checkpointed: int
) -> None:
    found = [
        span("ab"[index % 2], index, index + 5, rows, resumed=old, epoch=epoch)
        for index, (rows, old, epoch) in enumerate(spans)
    ]
    done = answers(a=marker(rows_resumed=resumed))
    pieces = pieces_of(done, snapshot(worker(spans=found), b=checkpointed), gone=[])
    assert sum(each.rows for each in pieces) == 100 + checkpointed
    assert all(each.rows > 0 and each.end >= each.begin for each in pieces)


@pytest.mark.parametrize("text", ["", "yesterday", "9999-99-99", "0001-01-01T00:00:00+23:59"])
def test_a_damaged_time_in_a_marker_costs_only_its_place(text: str) -> None:
    done = Answers()
    done.add("a", msgspec.structs.replace(marker(), start=text, end=text), T + 7)
    assert sum(each.rows for each in pieces_of(done, snapshot(worker()), gone=[])) == 100


# --------------------------------------------------------------------------- sums


def sums(state: str, **values: Any) -> Any:
    record = worker(
        state=state, finish_reasons={"stop": 150}, errors={"bad": 7}, rows_error=7, prompt_tokens=9
    )
    seen = msgspec.structs.replace(overview(snapshot(record), Prices(1.0)), state=state)
    return with_answers(seen, answers(a=marker(prompt_tokens=5, completion_tokens=6, **values)))


def test_sums_of_a_finished_run_are_those_of_its_markers() -> None:
    seen = sums("done", finish_reasons={"stop": 60, "length": 40}, rows_error=2, errors={"x": 2})
    assert seen.finish_reasons == {"stop": 60, "length": 40}
    assert (seen.errors, seen.rows_error) == ({"x": 2}, 2)
    assert (seen.prompt_tokens, seen.completion_tokens) == (5, 6)
    assert seen.cost.per_million_output_tokens == pytest.approx(1e6 * seen.cost.so_far / 6)


def test_while_chunks_are_open_the_records_know_more() -> None:
    seen = sums("running", finish_reasons={"stop": 60, "length": 40}, rows_error=2, errors={"x": 2})
    assert seen.finish_reasons == {"stop": 150, "length": 40}
    assert (seen.errors, seen.rows_error, seen.prompt_tokens) == ({"bad": 7, "x": 2}, 7, 9)


def test_markers_of_earlier_versions_leave_the_finish_reasons_to_the_records() -> None:
    assert sums("done").finish_reasons == {"stop": 150}


def test_the_larger_number_counts() -> None:
    assert most({"a": 3, "b": 1}, {"a": 2, "c": 4}) == {"a": 3, "b": 1, "c": 4}
