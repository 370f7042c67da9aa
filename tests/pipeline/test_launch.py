"""`batchinfer launch`: real workers on a stand-in for Slurm, and what is refused before anything is started."""

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

import fake_slurm
from batchinfer.check.examination import CheckConfig
from batchinfer.cli import main
from batchinfer.clusters import Plan, find_launches, name_of, new_id, record_launch, slurm
from batchinfer.core.clock import Clock
from batchinfer.core.errors import ConfigError
from batchinfer.core.prices import Machine
from batchinfer.core.records import Money
from batchinfer.pipeline import launch
from batchinfer.runs.launched import with_launches
from batchinfer.runs.overview import Overview, Rate, WorkerView
from batchinfer.runs.status import RunConfig, run_status
from batchinfer.storage.opening import open_store
from engine_contract import is_running
from making import ECHO, Call, make_job, run_process, wait_for

SLOW = (
    *("--echo-latency-seconds", "0.3", "--max-num-seqs", "4", "--lease-seconds", "3"),
    *("--grace-seconds", "1", "--checkpoint-seconds", "1"),
)


def other(run: Path, **changes: Any) -> Plan:
    """A launch of the run that another command made."""
    own = {"id": (identity := new_id(1.0)), "name": name_of(identity, str(run)), "workers": 1}
    return Plan(on="slurm", job="", run=str(run), model="", **own | changes)


def recorded(run: Path, *, is_old: bool = True, **changes: Any) -> Plan:
    """`other`, whose record lies in the run, for long if `is_old`."""
    plan = other(run, **changes)
    record_launch(open_store(str(run)), plan)
    if is_old:
        os.utime(run / f"launches/{plan.id}.json", (1, 1))
    return plan


def overview(run: Path, launch: str, state: str, reason: str = "", cost: float = 0.0) -> Overview:
    """What `status` sees of a run of which one worker is known, the first one of a launch."""
    store = open_store(str(run))
    seen = run_status(RunConfig(run=store.url), open_store=open_store, clock=Clock())
    money = Money(cost=cost)
    facts = {"id": f"{launch}-00000", "state": state, "reason": reason, "money": money}
    facts |= {"nonce": "", "machine": Machine("", "", "", 1, is_spot=False), "recent": Rate()}
    times = ("started", "heartbeat", "heartbeat_age_seconds", "clock_offset_seconds")
    worker = WorkerView(**facts, **dict.fromkeys(times, 0.0))
    own = {"workers": [worker], "launches": [], "cost": replace(seen.cost, so_far=cost)}
    return with_launches(replace(seen, **own), store)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of 60 rows for two workers, and a Slurm that runs them here."""
    fake_slurm.install(tmp_path / "bin")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(launch, "WATCH_SECONDS", 0.2)
    make_job(tmp_path / "job", rows=60, per_chunk=10, workers=2)
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "job"
    for task in fake_slurm.tasks():
        subprocess.run(["scancel", f"--name={task['name']}"], check=True)
    wait_for(lambda: not alive())


def alive() -> list[int]:
    """Ids of the processes of tasks of the fake Slurm that still run."""
    return [task["pid"] for task in fake_slurm.tasks() if is_running(task["pid"])]


def states() -> list[str]:
    return [task["state"] for task in fake_slurm.tasks()]


def worker_of(task: dict[str, Any]) -> int:
    """Id of the worker's process of a task: the child of its script."""
    children = (Path("/proc") / f"{task['pid']}/task/{task['pid']}/children").read_text()
    return int(children.split()[0])


def rows_done(run: Path) -> int:
    return sum(
        len(path.read_bytes().splitlines()) for path in run.glob("checkpoints/*/*.jsonl")
    ) + 10 * len(list(run.glob("outputs/*.succeed")))


def launching_of(job: Path, *options: str) -> tuple[str, ...]:
    return ("launch", str(job), "--run", str(job / "runs/a"), "--on", "slurm", *ECHO, *options)


def share_of(job: Path, identity: str) -> float | None:
    return find_launches(open_store(str(job / "runs/a")))[0][identity][0].share


def launched(call: Call, run: Path) -> list[dict[str, Any]]:
    return call("status", str(run), "--json").result["launches"]


