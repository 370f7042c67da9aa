"""The SkyPilot files: read by SkyPilot itself, checked by our rules, and run as it would run them."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchinfer.core import layout
from batchinfer.core.errors import RESTART_STATUSES
from batchinfer.core.shell import quote
from batchinfer.worker import command
from making import make_job, put_program

REPOSITORY = Path(__file__).resolve().parents[2]
JOB_FILES = ["worker.yaml", "examples/skypilot/pool-job.yaml"]
ALL_FILES = ["worker.yaml", "dev.yaml", "examples/skypilot/pool.yaml", *JOB_FILES[1:]]
pytestmark = pytest.mark.full  # needs the environment of SkyPilot
NEEDED = {"MODEL_NAME": "some/model", "OUTPUT_BUCKET": "s3://bucket/run"}


def load(name: str) -> dict:
    return yaml.safe_load((REPOSITORY / name).read_text())


# ------------------------------------------------------------------------- read by SkyPilot


@pytest.fixture(scope="session")
def read(tmp_path_factory):
    """Has a file read by SkyPilot's client, in its own environment, which answers one request after another."""
    # SkyPilot pins packages below what vLLM needs, so it cannot live in the environment of the tests.
    python = REPOSITORY / ".venv-sky/bin/python"
    if not python.exists():
        pytest.fail("needs what `make test` makes first: bash scripts/setup.sh --skypilot")
    reader = Path(__file__).resolve().parents[1] / "skypilot_reader.py"
    home = str(tmp_path_factory.mktemp("skypilot-home"))
    with subprocess.Popen(
        [python, reader],
        cwd=REPOSITORY,
        env={**os.environ, "HOME": home, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def ask(name: str, gpus: str = "", **envs: str) -> dict:
            request = {"text": (REPOSITORY / name).read_text(), "gpus": gpus, "envs": envs}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        process.wait(timeout=30)


@pytest.mark.parametrize("name", ALL_FILES)
def test_skypilot_reads_the_file(read, name):
    task = read(name, **(NEEDED if name in JOB_FILES else {}))
    assert task["candidates"]
    assert task["storage_mounts"] == 0, "results go straight to the bucket, never through a mount"


def test_worker_may_be_any_accelerator_on_spot_or_on_demand_or_none(read):
    candidates = read("worker.yaml", **NEEDED)["candidates"]
    names = ["L4", "A10G", "L40S", "A100", "A100-80GB", "H100"]
    found = {(*candidate["accelerators"], candidate["use_spot"]) for candidate in candidates}
    assert found == {(name, spot) for name in names for spot in (True, False)}
    on_cpus = read("worker.yaml", gpus="none", **NEEDED)["candidates"]
    assert all(candidate["accelerators"] is None for candidate in on_cpus)


@pytest.mark.parametrize("name", JOB_FILES)
@pytest.mark.parametrize("missing", sorted(NEEDED))
def test_launch_without_a_needed_variable_is_refused(read, name, missing):
    envs = {key: value for key, value in NEEDED.items() if key != missing}
    assert missing in read(name, **envs)["error"]


def test_local_manifest_is_copied_to_the_machine(read, tmp_path):
    manifest = tmp_path / "0.txt"
    manifest.write_text("chunks/part-00000.jsonl\n")
    task = read("worker.yaml", DATA_METADATA=str(manifest), **NEEDED)
    assert task["file_mounts"] == {"~/manifest.txt": str(manifest)}
    missing = read("worker.yaml", DATA_METADATA="./workers/77.txt", **NEEDED)["error"]
    assert "./workers/77.txt" in missing
    # Without one it is an empty file, and not the whole folder.
    [source] = read("worker.yaml", **NEEDED)["file_mounts"].values()
    assert Path(source).is_file()
    assert Path(source).stat().st_size == 0


@pytest.mark.parametrize("name", JOB_FILES)
def test_recovery_restarts_what_a_restart_can_cure_and_nothing_else(read, name):
    """SkyPilot accepts a misspelt key in silence. Every other exit counts against the number, 2 and 3 ("stop") too."""
    recovers = {
        "strategy": "EAGER_NEXT_REGION",
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [*RESTART_STATUSES],
    }
    assert load(name)["resources"]["job_recovery"] == recovers
    # Reading accepts a difference between candidates; the job's controller fails on it later.
    candidates = read(name, **NEEDED)["candidates"]
    assert len({json.dumps(each["job_recovery"], sort_keys=True) for each in candidates}) == 1


# ------------------------------------------------------------ what SkyPilot does not look at


@pytest.mark.parametrize("name", ALL_FILES)
def test_variables_stand_where_skypilot_replaces_them(name):
    # An undeclared one stays as literal text; in `resources` nothing is replaced.
    task = load(name)
    used = re.findall(r"\$\{?(\w+)", json.dumps([task.get("file_mounts"), task.get("workdir")]))
    assert set(used) <= set(task.get("envs") or {})
    assert "$" not in json.dumps(task["resources"])
    if "pool.yaml" not in name:
        assert "HF_TOKEN" in task["secrets"]
    assert "HF_TOKEN" not in (task.get("envs") or {}), "a token is a secret"


def test_a_preemption_stops_the_worker_of_its_own_job_alone(tmp_path):
    # The hook once ended every worker on the node, at each teardown.
    (hook,) = load("worker.yaml")["config"]["hooks"]
    assert hook["events"] == ["preemption"]
    put_program(tmp_path / "sleep", "#!/bin/bash\n")
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


# --------------------------------------------------------------- what reaches the worker's argv


@pytest.fixture
def worker(tmp_path, read):
    """Runs a file's `run` text with a worker that only writes what it got; returns arguments, environment, stderr."""
    workdir = tmp_path / "sky_workdir"
    for folder in ("scripts", ".venv/bin"):
        (workdir / folder).mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts/skypilot_worker.sh", workdir / "scripts")
    seen = tmp_path / "seen"
    text = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], {{**os.environ, 'PID': str(os.getpid())}}], open({str(seen)!r}, 'w'))\n"
    )
    put_program(workdir / ".venv/bin/batchinfer", text)

    def run(name: str, **envs: str) -> tuple[list[str], dict[str, str], str]:
        task = read(name, **NEEDED | envs)
        done = subprocess.run(
            ["bash", "-c", task["run_script"]],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 2), done.stderr
        given = [[], {}] if done.returncode else json.loads(seen.read_text())
        return (*given, done.stderr)

    return run


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("name", JOB_FILES)
def test_a_worker_finds_its_work_by_rank_or_by_a_url_or_a_copied_manifest(tmp_path, worker, name):
    arguments, environment, _ = worker(name, DATA_BUCKET="s3://bucket/job")
    given = ["--model", "some/model", "--output", "s3://bucket/run", "--job", "s3://bucket/job"]
    assert arguments == ["worker", *given]
    # The worker reads this variable itself; by rank it must not find the placeholder there.
    assert not {"DATA_METADATA", "HF_TOKEN"} & environment.keys()
    url = "s3://bucket/job/manifests/worker-00003.txt"
    arguments, _, _ = worker(name, MANIFEST_URL=url)
    assert option(arguments, "--manifest") == url
    assert "--job" not in arguments
    if name == "worker.yaml":
        manifest = tmp_path / "3.txt"
        manifest.write_text("chunks/part-00000.jsonl\n")
        arguments, environment, _ = worker(name, DATA_METADATA=str(manifest), DATA_BUCKET="s3://j")
        assert option(arguments, "--manifest") == str(tmp_path / "manifest.txt")
        # By this file a preemption finds the worker.
        assert (tmp_path / ".batchinfer-worker").read_text() == f"{environment['PID']}\n"


