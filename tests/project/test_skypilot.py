"""The SkyPilot files: read by SkyPilot itself, checked by our rules, and run as it would run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
JOB_FILES = ["worker.yaml", "examples/skypilot/pool-job.yaml"]
ALL_FILES = ["worker.yaml", "dev.yaml", "examples/skypilot/pool.yaml", *JOB_FILES[1:]]
JOB_RECOVERY_KEYS = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
NEEDED = {"MODEL_NAME": "some/model", "OUTPUT_BUCKET": "s3://bucket/run"}
DEMO_MODEL = REPOSITORY / "examples" / "demo-model"
# A tenth of a second a row, four at once: long enough to be killed in the middle.
SLOW_ECHO = "--echo-latency-seconds 0.1 --max-num-seqs 4"


def load(name: str) -> dict:
    return yaml.safe_load((REPOSITORY / name).read_text())


# ------------------------------------------------------------------------- read by SkyPilot


class Reader:
    """SkyPilot's client in its own environment, answering one request after another."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def read(self, text: str, **request) -> dict:
        self.process.stdin.write(json.dumps({"text": text, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "SkyPilot's client ended; see its stderr above"
        return json.loads(line)

    def read_file(self, name: str, **request) -> dict:
        answer = self.read((REPOSITORY / name).read_text(), **request)
        assert "error" not in answer, answer["error"]
        return answer


@pytest.fixture(scope="session")
def skypilot(tmp_path_factory):
    # Does nothing where `make setup` was run; SkyPilot pins packages below what vLLM needs, so
    # it cannot live in the environment of the tests.
    subprocess.run(["bash", "scripts/setup.sh", "--skypilot"], cwd=REPOSITORY, check=True)
    environment = {
        **os.environ,
        "HOME": str(tmp_path_factory.mktemp("skypilot-home")),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    with subprocess.Popen(
        [
            REPOSITORY / ".venv-sky/bin/python",
            Path(__file__).resolve().parents[1] / "skypilot_reader.py",
        ],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Reader(process)
        process.stdin.close()
        process.wait(timeout=30)


@pytest.mark.parametrize("name", ALL_FILES)
def test_skypilot_reads_the_file(skypilot, name):
    envs = NEEDED if name in JOB_FILES else {}
    task = skypilot.read_file(name, envs=envs)
    assert task["candidates"]
    assert task["storage_mounts"] == 0, "results go straight to the bucket, never through a mount"


def test_worker_may_be_any_accelerator_on_spot_or_on_demand(skypilot):
    task = skypilot.read_file("worker.yaml", envs=NEEDED)
    found = {
        (*candidate["accelerators"], candidate["use_spot"]) for candidate in task["candidates"]
    }
    names = ["L4", "A10G", "L40S", "A100", "A100-80GB", "H100"]
    assert found == {(name, spot) for name in names for spot in (True, False)}


def test_gpus_none_makes_the_same_worker_a_cpu_job(skypilot):
    task = skypilot.read_file(
        "worker.yaml", envs={**NEEDED, "BATCHINFER_EXTRA": "cpu"}, gpus="none"
    )
    assert all(candidate["accelerators"] is None for candidate in task["candidates"])
    assert task["envs"]["BATCHINFER_EXTRA"] == "cpu"


def test_dev_machine_gets_a_gpu_on_the_command_line(skypilot):
    assert skypilot.read_file("dev.yaml")["candidates"][0]["accelerators"] is None
    with_gpu = skypilot.read_file("dev.yaml", gpus="L4")
    assert with_gpu["candidates"][0]["accelerators"] == {"L4": 1}


@pytest.mark.parametrize("name", JOB_FILES)
@pytest.mark.parametrize("missing", sorted(NEEDED))
def test_launch_without_a_needed_variable_is_refused(skypilot, name, missing):
    envs = {key: value for key, value in NEEDED.items() if key != missing}
    answer = skypilot.read((REPOSITORY / name).read_text(), envs=envs)
    assert missing in answer["error"]


def test_local_manifest_is_copied_to_the_machine(skypilot, tmp_path):
    manifest = tmp_path / "0.txt"
    manifest.write_text("chunks/part-00000.jsonl\n")
    task = skypilot.read_file("worker.yaml", envs={**NEEDED, "DATA_METADATA": str(manifest)})
    assert task["file_mounts"] == {"~/manifest.txt": str(manifest)}


def test_local_manifest_that_does_not_exist_is_refused_at_launch(skypilot):
    answer = skypilot.read(
        (REPOSITORY / "worker.yaml").read_text(),
        envs={**NEEDED, "DATA_METADATA": "./workers/77.txt"},
    )
    assert "./workers/77.txt" in answer["error"]


def test_no_manifest_copies_one_empty_file_and_not_the_folder(skypilot):
    task = skypilot.read_file("worker.yaml", envs=NEEDED)
    [source] = task["file_mounts"].values()
    assert Path(source).is_file()
    assert Path(source).stat().st_size == 0


# ------------------------------------------------------------ what SkyPilot does not look at


@pytest.mark.parametrize("name", ALL_FILES)
def test_every_variable_in_mounts_is_declared(name):
    # An undeclared one stays as literal text and reads without complaint.
    task = load(name)
    declared = set(task.get("envs") or {})
    used = re.findall(r"\$\{?(\w+)", json.dumps([task.get("file_mounts"), task.get("workdir")]))
    assert set(used) <= declared


@pytest.mark.parametrize("name", ALL_FILES)
def test_resources_use_no_variable(name):
    # SkyPilot substitutes nothing there: `accelerators: $A` would be an accelerator named "$A".
    assert "$" not in json.dumps(load(name)["resources"])


@pytest.mark.parametrize("name", JOB_FILES)
def test_recovery_keys_are_spelled_right(name):
    # SkyPilot accepts a misspelled key in silence.
    assert set(load(name)["resources"]["job_recovery"]) == JOB_RECOVERY_KEYS


@pytest.mark.parametrize("name", JOB_FILES)
def test_recovery_restarts_what_a_restart_can_cure_and_nothing_else(name):
    from batchinfer.core import errors

    exit_codes = {
        error.exit_status
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.BatchinferError)
    }
    codes = set(load(name)["resources"]["job_recovery"]["recover_on_exit_codes"])
    assert codes == {33, 34, 75}
    assert codes <= exit_codes, "listed codes are ones that the worker can end with"


@pytest.mark.parametrize("name", JOB_FILES)
def test_exits_that_ask_for_no_restart_get_none(name):
    # SkyPilot counts every exit that is not in the list against this number, 2 and 3 ("stop") too.
    assert load(name)["resources"]["job_recovery"]["max_restarts_on_errors"] == 0


def test_recovery_is_the_same_in_every_candidate_and_file(skypilot):
    # Reading accepts a difference; the job's controller fails on it later.
    seen = [
        json.dumps(candidate["job_recovery"], sort_keys=True)
        for name in JOB_FILES
        for candidate in skypilot.read_file(name, envs=NEEDED)["candidates"]
    ]
    assert len(set(seen)) == 1


def test_a_preemption_stops_the_worker_of_its_own_job_alone(tmp_path):
    # The hook once ended every worker on the node, at each teardown.
    (hook,) = load("worker.yaml")["config"]["hooks"]
    assert hook["events"] == ["preemption"]
    (tmp_path / "sleep").write_text("#!/bin/bash\n")
    (tmp_path / "sleep").chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run_hook() -> None:
        subprocess.run(["bash", "-c", hook["run"]], env=environment, check=True, timeout=60)

    run_hook()  # before there is a worker
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    mine, other, unrelated = (
        subprocess.Popen([*waits, word]) for word in ("batchinfer", "batchinfer", "ssh")
    )
    try:
        for process in (unrelated, mine):  # a number may be another process's by now
            (tmp_path / ".batchinfer-worker").write_text(f"{process.pid}\n")
            run_hook()
        assert mine.wait(timeout=60) == -signal.SIGTERM
        assert (other.poll(), unrelated.poll()) == (None, None)
    finally:
        for process in (mine, other, unrelated):
            process.kill()
            process.wait()


def test_the_file_by_which_a_preemption_finds_the_worker_names_it(tmp_path, skypilot):
    done, _, environment = worker_arguments(tmp_path, "worker.yaml", skypilot, DATA_BUCKET="s3://j")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".batchinfer-worker").read_text() == f"{environment['PID']}\n"


@pytest.mark.parametrize("name", [name for name in ALL_FILES if "pool.yaml" not in name])
def test_token_is_a_secret_and_no_plain_variable(name):
    task = load(name)
    assert "HF_TOKEN" in task["secrets"]
    assert "HF_TOKEN" not in task.get("envs", {})


def test_pool_has_no_run_and_its_job_has_nothing_that_a_pool_ignores():
    assert "run" not in load("examples/skypilot/pool.yaml")
    job = load("examples/skypilot/pool-job.yaml")
    assert not {"setup", "workdir", "file_mounts"} & set(job)


def test_pool_job_asks_for_what_the_pool_has():
    pool, job = load("examples/skypilot/pool.yaml"), load("examples/skypilot/pool-job.yaml")
    assert job["resources"]["accelerators"] == pool["resources"]["accelerators"]


# --------------------------------------------------------------- what reaches the worker's argv


def worker_arguments(tmp_path: Path, name: str, skypilot: Reader, **envs: str):
    """Run a file's `run` text with a worker that only writes its arguments; returns it and them."""
    workdir = tmp_path / "sky_workdir"
    for folder in ("scripts", ".venv/bin"):
        (workdir / folder).mkdir(parents=True, exist_ok=True)
    script = workdir / "scripts" / "skypilot_worker.sh"
    script.write_bytes((REPOSITORY / "scripts" / "skypilot_worker.sh").read_bytes())
    double = workdir / ".venv" / "bin" / "batchinfer"
    double.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], {{**os.environ, 'PID': os.getpid()}}], open({str(tmp_path / 'seen')!r}, 'w'))\n"
    )
    double.chmod(0o755)
    task = skypilot.read_file(name, envs={**NEEDED, **envs})
    done = subprocess.run(
        ["bash", "-c", task["run_script"]],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    seen = json.loads((tmp_path / "seen").read_text()) if done.returncode == 0 else [[], {}]
    return done, seen[0], seen[1]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("name", JOB_FILES)
def test_worker_by_rank_gets_the_job_and_no_manifest(tmp_path, skypilot, name):
    done, arguments, environment = worker_arguments(
        tmp_path, name, skypilot, DATA_BUCKET="s3://bucket/job"
    )
    assert done.returncode == 0, done.stderr
    assert option(arguments, "--job") == "s3://bucket/job"
    assert option(arguments, "--output") == "s3://bucket/run"
    assert option(arguments, "--model") == "some/model"
    assert "--manifest" not in arguments
    # The worker reads this variable itself; by rank it must not find the placeholder there.
    assert "DATA_METADATA" not in environment
    assert "HF_TOKEN" not in environment


def test_worker_by_local_manifest_reads_the_mounted_copy(tmp_path, skypilot):
    manifest = tmp_path / "3.txt"
    manifest.write_text("chunks/part-00000.jsonl\n")
    _, arguments, _ = worker_arguments(
        tmp_path,
        "worker.yaml",
        skypilot,
        DATA_METADATA=str(manifest),
        DATA_BUCKET="s3://bucket/job",
    )
    assert option(arguments, "--manifest") == str(tmp_path / "manifest.txt")


@pytest.mark.parametrize("name", JOB_FILES)
def test_worker_by_manifest_url_reads_it_there(tmp_path, skypilot, name):
    url = "s3://bucket/job/manifests/worker-00003.txt"
    _, arguments, _ = worker_arguments(tmp_path, name, skypilot, MANIFEST_URL=url)
    assert option(arguments, "--manifest") == url
    assert "--job" not in arguments


def test_bare_bucket_name_means_s3(tmp_path, skypilot):
    _, arguments, _ = worker_arguments(
        tmp_path,
        "worker.yaml",
        skypilot,
        OUTPUT_BUCKET="my-output-bucket",
        DATA_BUCKET="my-data/job",
    )
    assert option(arguments, "--output") == "s3://my-output-bucket"
    assert option(arguments, "--job") == "s3://my-data/job"


def test_r2_bucket_takes_the_credentials_that_skypilot_brought(tmp_path, skypilot):
    (tmp_path / ".cloudflare").mkdir()
    (tmp_path / ".cloudflare" / "accountid").write_text("abc123\n")
    _, arguments, environment = worker_arguments(
        tmp_path, "worker.yaml", skypilot, OUTPUT_BUCKET="r2://b/run", DATA_BUCKET="r2://b/job"
    )
    assert option(arguments, "--output") == "s3://b/run"
    assert environment["AWS_ENDPOINT_URL"] == "https://abc123.r2.cloudflarestorage.com"
    assert environment["AWS_DEFAULT_REGION"] == "auto", "botocore does not read AWS_REGION"
    assert environment["AWS_PROFILE"] == "r2"
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == f"{tmp_path}/.cloudflare/r2.credentials"


def test_r2_bucket_without_an_account_is_refused(tmp_path, skypilot):
    done, _, _ = worker_arguments(tmp_path, "worker.yaml", skypilot, OUTPUT_BUCKET="r2://b/run")
    assert done.returncode == 2


@pytest.mark.parametrize("other", ["s3://bucket/job", "bare-name/job"])
def test_r2_and_s3_buckets_in_one_worker_are_refused(tmp_path, skypilot, other):
    # One endpoint serves a worker: the S3 bucket would be looked for at Cloudflare.
    (tmp_path / ".cloudflare").mkdir()
    (tmp_path / ".cloudflare" / "accountid").write_text("abc123\n")
    done, _, _ = worker_arguments(
        tmp_path, "worker.yaml", skypilot, OUTPUT_BUCKET="r2://b/run", DATA_BUCKET=other
    )
    assert done.returncode == 2
    assert other in done.stderr
    assert "AWS_ENDPOINT_URL" in done.stderr


def test_r2_output_of_a_job_elsewhere_is_no_mix(tmp_path, skypilot):
    (tmp_path / ".cloudflare").mkdir()
    (tmp_path / ".cloudflare" / "accountid").write_text("abc123\n")
    _, arguments, _ = worker_arguments(
        tmp_path, "worker.yaml", skypilot, OUTPUT_BUCKET="r2://b/run", DATA_BUCKET="gs://g/job"
    )
    assert option(arguments, "--job") == "gs://g/job"


def test_options_arrive_as_they_were_typed(tmp_path, skypilot):
    typed = ["--system-prompt", 'be "brief", it\'s $late', "--stop", "a\\nb", "--stop", ""]
    _, arguments, _ = worker_arguments(
        tmp_path,
        "worker.yaml",
        skypilot,
        DATA_BUCKET="s3://b/job",
        WORKER_ARGS=shlex.join(typed),
    )
    assert arguments[-len(typed) :] == typed


def test_options_with_an_open_quote_are_refused(tmp_path, skypilot):
    done, _, _ = worker_arguments(
        tmp_path, "worker.yaml", skypilot, DATA_BUCKET="s3://b/job", WORKER_ARGS="--stop 'x"
    )
    assert done.returncode == 2
    assert "WORKER_ARGS" in done.stderr


def test_neither_job_nor_manifest_is_refused_by_name(tmp_path, skypilot):
    done, _, _ = worker_arguments(tmp_path, "worker.yaml", skypilot)
    assert done.returncode == 2
    assert "DATA_BUCKET" in done.stderr


# ------------------------------------------------------------------ the real thing, as a machine


class Machine:
    """A machine as SkyPilot provides it: an empty home, this checkout as workdir, the mounts."""

    def __init__(self, home: Path, task: dict, environment: dict[str, str]) -> None:
        home.mkdir()
        (home / "sky_workdir").symlink_to(REPOSITORY)
        for target, source in task["file_mounts"].items():
            (home / target.removeprefix("~/")).write_bytes(Path(source).read_bytes())
        self.home = home
        self.task = task
        kept = ("PATH", "LANG", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        self.environment = {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NUM_NODES": "1",
            **environment,
        }

    def set_up(self) -> None:
        subprocess.run(
            ["bash", "-c", self.task["setup_script"]], env=self.environment, check=True, timeout=900
        )

    def start(self) -> subprocess.Popen:
        with (self.home / "run.log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", self.task["run_script"]],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        return (self.home / "run.log").read_text(errors="replace")


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def make_job(tmp_path: Path, num_rows: int, num_chunks: int, num_workers: int) -> Path:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"What is {i} plus {i + 1}?"} for i in range(num_rows)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = tmp_path / "job"
    subprocess.run(
        [
            *(sys.executable, "-m", "batchinfer.split", source, "--output", job),
            *("--num-chunks", str(num_chunks), "--num-workers", str(num_workers)),
        ],
        check=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    return job


def wait_until(condition, process: subprocess.Popen, machine: Machine) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}:\n{machine.log()}"
        assert time.monotonic() < deadline, machine.log()
        time.sleep(0.05)


def rows_of(run: Path) -> list[int]:
    outputs = []
    for marker in sorted(run.glob("outputs/*.succeed")):
        output = run / "outputs" / json.loads(marker.read_text())["output"]
        outputs += [json.loads(line) for line in output.read_text().splitlines()]
    assert all("body" in row for row in outputs)
    return [row["_row"] for row in outputs]


def machine_environment(rank: int, num_jobs: int) -> dict[str, str]:
    return {
        "SKYPILOT_TASK_ID": f"sky-managed-2026-01-01-00-00-00-000000_workers_{rank + 1}-0",
        "SKYPILOT_MANAGED_JOB_ID": str(rank + 1),
        "SKYPILOT_JOB_RANK": str(rank),
        "SKYPILOT_NUM_JOBS": str(num_jobs),
    }


ENGINES = [
    pytest.param("--engine echo --prompt-column prompt {slow}", 400, id="echo"),
    pytest.param(
        "--engine vllm --prompt-column prompt --max-tokens 24 --max-model-len 256",
        1200,
        id="vllm",
        # A kill and a resume with vLLM is in tests/worker/test_worker_vllm.py.
        marks=[pytest.mark.vllm, pytest.mark.slow],
    ),
]


@pytest.mark.parametrize(("worker_args", "num_rows"), ENGINES)
def test_worker_comes_back_on_a_new_machine_after_kill_and_finishes(
    tmp_path, skypilot, worker_args, num_rows
):
    job, run = make_job(tmp_path, num_rows, num_chunks=8, num_workers=2), tmp_path / "run"
    envs = {
        "MODEL_NAME": str(DEMO_MODEL),
        "OUTPUT_BUCKET": str(run),
        "DATA_BUCKET": str(job),
        "BATCHINFER_EXTRA": "cpu",
        "WORKER_ARGS": worker_args.format(slow=SLOW_ECHO),
    }
    task = skypilot.read_file("worker.yaml", envs=envs, gpus="none")
    first = Machine(tmp_path / "machine-1", task, machine_environment(0, 1))
    first.set_up()
    process = first.start()
    try:
        wait_until(lambda: any(run.glob("outputs/*.succeed")), process, first)
    finally:
        kill(process)
    assert len(list(run.glob("outputs/*.succeed"))) < 8, "it was killed with work left"

    # Recovered: the same task, an empty home, set-up again. What survives is in the bucket.
    second = Machine(tmp_path / "machine-2", task, machine_environment(0, 1))
    second.set_up()
    process = second.start()
    try:
        status = process.wait(timeout=280)
    finally:
        if process.poll() is None:
            kill(process)
    assert status == 0, second.log()
    assert rows_of(run) == list(range(num_rows))


def test_ranks_divide_the_job_between_them(tmp_path, skypilot):
    job, run = make_job(tmp_path, 60, num_chunks=6, num_workers=3), tmp_path / "run"
    envs = {
        "MODEL_NAME": "echo",
        "OUTPUT_BUCKET": str(run),
        "DATA_BUCKET": str(job),
        "BATCHINFER_EXTRA": "cpu",
        "WORKER_ARGS": "--engine echo --prompt-column prompt",
    }
    task = skypilot.read_file("worker.yaml", envs=envs, gpus="none")
    machines = [
        Machine(tmp_path / f"machine-{rank}", task, machine_environment(rank, 3))
        for rank in range(3)
    ]
    processes = [machine.start() for machine in machines]
    for machine, process in zip(machines, processes, strict=True):
        assert process.wait(timeout=240) == 0, machine.log()
    assert rows_of(run) == list(range(60))


def test_seed_form_by_local_manifest_finishes_its_own_share(tmp_path, skypilot):
    job, run = make_job(tmp_path, 60, num_chunks=6, num_workers=2), tmp_path / "run"
    envs = {
        "MODEL_NAME": "echo",
        "OUTPUT_BUCKET": str(run),
        "DATA_BUCKET": str(job),
        "DATA_METADATA": str(job / "manifests" / "worker-00001.txt"),
        "BATCHINFER_EXTRA": "cpu",
        "WORKER_ARGS": "--engine echo --prompt-column prompt",
    }
    task = skypilot.read_file("worker.yaml", envs=envs, gpus="none")
    machine = Machine(tmp_path / "machine", task, machine_environment(0, 1))
    assert machine.start().wait(timeout=240) == 0, machine.log()
    mine = (job / "manifests" / "worker-00001.txt").read_text().split()
    done = {marker.name.removesuffix(".succeed") for marker in run.glob("outputs/*.succeed")}
    assert done >= {Path(chunk).stem for chunk in mine}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_setup_makes_a_cpu_environment_from_nothing(tmp_path, skypilot):
    envs = {**NEEDED, "BATCHINFER_EXTRA": "cpu"}
    task = skypilot.read_file("worker.yaml", envs=envs, gpus="none")
    machine = Machine(tmp_path / "machine", task, machine_environment(0, 1))
    workdir = machine.home / "sky_workdir"
    workdir.unlink()
    subprocess.run(["git", "clone", "-q", REPOSITORY, workdir], check=True)
    machine.environment.update(
        {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    )
    machine.set_up()
    check = "import vllm, transformers, batchinfer"
    subprocess.run([workdir / ".venv/bin/python", "-c", check], cwd=workdir, check=True)
