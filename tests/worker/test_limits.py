"""--max-cost and --max-hours: the run ends with status 3, near the limit, and goes on with a higher one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, LimitReached
from batchinfer.core.records import Worker
from batchinfer.ledger.spending import up_seconds_of
from simulation.oracle import RUN
from simulation.scenario import close_files
from simulation.scheduler import Process
from simulation.stage import Stage, Started

NUM_WORKERS = 8
PRICE = 36.0
LIMITS = {"price_per_hour": PRICE, "max_cost": 60.0}
HOURLY = {**LIMITS, "max_cost": None, "max_hours": 0.2}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A job that eight workers do not end within their limits: 32 chunks of 80 rows, a row in 5 seconds."""
    with Stage([["row"] * 80] * 32, num_workers=NUM_WORKERS) as made:
        made.engine.row_seconds = 40.0
        made.engine.step_seconds = 5.0
        made.engine.load_seconds = 30.0
        yield made


def start(stage: Stage, index: int, **options: object) -> Started:
    manifest = layout.worker_manifest(index, NUM_WORKERS)
    return stage.start(
        f"w{index}", manifest=manifest, **{"lease_seconds": 24.0, **LIMITS, **options}
    )


def records(stage: Stage) -> dict[str, Worker]:
    """The readable records of workers, by their keys."""
    found = {}
    for key, data in stage.objects(layout.WORKERS).items():
        with contextlib.suppress(InputError):
            found[key] = codec.decode(data, Worker, name=key)
    return found


def cost(stage: Stage) -> float:
    """What the run has cost, by the records, at the price of a worker's machine."""
    return sum(PRICE * up_seconds_of(each) / 3600 for each in records(stage).values())


def play(stage: Stage, workers: list[Started], seconds: float = 5000.0) -> None:
    stage.scheduler.run(
        stage.scheduler.now + seconds, lambda: all(each.is_over for each in workers)
    )
    for each in workers:
        close_files(each.process.name)
        assert not each.crashes, each.crashes
        assert each.is_over


def let_pass(stage: Stage, seconds: float) -> None:
    stage.scheduler.run(stage.scheduler.now + seconds)


