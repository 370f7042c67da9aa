"""A rehearsal of --max-cost with real processes, kills and restarts among them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.records import Worker
from batchinfer.ledger.spending import up_seconds_of
from batchinfer.storage.opening import open_store
from making import finish_process, make_job, run_process, run_worker_process, start_process
from making import worker_arguments as arguments_of

DOLLARS_A_SECOND = 1.0
PRICE = ("--price-per-hour", str(3600 * DOLLARS_A_SECOND))
QUICK = ("--lease-seconds", "2", "--echo-load-seconds", "0.5", "--max-num-seqs", "4")
SLOW_ROWS = ("--echo-latency-seconds", "0.2")


def cost_of(run: Path) -> float:
    """Dollars, by the seconds of all workers' records."""
    store, total = open_store(str(run)), 0.0
    for info in store.list(layout.WORKERS):
        record = codec.decode(store.get(info.key).data, Worker, name=info.key)
        total += DOLLARS_A_SECOND * up_seconds_of(record)
    return total


def rehearse(
    folder: Path, *, num_workers: int, max_cost: float, rows: int, tolerance: float
) -> None:
    """Kill a third of the workers while they load or work, start half of these again, and let all reach the limit."""
    near = pytest.approx(max_cost, rel=tolerance)
    job, run = folder / "job", folder / "run"
    make_job(job, rows=rows, per_chunk=200, workers=num_workers)

    def start(index: int, limit: float):
        options = (*PRICE, *QUICK, *SLOW_ROWS, "--worker-id", f"w{index}")
        limits = ("--max-cost", str(limit))
        return start_process(arguments_of(job, run, *options, *limits, index=index))

    living = [start(index, max_cost) for index in range(num_workers)]
    victims = living[:: max(2, num_workers // 3)]
    while len(list(open_store(str(run)).list(layout.WORKERS))) < num_workers:
        time.sleep(0.05)
    for index, victim in enumerate(victims):
        time.sleep(0.3)
        victim.kill()
        finish_process(victim)
        if index % 2 == 0:
            living.append(start(living.index(victim), max_cost))
    for process in living:
        if process in victims:
            continue
        ended = finish_process(process)
        assert ended.status == 3, ended.stderr
        assert "the run has cost $" in ended.result["reason"]
        assert "higher limit" in ended.stderr
        assert ended.result["run_cost"] == near
    assert cost_of(run) == near
    status = run_process(["status", str(run)])
    assert status.result["cost"] == near
    assert status.result["max_cost"] == max_cost
    assert "(--max-cost)" in status.stderr


def test_two_workers_stop_at_the_limit_and_go_on_with_a_higher_one(tmp_path: Path) -> None:
    rehearse(tmp_path, num_workers=2, max_cost=10.0, rows=1600, tolerance=0.5)
    job, run = tmp_path / "job", tmp_path / "run"
    same = run_worker_process(job, run, *PRICE, "--max-cost", "10")
    assert same.status == 3
    assert "loading" not in same.stderr
    assert run_worker_process(job, run, *PRICE, "--max-cost", "1000").status == 0
    assert run_process(["verify", str(run)]).status == 0


@pytest.mark.slow
def test_eight_workers_stop_at_the_limit(tmp_path: Path) -> None:
    rehearse(tmp_path, num_workers=8, max_cost=240.0, rows=20_000, tolerance=0.05)


def test_without_a_price_the_worker_is_refused_before_it_loads(tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=4, per_chunk=2)
    ended = run_worker_process(tmp_path / "job", tmp_path / "run", "--max-cost", "5")
    assert ended.status == 2
    assert "no price of this machine is known" in ended.stderr
    assert "--price-per-hour" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_run_refuses_it_before_anything_is_written(tmp_path: Path) -> None:
    source, dest = tmp_path / "a.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt": "x"}\n')
    command = ["run", str(source), "-o", str(dest), "--engine", "echo", "--max-cost", "5"]
    ended = run_process(command)
    assert ended.status == 2
    assert "--price-per-hour" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    ended = run_process([*command, *PRICE])
    assert ended.status == 0
    assert 0 < ended.result["worker"]["run_cost"] < 5


def test_a_run_that_stops_at_its_limit_goes_on_with_a_higher_one(tmp_path: Path) -> None:
    source, dest = tmp_path / "a.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(200)))
    command = ["run", str(source), "-o", str(dest), "--engine", "echo", *PRICE, *QUICK]
    ended = run_process([*command, *SLOW_ROWS, "--max-cost", "6", "--grace-seconds", "0"])
    assert ended.status == 3
    assert not dest.exists()
    ended = run_process([*command, "--max-cost", "1000"])
    assert ended.status == 0
    assert ended.result["worker"]["rows_resumed"] > 0
    assert len(dest.read_text().splitlines()) == 200


@pytest.mark.parametrize("number", ["nan", "0", "-1", "inf", "much"])
def test_a_limit_that_is_no_number_above_0_is_refused(tmp_path: Path, number: str) -> None:
    from click.testing import CliRunner

    from batchinfer.worker.command import command

    for option in ("--max-cost", "--max-hours"):
        found = CliRunner().invoke(command, [option, number])
        assert found.exit_code == 2
        assert option in found.output
