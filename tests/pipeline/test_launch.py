"""`batchinfer launch`: real workers of this machine, and what is refused before anything is started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchinfer.check.steps import CheckWorld
from batchinfer.cli import main
from batchinfer.clusters import Plan, find_cluster
from batchinfer.clusters.launches import find_launches, record_launch, record_submission
from batchinfer.clusters.local import _supervisors
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import StorageError
from batchinfer.core.prices import Machine, Price
from batchinfer.pipeline import launching
from batchinfer.pipeline.launching import Launch, LaunchConfig
from batchinfer.storage.opening import open_store
from making import ECHO, make_job

SLOW = (
    "--echo-latency-seconds",
    "0.3",
    "--max-num-seqs",
    "4",
    "--lease-seconds",
    "3",
    "--grace-seconds",
    "1",
)
WAIT_SECONDS = 120.0


class Outcome:
    """Exit status, result and messages of one command."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.result: dict[str, Any] = json.loads(out.splitlines()[-1]) if out.strip() else {}
        self.err = err


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def called(*arguments: str) -> Outcome:
        status = main.main(arguments)
        return Outcome(status, *capfd.readouterr())

    return called


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_job(tmp_path / "job", rows=60, per_chunk=10, workers=2)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "job"
    for folder in tmp_path.glob("batchinfer-launches/*"):
        find_cluster("local").cancel({"folder": str(folder)})
        wait_for(lambda folder=folder: not processes_of(folder.name))


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, at most WAIT_SECONDS."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def processes_of(launch: str) -> list[int]:
    """Ids of the worker processes of a launch."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"BATCHINFER_LAUNCH={launch}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def states_of(launched: Outcome) -> list[dict[str, Any]]:
    path = Path(launched.result["handle"]["folder"]) / "state.json"
    return json.loads(path.read_bytes()) if path.exists() else []


def is_done(launched: Outcome) -> bool:
    return [one["state"] for one in states_of(launched)] == ["done", "done"]


def rows_done(run: Path) -> int:
    return sum(
        len(path.read_bytes().splitlines()) for path in run.glob("checkpoints/*/*.jsonl")
    ) + 10 * len(list(run.glob("outputs/*.succeed")))


def test_launched_workers_do_the_job_and_one_that_is_killed_comes_back(
    job: Path, call: Callable[..., Outcome]
) -> None:
    run = job / "runs/a"
    launched = call(
        "launch", str(job), "--run", str(run), "--on", "local", "--workers", "2", *ECHO, *SLOW,
        "--checkpoint-seconds", "1",
    )  # fmt: skip
    assert launched.status == 0, launched.err
    wait_for(lambda: rows_done(run))
    victim = states_of(launched)[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: is_done(launched))
    states = states_of(launched)
    assert states[0]["starts"] == 2
    assert states[1]["starts"] == 1
    verified = call("verify", str(run))
    assert verified.status == 0, verified.err
    assert verified.result["rows_ok"] == 60
    seen = call("status", str(run), "--json").result
    (view,) = seen["launches"]
    assert (view["expected"], view["seen"], view["not_seen"]) == (2, 2, {})
    names = {worker["id"] for worker in seen["workers"]}
    assert names == {f"{launched.result['launch']}-0000{rank}" for rank in (0, 1)}


def test_a_launch_is_stopped_and_cancelled_and_can_be_made_again(
    job: Path, call: Callable[..., Outcome]
) -> None:
    run = job / "runs/a"
    arguments = ("launch", str(job), "--run", str(run), "--on", "local", "--workers", "2", *ECHO)
    launched = call(*arguments, *SLOW)
    wait_for(lambda: len(list(run.glob("workers/*.json"))) == 2)
    stopped = call("stop", str(run), "--cancel")
    assert stopped.status == 0
    assert stopped.result["stopped"]
    wait_for(lambda: not processes_of(launched.result["launch"]))
    wait_for(lambda: {one["state"] for one in states_of(launched)} == {"cancelled"})
    assert call("stop", str(run), "--cancel").result["left"] == []
    assert call("stop", str(run), "--resume").status == 0
    again = call(*arguments)
    wait_for(lambda: is_done(again))
    assert call("verify", str(run)).status == 0
    seen = call("status", str(run), "--json").result
    assert [view["seen"] for view in seen["launches"]] == [2, 2]


def test_status_shows_workers_that_failed_before_they_could_say_so(
    job: Path, call: Callable[..., Outcome]
) -> None:
    """A worker that cannot even begin leaves no record; only its cluster knows of it."""
    run = job / "runs/a"
    launched = call(
        "launch", str(job), "--run", str(run), "--on", "local", "--workers", "2", *ECHO,
        "--env", "BATCHINFER_WORKER_MAX_TOKENS=none-such", "--no-check",
    )  # fmt: skip
    wait_for(lambda: [one["state"] for one in states_of(launched)] == ["failed", "failed"])
    seen = call("status", str(run), "--json").result
    (view,) = seen["launches"]
    assert (view["expected"], view["seen"]) == (2, 0)
    assert view["not_seen"] == {"failed (ended with exit status 2)": 2}
    shown = call("status", str(run))
    assert "2 workers on local" in shown.err
    assert "2 never seen: failed (ended with exit status 2)" in shown.err


def rows_file(path: Path, first: int, count: int) -> str:
    lines = (json.dumps({"prompt": f"row {first + number}"}) for number in range(count))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_data_set_is_split_first_and_its_job_grows_with_it(
    tmp_path: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [rows_file(tmp_path / "a.jsonl", 0, 30)]
    job, run = tmp_path / "job", tmp_path / "job/runs/a"

    def launch(*options: str) -> Outcome:
        common = ("--run", str(run), "--workers", "2", *ECHO)
        return call("launch", *data, *common, *(options or ("--on", "local")))

    shown = launch("--on", "local", "--dry-run")
    assert "a.jsonl: 30 rows, split into the job" in shown.err
    assert not (job / "job.json").exists()
    # The cluster refuses, when the data set is split already. The next command takes the job that is there.
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\necho refused >&2; exit 1\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        assert launch("--on", "slurm").status == 2
    made = (job / "job.json").read_bytes()
    first = launch()
    assert first.status == 0, first.err
    wait_for(lambda: is_done(first))
    assert (job / "job.json").read_bytes() == made
    assert len(list(job.glob("manifests/worker-*"))) == 2

    data.append(rows_file(tmp_path / "b.jsonl", 30, 20))
    assert "new files are appended" in launch("--on", "local", "--dry-run").err
    second = launch()
    wait_for(lambda: is_done(second))
    verified = call("verify", str(run))
    assert (verified.status, verified.result["rows_ok"]) == (0, 50)

    data[:] = [rows_file(tmp_path / "c.jsonl", 7, 9)]
    other = launch("--on", "local", "--dry-run")
    assert other.status == 2
    assert "holds a finished job that differs in the source's files" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "--run", "job/runs/b"], "no job.json there, and no data set either"),
        (["missing", "--run", "answers"], "no job.json there"),
        (["data.jsonl", "--run", "answers"], "say where its job goes: --job URL"),
        (["job", "--job", "other", "--run", "answers"], "is a job already"),
        (["data.jsonl", "--run", "new/runs/a", "--workers", "9"], "the data set has 3 rows"),
        (["data.jsonl", "--run", "new/runs/a", "--on", "skypilot"], "cannot reach a folder"),
        (["data.jsonl", "--run", "new/runs/a", "--prompt-column", "text"], "would not work"),
    ],
)
def test_a_data_set_that_cannot_be_launched_is_refused_before_it_is_split(
    arguments: list[str], message: str, job: Path, call: Callable[..., Outcome], tmp_path: Path
) -> None:
    rows_file(tmp_path / "data.jsonl", 0, 3)
    done = call("launch", "--on", "local", "--workers", "1", *ECHO, *arguments)
    assert done.status == 2
    assert message in done.err
    assert not (tmp_path / "new/job.json").exists()


def test_ranks_split_and_collect_what_one_process_would(
    tmp_path: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "a.jsonl", 0, 60)
    shape = ("--num-chunks", "6", "--num-workers", "2")
    assert call("split", "a.jsonl", "--output", "one", *shape).status == 0

    def launch(*options: str) -> Outcome:
        return call("launch", *options[:2], "--on", "local", "--workers", "2", *options[2:])

    words = ("--", "a.jsonl", "--output", "many", *shape)
    shown = launch("--what", "split", "--dry-run", *words)
    assert shown.status == 0, shown.err
    assert len(shown.result["submission"].splitlines()) == 2
    assert not Path("many").exists()
    split = launch("--what", "split", *words)
    assert split.result["cancel"].endswith(f"--cancel {split.result['handle']['folder']}")
    assert f"no record is kept of them; cancel them with: {split.result['cancel']}" in split.err
    wait_for(lambda: is_done(split))
    assert files_below(tmp_path / "many") == files_below(tmp_path / "one")
    worker = ("worker", "--job", "many", "--output", "run", *ECHO)
    refused = launch("--what", "collect", "--", "run", "table", "--shard-rows", "10")
    assert (refused.status, "no run" in refused.err or "no such run" in refused.err) == (2, True)
    assert call(*worker).status == 0
    assert call("collect", "run", "alone", "--shard-rows", "10").status == 0
    collect = launch("--what", "collect", "--", "run", "table", "--shard-rows", "10")
    wait_for(lambda: is_done(collect))
    assert files_below(tmp_path / "table") == files_below(tmp_path / "alone")


def files_below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        (["--what", "split", "--model", "x"], ["a"], "--model: is an option of workers"),
        (["--what", "split", "--run", "x"], ["a"], "--run: is an option of workers"),
        (["--what", "split"], ["a.jsonl"], "Missing option '--output'"),
        (["--what", "split"], ["a.jsonl", "--output", "j", "--colums", "a"], "No such option"),
        (["--what", "split"], ["b.jsonl", "--output", "j"], "b.jsonl: no such file"),
        (["--what", "split"], ["a.jsonl", "--output", "j", "--rank", "0"], "launch gives them"),
        (["--what", "split"], ["a.jsonl", "--output", "j", "--append"], "--append: not together"),
        (["--what", "split", "--on", "ray"], ["a.jsonl", "--output", "s3://b/j"], "cannot reach"),
        (["--what", "collect"], ["run"], "is the only place that is named"),
        (["--what", "collect"], ["run", "out.csv"], "is no folder of a disk or bucket"),
        (["--what", "collect", "--workers", "9"], ["run", "out"], "the table has 1 file"),
        (["--workers", "2"], ["job"], "--run: is missing"),
        (["--workers", "2", "--run", "run"], [], "no job and no data set is named"),
    ],
)
def test_ranks_that_cannot_work_are_refused_before_they_start(
    options: list[str], words: list[str], message: str, job: Path, call: Callable[..., Outcome]
) -> None:
    rows_file(Path("a.jsonl"), 0, 3)
    assert call("worker", "--job", str(job), "--output", "run", *ECHO).status == 0
    done = call("launch", "--on", "local", "--workers", "2", *options, "--", *words)
    assert done.status == 2
    assert message in done.err
    assert not Path("batchinfer-launches").exists()


def test_a_second_launch_starts_the_workers_that_failed_again(
    job: Path, call: Callable[..., Outcome]
) -> None:
    run = job / "runs/a"
    arguments = ("launch", str(job), "--run", str(run), "--on", "local", *ECHO, "--no-check")
    broken = call(
        *arguments, "--workers", "1", "--env", "BATCHINFER_WORKER_MAX_TOKENS=none-such"
    )  # fmt: skip
    wait_for(lambda: [one["state"] for one in states_of(broken)] == ["failed"])
    failed = f"{broken.result['launch']}-00000"
    shown = call(*arguments, "--dry-run")
    assert (shown.result["workers"], shown.result["replaces"]) == (1, [failed])
    assert f"1 in place of workers that failed: {failed}" in shown.err
    refused = call(*arguments, "--workers", "2")
    assert refused.status == 2
    assert "--workers 2: the job has 2 worker manifests, and 1 that failed" in refused.err
    both = call(*arguments, "--workers", "1")
    assert (both.result["workers"], both.result["replaces"]) == (2, [failed])
    wait_for(lambda: is_done(both))
    assert call("verify", str(run)).result["rows_ok"] == 60
    seen = call("status", str(run), "--json").result
    figures = [(one["id"], one["failed"], one["relaunched"]) for one in seen["launches"]]
    assert figures == [(broken.result["launch"], [], 1), (both.result["launch"], [], 0)]
    assert "1 launched again" in call("status", str(run)).err
    assert "--workers: is missing" in call(*arguments).err


def test_workers_that_live_or_were_stopped_are_not_started_again(
    job: Path, call: Callable[..., Outcome]
) -> None:
    """The supervisor is killed, so the cluster calls its workers failed; their heartbeats say that they live."""
    run = job / "runs/a"
    arguments = ("launch", str(job), "--run", str(run), "--on", "local", *ECHO, *SLOW)
    launched = call(*arguments, "--workers", "2")
    wait_for(lambda: len(list(run.glob("workers/*.json"))) == 2)
    for pid in _supervisors(Path(launched.result["handle"]["folder"])):
        os.kill(pid, signal.SIGKILL)
    assert "--workers: is missing" in call(*arguments, "--no-check", "--dry-run").err
    assert call("stop", str(run), "--cancel").status == 0
    wait_for(lambda: not processes_of(launched.result["launch"]))
    assert "--workers: is missing" in call(*arguments, "--no-check", "--dry-run").err


def test_a_dry_run_starts_and_writes_nothing(job: Path, call: Callable[..., Outcome]) -> None:
    """What it prints is what would run: the lines are run here, as a user might."""
    run = job / "runs/a"
    shown = call(
        "launch", str(job), "--run", str(run), "--on", "local", "--workers", "2", *ECHO,
        "--system-prompt", "it's \"one\"", "--as-chat", "--dry-run",
    )  # fmt: skip
    assert shown.status == 0, shown.err
    assert not run.parent.exists()
    assert not Path("batchinfer-launches").exists()
    lines = shown.result["submission"].splitlines()
    assert len(lines) == 2
    for line in lines:
        subprocess.run(["bash", "-c", f"env {line}"], check=True, capture_output=True)
    assert call("verify", str(run)).result["rows_ok"] == 60


def test_workers_get_the_limit_with_the_price_that_is_known_here(
    job: Path, call: Callable[..., Outcome]
) -> None:
    def submission(*options: str) -> str:
        command = ["launch", str(job), "--run", str(job / "runs/a"), "--on", "local"]
        shown = call(*command, "--workers", "2", *ECHO, "--dry-run", "--no-check", *options)
        assert shown.status == 0, shown.err
        return shown.result["submission"]

    spot = submission("--max-cost", "9", "--gpu", "L4:2", "--spot")
    assert "--max-cost 9.0 --price-per-hour 0.7" in spot
    assert "BATCHINFER_SPOT=1" in spot
    assert "--price-per-hour 3.0" in submission("--max-cost", "9", "--price-per-hour", "3")
    assert "--price-per-hour" not in submission("--max-hours", "9", "--gpu", "L4:2")


@pytest.mark.parametrize(
    ("infra", "place"),
    [("aws/us-east-1", ("aws", "us-east-1")), ("gcp", ("gcp", "")), ("aws/*/a", ("aws", ""))],
)
def test_the_price_of_a_machine_is_looked_up_where_skypilot_is_to_start_it(
    infra: str, place: tuple[str, str]
) -> None:
    asked: list[Machine] = []

    def price(machine: Machine) -> Price:
        asked.append(machine)
        return Price(0.5, "a test")

    launch = Launch(
        LaunchConfig(
            sources=["s3://b/j"],
            run="s3://b/r",
            cluster="skypilot",
            gpu="L4:2",
            options={"infra": infra},
        ),
        {"max_cost": 9.0, "price_per_hour": None},
        open_store=open_store,
        world=cast("CheckWorld", SimpleNamespace(prices=SimpleNamespace(price=price))),
        clock=SystemClock(),
    )
    assert launch._price() == {"price_per_hour": 0.5}
    [machine] = asked
    assert (machine.cloud, machine.region, machine.accelerator, machine.gpus) == (*place, "L4", 2)


REFUSED = [
    (["--workers", "3"], "the job has 2 worker manifests", "--num-workers 3"),
    ([], "--workers: is missing", "--hours H"),
    (["--workers", "2", "--prompt-column", "promt"], "would not work", "nothing was submitted"),
    (
        ["--workers", "2", "--max-cost", "9", "--gpu", "none"],
        "no price of a worker's machine",
        "--price-per-hour",
    ),
    (["--workers", "2", "--name", "a\nb"], "--name 'a\\nb'", ""),
    (["--workers", "2", "--env", "x"], "expected NAME=VALUE", ""),
    (["--workers", "2", "--gpu", "L4:x"], "expected NAME or NAME:NUMBER", "--gpu L4:2"),
    (
        ["--workers", "2", "--nnodes", "2", "--master-addr", "10.0.0.1"],
        "--nnodes: a worker that is launched runs on one machine",
        "--num-nodes 2 worker.yaml",
    ),
    (["--workers", "2", "--headless"], "--headless: a worker that is launched", ""),
    (["--workers", "2", "--gpu", "L4\nx"], "expected NAME or NAME:NUMBER", "--gpu L4:2"),
    (
        ["--workers", "2", "--secret", "NO_SUCH_TOKEN"],
        "--secret NO_SUCH_TOKEN: has no value",
        "export NO_SUCH_TOKEN=",
    ),
    (["--workers", "2", "--gpu", "L4:0"], "expected NAME or NAME:NUMBER", "--gpu L4:2"),
    (
        [
            "--workers",
            "2",
            "--gpu",
            "none",
            "--cluster-option",
            "log-dir=/dev/null/logs",
            "--no-check",
        ],
        "cannot be made",
        "name a folder",
    ),
    (
        ["--workers", "2", "--cluster-option", "log_dirs=x"],
        "no such option",
        "did you mean 'log-dir'?",
    ),
    (["--workers", "2", "--on", "kubernetes"], "cannot reach a folder of this machine", "bucket"),
    (["--workers", "2", "--on", "skypilot"], "cannot reach a folder of this machine", "bucket"),
    (["--workers", "2", "--on", "lokal"], "is no cluster", "did you mean 'local'?"),
]


@pytest.mark.parametrize(("arguments", "message", "hint"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(
    arguments: list[str], message: str, hint: str, job: Path, call: Callable[..., Outcome]
) -> None:
    run = job / "runs/a"
    done = call("launch", str(job), "--run", str(run), "--on", "local", *ECHO, *arguments)
    assert done.status == 2
    assert message in done.err
    assert hint in done.err
    assert not list(run.glob("launches/*"))
    assert not Path("batchinfer-launches").exists()


def test_a_launch_with_another_configuration_is_refused(
    job: Path, call: Callable[..., Outcome]
) -> None:
    run = str(job / "runs/a")
    assert call("worker", "--job", str(job), "--output", run, *ECHO).status == 0
    done = call(
        "launch",
        str(job),
        "--run",
        run,
        "--on",
        "local",
        "--workers",
        "2",
        *ECHO,
        "--max-tokens",
        "9",
    )
    assert done.status == 2
    assert "another sampling" in done.err


def test_a_second_launch_waits_for_the_first_to_be_recorded(
    job: Path, call: Callable[..., Outcome]
) -> None:
    run = str(job / "runs/a")
    plan = Plan(
        id="20261122-101112-ab12", name="x", workers=1, job=str(job), run=run, model="", words=""
    )
    store = open_store(run)
    record_launch(store, "local", plan, SystemClock().now())
    done = call("launch", str(job), "--run", run, "--on", "local", "--workers", "2", *ECHO)
    assert done.status == 2
    assert "the launch 20261122-101112-ab12 has been under way for" in done.err
    (found,), _ = find_launches(store)
    assert found.handle is None


def test_launches_of_one_second_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Their ids differ in random digits only."""
    store = open_store(str(tmp_path))
    names = [f"20261122-101112-{digits}" for digits in ("ffff", "0000", "7777")]
    for index, name in enumerate(names):
        plan = Plan(id=name, name="x", workers=1, job="", run="", model="", words="")
        record_launch(store, "local", plan, 1_763_806_272 + 0.1 * index)
    found, notes = find_launches(store)
    assert ([launch.record.plan.id for launch in found], notes) == (names, [])