def test_bare_bucket_name_means_s3_and_options_arrive_as_they_were_typed(worker):
    typed = ["--system-prompt", 'be "brief", it\'s $late', "--stop", "a\\nb", "--stop", ""]
    buckets = {"OUTPUT_BUCKET": "my-output-bucket", "DATA_BUCKET": "my-data/job"}
    arguments, _, _ = worker("worker.yaml", **buckets, WORKER_ARGS=shlex.join(typed))
    assert option(arguments, "--output") == "s3://my-output-bucket"
    assert option(arguments, "--job") == "s3://my-data/job"
    assert arguments[-len(typed) :] == typed


@pytest.mark.parametrize(("rank", "words"), [("0", []), ("1", ["--headless"])])
def test_machines_of_a_job_run_one_model_and_words_of_launch_arrive_as_they_are(
    worker, rank, words
):
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": rank}
    nodes["SKYPILOT_NODE_IPS"] = "10.0.0.7\n10.0.0.8\n"
    hard = 'Say "it\'s"\r\nin $HOME: \u3000 $(HOME) \U0001f469\u200d\U0001f680'
    launched = f"--system-prompt {quote(hard)} --examples <(printf %s '{{}}')"
    given, _, _ = worker("worker.yaml", DATA_BUCKET="s3://j", WORKER_WORDS=launched, **nodes)
    own = ["--nnodes", "2", "--node-rank", rank, "--master-addr", "10.0.0.7", *words]
    assert given[1:4] == ["--system-prompt", hard, "--examples"]
    assert given[4].startswith("/dev/fd/")
    assert given[-len(own) :] == own, "the job's own places win over those of the words"