# --------------------------------------------------------------------------- workers that run


def test_launched_workers_do_the_job(job, call, tmp_path):
    """Workers get texts of files as ``<(printf …)``, which can be read only once."""
    run = job / "runs/a"
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("no run is here yet")
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    files = [f"--tools={tmp_path}/tools.json", f"--json-schema={tmp_path}/schema.json"]
    done = call(*launching_of(job, "--workers", "2", "--as-chat", *files))
    assert done.status == 0, done.err
    wait_for(lambda: states() == ["COMPLETED", "COMPLETED"])
    verified = call("verify", str(run))
    assert (verified.status, verified.result["rows_ok"]) == (0, 60)
    seen = call("status", str(run), "--json").result
    (view,) = seen["launches"]
    assert (view["workers"], view["away"], view["lost"]) == (2, {}, [])
    names = {worker["id"] for worker in seen["workers"]}
    assert names == {f"{done.result['launch']}-0000{rank}" for rank in (0, 1)}
    body = json.loads((run / "run.json").read_text())["config"]["prompt"]["body"]
    assert body.keys() == {"tools", "response_format"}
    assert not list(Path().iterdir())
    recorded(run)  # a launch whose worker never came is not lost, since nothing is left to do
    assert [view["lost"] for view in launched(call, run)] == [[], []]