@pytest.mark.parametrize("is_submitted", [False, True])
def test_of_two_launches_at_once_at_most_one_starts_workers(
    is_submitted: bool,
    job: Path,
    call: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one is recorded when this one has checked everything; it may even be submitted by then."""
    run = str(job / "runs/a")
    store, now = open_store(run), SystemClock().now()
    other = Plan(
        id="20261122-101112-ab12", name="x", workers=1, job=str(job), run=run, model="", words=""
    )

    def after_the_other(*arguments: Any) -> None:
        record_launch(store, "local", other, now)
        if is_submitted:
            record_submission(store, other, {"folder": "x/20261122-101112-ab12"}, now)
        record_launch(*arguments)

    monkeypatch.setattr(launching, "record_launch", after_the_other)
    done = call("launch", str(job), "--run", run, "--on", "local", "--workers", "2", *ECHO)
    assert done.status == 2
    assert (
        "another launch was made meanwhile (20261122-101112-ab12), so this one submitted nothing"
        in done.err
    )
    (found,), _ = find_launches(store)
    assert found.record.plan.id == "20261122-101112-ab12"
    assert not Path("batchinfer-launches").exists()


def test_workers_whose_launch_cannot_be_recorded_can_be_cancelled_by_hand(
    job: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job / "runs/a"

    def fails(*_arguments: Any) -> None:
        raise StorageError("bucket: gone")

    monkeypatch.setattr(launching, "record_submission", fails)
    arguments = ("--on", "local", "--workers", "2", *ECHO, *SLOW)
    done = call("launch", str(job), "--run", str(run), *arguments)
    assert done.status == 34
    (folder,) = Path("batchinfer-launches").resolve().glob("*")
    wait_for(lambda: len(list(run.glob("workers/*.json"))) == 2)
    (command,) = re.findall(r"to cancel them: (.*)", done.err)
    with bystander("batchinfer.clusters.local", str(folder)) as other:
        subprocess.run(shlex.split(command), check=True)
        wait_for(lambda: not processes_of(folder.name))
        assert other.poll() is None
    state = '"state":"cancelled"'
    wait_for(lambda: (folder / "state.json").read_text().count(state) == 2)


@contextlib.contextmanager
def bystander(*words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that is none of a launch's, with these words in its command line, such as an editor or a grep."""
    program = [sys.executable, "-c", "import time; time.sleep(600)", *words]
    with subprocess.Popen(program, env={**os.environ, **variables}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_only_a_launchs_own_processes_are_ended(tmp_path: Path) -> None:
    """The launch has ended, and its folder's path is in the command lines of others."""
    folder = tmp_path / "20261122-101112-ab12"
    local = find_cluster("local")
    with (
        bystander("-m", "batchinfer.clusters.local", str(folder)) as reader,
        bystander("batchinfer", "worker", BATCHINFER_LAUNCH=folder.name) as searcher,
    ):
        local.cancel({"folder": str(folder)})
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.5)
        assert searcher.poll() is None


def test_the_record_of_a_launch_holds_no_secrets(
    job: Path, call: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job / "runs/a"
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\ncat >{tmp_path}/script; echo 4711\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    done = call(
        "launch", str(job), "--run", str(run), "--on", "slurm", "--workers", "2", "--no-check",
        "--model", "m", "--prompt-column", "prompt", "--env", "HF_TOKEN=hush1", "--env", "REGION=eu",
        "--env", "HTTPS_PROXY=http://me:hush2@proxy", "--engine-arg", "hf_token=hush3",
    )  # fmt: skip
    assert done.status == 0, done.err
    (record, submission) = (path.read_text() for path in sorted(run.glob("launches/*")))
    script = (tmp_path / "script").read_text()
    assert all(f"hush{number}" in script for number in (1, 2, 3))
    assert "hush" not in record + submission
    assert '"REGION": "eu"' in record


def test_a_launch_of_which_nobody_knows_whether_it_was_submitted_stays_on_record(
    job: Path, call: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch has queued the workers, and its answer is lost."""
    run = job / "runs/a"
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    arguments = ("launch", str(job), "--run", str(run), "--on", "slurm", "--workers", "2", *ECHO)

    def sbatch_fails(message: str) -> Outcome:
        program.write_text(f"#!/bin/bash\necho {message!r} >&2; exit 1\n")
        program.chmod(0o755)
        return call(*arguments, "--name", "my job")

    refused = sbatch_fails("Invalid partition name specified")
    assert refused.status == 2
    assert not list(run.glob("launches/*"))
    lost = sbatch_fails("Batch job submission failed: Socket timed out on send/recv operation")
    assert lost.status == 2
    (record,) = run.glob("launches/*")
    assert "may have been submitted or not" in lost.err
    assert "squeue --me --name='my job'" in lost.err
    assert f"remove {record}" in lost.err
    assert "has been under way" in call(*arguments).err
    left = call("stop", str(run), "--cancel").result["left"]
    assert (
        "what it submitted is not known; look for its jobs: squeue --me --name='my job'" in left[0]
    )
    rows_file(tmp_path / "a.jsonl", 0, 3)
    words = ("--what", "split", "--workers", "2", "--on", "slurm", "--", "a.jsonl", "--output", "j")
    ranks = call("launch", *words)
    assert ranks.status == 2
    assert "the ranks may have been submitted or not" in ranks.err
    assert "squeue --me --name=batchinfer; end those that are there, and launch again" in ranks.err


def test_a_damaged_record_of_a_launch_is_a_note(job: Path, call: Callable[..., Outcome]) -> None:
    run = job / "runs/a"
    assert call("worker", "--job", str(job), "--output", str(run), *ECHO).status == 0
    (run / "launches").mkdir()
    (run / "launches/x.json").write_text('{"plan": \x1b[31m')
    seen = call("status", str(run), "--json")
    assert seen.status == 0
    assert seen.result["launches"] == []
    assert any("launches/x.json: cannot be read" in note for note in seen.result["notes"])


def test_hours_and_a_rate_say_how_many_workers(job: Path, call: Callable[..., Outcome]) -> None:
    """60 rows at one row in 200 s take 12,000 s of one worker; two are done within 2 hours, and 1 is not."""
    done = call(
        "launch", str(job), "--run", str(job / "runs/a"), "--on", "local", *ECHO, "--hours", "2",
        "--rate", "0.005", "--dry-run",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert done.result["workers"] == 2