def test_a_launch_may_name_no_model(worker):
    """An endpoint or a rehearsal needs none: each machine was set up and ended with 2."""
    launched = {"MODEL_NAME": "", "WORKER_WORDS": "--engine echo", "DATA_BUCKET": "s3://b/job"}
    given, _, said = worker("worker.yaml", **launched)
    assert given[:3] == ["worker", "--engine", "echo"], said
    assert "--model" not in given


def test_r2_bucket_takes_the_credentials_that_skypilot_brought(tmp_path, worker):
    (tmp_path / ".cloudflare").mkdir()
    (tmp_path / ".cloudflare" / "accountid").write_text("abc123\n")
    for job in ("r2://b/job", "gs://g/job"):
        buckets = {"OUTPUT_BUCKET": "r2://b/run", "DATA_BUCKET": job}
        arguments, environment, _ = worker("worker.yaml", **buckets)
        assert option(arguments, "--output") == "s3://b/run"
        assert option(arguments, "--job") == job.replace("r2", "s3")
    assert environment["AWS_ENDPOINT_URL"] == "https://abc123.r2.cloudflarestorage.com"
    assert environment["AWS_DEFAULT_REGION"] == "auto", "botocore does not read AWS_REGION"
    assert environment["AWS_PROFILE"] == "r2"
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == f"{tmp_path}/.cloudflare/r2.credentials"


@pytest.mark.parametrize(
    ("envs", "said"),
    [
        ({}, "DATA_BUCKET"),
        ({"MODEL_NAME": "", "DATA_BUCKET": "s3://b/job"}, "MODEL_NAME: is empty"),
        ({"DATA_BUCKET": "s3://b/job", "WORKER_ARGS": "--stop 'x"}, "WORKER_ARGS"),
        ({"OUTPUT_BUCKET": "r2://b/run", "DATA_BUCKET": "r2://b/job"}, "no account id"),
        # One endpoint serves a worker: the S3 bucket would be looked for at Cloudflare.
        ({"OUTPUT_BUCKET": "r2://b/run", "DATA_BUCKET": "s3://bucket/job"}, "s3://bucket/job: is"),
        ({"OUTPUT_BUCKET": "r2://b/run", "DATA_BUCKET": "bare-name/job"}, "bare-name/job: is"),
    ],
)
def test_what_cannot_work_is_refused_by_name(worker, envs, said):
    _, _, stderr = worker("worker.yaml", **envs)
    assert said in stderr


# ------------------------------------------------------------------ what a machine runs


def test_the_set_up_installs_what_the_machine_needs(tmp_path, read, worker):
    task = read("worker.yaml", gpus="none", BATCHINFER_EXTRA="cpu", **NEEDED)
    (tmp_path / "sky_workdir/scripts/setup.sh").write_text(f'echo "$*" >{tmp_path}/set-up\n')
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", task["setup_script"]], env=environment, check=True)
    assert (tmp_path / "set-up").read_text().split() == ["--extras", "cpu"]


def test_a_worker_goes_by_the_rank_and_the_task_that_skypilot_names(tmp_path):
    """Kills and resumes are proved elsewhere, by chaos/; the set-up by test_setup_script.py."""
    make_job(tmp_path, rows=60, per_chunk=10, workers=3)
    task = {"SKYPILOT_TASK_ID": "sky-managed-2026_workers_2-0"}
    task |= {"SKYPILOT_JOB_RANK": "1", "SKYPILOT_NUM_JOBS": "3"}
    manifests = command._manifests_by_rank(str(tmp_path), task)
    assert manifests == [f"{tmp_path}/{layout.worker_manifest(1, 3)}"]
    assert command._default_worker_id(task) == "sky-managed-2026_workers_2-0-0"
