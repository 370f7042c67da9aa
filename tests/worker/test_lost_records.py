"""A worker whose record was removed or damaged while it was away: it goes on where it stopped, and waits for nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.records import Claim, WorkerLease
from simulation.oracle import RUN
from simulation.scheduler import Process
from simulation.stage import Ending, Stage

RECORD = layout.worker_key("w0")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage([["a"] * 6, ["b"] * 6, ["c"] * 6], seed=1) as made:
        made.engine.row_seconds = 2.0
        made.engine.max_in_flight = 4
        yield made


def run_killed(stage: Stage, after_seconds: float) -> Ending:
    is_first = True

    def hook(_number: int, _method: str, _key: str, process: Process) -> None:
        nonlocal is_first
        if is_first:
            stage.scheduler.after(after_seconds, process.kill)
        is_first = False

    return stage.run(hook=hook, checkpoint_rows=1)


def lose_record(stage: Stage, damage: bytes | None) -> None:
    if damage is None:
        stage.server.delete(RUN + RECORD)
    else:
        stage.put(RECORD, damage)


def record(stage: Stage) -> WorkerLease:
    return codec.decode(stage.objects()[RECORD], WorkerLease, name=RECORD)


DAMAGE = pytest.mark.parametrize(
    "damage", [None, b"", b"{", b'{"id": 1}', b"\xff"], ids=["gone", "empty", "cut", "odd", "bytes"]
)


@DAMAGE
def test_it_takes_its_own_chunks_back_at_once(stage: Stage, damage: bytes | None) -> None:
    """It said that it had every chunk itself, and waited."""
    assert run_killed(stage, 5.0).is_killed
    assert stage.objects(layout.CLAIMS)
    lose_record(stage, damage)
    before = stage.scheduler.now
    assert stage.run(within_seconds=60.0).is_success
    assert stage.scheduler.now - before < 30


@DAMAGE
def test_a_record_that_is_lost_while_it_runs_is_written_again(
    stage: Stage, damage: bytes | None
) -> None:
    stage.scheduler.after(4.0, lambda: lose_record(stage, damage))
    assert stage.run(lease_seconds=3.0).is_success
    assert record(stage).state == "done"


def test_a_chunk_held_in_its_own_name_does_not_keep_it_waiting(stage: Stage) -> None:
    key = layout.claim_key("part-00001")
    stage.put(key, codec.encode(Claim(worker="w0", nonce="from before")))
    assert stage.run(within_seconds=60.0).is_success