def test_watch_starts_a_worker_again_that_was_killed_until_the_run_is_done(job, call):
    run = job / "runs/a"

    def kill_one() -> None:
        wait_for(lambda: rows_done(run))
        os.kill(worker_of(fake_slurm.tasks()[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    done = call(*launching_of(job, "--workers", "2", *SLOW, "--watch"))
    killer.join()
    assert done.status == 0, done.err
    assert done.result["rows_done"] == 60
    assert "1 lost" in done.err
    assert "away: 0 (gone; slurm: FAILED" in done.err
    assert "\ndone: 60 of 60 rows" in done.err
    wait_for(lambda: not alive())
    # On a busy machine one comes when all is done, and is cancelled.
    assert states()[0] == "FAILED"
    wait_for(lambda: {*states()[1:]} <= {"COMPLETED", "CANCELLED"})
    assert call("verify", str(run)).result["rows_ok"] == 60
    assert sorted(len(one["replaces"]) for one in launched(call, run)) == [0, 1]


def test_a_launch_is_stopped_and_cancelled_and_can_be_made_again(job, tmp_path, call):
    run = job / "runs/a"
    call(*launching_of(job, "--workers", "2", *SLOW))
    wait_for(lambda: len(list(run.glob("workers/*.stats.json"))) == 2)
    recorded(run)  # Slurm does not know its worker
    stopped = call("stop", str(run), "--cancel")
    assert (stopped.status, stopped.result["left"]) == (0, [])
    wait_for(lambda: not alive())
    assert set(states()) <= {"CANCELLED", "FAILED"}  # some saw stop.json first
    refused = call(*launching_of(job, "--workers", "2"))
    assert refused.status == 2
    assert "stop RUN --resume" in refused.err
    assert len(states()) == 2
    assert call("stop", str(run), "--resume").status == 0
    lacking = call(*launching_of(job))  # what somebody cancelled is not started by itself
    assert "--workers: is missing" in lacking.err
    for task in tmp_path.glob("slurm/*.json"):  # nor when Slurm has forgotten it
        task.unlink()
    for record in run.glob("launches/*"):
        os.utime(record, (1, 1))
    again = call(*launching_of(job, "--workers", "2"))
    assert (again.status, again.result["replaces"]) == (0, [])
    wait_for(lambda: states() == ["COMPLETED", "COMPLETED"])
    assert call("verify", str(run)).status == 0


@pytest.fixture
def queued(job, tmp_path):
    """A worker of another launch that stays in Slurm's queue, as its first task."""
    name = recorded(job / "runs/a", is_old=False).name
    waits = {"job": 0, "index": 0, "name": name, "pid": 0, "state": "PENDING"}
    (tmp_path / "slurm/0000-0000.json").write_text(json.dumps(waits))


@pytest.mark.usefixtures("queued")
def test_a_watch_cancels_workers_that_would_come_after_the_end(job, call):
    """They were rented to find that nothing is left to do."""
    done = call(*launching_of(job, "--workers", "1", "--watch"))
    assert done.status == 0, done.err
    assert states()[0] == "CANCELLED"


def test_a_watch_gives_up_and_a_forged_record_makes_it_start_no_more_than_the_job_has_manifests(
    job, call, monkeypatch
):
    """Without a check, too."""
    recorded(job / "runs/a", workers=500)
    monkeypatch.setenv("FAKE_SLURM_FATE", "broken")
    monkeypatch.setattr(launch, "WATCH_SECONDS", 0.01)
    done = call(*launching_of(job, "--workers", "1", "--no-check", "--watch"))
    assert done.status == 3
    assert "were started again and again, and no row was finished since" in done.err
    # A new worker and two in lost ones' places; pauses of 1, 2, 4, 8 and 16 minutes: half an hour in all.
    started = Counter(task["name"] for task in fake_slurm.tasks())
    assert sorted(started.values()) == [*[2] * 5, 1 + 2]


LIMIT = ("--max-hours", "1e-5", "--echo-latency-seconds", "2")


def test_a_watch_ends_when_its_workers_stop_by_a_rule(job, call):
    done = call(*launching_of(job, "--workers", "2", *SLOW, *LIMIT, "--watch"))
    assert done.status == 3
    assert "no worker is left (LimitReached" in done.err
    assert len(states()) == 2


def test_a_watch_looks_again_before_it_says_that_no_worker_is_left(job, call, monkeypatch):
    """All may have come and ended after it read their records, and before it asked the cluster."""
    looks = []

    def nobody_at_first(*arguments: Any, **options: Any) -> Overview:
        seen = run_status(*arguments, **options)
        looks.append(seen)
        nobody = [replace(each, coming=0, lost=[]) for each in seen.launches]
        return seen if len(looks) > 1 else replace(seen, workers=[], launches=nobody)

    monkeypatch.setattr(launch, "run_status", nobody_at_first)
    done = call(*launching_of(job, "--workers", "1", "--watch"))
    assert done.status == 0, done.err


def test_no_lost_worker_is_started_again_beyond_a_limit_or_while_the_run_stops():
    made = Mock(_began=0.0, _num_manifests=9, **{"_clock.now.return_value": 3600.0})
    cases = ("running", 2, 2, 1), ("running", 1, 2, 0), ("running", 2, 1, 0), ("stopping", 2, 2, 0)
    for state, max_cost, max_hours, expected in cases:
        made._options = {"max_cost": max_cost, "max_hours": max_hours}
        seen = Mock(state=state, launches=[Mock(lost=["w"])], **{"cost.so_far": 1.0})
        assert len(launch.Launch._restartable(made, seen)) == expected


@pytest.mark.usefixtures("queued")
def test_a_watch_ends_when_the_run_is_stopped_although_a_worker_is_still_to_come(job, call):
    run = job / "runs/a"

    def stop() -> None:
        wait_for(lambda: rows_done(run))
        assert run_process(["stop", str(run)]).status == 0

    with ThreadPoolExecutor(1) as threads:
        stopped = threads.submit(stop)
        done = call(*launching_of(job, "--workers", "1", *SLOW, "--watch"))
        stopped.result()
    assert done.status == 3
    # Perhaps without a reason: a worker writes it a moment after its lease is closed.
    assert "runs/a: is stopped, and no worker is left" in done.err
    assert states()[0] == "PENDING"


# --------------------------------------------------------------------------- workers that are away


STOPPED = "Interrupted: stopped by SIGTERM"
AWAY = [
    # state and reason in the worker's record, what Slurm says; whether it is away, lost, and to come
    ("stopped", STOPPED, "PENDING", (1, 0, 1)),
    ("stopped", STOPPED, "FAILED", (1, 1, 0)),
    ("stopped", STOPPED, "CANCELLED", (1, 0, 0)),
    ("stopped", "LimitReached: $3", "FAILED", (0, 0, 0)),
    ("failed", "EngineDied: x", "REQUEUED", (1, 0, 1)),
    ("failed", "EngineDied: x", "NODE_FAIL", (1, 1, 0)),
    ("failed", "ConfigError: x", "FAILED", (1, 0, 0)),
    ("gone", "", "OUT_OF_MEMORY", (1, 1, 0)),
    ("gone", "", "RUNNING", (1, 0, 1)),
    ("running", "", "FAILED", (0, 0, 0)),
]


@pytest.mark.parametrize(("state", "reason", "says", "numbers"), AWAY)
def test_a_worker_that_did_not_come_back_is_told_from_one_that_will(
    state, reason, says, numbers, job, tmp_path
):
    """Those that a signal had stopped were not shown at all, whether they were queued again or gone for good."""
    plan = recorded(job / "runs/a")
    if says:
        task = {"job": 1, "index": 0, "name": plan.name, "pid": 0, "state": says}
        (tmp_path / "slurm/0001-0000.json").write_text(json.dumps(task))
    (view,) = overview(job / "runs/a", plan.id, state, reason).launches
    assert (len(view.away), len(view.lost), view.coming) == numbers
    for said in view.away:
        assert said.startswith(state)
        assert says in said


def test_workers_of_a_new_launch_may_be_unknown_to_the_cluster_for_a_while(job, call, monkeypatch):
    """If the cluster cannot be asked, that is a note, and no worker is lost."""
    run = job / "runs/a"
    recorded(run, is_old=False)
    (view,) = launched(call, run)
    assert (view["lost"], view["coming"]) == ([], 1)
    os.utime(next(run.glob("launches/*")), (1, 1))
    (view,) = launched(call, run)
    assert (len(view["lost"]), view["coming"]) == (1, 0)
    assert view["away"] == {"never seen; slurm: not known there": [0]}
    monkeypatch.setenv("PATH", "/nowhere")
    seen = call("status", str(run), "--json").result
    assert "slurm cannot be asked here: squeue: is not on the PATH" in " ".join(seen["notes"])
    assert (seen["launches"][0]["lost"], seen["launches"][0]["coming"]) == ([], 1)


# --------------------------------------------------------------------------- what would be submitted


def test_what_a_dry_run_prints_is_what_launch_would_submit_but_for_passwords(call):
    """Values in queries were masked, so workers got another prompt, and an endpoint no version of its API."""
    url, cited = "https://host/v1?api-version=2024", "cite https://example.com/?id=7"
    options = ("s3://b/job", "--run", "s3://b/job/r", "--on", "slurm", "--workers", "2")
    options += ("--spot", "--max-cost", "9", "--price-per-hour", "1")
    options += ("--engine", "openai", "--model", "m", "--system-prompt", cited, "--dry-run")
    shown = call("launch", *options, "--base-url", url)
    assert (shown.status, shown.err) == (0, "")
    for said in (url, cited, "_SPOT=1", "--max-cost 4.5"):  # each worker's share of the budget
        assert said in shown.out
    hidden = call("launch", *options, "--base-url", url.replace("host", "me:hush@host"))
    assert "hush" not in hidden.out + hidden.err
    assert url.replace("host", "…@host") in hidden.out
    assert "secrets of URLs are shown as …" in hidden.err


def test_lost_workers_are_started_again_for_what_they_have_left_of_their_shares(
    job, call, monkeypatch
):
    """The price that counts is that of --gpu: `check` asked for one of the machine here, and launched nothing."""
    budget = ("--max-cost", "9", "--gpu", "L4")
    monkeypatch.setenv("FAKE_SLURM_FATE", "broken")
    first = call(*launching_of(job, "--workers", "2", *budget)).result["launch"]
    seen = overview(job / "runs/a", first, "failed", cost=1.5)
    assert seen.launches[0].left == 7.5
    monkeypatch.setattr(launch, "run_status", lambda *_, **__: seen)
    again = call(*launching_of(job, *budget)).result["launch"]
    assert share_of(job, again) == 3.75


def test_workers_that_are_added_get_a_budget_that_is_neither_spent_nor_given_to_others(
    job, call, monkeypatch
):
    """They got what was not spent, so the run could cost about twice as much; a spent budget still bought machines."""
    plan = recorded(job / "runs/a", is_old=False, workers=2, share=2.5)

    def with_cost(cost: float) -> None:
        seen = overview(job / "runs/a", plan.id, "running", cost=cost)
        monkeypatch.setattr(launch, "run_status", lambda *_, **__: seen)

    def add(most: str) -> Any:
        return call(*launching_of(job, "--workers", "1", "--max-cost", most, "--gpu", "L4"))

    with_cost(0.5)
    refused = add("5")
    assert (refused.status, states()) == (2, [])
    assert "the run has cost $0.50, and its workers may spend $4.50 more" in refused.err
    with_cost(9.5)
    assert add("7").status == 2
    with_cost(0.5)
    added = add("9").result["launch"]
    assert share_of(job, added) == 4


def test_the_model_must_fit_each_accelerator_of_the_template(tmp_path, call, monkeypatch):
    """Without --gpu the memory was not looked at, and SkyPilot takes the cheapest of them."""
    asked: list[CheckConfig] = []
    monkeypatch.setattr(launch, "examine", asked.append)
    places = ("memory://x/job", "--run", "memory://x/job/runs/a", "--on", "skypilot")
    template = tmp_path / "mine.yaml"
    template.write_text("resources: {accelerators: [L4, 'A100:2', TPU-v5:4]}")
    for more in ((), ("--gpu", "H100:8"), ("--template", str(template))):
        call("launch", *places, "--model", "org/m", *more)
    assert [one.options["gpu"] for one in asked] == [
        "L4:1,A10G:1,L40S:1,A100:1,A100-80GB:1,H100:1",
        "H100:8",
        "L4:1,A100:2",
    ]


# --------------------------------------------------------------------------- records, races, lost answers


@pytest.mark.parametrize(
    ("fate", "is_there"), [("refused", False), ("silent", False), ("lost", True)]
)
def test_a_launch_stays_on_record_if_the_cluster_has_got_it(fate, is_there, job, call, monkeypatch):
    """An empty answer of sbatch counted as a job; a lost answer left workers that nobody could name."""
    run = job / "runs/a"
    monkeypatch.setenv("FAKE_SLURM_FATE", fate)
    done = call(*launching_of(job, "--workers", "2", *SLOW))
    assert done.status == 2
    assert "sbatch" in done.err
    found, _ = find_launches(open_store(str(run)))
    assert bool(found) == is_there
    assert bool(states()) == is_there
    if is_there:
        assert f"if workers are there: batchinfer status {run}" in done.err
        wait_for(lambda: len(list(run.glob("workers/*.stats.json"))) == 2)
        assert call("stop", str(run), "--cancel").result["left"] == []
        wait_for(lambda: not alive())


def test_of_two_launches_at_once_at_most_one_starts_workers(job, call, monkeypatch):
    """The record of the other would make workers that never came, also where the cluster does not answer."""
    store, plan = open_store(str(job / "runs/a")), other(job / "runs/a")

    def after_the_other(*arguments: Any) -> None:
        record_launch(store, plan)
        record_launch(*arguments)

    monkeypatch.setattr(launch, "record_launch", after_the_other)
    monkeypatch.setattr(slurm, "look", Mock(side_effect=ConfigError("failed")))
    done = call(*launching_of(job, "--workers", "2"))
    assert done.status == 2
    assert f"another launch was made meanwhile ({plan.id})" in done.err
    assert set(find_launches(store)[0]) == {plan.id}
    assert not states()


@pytest.mark.parametrize("options", [["--cancel"], []])
def test_workers_that_are_submitted_while_the_run_is_stopped_are_cancelled(
    job, call, monkeypatch, options
):
    """`stop --cancel` may look for them before they are there."""
    submit = slurm.submit

    def after_stop(plan: Plan) -> None:
        assert main.main(["stop", plan.run, *options]) == 0
        submit(plan)

    monkeypatch.setattr(slurm, "submit", after_stop)
    done = call(*launching_of(job, "--workers", "2"))
    assert done.status == 2
    assert "was stopped meanwhile, so the workers were cancelled" in done.err
    [(record, _)] = find_launches(open_store(str(job / "runs/a")))[0].values()
    assert record.is_cancelled
    assert len(states()) == 2
    wait_for(lambda: set(states()) <= {"CANCELLED", "FAILED"})  # some saw stop.json first