class TestCost:
    def test_eight_workers_end_when_the_run_has_cost_as_much_as_it_may(self, stage: Stage) -> None:
        workers = [start(stage, index) for index in range(NUM_WORKERS)]
        play(stage, workers)
        for each in workers:
            assert isinstance(each.endings[0].error, LimitReached)
            assert each.endings[0].error.exit_status == 3
        assert cost(stage) == pytest.approx(60.0, rel=0.05)
        assert {each.state for each in records(stage).values()} == {"stopped"}
        assert layout.STOP_KEY not in stage.objects()

    def test_starts_that_died_and_machines_that_load_are_counted(self, stage: Stage) -> None:
        """Two are killed while they load, two later, and only one of each comes back."""
        workers = [start(stage, index) for index in range(NUM_WORKERS)]
        let_pass(stage, 20)
        for victim in workers[:2]:
            victim.process.kill()
        let_pass(stage, 100)
        for victim in workers[2:4]:
            victim.process.kill()
        paid_by_dead = cost(stage)
        let_pass(stage, 60)
        again = [start(stage, 0), start(stage, 2)]
        play(stage, [*workers[4:], *again])
        for each in (*workers[4:], *again):
            assert isinstance(each.endings[0].error, LimitReached)
        found = records(stage)
        assert up_seconds_of(found["workers/w1.json"]) == pytest.approx(20, abs=4)
        assert paid_by_dead > 5
        assert cost(stage) == pytest.approx(60.0, rel=0.05)

    def test_it_goes_on_with_a_higher_limit_and_not_with_the_same(self, stage: Stage) -> None:
        play(stage, [start(stage, index, max_cost=10.0) for index in range(NUM_WORKERS)])
        before = stage.objects()
        (refused,) = [start(stage, 0, max_cost=10.0)]
        play(stage, [refused])
        error = refused.endings[0].error
        assert isinstance(error, LimitReached)
        assert "$10." in error.message
        assert "--max-cost is $10.00" in error.message
        assert "higher limit" in error.hint
        assert stage.objects() == before, "a refused start leaves the run as it was"
        rows = len(set(stage.finished))
        play(stage, [start(stage, index, max_cost=20.0) for index in range(NUM_WORKERS)])
        assert cost(stage) == pytest.approx(20.0, rel=0.05)
        assert len(set(stage.finished)) > rows
        twice = len(stage.finished) - len(set(stage.finished))
        assert twice <= NUM_WORKERS * stage.engine.max_in_flight, "finished rows were saved"

    def test_a_run_that_ends_below_its_limit_ends_well(self) -> None:
        with Stage([["row"] * 20]) as stage:
            ending = stage.run(**LIMITS)
        assert ending.is_success
        assert 0 < ending.result["run_cost"] < 1
        assert ending.result["max_cost"] == 60.0

    @pytest.mark.parametrize("damage", [b"{}", b"[1", None])
    def test_a_record_that_is_damaged_or_lost_keeps_its_cost_and_crashes_nobody(
        self, stage: Stage, damage: bytes | None
    ) -> None:
        workers = [start(stage, index) for index in range(NUM_WORKERS)]
        let_pass(stage, 300)
        workers[0].process.kill()
        let_pass(stage, 20)
        lost = PRICE * up_seconds_of(records(stage)["workers/w0.json"]) / 3600
        if damage is None:
            stage.server.delete(f"{RUN}workers/w0.json")
        else:
            stage.put("workers/w0.json", damage)
        play(stage, workers[1:])
        found = [each for key, each in records(stage).items() if key != "workers/w0.json"]
        alive = sum(PRICE * up_seconds_of(each) / 3600 for each in found)
        assert len(found) == NUM_WORKERS - 1
        assert alive + lost == pytest.approx(60.0, rel=0.05)

    def test_a_record_that_was_lost_and_begun_anew_keeps_the_earlier_cost(
        self, stage: Stage
    ) -> None:
        workers = [start(stage, index) for index in range(2)]
        let_pass(stage, 1800)
        workers[0].process.kill()
        let_pass(stage, 20)
        lost = PRICE * up_seconds_of(records(stage)["workers/w0.json"]) / 3600
        stage.put("workers/w0.json", b"{")
        again = start(stage, 0, max_cost=None)
        play(stage, [workers[1]], 20_000)
        again.process.kill()
        assert lost > 15
        assert cost(stage) + lost == pytest.approx(60.0, rel=0.05)

    def test_what_another_worker_costs_is_by_its_own_price(self, stage: Stage) -> None:
        cheap = start(stage, 0, price_per_hour=1.0)
        play(stage, [start(stage, 1, price_per_hour=359.0), cheap], 20_000)
        up = {key: up_seconds_of(each) for key, each in records(stage).items()}
        assert up["workers/w0.json"] == pytest.approx(600, rel=0.05)
        money = {key: each.money for key, each in records(stage).items()}
        assert money["workers/w1.json"].cost == pytest.approx(60 * 359 / 360, rel=0.05)

    def test_a_new_price_does_not_change_what_earlier_starts_have_cost(self, stage: Stage) -> None:
        first = start(stage, 0)
        let_pass(stage, 1000)
        first.process.kill()
        play(stage, [start(stage, 0, price_per_hour=360.0, max_cost=60.0)], 20_000)
        assert records(stage)["workers/w0.json"].money.cost == pytest.approx(60.0, rel=0.05)
        up = up_seconds_of(records(stage)["workers/w0.json"])
        assert up == pytest.approx(1000 + 500, rel=0.05)

    def test_storage_that_fails_for_a_while_ends_nobody_and_the_limit_holds(
        self, stage: Stage
    ) -> None:
        def hook(_number: int, method: str, key: str, _process: Process) -> str | None:
            is_look = method.startswith("list") and key.endswith(layout.WORKERS)
            return "error" if is_look and 100 < stage.scheduler.now < 700 else None

        stage.network.hook = hook
        workers = [start(stage, index) for index in range(NUM_WORKERS)]
        play(stage, workers)
        for each in workers:
            assert isinstance(each.endings[0].error, LimitReached)
        assert cost(stage) == pytest.approx(60.0, rel=0.05)

    def test_few_requests_are_sent_for_it(self, stage: Stage) -> None:
        """The looks come more often only near the limit: far fewer than a heartbeat's."""
        num_looks = 0

        def hook(_number: int, method: str, key: str, _process: Process) -> None:
            nonlocal num_looks
            num_looks += method.startswith("list") and key.endswith(layout.WORKERS)

        stage.network.hook = hook
        play(stage, [start(stage, index) for index in range(NUM_WORKERS)])
        beats = sum(each.beat for each in records(stage).values())
        assert NUM_WORKERS <= num_looks < beats / 4


class TestHours:
    def test_time_in_which_nobody_ran_is_not_counted(self, stage: Stage) -> None:
        """The first start lasts 5 minutes, and dies; after two hours two workers have the other 7."""
        first = start(stage, 0, **HOURLY)
        let_pass(stage, 300)
        first.process.kill()
        let_pass(stage, 7200)
        began = stage.scheduler.now
        again = [start(stage, 0, **HOURLY), start(stage, 1, **HOURLY)]
        play(stage, again)
        for each in again:
            assert isinstance(each.endings[0].error, LimitReached)
            assert "--max-hours is 0.2" in each.endings[0].error.message
        assert stage.scheduler.now - began == pytest.approx(720 - 300, rel=0.05)

    def test_it_needs_no_price(self, stage: Stage) -> None:
        worker = start(stage, 0, **{**HOURLY, "price_per_hour": None})
        play(stage, [worker])
        assert isinstance(worker.endings[0].error, LimitReached)
        assert stage.scheduler.now == pytest.approx(720, rel=0.05)


def test_a_run_that_is_done_before_its_cost_is_noticed_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Cost is looked at once a second, and this run takes less."""
    logging.disable(logging.NOTSET)
    with Stage([["row"]]) as stage:
        stage.engine.load_seconds = stage.engine.row_seconds = 0.01
        ending = stage.run(price_per_hour=3600.0, max_cost=0.01, lease_seconds=24.0)
        assert ending.is_success
        assert ending.result["run_cost"] > ending.result["max_cost"]
    assert "more than --max-cost $0.01: its work was done before" in caplog.text
