"""A worker's record: its sums are right over restarts, and its size is bounded."""

from types import SimpleNamespace

import msgspec
import pytest

from batchinfer.core import codec
from batchinfer.core.counts import MAX_CODES, OTHER, Counts
from batchinfer.core.errors import EngineDied, LimitReached, RunMismatch
from batchinfer.core.records import EngineInfo, EngineStats, Failure, FinishedRow, Money, Worker
from batchinfer.worker.minutes import MAX_MINUTES
from batchinfer.worker.telemetry import Telemetry
from fakes import FakeClock, lease_record


def finished(line: int, *, code: str = "", finish_reason: str = "stop") -> FinishedRow:
    said = {"code": code, "finish_reason": finish_reason, "output": msgspec.Raw(b"{}")}
    return FinishedRow(line=line, ok=not code, prompt_tokens=10, completion_tokens=20, **said)


def start_after(clock: FakeClock, before: Worker | None = None) -> Telemetry:
    """The telemetry of a start after the one that left this record, ten minutes later."""
    clock.seconds += 600
    made = Telemetry("w0", clock, host={"cloud": "aws"})
    made.begin(before and lease_record(), before)
    return made


# --------------------------------------------------------------------------- over epochs


def test_counters_add_up_over_epochs_and_open_chunks_do_not_stay(clock):
    first = start_after(clock)
    first.rows_finished([finished(0), finished(1, code="prompt_too_long")])
    chunk = SimpleNamespace(name="part-00000", num_rows=4, num_left=3, counts=Counts())
    first.chunk_opened(chunk)
    first.note_engine_stats(EngineStats(restarts=1))
    before = first.snapshot()
    assert before.open_chunks == {"part-00000": 1}
    second = start_after(clock, before)
    assert second.snapshot().open_chunks == {}
    second.rows_finished([finished(2)])
    record = second.snapshot()
    assert (record.rows_done, record.rows_ok, record.rows_error) == (3, 2, 1)
    assert (record.prompt_tokens, record.completion_tokens) == (30, 60)
    assert record.errors == {"prompt_too_long": 1}
    assert record.finish_reasons == {"stop": 2}
    assert (record.num_starts, record.engine_restarts) == (2, 1)
    assert second.counts.rows_done == 1, "the log and the result tell of this start alone"


def test_each_start_of_a_worker_is_paid_at_its_own_price(clock):
    """A worker that a dearer machine replaced would end too early by --max-cost, and after a cheaper one too late."""
    before = None
    for gpu, price, cost in (("A", 6, 1), ("A", 60, 11), ("A", None, 21), ("B", None, 21)):
        made = Telemetry("w0", clock, host={"gpu": gpu}, money=Money(price_per_hour=price))
        made.begin(before and lease_record(), before)
        clock.seconds += 600
        before = made.snapshot()
        assert before.money.cost == pytest.approx(cost)


@pytest.mark.parametrize(
    ("kind", "attempts"), [(RunMismatch, 0), (LimitReached, 0), (EngineDied, 1)]
)
def test_a_start_that_was_refused_or_asked_to_end_is_no_attempt(clock, kind, attempts):
    """With the right options, the worker would still have been taken for one that makes no progress."""
    telemetry_ = start_after(clock)
    telemetry_.end_with(kind("why"))
    assert telemetry_.snapshot().attempts == attempts


def test_a_chunk_that_another_published_first_counts_as_done_but_not_as_ours(clock):
    telemetry_ = start_after(clock)
    telemetry_.workload.set_own({"part-00000": 4})
    chunk = SimpleNamespace(name="part-00000", num_rows=4, num_left=0, counts=Counts())
    chunk.started = clock.now()
    telemetry_.chunk_opened(chunk)
    telemetry_.chunk_closed(chunk, "lost")
    work = telemetry_.workload
    assert (work.rows_done, work.chunks_done, work.chunks_skipped) == (4, 1, 1)


# --------------------------------------------------------------------------- bounds


def test_a_record_is_bounded_whatever_happens(clock):
    record: Worker | None = None
    for _ in range(300):
        telemetry_ = start_after(clock, record)
        record = telemetry_.latest
    for index in range(3 * MAX_CODES):
        code = f"code_{index}"
        telemetry_.row_failed("part-00000", index, Failure(code=code, message="x" * 10_000))
        telemetry_.rows_finished([finished(index, code=code)])
        telemetry_.rows_finished([finished(index, finish_reason=f"reason {index}")])
    telemetry_.rows_finished([finished(0, code="code_0")])
    for _ in range(3000):
        clock.seconds += 60
        telemetry_.rows_finished([finished(0)])
    record = telemetry_.snapshot()
    assert record.num_starts == 300
    assert len(record.examples) == MAX_CODES
    assert all(len(example.message) <= 500 for example in record.examples.values())
    assert max(len(record.errors), len(record.finish_reasons)) == MAX_CODES + 1
    assert (record.errors["code_0"], record.errors[OTHER]) == (2, 2 * MAX_CODES)
    assert len(record.minutes) <= MAX_MINUTES
    assert record.rows_done == 6 * MAX_CODES + 3001, "no row is lost by thinning"
    assert len(codec.encode(record)) < 400_000


@pytest.mark.parametrize(("rows", "steps", "times"), [(150, 9, 1), (400, 9, 0), (0, 0, 0)])
def test_a_front_end_that_keeps_the_engine_waiting_is_told_once(
    caplog, monkeypatch, rows, steps, times
):
    """A model of 1B took 34 s for what it can do in 21, and nobody said so."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    telemetry_ = start_after(FakeClock())
    telemetry_.engine_ready(
        EngineInfo(name="vllm", version="", model="m", max_in_flight=640, max_num_seqs=512)
    )
    telemetry_.rows_in_engine(640)
    for now in ([rows] * 29 + [512] + [rows] * 30) * 2:
        telemetry_.note_engine_stats(EngineStats(steps=steps, rows=now))
    assert caplog.text.count("--api-server-count") == times
